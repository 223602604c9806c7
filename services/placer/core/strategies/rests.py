"""What the rest of a device is worth: prices of the sizes that are asked for, from the cutting-stock problem.

The fewest devices that hold all requests for part of one, mixed devices counted in fractions, is a linear program; its
dual prices say what part of a device each size is worth. A rest is worth what the best mix of sizes in it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.placer.core.columns import Floats, Ints
from shared.messages import SHARE_WHOLE_MICRO

UNIT_MICRO: Final = 1_000
"""Sizes and rests are looked at in thousandths of a device: sizes rounded up, to at least a hundredth, rests down."""
WORTH: Final = 10**9
"""The worth of a whole device, so that worths are integers."""

_WHOLE: Final = SHARE_WHOLE_MICRO // UNIT_MICRO
_LEAST: Final = 10
_ENOUGH: Final = 1e-9
_ROUNDS: Final = 1_000


@dataclass(frozen=True)
class Rests:
    """`value[r]` is the worth of r free thousandths of a device, `price[s]` that of a request for s of them."""

    value: Ints
    price: Ints

    @classmethod
    def of(cls, numbers: Mapping[int, int]) -> Rests:
        """From how many requests there are for each share, in millionths; 0 and a whole device do not count."""
        counted: dict[int, int] = {}
        for share, number in numbers.items():
            if 0 < share < SHARE_WHOLE_MICRO and number:
                size = _size(share)
                counted[size] = counted.get(size, 0) + number
        sizes = np.array(sorted(counted), np.int64)
        prices = _prices(sizes, np.array([counted[size] for size in sizes.tolist()], np.float64))
        value = _best_mix(sizes, prices)
        worth = np.round(np.minimum(value, 1.0) * 10**6).astype(np.int64) * (WORTH // 10**6)
        worth[_WHOLE] = WORTH
        price = worth.copy()
        price[sizes] = np.round(prices * 10**6).astype(np.int64) * (WORTH // 10**6)
        return cls(worth, price)

    def priced(self, share_micro: int) -> int:
        """What a request for so much of a device is worth; nothing is worth nothing, and a whole device WORTH."""
        return int(self.price[_size(share_micro)]) if share_micro else 0


def _size(share_micro: int) -> int:
    return max(-(-share_micro // UNIT_MICRO), _LEAST)


def _prices(sizes: Ints, numbers: Floats) -> Floats:
    """The dual prices, by the revised simplex method with columns made as they are needed (Gilmore and Gomory, 1961).

    A column is a mix of sizes in one device, or costs nothing and says that there is one of a size more than is needed.
    """
    prices: Floats = np.zeros(len(sizes))
    costs = np.ones(len(sizes))
    basis = np.diag((_WHOLE // sizes).astype(np.float64))
    for _ in range(_ROUNDS if len(sizes) else 0):
        prices = np.linalg.solve(basis.T, costs).astype(np.float64)
        if prices.min() < -_ENOUGH:
            column, cost = -np.eye(len(sizes))[int(prices.argmin())], 0.0
        else:
            prices = np.maximum(prices, 0.0)
            value = _best_mix(sizes, prices)
            if value[_WHOLE] <= 1 + _ENOUGH:
                break
            column, cost = _mix(sizes, prices, value), 1.0
        amounts, direction = np.linalg.solve(basis, np.stack([numbers, column], axis=1)).T
        steps = np.where(direction > _ENOUGH, amounts / np.where(direction > _ENOUGH, direction, 1), np.inf)
        leaving = int(steps.argmin())
        basis[:, leaving], costs[leaving] = column, cost
    return np.maximum(prices, 0.0)


def _best_mix(sizes: Ints, prices: Floats) -> Floats:
    """The best worth of a mix of sizes in each rest from 0 to the whole device: one more piece until none helps."""
    value = np.zeros(_WHOLE + 1)
    if not len(sizes):
        return value
    before = np.arange(_WHOLE + 1) - sizes[:, None]
    fits, before = before >= 0, np.maximum(before, 0)
    while True:
        more = np.where(fits, value[before] + prices[:, None], 0.0).max(axis=0)
        more = np.maximum.accumulate(more)
        if (more <= value + _ENOUGH).all():
            return value
        value = np.maximum(value, more)


def _mix(sizes: Ints, prices: Floats, value: Floats) -> Floats:
    """How many of each size the best mix of a whole device has."""
    mix, rest = np.zeros(len(sizes)), _WHOLE
    while fitting := int(np.searchsorted(sizes, rest, "right")):
        worth = value[rest - sizes[:fitting]] + prices[:fitting]
        best = int(worth.argmax())
        if worth[best] < _ENOUGH:
            break
        mix[best] += 1
        rest -= int(sizes[best])
    return mix

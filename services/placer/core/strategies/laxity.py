"""Our own strategy for shared devices: what is scarce, what rests are worth, and what is left without CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.strategies.base import Candidates, Compiled, Ranking
from services.placer.core.strategies.nodes import Asked, Change, by_row
from services.placer.core.strategies.outlook import CERTAIN, Outlook
from services.placer.core.strategies.worth import Worth

POINT: Final = 10**9
"""One point of the score, which is an integer, so that equals are equal on every machine."""
_EACH: Final = np.ones(3, np.int64)


@dataclass(frozen=True)
class Laxity:
    """FGD's gradient with five corrections; never refuses what fits.

    Score of a device, in steps of `step` points =
    usable x (less fragment, in devices, each kind weighing more the scarcer its places are and needing its memory too)
    + served x (less that expected requests could not take because the node's CPU or memory ends first)
    - rest x (worth of the device's rest that is lost)
    + (less stranded devices, those without `cpu_per_device_milli` beside them)
    - snug x (free GPU after / 8 devices + free CPU after / 128 cores),
    too small to matter but among near equals: it makes the result independent of the order of names.
    docs/placement.md has the formulas and where the weights come from.
    """

    outlook: Outlook = field(default_factory=Outlook)
    usable: float = 0.5
    served: float = 0.1
    rest: int = 13
    cpu_per_device_milli: int = 7_700
    snug: float = 0.02
    step: float = 0.001
    name: str = "laxity"

    def compiled(self, asked: Asked, resources: tuple[str, ...]) -> Compiled | None:  # noqa: ARG002
        numbers = np.array((*self._taken(asked), *self._points, *self._snugness, self._stride))
        return Compiled("laxity", (*self._worth.tables, numbers, np.array((1 / self.step,))), 1)

    def rank(self, rows: Candidates) -> Ranking:
        change = Change(rows.nodes, rows.asked)
        points = self._worth.gained(change)
        points += self._taken(change.asked)
        points //= self._points
        score = points @ _EACH - self._snug(change)[change.of_place]
        return by_row(change.of_rows(score // self._stride), 1 / self.step)

    def _snug(self, change: Change) -> Ints:
        """What is left on each node, in POINTs."""
        nodes, asked = change.nodes, change.asked
        gpu, cpu = self._snugness
        left: Ints = nodes.idle * gpu + nodes.cpu_free * cpu - (asked.gpu_micro * gpu + asked.cpu_milli * cpu)
        return left // 1_000

    def _taken(self, asked: Asked) -> Ints:
        """What the request itself is of each part of `Worth`: nothing else is lost. One more is for rounding down."""
        key = asked.count, asked.share_micro
        if (found := self._taken_by.get(key)) is None:
            price = self.rest * self.outlook.rests.priced(asked.share_micro)
            whole, points = asked.gpu_micro * CERTAIN, asked.gpu_micro * (POINT // 1_000_000)
            found = self._taken_by[key] = np.array([whole, whole, points + asked.count * price + 1])
        return found

    @property
    def _snugness(self) -> tuple[int, int]:
        """What is lost with a millionth of a device and with a milli CPU left, in thousandths of POINTs."""
        return round(self.snug * POINT / 8_000), round(self.snug * POINT / 128)

    @property
    def _stride(self) -> int:
        return round(self.step * POINT)

    @cached_property
    def _taken_by(self) -> dict[tuple[int, int], Ints]:
        """By devices and share."""
        return {}

    @cached_property
    def _worth(self) -> Worth:
        return self.outlook.worth(self.rest, self.cpu_per_device_milli)

    @cached_property
    def _points(self) -> Ints:
        """What one POINT is of each part of `Worth`."""
        return np.array([_per_device(self.usable), _per_device(self.served), 1])


def _per_device(weight: float) -> int:
    """What divides weighed millionths so that one device makes `weight` points."""
    return round(CERTAIN * 1_000_000 / (weight * POINT))

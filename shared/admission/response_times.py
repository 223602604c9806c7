"""How long tasks took, counted in bins: order statistics with a bound on their error, in little room; no model."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import Final

from shared.deadlines import wilson

NEVER_US: Final = 1 << 60
"""The time of a task that was overdue and never ended; a bound of so much or more is that of who may never end."""
GENERATION: Final = 5_000
"""Times are forgotten in two generations, so that between one and two of them, the newest, are looked at."""
_BITS: Final = 9
"""A bin is at most 1/256 of its time wide: a bound is at most 0.4 % above the time that it stands for."""


class ResponseTimes:
    """The newest response times of one kind of task in one kind of place: at least GENERATION once there are so many.

    Bins are those of an HDR histogram (Tene): as many to each doubling of the time. A time counts as the longest one
    of its bin.
    """

    def __init__(self, newer: Mapping[int, int] | None = None, older: Mapping[int, int] | None = None) -> None:
        self._newer, self._older = Counter(newer or {}), Counter(older or {})
        self._fresh, self._stale = self._newer.total(), self._older.total()
        self._sorted: tuple[list[int], list[int]] | None = None

    def __len__(self) -> int:
        return self._fresh + self._stale

    def add(self, times_us: Iterable[int]) -> None:
        """The newest last."""
        for time_us in times_us:
            if self._fresh >= GENERATION:
                self._older, self._stale = self._newer, self._fresh
                self._newer, self._fresh = Counter(), 0
            self._newer[_bin(time_us)] += 1
            self._fresh += 1
        self._sorted = None

    def order_us(self, place: int) -> int:
        """The time at this place from the shortest on, counted from 1."""
        bins, upto = self._in_order()
        return _longest_us(bins[bisect_right(upto, place - 1)])

    def within(self, time_us: int) -> int:
        """How many took no longer, at least."""
        bins, upto = self._in_order()
        at = bisect_right(bins, _bin(time_us + 1) - 1)
        return upto[at - 1] if at else 0

    def likely_us(self, ratio: float) -> int | None:
        """The next task takes no longer with this probability; None where too few were seen (fewer than 99 for 0.99).

        Split conformal prediction: the ⌈(n + 1) ratio⌉-th of n (Vovk, Gammerman, Shafer 2005). Assumes that the next
        task is like those seen: then the probability, over all that could have been seen, is at least the ratio and at
        most 1 / (n + 1) above it.
        """
        return self._at(_conformal(len(self), ratio))

    def proven_us(self, ratio: float) -> int | None:
        """The least time within which the Wilson 95 % lower bound of the tasks reaches the ratio; None where none does
        (fewer than 381 for 0.99). It is what an admission rests on.
        """
        return self._at(_proving(len(self), ratio))

    def dump(self) -> tuple[dict[int, int], dict[int, int]]:
        """The newer and the older generation: how many in which bin."""
        return dict(self._newer), dict(self._older)

    def _at(self, place: int) -> int | None:
        return min(NEVER_US, self.order_us(place)) if place <= len(self) else None

    def _in_order(self) -> tuple[list[int], list[int]]:
        """The bins, and how many times lie in each and in those before it."""
        if self._sorted is None:
            both = sorted((self._newer + self._older).items())
            self._sorted = [bin_ for bin_, _ in both], list(accumulate(count for _, count in both))
        return self._sorted


def _bin(time_us: int) -> int:
    shift = max(0, time_us.bit_length() - _BITS)
    return shift << _BITS | time_us >> shift


def _longest_us(bin_: int) -> int:
    shift = bin_ >> _BITS
    return ((bin_ - (shift << _BITS) + 1) << shift) - 1


def _conformal(count: int, ratio: float) -> int:
    return ceil((count + 1) * ratio - 1e-9)  # 0.99 of 100 is 99, also where the product is a little more


@lru_cache(maxsize=4096)
def _proving(count: int, ratio: float) -> int:
    """The least number of tasks met, of so many, that shows the ratio; one more than all where none does."""
    low, high = 0, count + 1
    while low < high:
        met = (low + high) // 2
        bounds = wilson(met, count)
        if bounds and bounds.lower >= ratio:
            high = met
        else:
            low = met + 1
    return low

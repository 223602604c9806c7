"""Whether tasks of a container take longer while a neighbour is active: a test that may be looked at after each task.

A conformal test martingale (Vovk, Gammerman, Shafer 2005). If the neighbour has no effect, the rank of each new time
among all before it is uniform and independent of those, whatever the times are distributed like. So a bet that times
beside the neighbour are long and the others short wins nothing on average, and by Ville's inequality its gain ever
reaches 1 / ALARM with a probability of at most ALARM. What is bet follows from who was beside whom so far.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median
from typing import Final

import numpy as np

from services.deadline_tracker.device_time import Tasks, Terms, active_us, device_time_us
from shared.admission import RtTask, Sharing
from shared.messages import Regime

ALARM: Final = 1e-4
"""The false-alarm rate: at most so many, of each pair of neighbours and each HISTORY / 2 tasks."""
HISTORY: Final = 512
"""Times that a new one is ranked among, at most; there are half as many at least once there were so many."""
LEAST_RATIO: Final = 1.05
"""What is slowed by less is not worth an alarm."""
MOST_TASKS: Final = 16
"""Of one container in one look; of more, as many that are evenly spread."""
_ACTIVE, _IDLE = 0.5, 0.1
_TOLD: Final = 128
"""Times of which medians are told."""
_STAKE: Final = 0.9
_EAGER: Final = (1.0, 0.3)
"""Two ways to bet, half of the stakes each: as if the times were wholly apart, and as if they overlapped."""


Beside = Mapping[str, bool | None]
"""Of each neighbour whether it was active beside a task; None is for a part of it, absent is that it was not there."""


@dataclass(frozen=True, slots=True)
class Found:
    """A noisy neighbour: the median times beside it and without it, and of how many tasks."""

    neighbour: str
    beside_us: float
    without_us: float
    tasks: int

    @property
    def ratio(self) -> float:
        return self.beside_us / max(1.0, self.without_us)


def beside(
    sharing: Sharing, declared: Sequence[RtTask | None], tasks: Tasks, since_us: int, now_us: int
) -> Iterator[tuple[int, float, dict[int, bool | None]]]:
    """Of the tasks of one device that ended since then: whose each is, how long it took, who was active beside it.

    What sharing the device explains is taken from the time: waiting at a gate, and turns of others, with one turn more
    where anybody wanted the device too. Active is who had an open task for half of the task's declared runtime (or
    deadline) from its begin on, whatever it took; not active, for less than a tenth; in between it is None.
    """
    time_us = device_time_us(sharing, tasks, now_us, Terms.of(declared))
    length_us = np.array([task.runtime_us if task else 0 for task in declared])[tasks.who]
    length_us = np.where(length_us > 0, length_us, tasks.due_us - tasks.begin_us)
    until_us = np.minimum(tasks.begin_us + np.maximum(1, length_us), now_us)
    parts = active_us(tasks, tasks.begin_us, until_us, now_us) / np.maximum(1, until_us - tasks.begin_us)[:, None]
    turn_us = sum(sharing.measured() or ()) if sharing.regime is Regime.TIME_SLICED else 0
    for who in range(tasks.containers):
        rows = np.flatnonzero((tasks.who == who) & (tasks.end_us > since_us) & (tasks.end_us <= now_us))
        for row in rows[:: -(-len(rows) // MOST_TASKS) or 1].tolist():
            there = {other: _active(part) for other, part in enumerate(parts[row].tolist()) if other != who}
            alone = all(active is False for active in there.values())
            yield who, float(time_us[row]) - (0 if alone else turn_us), there


def _active(part: float) -> bool | None:
    return True if part >= _ACTIVE else False if part < _IDLE else None


@dataclass(slots=True)
class _Ranks:
    """The times so far, in order, and how many of them were beside each neighbour."""

    times: list[float] = field(default_factory=list)
    beside: Counter[str] = field(default_factory=Counter)

    def add(self, time_us: float, beside: Beside) -> None:
        insort(self.times, time_us)
        self.beside.update(name for name, there in beside.items() if there)

    def above(self, time_us: float) -> float:
        """Which part of the times is longer, this one counted by half, and equal ones too."""
        count, low, high = len(self.times), bisect_left(self.times, time_us), bisect_right(self.times, time_us)
        return (count - high + (high - low + 1) / 2) / (count + 1)


class Neighbours:
    """Of one container: fed with each task in turn, which neighbours were active at it, and how long it took."""

    def __init__(self) -> None:
        self._ranks, self._next = _Ranks(), _Ranks()
        self._gains: dict[str, list[float]] = {}
        """Of each neighbour the logarithm of what each way of betting has made of 1."""
        self._noisy: dict[str, float] = {}
        """Who was found, and by how much it lengthens a task."""
        self._recent: deque[tuple[float, Beside]] = deque(maxlen=_TOLD)

    def add(self, time_us: float, beside: Beside) -> Found | None:
        """Who is found noisy by this task.

        `beside` must not depend on how long the task took. What a neighbour does that was found is taken from the times
        that follow, so that nobody is accused for being there together with it; it is told again after HISTORY / 2
        tasks.
        """
        self._recent.append((time_us, beside))
        for name, ratio in self._noisy.items():
            time_us /= ratio if beside.get(name) else 1
        above = self._ranks.above(time_us)
        for name, there in beside.items():
            if there is not None and name not in self._noisy:
                self._bet(name, there, above)
        self._keep(time_us, beside)
        return self._alarm(beside)

    def _keep(self, time_us: float, beside: Beside) -> None:
        self._ranks.add(time_us, beside)
        if len(self._ranks.times) > HISTORY // 2:
            self._next.add(time_us, beside)
        if len(self._ranks.times) == HISTORY:
            self._ranks, self._next = self._next, _Ranks()
            self._gains.clear()
            self._noisy.clear()

    def _alarm(self, beside: Beside) -> Found | None:
        """The strongest of those whose gains suffice. With a new one the times are ranked anew."""
        found = max(beside, key=lambda name: sum(map(exp, self._gains.get(name, ()))), default=None)
        if found is None or sum(map(exp, self._gains.get(found, ()))) < len(_EAGER) / ALARM:
            return None
        told = self._told(found)
        self._noisy[found] = max(1.0, told.ratio)
        self._ranks, self._next = _Ranks(), _Ranks()
        self._gains.clear()
        return told if told.ratio >= LEAST_RATIO else None

    def _bet(self, name: str, there: bool, above: float) -> None:
        ranks, gains = self._ranks, self._gains.setdefault(name, [0.0] * len(_EAGER))
        part = (ranks.beside[name] + 0.5) / (len(ranks.times) + 1)
        power = _power(1 - part if there else part)
        rank = 1 - above if there else above
        for way, eager in enumerate(_EAGER):
            gains[way] += log(1 - _STAKE + _STAKE * density(power * eager, rank))

    def _told(self, name: str) -> Found:
        beside = [time for time, there in self._recent if there.get(name)]
        without = [time for time, there in self._recent if there.get(name, False) is False]
        return Found(name, median(beside), median(without), len(beside) + len(without))


def density(power: float, rank: float) -> float:
    """What a bet of 1 is worth: the more the higher the rank and the power.

    A density on 0 to 1, and convex: so its mean over the midpoints of equal parts, as ranks among finitely many times
    are, is at most 1.
    """
    return 1 + power * (2 * rank - 1) if power < 1 else (power + 1) * rank**power


def _power(least: float) -> float:
    """k of (k + 1) x^k that gains most if ranks are uniform between `least` and 1."""
    mean_log = (least - 1 - least * log(least)) / (1 - least)
    return max(0.0, -1 / mean_log - 1)

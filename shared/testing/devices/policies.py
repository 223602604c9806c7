"""Who has the device when: the gate, the driver's round robin, and all at once with contention."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Protocol

from shared.testing.devices.jobs import Job

_NANO = 10**6
"""Work is counted in millionths of a microsecond where it runs slower than alone."""


@dataclass(slots=True)
class Work:
    """One device part of a job: what is left of it, and for the gate by when it is due and how long it may hold."""

    job: Job
    left_us: int
    due_us: int
    most_us: int
    pressure_milli: int = 0


class Policy(Protocol):
    """Asked at one time after the other: first what ended by then, then what arrived, then who goes on."""

    whole: bool
    """Whether a job holds the device for all its parts at once."""

    def enter(self, container: str) -> None:
        """One more container, of which parts may arrive."""

    def next_us(self) -> int | None:
        """When it does something next by itself."""

    def until(self, now_us: int) -> list[Work]:
        """Lets time pass; the parts that ended."""

    def arrive(self, work: Work) -> None: ...

    def go_on(self, now_us: int) -> None:
        """Gives the device to somebody where it is free."""

    def drop(self, container: str) -> None:
        """Its parts are gone, also the one that runs."""


class Gate:
    """One part at a time, earliest due first, not preempted; soft ones (due `inf`) only when nobody else waits.

    Each hand-over costs. With `ends_overruns` a part that would hold the device beyond what it may is ended then.
    """

    whole = True

    def __init__(self, handover_us: int = 0, ends_overruns: bool = False) -> None:
        self._handover_us, self._ends_overruns = handover_us, ends_overruns
        self._waiting: list[tuple[int, int, Work]] = []
        self._arrived = 0
        self._holder: Work | None = None
        self._until_us = 0

    def enter(self, container: str) -> None:
        """Whoever comes waits by its deadline alone."""

    def next_us(self) -> int | None:
        return self._until_us if self._holder else None

    def until(self, now_us: int) -> list[Work]:
        if self._holder is None or self._until_us > now_us:
            return []
        ended, self._holder = [self._holder], None
        return ended

    def arrive(self, work: Work) -> None:
        self._arrived += 1
        heappush(self._waiting, (work.due_us, self._arrived, work))

    def go_on(self, now_us: int) -> None:
        if self._holder or not self._waiting:
            return
        work = self._holder = heappop(self._waiting)[2]
        begun_us = now_us + self._handover_us
        work.job.start_us = begun_us
        holds_us = min(work.left_us, work.most_us) if self._ends_overruns else work.left_us
        work.job.cut = holds_us < work.left_us
        self._until_us = begun_us + holds_us

    def drop(self, container: str) -> None:
        self._waiting = [each for each in self._waiting if each[2].job.container != container]
        heapify(self._waiting)
        if self._holder and self._holder.job.container == container:
            self._holder = None


class RoundRobin:
    """A fixed ring of contexts; each that has work has the device for a slice at most, each change of context costs."""

    whole = False

    def __init__(self, slice_us: int, switch_us: int) -> None:
        self._slice_us, self._switch_us = slice_us, switch_us
        self._ring: deque[str] = deque()
        self._works: dict[str, deque[Work]] = {}
        self._last: str | None = None
        self._turn: tuple[Work, int, int] | None = None
        """Who runs, how much of it is done in this turn, and when that ends."""

    def enter(self, container: str) -> None:
        self._ring.append(container)
        self._works[container] = deque()

    def next_us(self) -> int | None:
        return self._turn[2] if self._turn else None

    def until(self, now_us: int) -> list[Work]:
        if self._turn is None or self._turn[2] > now_us:
            return []
        (work, ran_us, _), self._turn = self._turn, None
        work.left_us -= ran_us
        if work.left_us:
            return []
        return [self._works[work.job.container].popleft()]

    def arrive(self, work: Work) -> None:
        self._works[work.job.container].append(work)

    def go_on(self, now_us: int) -> None:
        if self._turn:
            return
        for _ in range(len(self._ring)):
            name = self._ring[0]
            self._ring.rotate(-1)
            if self._works[name]:
                self._begin(now_us, self._works[name][0])
                return

    def _begin(self, now_us: int, work: Work) -> None:
        begun_us = now_us + (self._switch_us if self._last != work.job.container else 0)
        if work.job.start_us is None:
            work.job.start_us = begun_us
        ran_us = min(self._slice_us, work.left_us)
        self._last, self._turn = work.job.container, (work, ran_us, begun_us + ran_us)

    def drop(self, container: str) -> None:
        del self._works[container]
        self._ring.remove(container)
        if self._turn and self._turn[0].job.container == container:
            self._turn = None


def pressed(work: Work, beside: list[Work]) -> int:
    """The slowdown of a part, in thousandths: as long as alone, and longer by the pressure of each that runs beside."""
    return 1000 + sum(other.pressure_milli for other in beside if other is not work)


@dataclass(slots=True)
class Together:
    """All at once (MPS): each as slow as `slowdown_milli` says of it and those that run beside it."""

    slowdown_milli: Callable[[Work, list[Work]], int] = pressed
    whole: bool = False
    _running: list[tuple[Work, int]] = field(default_factory=list)
    """With the work that is left, in millionths of a microsecond alone."""
    _now_us: int = 0

    def enter(self, container: str) -> None:
        """Whoever comes runs at once."""

    def next_us(self) -> int | None:
        ends = [
            self._now_us + -(-left // speed) for (_, left), speed in zip(self._running, self._speeds(), strict=True)
        ]
        return min(ends, default=None)

    def _speeds(self) -> list[int]:
        """Work done in each microsecond."""
        works = [work for work, _ in self._running]
        return [1000 * _NANO // max(1, self.slowdown_milli(work, works)) for work in works]

    def until(self, now_us: int) -> list[Work]:
        passed_us, self._now_us = now_us - self._now_us, now_us
        lefts = [(w, left - passed_us * s) for (w, left), s in zip(self._running, self._speeds(), strict=True)]
        self._running = [(work, left) for work, left in lefts if left > 0]
        return [work for work, left in lefts if left <= 0]

    def arrive(self, work: Work) -> None:
        if work.job.start_us is None:
            work.job.start_us = self._now_us
        self._running.append((work, work.left_us * _NANO))

    def go_on(self, now_us: int) -> None:
        """Nobody waits for anybody."""

    def drop(self, container: str) -> None:
        self._running = [each for each in self._running if each[0].job.container != container]

"""One simulated device: containers come and go, time is moved on by whoever holds it, and what happened is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from heapq import heappop, heappush
from typing import Final

from shared.admission import Sharing
from shared.messages import Kind, Regime
from shared.testing.devices.jobs import Container, Job, device_parts
from shared.testing.devices.policies import Gate, Policy, RoundRobin, Together, Work

NEVER_DUE: Final = 1 << 62
"""For the gate: soft parts, after all others."""


class What(StrEnum):
    RELEASED = "released"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a job and when. A task of the SDK begins at the release and ends at the end."""

    at_us: int
    what: What
    job: Job


@dataclass(slots=True)
class _Resident:
    container: Container
    releases_us: Iterator[int] | None
    released: int = 0
    overruns_us: list[int] = field(default_factory=list)
    """By how much its next jobs run longer."""


class Device:
    """Deterministic: the same calls give the same events. Nothing happens but in `advance`.

    `policy` replaces the one of the regime. Raises ValueError for a second container on an exclusive device, for a name
    that is there already, and for a time-sliced device of unknown slice or switch cost.
    """

    def __init__(self, sharing: Sharing, policy: Policy | None = None) -> None:
        self.now_us = 0
        self.sharing = sharing
        self._policy = policy or _policy(sharing)
        self._residents: dict[str, _Resident] = {}
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._set = 0
        self._open: dict[int, tuple[Job, list[int]]] = {}
        """Jobs with the parts that are still to come, by their identity."""
        self._events: list[Event] = []

    def add(self, container: Container) -> None:
        """Its releases before now come at once."""
        if container.name in self._residents:
            raise ValueError(f"{container.name} is on the device already")
        if self._residents and self.sharing.regime in (Regime.EXCLUSIVE, Regime.MIG):
            raise ValueError(f"the device is shared with nobody ({self.sharing.regime})")
        times = None if container.releases_us is None else iter(container.releases_us)
        resident = self._residents[container.name] = _Resident(container, times)
        self._policy.enter(container.name)
        self._next_release(resident, self.now_us)

    def remove(self, name: str) -> None:
        """Its open jobs are aborted at once. Raises KeyError where it is not there."""
        del self._residents[name]
        self._policy.drop(name)
        gone = [key for key, (job, _) in self._open.items() if job.container == name]
        for key in gone:
            self._open.pop(key)[0].aborted = True
        self._policy.go_on(self.now_us)

    def overrun(self, name: str, by_us: int, jobs: int = 1) -> None:
        """The next jobs of a container run longer by so much."""
        self._residents[name].overruns_us += [by_us] * jobs

    def advance(self, to_us: int) -> list[Event]:
        """Moves time on; what happened since the last call, in order."""
        while (at_us := self._next_us()) is not None and at_us <= to_us:
            self.now_us = at_us
            for work in self._policy.until(at_us):
                self._part_ended(work)
            while self._timers and self._timers[0][0] == at_us:
                heappop(self._timers)[2]()
            self._policy.go_on(at_us)
        self.now_us = max(self.now_us, to_us)
        self._policy.until(self.now_us)
        events, self._events = self._events, []
        return events

    def open_jobs(self) -> list[Job]:
        """Those that were released and have not ended."""
        return [job for job, _ in self._open.values()]

    # -------------------------------------------------------------------------------------- a job's way

    def _next_us(self) -> int | None:
        times = [self._timers[0][0]] if self._timers else []
        own = self._policy.next_us()
        return min([*times, own] if own is not None else times, default=None)

    def _at(self, at_us: int, call: Callable[[], None]) -> None:
        self._set += 1
        heappush(self._timers, (max(at_us, self.now_us), self._set, call))

    def _next_release(self, resident: _Resident, at_us: int) -> None:
        if resident.releases_us is not None:
            following = next(resident.releases_us, None)
            if following is None:
                return
            at_us = following
        self._at(at_us, partial(self._release, resident))

    def _release(self, resident: _Resident) -> None:
        container = resident.container
        if self._residents.get(container.name) is not resident:
            return
        overrun_us = resident.overruns_us.pop(0) if resident.overruns_us else 0
        job = container.job(resident.released, self.now_us, overrun_us)
        resident.released += 1
        self._tell(What.RELEASED, job)
        parts = device_parts(container.task, job.runtime_us, self._policy.whole)
        self._open[id(job)] = (job, parts)
        self._after_host(container.before_us, partial(self._arrive, job))
        if resident.releases_us is not None:
            self._next_release(resident, 0)

    def _after_host(self, host_us: int, call: Callable[[], None]) -> None:
        """A host part of no length takes no time at all."""
        if host_us:
            self._at(self.now_us + host_us, call)
        else:
            call()

    def _arrive(self, job: Job) -> None:
        if id(job) not in self._open:
            return
        if job.arrival_us is None:
            job.arrival_us = self.now_us
        container, left_us = self._residents[job.container].container, self._open[id(job)][1].pop(0)
        task = container.task
        due_us = NEVER_DUE if task.kind is Kind.SOFT else self.now_us + task.deadline_us - task.host_us
        most_us = task.runtime_us + self.sharing.margin_us
        self._policy.arrive(Work(job, left_us, due_us, most_us, container.pressure_milli))

    def _part_ended(self, work: Work) -> None:
        job = work.job
        parts, container = self._open[id(job)][1], self._residents[job.container].container
        rest_us, inner = container.task.host_us - container.before_us, len(container.task.parts()) - 1
        between_us = 0 if self._policy.whole else rest_us // (inner + 1)
        if parts:
            self._after_host(between_us, partial(self._arrive, job))
        else:
            self._after_host(rest_us - between_us * inner, partial(self._end, job))

    def _end(self, job: Job) -> None:
        if self._open.pop(id(job), None) is None:
            return
        job.end_us = self.now_us
        self._tell(What.ENDED, job)
        resident = self._residents[job.container]
        if resident.releases_us is None:
            self._next_release(resident, self.now_us)

    def _tell(self, what: What, job: Job) -> None:
        self._events.append(Event(self.now_us, what, job))


def run(sharing: Sharing, containers: Iterable[Container], horizon_us: int, policy: Policy | None = None) -> list[Job]:
    """All jobs that were released up to the horizon, in that order; some may not have ended by then."""
    device = Device(sharing, policy)
    for container in containers:
        device.add(container)
    return [event.job for event in device.advance(horizon_us) if event.what is What.RELEASED]


def _policy(sharing: Sharing) -> Policy:
    match sharing.regime:
        case Regime.GATED:
            return Gate(sharing.handover_us)
        case Regime.TIME_SLICED:
            measured = sharing.measured()
            if measured is None:
                raise ValueError("a simulated time-sliced device needs its slice and switch cost")
            return RoundRobin(*measured)
        case Regime.MPS:
            return Together()
    return Gate()

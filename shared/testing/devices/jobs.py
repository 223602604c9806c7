"""What runs on a simulated device: containers, their jobs, and when these are released. Integer microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from shared.admission import RtTask


class Chance(Protocol):
    """The part of `random.Random` that is drawn from; whoever makes it chooses the seed."""

    def randint(self, a: int, b: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Container:
    """Runs jobs of one task, each for its declared runtime, or for `runtimes_us` by the number of the job.

    `releases_us` are times in order; None is a container that is always busy: its next job follows the one before at
    once. Of the host part, `before_us` comes before the device part, the same share of the rest between each two
    segments, and what is left behind the last. `pressure_milli` is by how many thousandths it slows down each
    neighbour that runs at the same time (MPS).
    """

    name: str
    task: RtTask
    releases_us: Iterable[int] | None
    runtimes_us: Mapping[int, int] = field(default_factory=dict)
    before_us: int = 0
    pressure_milli: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.before_us <= self.task.host_us:
            raise ValueError(f"what comes before the device part is some of the host part: {self}")

    def job(self, number: int, release_us: int, overrun_us: int) -> Job:
        """One of its jobs; an overrun lengthens the last device part."""
        runtime_us = self.runtimes_us.get(number, self.task.runtime_us) + overrun_us
        return Job(self.name, number, release_us, release_us + self.task.deadline_us, runtime_us)


@dataclass(slots=True)
class Job:
    """One task in the sense of the SDK: begun at its release, due a deadline later; None is what has not been yet.

    `arrival_us`: it first wanted the device. `start_us`: it first had it. `cut`: the gate ended it. `aborted`: its
    container was removed.
    """

    container: str
    number: int
    release_us: int
    due_us: int
    runtime_us: int
    arrival_us: int | None = None
    start_us: int | None = None
    end_us: int | None = None
    cut: bool = False
    aborted: bool = False

    def missed(self, now_us: int) -> bool:
        """Whether its deadline passed before its end, as far as one knows at this time."""
        return not self.aborted and (now_us if self.end_us is None else self.end_us) > self.due_us


def device_parts(task: RtTask, runtime_us: int, whole: bool) -> list[int]:
    """The device parts of a job that takes so long: the declared ones, the last of them shorter or longer.

    `whole`: the device is held for all of them at once.
    """
    declared = [runtime_us] if whole else list(task.parts())
    parts: list[int] = []
    for part in declared[:-1]:
        parts.append(min(part, runtime_us - sum(parts)))
    return [part for part in (*parts, runtime_us - sum(parts)) if part]


# ------------------------------------------------------------------------------------------- releases


def periodic(first_us: int, period_us: int) -> Iterator[int]:
    """As often as the task may, from one time on."""
    return count(first_us, period_us)


def sporadic(first_us: int, period_us: int, chance: Chance, most_us: int) -> Iterator[int]:
    """With up to `most_us` more than the period between two releases."""
    at = first_us
    while True:
        yield at
        at += period_us + chance.randint(0, most_us)


def just_before(tasks: Sequence[RtTask], blocker: int, tick_us: int = 1) -> list[Container]:
    """The worst releases for a gate: all at once, as often as they may, one of them a tick before the others.

    For each time by which something may be late the worst is the longest task that is due later, begun just before all
    that are due by then (George, Rivierre, Spuri 1996); with each task in turn as `blocker` all times are covered.
    """
    return [
        Container(f"{place}", task, periodic(0 if place == blocker else tick_us, task.period_us))
        for place, task in enumerate(tasks)
    ]

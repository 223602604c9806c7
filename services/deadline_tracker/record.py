"""What is known of one ring's open tasks and of one container's record; pure state, no messages are made here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from services.deadline_tracker.timing import Timing
from shared.deadlines import Outcome, SlidingWindow, Standing, guarantee_ratio, standing, wilson
from shared.messages import ContainerRecord, DeadlineEvent, RingInfo


@dataclass(slots=True)
class OpenTask:
    """A task whose end has not been seen. ``overdue``: already judged missed while it runs."""

    task: int
    begin_us: int
    deadline_us: int
    name: str
    overdue: bool = False


@dataclass(slots=True)
class Ring:
    """One writer's records. ``high`` is the last sequence counted: what comes again lies at or below it."""

    container: str
    high: int = 0
    open: dict[int, OpenTask] = field(default_factory=dict)
    closed: bool = False

    def dump(self) -> list[Any]:
        tasks = [[s, t.task, t.begin_us, t.deadline_us, t.name, t.overdue] for s, t in self.open.items()]
        return [self.container, self.high, self.closed, tasks]

    @classmethod
    def load(cls, state: list[Any]) -> Self:
        container, high, closed, tasks = state
        return cls(container, high, {seq: OpenTask(*fields) for seq, *fields in tasks}, closed)


COUNTS = ("met", "missed", "lost", "aborted", "invalid", "late_record")


@dataclass(slots=True)
class Record:
    """One container's tasks: counts of its whole life, and a window of verdicts for its guarantee ratio."""

    container: str
    guarantee: float
    window: SlidingWindow
    request_id: str | None = None
    replica: int | None = None
    generation: int | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    times: Timing = field(default_factory=Timing)
    warned: bool = False
    """Said to be at risk, and not recovered since."""
    touched_seq: int = 0
    """Stream sequence of the last batch that named it."""
    unsaid: dict[str, tuple[int, DeadlineEvent]] = field(default_factory=dict)
    """Verdicts that the stream does not show yet: by id, the sequence of the batch that led to it, and what to say."""

    def learn(self, info: RingInfo) -> None:
        """Takes over what a batch says of the container; what it does not know stays."""
        if info.request_id is not None:
            self.request_id, self.replica, self.generation = info.request_id, info.replica, info.generation
        if info.guarantee is not None:
            self.guarantee = info.guarantee

    def judge(self, outcome: Outcome) -> str | None:
        """Counts one verdict; returns ``at_risk`` or ``recovered`` when the record crosses its bound.

        At risk when the upper bound falls below the guarantee, recovered only when the lower one reaches it: between
        the two nothing is said, so that a record at the edge does not flap.
        """
        self.counts[outcome] += 1
        if outcome == Outcome.INVALID:
            return None
        self.window.push(outcome == Outcome.MET)
        now = self.standing
        if now == Standing.AT_RISK and not self.warned:
            self.warned = True
            return "at_risk"
        if now == Standing.GOOD and self.warned:
            self.warned = False
            return "recovered"
        return None

    def said(self, event_id: str) -> None:
        """The stream has it, and so all before it: the verdicts of a record are said in order."""
        while (first := next(iter(self.unsaid))) != event_id:
            del self.unsaid[first]
        del self.unsaid[event_id]

    def kept(self) -> Iterator[tuple[str, DeadlineEvent]]:
        return ((event_id, event) for event_id, (_, event) in self.unsaid.items())

    @property
    def judged(self) -> int:
        return self.counts["met"] + self.counts["missed"]

    @property
    def standing(self) -> Standing:
        return standing(self.window.met, self.window.missed, self.guarantee)

    @property
    def bounds(self) -> tuple[float | None, float | None, float | None]:
        """Guarantee ratio of the window, its lower and its upper bound; None where nothing was judged."""
        interval = wilson(self.window.met, self.window.met + self.window.missed)
        ratio = guarantee_ratio(self.window.met, self.window.missed)
        return (ratio, interval.lower, interval.upper) if interval else (None, None, None)

    def published(self, open_tasks: int) -> ContainerRecord:
        ratio, lower, upper = self.bounds
        return ContainerRecord(
            container=self.container,
            request_id=self.request_id,
            replica=self.replica,
            generation=self.generation,
            guarantee=self.guarantee,
            open=open_tasks,
            window_met=self.window.met,
            window_missed=self.window.missed,
            ratio=ratio,
            lower=lower,
            upper=upper,
            standing=Standing.AT_RISK if self.warned else self.standing,
            **self.counts,
            timed=self.times.count,
            newest_us=self.times.newest_us,
        )

    def dump(self) -> dict[str, Any]:
        return {
            "guarantee": self.guarantee,
            "window": self.window.dump(),
            "of": [self.request_id, self.replica, self.generation],
            "counts": self.counts,
            "warned": self.warned,
            "times": self.times.dump(),
            "touched": self.touched_seq,
            "unsaid": [[name, seq, event.model_dump(exclude_unset=True)] for name, (seq, event) in self.unsaid.items()],
        }

    @classmethod
    def load(cls, container: str, state: dict[str, Any]) -> Self:
        record = cls(container, state["guarantee"], SlidingWindow.load(state["window"]), *state["of"])
        record.counts.update(state["counts"])
        record.times = Timing.load(state.get("times", ()))
        record.warned, record.touched_seq = state["warned"], state["touched"]
        record.unsaid = {n: (seq, DeadlineEvent.model_validate(e)) for n, seq, e in state.get("unsaid", ())}
        return record

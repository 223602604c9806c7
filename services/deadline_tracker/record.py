"""What is known of one ring's open tasks and of one container's record; pure state, no messages are made here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, Self

from services.deadline_tracker.timing import Timing
from shared.deadlines import Outcome, SlidingWindow, Standing, guarantee_ratio, standing, wilson
from shared.messages import ContainerRecord, DeadlineEvent, RingInfo

Task = tuple[int, int, int, str]
"""A task as its begin says: its number, begin_us, deadline_us, name. A plain tuple: there are many of them."""
STAMP_US: Final = 1
DEADLINE_US: Final = 2


MOST_K: Final = 10_000
"""The longest (m,k) that a request may declare."""
COUNTS = ("met", "missed", "lost", "aborted", "invalid", "late_record")


@dataclass(slots=True)
class Record:
    """One container's tasks: counts of its whole life, and a window of verdicts for its guarantee ratio."""

    container: str
    guarantee: float
    verdicts: SlidingWindow
    request_id: str | None = None
    replica: int | None = None
    generation: int | None = None
    counted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    timing: Timing = field(default_factory=Timing)
    warned: bool = False
    """Said to be at risk, and not recovered since."""
    asks_anew: bool = False
    """Its guarantee was changed, and no verdict was held against the new one yet."""
    met_us: list[int] = field(default_factory=list)
    """How long the tasks took that were met and are not counted yet: ``counts``, ``window`` and ``times`` do that."""
    least_met: int = 0
    newest: SlidingWindow | None = None
    """Of a container that declared (m,k): at least m of its last k tasks are to be met."""
    touched_seq: int = 0
    """Stream sequence of the last batch that named it."""
    unsaid: dict[str, tuple[int, DeadlineEvent]] = field(default_factory=dict)
    """Verdicts that the stream does not show yet: by id, the sequence of the batch that led to it, and what to say."""

    def learn(self, info: RingInfo) -> None:
        """Takes over what a batch says of the container; what it does not know stays."""
        if info.request_id is not None:
            self.request_id, self.replica, self.generation = info.request_id, info.replica, info.generation
        if info.guarantee is not None and info.guarantee != self.guarantee:
            self.count_met()
            self.guarantee, self.asks_anew = info.guarantee, True
        if info.window is not None and info.window != self.constraint:
            m, k = info.window
            if 1 <= m <= k <= MOST_K:
                self.count_met()
                self.least_met, self.newest = m, SlidingWindow(k)

    @property
    def counts(self) -> dict[str, int]:
        """Verdicts, and tasks without one, since the container began."""
        self.count_met()
        return self.counted

    @property
    def window(self) -> SlidingWindow:
        """The last verdicts."""
        self.count_met()
        return self.verdicts

    @property
    def times(self) -> Timing:
        """How long its tasks took."""
        self.count_met()
        return self.timing

    def count_met(self) -> None:
        if times := self.take_met():
            self.counted[Outcome.MET] += times
            self._push(met=True, times=times)

    def take_met(self) -> int:
        """How many tasks were met and are not counted yet; they are the caller's to count."""
        times = len(self.met_us)
        self.timing.extend(self.met_us)
        self.met_us.clear()  # in place: a judge may hold it
        return times

    @property
    def crosses(self) -> bool:
        """Whether a task that was met and is not counted yet may make it cross a bound; only asked of a record that
        was ``warned`` or ``asks_anew``: no other can.

        Both bounds only rise with a met task. So a record cannot get at risk by one, unless more is asked of it than
        before; and whether one of them makes it recover shows after the last of them.
        """
        if self.asks_anew:
            return True
        then = self.verdicts.copy()
        then.push(met=True, times=len(self.met_us))
        return standing(then.met, then.missed, self.guarantee) == Standing.GOOD

    def judge(self, outcome: Outcome) -> str | None:
        """Counts one verdict; returns ``at_risk`` or ``recovered`` when the record crosses its bound.

        At risk when the upper bound falls below the guarantee or (m,k) is violated; recovered only when the lower one
        reaches it and (m,k) holds: between the two nothing is said, so that a record at the edge does not flap.
        """
        self.counts[outcome] += 1
        if outcome == Outcome.INVALID:
            return None
        self._push(met=outcome == Outcome.MET)
        self.asks_anew = False
        now, violated = self.standing, self.violated
        if not self.warned and (violated or now == Standing.AT_RISK):
            self.warned = True
            return "at_risk"
        if self.warned and not violated and now == Standing.GOOD:
            self.warned = False
            return "recovered"
        return None

    def _push(self, *, met: bool, times: int = 1) -> None:
        self.verdicts.push(met=met, times=times)
        if self.newest is not None:
            self.newest.push(met=met, times=times)

    @property
    def constraint(self) -> tuple[int, int] | None:
        """(m,k) as declared."""
        return None if self.newest is None else (self.least_met, self.newest.length)

    @property
    def violated(self) -> bool:
        """Fewer than m of the last k tasks are met; those not seen yet count as met."""
        self.count_met()
        return self.newest is not None and self.newest.missed > self.newest.length - self.least_met

    @property
    def distance_to_failure(self) -> int | None:
        """Misses in a row, from now on, that violate (m,k); 0: it is violated. None where none was declared."""
        self.count_met()
        return None if self.newest is None else self.newest.distance_to_failure(self.least_met)

    def said(self, event_id: str) -> None:
        """The stream has it, and so all that batches before its own led to; within one, releases differ in order."""
        seq, _ = self.unsaid.pop(event_id)
        for before in list(takewhile(lambda other: self.unsaid[other][0] < seq, self.unsaid)):
            del self.unsaid[before]

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
            m_of_k=self.constraint,
            distance_to_failure=self.distance_to_failure,
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
            "asks_anew": self.asks_anew,
            "m_of_k": None if self.newest is None else [self.least_met, self.newest.dump()],
            "times": self.times.dump(),
            "touched": self.touched_seq,
            "unsaid": [[name, seq, event.model_dump(exclude_unset=True)] for name, (seq, event) in self.unsaid.items()],
        }

    @classmethod
    def load(cls, container: str, state: dict[str, Any]) -> Self:
        record = cls(container, state["guarantee"], SlidingWindow.load(state["window"]), *state["of"])
        record.counts.update(state["counts"])
        record.timing = Timing.load(state.get("times", ()))
        record.warned, record.touched_seq = state["warned"], state["touched"]
        record.asks_anew = state.get("asks_anew", False)
        if (firm := state.get("m_of_k")) is not None:
            record.least_met, record.newest = firm[0], SlidingWindow.load(firm[1])
        record.unsaid = {n: (seq, DeadlineEvent.model_validate(e)) for n, seq, e in state.get("unsaid", ())}
        return record


@dataclass(slots=True)
class Ring:
    """One writer's records. ``high`` is the last sequence counted: what comes again lies at or below it."""

    name: str
    record: Record
    """Of the container that it was first said to belong to."""
    high: int = 0
    open: dict[int, Task] = field(default_factory=dict)
    """Tasks whose end has not been seen and that have no verdict: by the sequence of their begin."""
    overdue: dict[int, Task] = field(default_factory=dict)
    """Tasks that were judged missed while they run."""
    closed: bool = False
    told: RingInfo | None = None
    """What the last batch said of it."""

    @property
    def container(self) -> str:
        return self.record.container

    @property
    def running(self) -> int:
        return len(self.open) + len(self.overdue)

    def lose_open(self) -> None:
        """The open tasks can have no verdict any more; those judged while they ran keep theirs."""
        self.record.counts["lost"] += len(self.open)
        self.open.clear()
        self.overdue.clear()

    def dump(self) -> list[Any]:
        tasks = [[seq, *task, False] for seq, task in self.open.items()]
        tasks += [[seq, *task, True] for seq, task in self.overdue.items()]
        return [self.container, self.high, self.closed, tasks]

    @classmethod
    def load(cls, name: str, state: list[Any], records: Mapping[str, Record]) -> Self:
        container, high, closed, tasks = state
        ring = cls(name, records[container], high, closed=closed)
        for seq, number, begin_us, deadline_us, task_name, overdue in tasks:
            begun = ring.overdue if overdue else ring.open
            begun[seq] = (number, begin_us, deadline_us, task_name)
        return ring

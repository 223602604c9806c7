"""The tracker's rules in their plainest form, one row at a time: what the quick judge is compared with."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shared.deadlines import Outcome, Standing, standing, tardiness_us, verdict
from shared.messages import TaskBatch, TaskEventKind


@dataclass
class Task:
    number: int
    begin_us: int
    deadline_us: int
    name: str
    overdue: bool = False


@dataclass
class Ring:
    container: str
    high: int = 0
    open: dict[int, Task] = field(default_factory=dict)
    closed: bool = False


@dataclass
class Record:
    guarantee: float
    window: deque[bool]
    newest: deque[bool] | None = None
    least_met: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    warned: bool = False


@dataclass
class RowByRow:
    """Hears the batches of one node. ``told``: each verdict as (id, what the record showed then, tardiness)."""

    guarantee: float
    window: int
    rings: dict[str, Ring] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    told: list[tuple[Any, ...]] = field(default_factory=list)
    decided: list[tuple[Any, ...]] = field(default_factory=list)
    """Each task that was decided or ended: ring, sequence, begin, end, deadline, verdict."""

    def hear(self, batch: TaskBatch) -> None:
        rows = list(zip(*(getattr(batch, column) for column in COLUMNS), strict=True))
        if any(not (0 <= row[0] < len(batch.rings) and 0 <= row[-1] < len(batch.names)) for row in rows):
            self.counters["batches_malformed"] += 1
            return
        for info in batch.rings:
            self.rings.setdefault(info.ring, Ring(info.container))
            record = self.records.setdefault(info.container, Record(self.guarantee, deque(maxlen=self.window)))
            record.guarantee = record.guarantee if info.guarantee is None else info.guarantee
            firm = None if record.newest is None else (record.least_met, record.newest.maxlen)
            if info.window is not None and info.window != firm:
                record.least_met, record.newest = info.window[0], deque(maxlen=info.window[1])
        for ring, *row, name in rows:
            self._row(batch.node, batch.rings[ring].ring, tuple(row), batch.names[name])

    def _row(self, node: str, of: str, row: tuple[int, ...], name: str) -> None:
        kind, seq, begin_seq, number, stamp_us, deadline_us = row
        ring = self.rings[of]
        record = self.records[ring.container]
        if kind in (TaskEventKind.BEGIN, TaskEventKind.END):
            if seq <= ring.high:
                self.counters["records_again"] += 1
                return
            if seq > ring.high + 1:
                self._lose_open(ring, record)
            ring.high = seq
        if kind == TaskEventKind.BEGIN:
            ring.open[seq] = Task(number, stamp_us, deadline_us, name)
        elif kind == TaskEventKind.END:
            self._end(node, of, begin_seq, stamp_us)
        elif kind == TaskEventKind.OVERDUE:
            self._overdue(node, of, seq)
        elif kind in (TaskEventKind.ABORTED, TaskEventKind.LOST):
            task = ring.open.pop(seq, None)
            if task is None:
                self.counters["records_again"] += 1
            elif kind == TaskEventKind.ABORTED:
                record.counts["aborted"] += 1
            else:
                record.counts["lost"] += not task.overdue
        elif kind == TaskEventKind.CLOSED:
            self._lose_open(ring, record)
            ring.closed = True
        else:
            self.counters["rows_malformed"] += 1

    def _lose_open(self, ring: Ring, record: Record) -> None:
        record.counts["lost"] += sum(not task.overdue for task in ring.open.values())
        ring.open.clear()

    def _end(self, node: str, of: str, begin_seq: int, end_us: int) -> None:
        task = self.rings[of].open.pop(begin_seq, None)
        if task is None:
            self.counters["ends_without_begin"] += 1
            return
        outcome = verdict(task.begin_us, end_us, task.deadline_us)
        said = "ended" if task.overdue else str(outcome)
        self.decided.append((of, begin_seq, task.begin_us, end_us, task.deadline_us, said))
        if task.overdue:
            self.records[self.rings[of].container].counts["late_record"] += outcome == Outcome.MET
        else:
            self._judge(node, of, begin_seq, outcome, tardiness_us(task.begin_us, end_us, task.deadline_us))

    def _overdue(self, node: str, of: str, begin_seq: int) -> None:
        task = self.rings[of].open.get(begin_seq)
        if task is None or task.overdue:
            self.counters["records_again"] += 1
            return
        task.overdue = True
        self.decided.append((of, begin_seq, task.begin_us, None, task.deadline_us, "overdue"))
        self._judge(node, of, begin_seq, Outcome.MISSED, None)

    def _judge(self, node: str, of: str, begin_seq: int, outcome: Outcome, tardy: int | None) -> None:
        container = self.rings[of].container
        record = self.records[container]
        record.counts[outcome] += 1
        if outcome == Outcome.INVALID:
            return
        for window in (record.window, record.newest):
            if window is not None:
                window.append(outcome == Outcome.MET)
        shows = (record.window.count(True), record.window.count(False))
        if crossed := _crossed(record, standing(*shows, record.guarantee)):
            judged = record.counts["met"] + record.counts["missed"]
            self.told.append((f"{node}/{container}/{judged}/{crossed}", *shows, None))
        if outcome == Outcome.MISSED:
            self.told.append((f"{node}/{of}/{begin_seq}/missed", *shows, tardy))


def _crossed(record: Record, now: Standing) -> str | None:
    newest = record.newest
    violated = newest is not None and newest.count(False) > (newest.maxlen or 0) - record.least_met
    if not record.warned and (violated or now == Standing.AT_RISK):
        record.warned = True
        return "at_risk"
    if record.warned and not violated and now == Standing.GOOD:
        record.warned = False
        return "recovered"
    return None


COLUMNS = ("ring", "kind", "seq", "begin_seq", "task", "stamp_us", "deadline_us", "name")


def heard(batches: Iterable[TaskBatch], guarantee: float, window: int) -> RowByRow:
    it = RowByRow(guarantee, window)
    for batch in batches:
        it.hear(batch)
    return it

"""The open tasks of one ring and what each read of it decides about them (DESIGN 7); no batches, no files."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shared.messages import RingInfo, TaskEventKind

GUARD_US: Final = 1_000
"""How far past its deadline a task must be before it is called overdue (DESIGN 7): a record is written a little after
the stamp that it carries."""
MAX_OPEN: Final = 65_536
"""Open tasks remembered per ring; a writer that never ends its tasks has the oldest ones counted as lost."""

BEGIN, END = TaskEventKind.BEGIN.value, TaskEventKind.END.value
OVERDUE, ABORTED = TaskEventKind.OVERDUE.value, TaskEventKind.ABORTED.value
LOST, CLOSED = TaskEventKind.LOST.value, TaskEventKind.CLOSED.value


class Row(NamedTuple):
    """One task event: a row of TaskBatch."""

    kind: int
    seq: int
    begin_seq: int
    task: int
    stamp_us: int
    deadline_us: int
    name: str


class RingRows(NamedTuple):
    """What one read of one ring took, in the order of ``seq``; ``kind`` is BEGIN or END.

    ``lost`` counts the records that were gone before they could be taken. Everything up to ``taken`` is here or lost;
    what lies between ``taken`` and ``head`` comes with the next read. ``writer_gone`` was asked before the read.
    """

    info: RingInfo
    rows: tuple[Row, ...] = ()
    lost: int = 0
    taken: int = 0
    head: int = 0
    writer_gone: bool = False
    pid: int | None = None
    inherited: bool = False
    """The ring is older than this monitor: another one may have read it before."""


@dataclass(slots=True)
class OpenTasks:
    """Follows one ring from its first read to its CLOSED. Each task is written overdue and given up at most once."""

    info: RingInfo
    counts: Counter[int] = field(default_factory=Counter)
    """Rows written so far, by kind."""
    lost_records: int = 0
    closed: bool = False
    last_seq: int = 0
    pid: int | None = None
    ended_late: bool = False
    """A task of the last reading was not known to be late, and ended after its deadline."""
    busy_us: int = 0
    """Time in which a task was open, up to when none was last; without that of tasks whose end was lost."""
    _busy_since_us: int = 0
    next_due_us: int | None = None
    """When the next task becomes overdue unless it ends; None while no task is open and undecided."""
    _open: dict[int, Row] = field(default_factory=dict)
    """Begins of open tasks, by their sequence."""
    _overdue: set[int] = field(default_factory=set)
    """Those of them that were written overdue."""
    _due: list[tuple[int, int]] = field(default_factory=list)

    def take(self, read: RingRows, clock_us: int) -> list[Row]:
        """The rows that this read adds to the stream. ``clock_us`` was read before the ring was."""
        first = read.inherited and not self.counts
        self.info, self.pid, self.ended_late = read.info, read.pid, False
        if not first:  # what was overwritten before this monitor began may have been told by its predecessor
            self.lost_records += read.lost
        rows = self._records(read, clock_us)
        if read.writer_gone and read.taken == read.head:
            rows += self._close(ABORTED, clock_us)
        elif not read.lost and read.taken == read.head:
            rows += self._judge(clock_us)
        return self._written(rows + self._forget_oldest(clock_us))

    def pass_quiet(self, clock_us: int) -> list[Row]:
        """The same where the ring had nothing new."""
        return self._written(self._judge(clock_us))

    def vanish(self, clock_us: int) -> list[Row]:
        """The ring cannot be read any more and its writer may live: open tasks are lost, the ring is closed."""
        return self._written(self._close(LOST, clock_us))

    def open_tasks(self) -> Iterator[tuple[Row, bool]]:
        """The begin of each open task, and whether it was written overdue."""
        return ((begin, seq in self._overdue) for seq, begin in self._open.items())

    def check(self) -> None:
        """Assert that no open task can be forgotten and that a closed ring has none."""
        due = {seq: due_us for due_us, seq in self._due}
        assert self._overdue <= self._open.keys(), "an overdue task is not open"
        assert self._open.keys() - self._overdue <= due.keys(), "an open task has no due time"
        waited_for = min((due[seq] for seq in self._open.keys() - self._overdue), default=None)
        assert self.next_due_us == waited_for, "the next due time is that of another task"
        assert not (self.closed and self._open), "a closed ring has open tasks"
        assert len(self._open) <= MAX_OPEN, "more open tasks than the bound"
        assert self.counts[OVERDUE] <= self.counts[BEGIN], "more overdue tasks than begun ones"
        assert self.counts[ABORTED] + self.counts[LOST] <= self.counts[BEGIN], "more given up than begun"
        assert self.counts[CLOSED] == int(self.closed), "a ring is closed once"

    def _records(self, read: RingRows, clock_us: int) -> list[Row]:
        """The records themselves. At a gap the open tasks are lost: their ends may have been in it (DESIGN 7)."""
        rows: list[Row] = []
        due: dict[int, int] = {}
        """Of the tasks that were begun in this read and are open at its end: most have ended by then."""
        for row in read.rows:
            kind, seq, begin_seq, _, stamp_us, deadline_us, _ = row
            if seq != self.last_seq + 1:
                rows += self._drop(list(self._open), clock_us)
                due.clear()
            self.last_seq = seq
            if kind == BEGIN:
                if not self._open:
                    self._busy_since_us = stamp_us
                self._open[seq] = row
                due[seq] = stamp_us + deadline_us + GUARD_US
            elif begin := self._open.pop(begin_seq, None):
                due.pop(begin_seq, None)
                if begin_seq in self._overdue:
                    self._overdue.remove(begin_seq)
                elif stamp_us - begin.stamp_us > begin.deadline_us:
                    self.ended_late = True
                if not self._open and stamp_us > self._busy_since_us:
                    self.busy_us += stamp_us - self._busy_since_us
            rows.append(row)
        if read.taken > self.last_seq:
            rows += self._drop(list(self._open), clock_us)
            due.clear()
            self.last_seq = read.taken
        for seq, due_us in due.items():
            heapq.heappush(self._due, (due_us, seq))
        return rows

    def busy_us_at(self, clock_us: int) -> int:
        """With what is open now."""
        return self.busy_us + (max(0, clock_us - self._busy_since_us) if self._open else 0)

    def _undecided(self, seq: int) -> bool:
        return seq in self._open and seq not in self._overdue

    def _judge(self, clock_us: int) -> list[Row]:
        """Those that are overdue by now."""
        rows = []
        while self._due and self._due[0][0] < clock_us:
            seq = heapq.heappop(self._due)[1]
            if self._undecided(seq):
                self._overdue.add(seq)
                rows.append(_verdict(self._open[seq], OVERDUE, clock_us))
        return rows

    def _forget_oldest(self, clock_us: int) -> list[Row]:
        """Keep both the open tasks and the due times of long ended ones within bounds."""
        if len(self._due) > 2 * len(self._open) + 1_024:
            self._due = [entry for entry in self._due if self._undecided(entry[1])]
            heapq.heapify(self._due)
        excess = len(self._open) - MAX_OPEN
        return self._drop(list(self._open)[:excess], clock_us) if excess > 0 else []

    def _drop(self, seqs: list[int], clock_us: int) -> list[Row]:
        """Their ends will never be known. A task that is overdue already keeps that verdict."""
        dropped = [self._open.pop(seq) for seq in seqs]
        rows = [_verdict(begin, LOST, clock_us) for begin in dropped if begin.seq not in self._overdue]
        self._overdue.difference_update(seqs)
        return rows

    def _close(self, kind: int, clock_us: int) -> list[Row]:
        if kind == ABORTED:
            self.busy_us = self.busy_us_at(clock_us)
        left = [begin for seq, begin in self._open.items() if kind == ABORTED or seq not in self._overdue]
        rows = [_verdict(begin, kind, clock_us) for begin in left]
        self._open.clear()
        self._overdue.clear()
        self._due.clear()
        self.closed = True
        return [*rows, Row(CLOSED, self.last_seq, 0, 0, clock_us, 0, "")]

    def _written(self, rows: list[Row]) -> list[Row]:
        for row in rows:  # for a few rows a tenth of what Counter.update costs
            self.counts[row.kind] += 1
        while self._due and not self._undecided(self._due[0][1]):
            heapq.heappop(self._due)
        self.next_due_us = self._due[0][0] if self._due else None
        return rows


def _verdict(begin: Row, kind: int, clock_us: int) -> Row:
    """A row of the monitor's own about a task: the sequence of its begin, stamped with the clock that judged it."""
    return begin._replace(kind=kind, stamp_us=clock_us)

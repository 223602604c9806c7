"""The open tasks of one ring and what each read of it decides about them (DESIGN 7); no batches, no files."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
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


Fields = tuple[int, int, int, int, int, int, str]
"""Those of a Row, as a plain tuple: it is made, and taken apart, in a seventh of the time."""


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
    rows: tuple[Fields, ...] = ()
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
    _open: dict[int, Fields] = field(default_factory=dict)
    """Begins of open tasks, by their sequence."""
    _overdue: set[int] = field(default_factory=set)
    """Those of them that were written overdue."""
    _due: list[tuple[int, int]] = field(default_factory=list)

    def take(self, read: RingRows, clock_us: int) -> Sequence[Fields]:
        """The rows that this read adds to the stream. ``clock_us`` was read before the ring was."""
        first = read.inherited and not self.counts
        self.info, self.pid, self.ended_late = read.info, read.pid, False
        if not first:  # what was overwritten before this monitor began may have been told by its predecessor
            self.lost_records += read.lost
        rows, drained = self._records(read, clock_us), read.taken == read.head
        if read.writer_gone and drained:
            verdicts = self._close(ABORTED, clock_us)
        elif self._due:
            verdicts = self._judge(clock_us) if drained and not read.lost else []
            verdicts += self._forget_oldest(clock_us)
        else:
            self.next_due_us = None
            return rows
        self._wait_for_next()
        return [*rows, *verdicts] if verdicts else rows

    def pass_quiet(self, clock_us: int) -> Sequence[Fields]:
        """The same where the ring had nothing new."""
        rows = self._judge(clock_us)
        self._wait_for_next()
        return rows

    def vanish(self, clock_us: int) -> Sequence[Fields]:
        """The ring cannot be read any more and its writer may live: open tasks are lost, the ring is closed."""
        rows = self._close(LOST, clock_us)
        self._wait_for_next()
        return rows

    def open_tasks(self) -> Iterator[tuple[Row, bool]]:
        """The begin of each open task, and whether it was written overdue."""
        return ((Row._make(begin), seq in self._overdue) for seq, begin in self._open.items())

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

    def _records(self, read: RingRows, clock_us: int) -> Sequence[Fields]:
        """The records themselves. At a gap the open tasks are lost: their ends may have been in it (DESIGN 7)."""
        rows, last_seq = read.rows, self.last_seq + len(read.rows)
        if read.taken == last_seq and (not rows or rows[-1][1] == last_seq):  # sequences rise: none is missing
            self._follow(rows)
            return rows
        told: list[Fields] = []
        for row in rows:
            if row[1] != self.last_seq + 1:
                told += self._drop(list(self._open), clock_us)
                self.last_seq = row[1] - 1
            self._follow((row,))
            told.append(row)
        if read.taken > self.last_seq:
            told += self._drop(list(self._open), clock_us)
            self.last_seq = read.taken
        return told

    def _follow(self, rows: Sequence[Fields]) -> None:
        """What records without a gap between them begin and end; most tasks do both in one read."""
        opened, begun, before = self._open, 0, self.last_seq
        for row in rows:
            kind, seq, begin_seq, _, stamp_us, _, _ = row
            if kind == BEGIN:
                if not opened:
                    self._busy_since_us = stamp_us
                opened[seq] = row
                begun += 1
            elif begin := opened.pop(begin_seq, None):
                _, _, _, _, begun_us, deadline_us, _ = begin
                if begin_seq in self._overdue:
                    self._overdue.remove(begin_seq)
                elif stamp_us - begun_us > deadline_us:
                    self.ended_late = True
                if not opened and stamp_us > self._busy_since_us:
                    self.busy_us += stamp_us - self._busy_since_us
        self.last_seq = before + len(rows)
        if begun:
            self.counts[BEGIN] += begun
        if begun < len(rows):
            self.counts[END] += len(rows) - begun
        for seq, (_, _, _, _, stamp_us, deadline_us, _) in reversed(opened.items()):
            if seq <= before:
                break
            heapq.heappush(self._due, (stamp_us + deadline_us + GUARD_US, seq))

    def busy_us_at(self, clock_us: int) -> int:
        """With what is open now."""
        return self.busy_us + (max(0, clock_us - self._busy_since_us) if self._open else 0)

    def _undecided(self, seq: int) -> bool:
        return seq in self._open and seq not in self._overdue

    def _judge(self, clock_us: int) -> list[Fields]:
        """Those that are overdue by now."""
        late = []
        while self._due and self._due[0][0] < clock_us:
            seq = heapq.heappop(self._due)[1]
            if self._undecided(seq):
                self._overdue.add(seq)
                late.append(self._open[seq])
        return self._verdicts(late, OVERDUE, clock_us)

    def _forget_oldest(self, clock_us: int) -> list[Fields]:
        """Keep both the open tasks and the due times of long ended ones within bounds."""
        if len(self._due) > 2 * len(self._open) + 1_024:
            self._due = [entry for entry in self._due if self._undecided(entry[1])]
            heapq.heapify(self._due)
        excess = len(self._open) - MAX_OPEN
        return self._drop(list(self._open)[:excess], clock_us) if excess > 0 else []

    def _drop(self, seqs: list[int], clock_us: int) -> list[Fields]:
        """Their ends will never be known. A task that is overdue already keeps that verdict."""
        dropped = {seq: self._open.pop(seq) for seq in seqs}
        rows = self._verdicts([begin for seq, begin in dropped.items() if seq not in self._overdue], LOST, clock_us)
        self._overdue.difference_update(seqs)
        return rows

    def _close(self, kind: int, clock_us: int) -> list[Fields]:
        if kind == ABORTED:
            self.busy_us = self.busy_us_at(clock_us)
        left = [begin for seq, begin in self._open.items() if kind == ABORTED or seq not in self._overdue]
        rows = self._verdicts(left, kind, clock_us)
        self._open.clear()
        self._overdue.clear()
        self._due.clear()
        self.closed = True
        self._count(CLOSED, 1)
        return [*rows, Row(CLOSED, self.last_seq, 0, 0, clock_us, 0, "")]

    def _verdicts(self, begins: list[Fields], kind: int, clock_us: int) -> list[Fields]:
        """Rows of the monitor's own about tasks: the sequences of their begins, and the clock that judged them."""
        self._count(kind, len(begins))
        return [Row._make(begin)._replace(kind=kind, stamp_us=clock_us) for begin in begins]

    def _count(self, kind: int, rows: int) -> None:
        if rows:
            self.counts[kind] += rows

    def _wait_for_next(self) -> None:
        while self._due and not self._undecided(self._due[0][1]):
            heapq.heappop(self._due)
        self.next_due_us = self._due[0][0] if self._due else None

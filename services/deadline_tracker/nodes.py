"""What is tracked of one node, and the checkpoint that it is written to and read from; nothing is judged here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from services.deadline_tracker.record import DEADLINE_US, STAMP_US, Record, Ring
from shared.messages import NodeDeadlines

KEEP_CLOSED = 256
"""Closed rings and finished containers remembered per node: a monitor that died before it removed a ring file reads
the ring again, and what it repeats must still be known as counted."""


@dataclass(slots=True)
class Node:
    """Everything tracked of one node, and the stream sequence that it includes."""

    name: str
    partition: int = 0
    stream_seq: int = 0
    rings: dict[str, Ring] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    revision: int = 0
    unsaved_seq: int = 0
    """Of the first batch that its checkpoint does not include; 0: it includes all."""
    early: dict[str, int] = field(default_factory=dict)
    """Verdicts that another instance said before we counted their batch: id and stream sequence."""

    @property
    def unsaid(self) -> int:
        return sum(len(record.unsaid) for record in self.records.values())

    @property
    def first_unsaid_seq(self) -> int:
        """Of the batch that led to the first verdict that is not known to be in the stream; of none, the next."""
        seqs = (seq for record in self.records.values() for seq, _ in record.unsaid.values())
        return min(seqs, default=self.stream_seq + 1)

    def running(self, containers: Collection[str]) -> Iterator[tuple[str, int, int]]:
        """Container, begin and deadline of each open task of these. Others may have thousands that never end."""
        for ring in self.rings.values():
            if ring.container not in containers:
                continue
            for task in (*ring.open.values(), *ring.overdue.values()):
                yield ring.container, task[STAMP_US], task[DEADLINE_US]

    def forget_old(self) -> None:
        """Keeps a bounded number of closed rings and of records that no ring names any more, the newest ones."""
        closed = [name for name, ring in self.rings.items() if ring.closed]
        for name in closed[:-KEEP_CLOSED]:
            del self.rings[name]
        live = {ring.container for ring in self.rings.values()}
        done = sorted((r.touched_seq, name) for name, r in self.records.items() if name not in live)
        for _, name in done[:-KEEP_CLOSED]:
            del self.records[name]

    def another_stream(self) -> None:
        """Its sequences begin again, and what it holds is new to all."""
        self.stream_seq, self.early = 0, {}
        self.unsaved_seq = min(1, self.unsaved_seq)
        for record in self.records.values():
            record.unsaid.clear()

    def published(self, wall_us: int) -> NodeDeadlines:
        open_tasks: Counter[str] = Counter()
        for ring in self.rings.values():
            open_tasks[ring.container] += ring.running
        state = {
            "rings": {name: ring.dump() for name, ring in self.rings.items()},
            "records": {name: record.dump() for name, record in self.records.items()},
        }
        return NodeDeadlines(
            node=self.name,
            at_us=wall_us,
            stream_seq=self.stream_seq,
            containers=tuple(r.published(open_tasks[name]) for name, r in self.records.items()),
            checkpoint=state,
        )

    def restore(self, saved: NodeDeadlines) -> None:
        """Raises KeyError, TypeError or ValueError, and changes nothing, where it was not written by us."""
        state: Any = saved.checkpoint
        records = {name: Record.load(name, s) for name, s in state["records"].items()}
        rings = {name: Ring.load(name, s, records) for name, s in state["rings"].items()}
        self.stream_seq, self.rings, self.records = saved.stream_seq, rings, records

    def check(self) -> None:
        """Asserts what must always hold."""
        for ring in self.rings.values():
            assert ring.record is self.records.get(ring.container), f"a ring of {self.name} has no record"
            begun = {**ring.open, **ring.overdue}
            assert len(begun) == ring.running, f"a task is open and overdue: {ring}"
            assert all(0 < seq <= ring.high for seq in begun), f"open tasks beyond the head: {ring}"
        for record in self.records.values():
            assert record.window.met + record.window.missed == min(record.judged, record.window.length)

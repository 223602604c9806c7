"""The tracker's state machine: task batches in stream order become verdicts, records and warnings; no I/O, no clock.

The first of end and overdue in stream order decides a task. Each record (ring id, sequence, kind) counts once, so a
batch that comes again, or a monitor that reads its rings again, changes nothing; an offline recount of the stream
gives the same verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from services.deadline_tracker.record import OpenTask, Record, Ring
from shared.deadlines import Outcome, SlidingWindow, tardiness_us, verdict
from shared.effects import (
    Commit,
    CommitDone,
    CommitOutcome,
    Draining,
    Effect,
    KeyChanged,
    Publish,
    Received,
    Tick,
    WatchReplayed,
    Write,
)
from shared.errors import FieldError
from shared.messages import DeadlineEvent, NodeDeadlines, RingInfo, TaskBatch, TaskEventKind
from shared.subjects import DEADLINES, Subjects, decode, node_key

KEEP_CLOSED = 256
"""Closed rings and finished containers remembered per node: a monitor that died before it removed a ring file reads
the ring again, and what it repeats must still be known as counted."""


@dataclass(slots=True)
class Node:
    """Everything tracked of one node, and the stream sequence that it includes."""

    name: str
    stream_seq: int = 0
    rings: dict[str, Ring] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    revision: int = 0
    dirty: bool = False
    writing: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One event of a batch."""

    ring: str
    kind: int
    seq: int
    begin_seq: int
    task: int
    stamp_us: int
    deadline_us: int
    name: str


@dataclass(frozen=True, slots=True)
class Case:
    """One row and all that it concerns."""

    node: Node
    batch: TaskBatch
    ring: Ring
    record: Record
    row: Row


class Core:
    """``guarantee`` is judged where a container declares none; ``window`` is the length of the ratio's window."""

    def __init__(self, subjects: Subjects, guarantee: float, window: int) -> None:
        self.subjects = subjects
        self.guarantee = guarantee
        self.window = window
        self.nodes: dict[str, Node] = {}
        self.counters: Counter[str] = Counter()
        self._commits: dict[int, str] = {}
        self._commit = 0
        self._delivered = 0
        """Stream sequence of the last batch that the shell delivered; it only ever grows within one stream."""

    def handle(self, event: object, now_us: int) -> list[Effect]:  # noqa: ARG002 - the tracker judges no time
        match event:
            case Received(message=TaskBatch() as batch, subject=subject, seq=seq):
                if subject == self.subjects.task_events(batch.node):
                    return self._batch(batch, seq)
                self.counters["batches_of_another_node"] += 1
            case Tick(wall_us=wall_us):
                return self._checkpoints(wall_us)
            case CommitDone() as done:
                self._committed(done)
            case KeyChanged(bucket=bucket, key=key, value=value, revision=revision) if bucket == DEADLINES:
                self._loaded(key, value, revision)
            case Draining() | WatchReplayed():
                pass
        return []

    def start_seq(self) -> int:
        """First stream sequence that some node has not counted yet; 1 when nothing is known."""
        first = min((node.stream_seq + 1 for node in self.nodes.values()), default=1)
        self._delivered = first - 1
        return first

    # --- batches ---

    def _batch(self, batch: TaskBatch, seq: int) -> list[Effect]:
        if seq < self._delivered:
            self._another_stream()
        self._delivered = seq
        node = self.nodes.setdefault(batch.node, Node(batch.node))
        if seq <= node.stream_seq:
            self.counters["batches_again"] += 1
            return []
        node.stream_seq, node.dirty = seq, True
        try:
            rows = list(_rows(batch))
        except IndexError:
            self.counters["batches_malformed"] += 1
            return []
        for info in batch.rings:
            self._learn(node, info, seq)
        effects: list[Effect] = []
        for row in rows:
            ring = node.rings[row.ring]
            effects += self._row(Case(node, batch, ring, node.records[ring.container], row))
        self._forget_old(node)
        return effects

    def _another_stream(self) -> None:
        """The stream was lost and made anew: its sequences begin again, and what it holds is new to all."""
        self.counters["streams_made_anew"] += 1
        for node in self.nodes.values():
            node.stream_seq = 0

    def _learn(self, node: Node, info: RingInfo, seq: int) -> None:
        node.rings.setdefault(info.ring, Ring(info.container))
        record = node.records.get(info.container)
        if record is None:
            record = Record(info.container, self.guarantee, SlidingWindow(self.window))
            node.records[info.container] = record
        record.learn(info)
        record.touched_seq = seq

    def _row(self, case: Case) -> list[Effect]:
        ring, row = case.ring, case.row
        if row.kind in (TaskEventKind.BEGIN, TaskEventKind.END):
            if row.seq <= ring.high:
                self.counters["records_again"] += 1
                return []
            if row.seq > ring.high + 1:  # records never seen: the ends of open tasks may be among them
                _lose_open(case)
            ring.high = row.seq
        match row.kind:
            case TaskEventKind.BEGIN:
                ring.open[row.seq] = OpenTask(row.task, row.stamp_us, row.deadline_us, row.name)
            case TaskEventKind.END:
                return self._end(case)
            case TaskEventKind.OVERDUE:
                return self._overdue(case)
            case TaskEventKind.ABORTED | TaskEventKind.LOST:
                self._without_end(case)
            case TaskEventKind.CLOSED:
                _lose_open(case)
                ring.closed = True
            case _:
                self.counters["rows_malformed"] += 1
        return []

    def _end(self, case: Case) -> list[Effect]:
        row = case.row
        task = case.ring.open.pop(row.begin_seq, None)
        if task is None:
            self.counters["ends_without_begin"] += 1
            return []
        outcome = verdict(task.begin_us, row.stamp_us, task.deadline_us)
        if task.overdue:
            case.record.counts["late_record"] += outcome == Outcome.MET
            return []
        tardy = tardiness_us(task.begin_us, row.stamp_us, task.deadline_us)
        return self._judge(case, row.begin_seq, task, outcome, tardy)

    def _overdue(self, case: Case) -> list[Effect]:
        task = case.ring.open.get(case.row.seq)
        if task is None or task.overdue:
            self.counters["records_again"] += 1
            return []
        task.overdue = True
        return self._judge(case, case.row.seq, task, Outcome.MISSED, None)

    def _without_end(self, case: Case) -> None:
        """Aborted is a count of its own, also where overdue was written before; lost only where nothing was."""
        task = case.ring.open.pop(case.row.seq, None)
        if task is None:
            self.counters["records_again"] += 1
        elif case.row.kind == TaskEventKind.ABORTED:
            case.record.counts["aborted"] += 1
        else:
            case.record.counts["lost"] += not task.overdue

    def _judge(self, case: Case, begin_seq: int, task: OpenTask, outcome: Outcome, tardy: int | None) -> list[Effect]:
        record, node, ring = case.record, case.node.name, case.row.ring
        crossed = record.judge(outcome)
        effects: list[Effect] = []
        if outcome == Outcome.MISSED:
            said = {"task": task.task, "deadline_us": task.deadline_us, "ring": ring, "seq": begin_seq}
            event_id = f"{node}/{ring}/{begin_seq}/missed"
            effects.append(self._event(case, "missed", event_id, {**said, "name": task.name, "tardiness_us": tardy}))
        if crossed:
            event_id = f"{node}/{record.container}/{record.judged}/{crossed}"
            effects.append(self._event(case, crossed, event_id, {"task": None, "deadline_us": None}))
        return effects

    def _event(self, case: Case, kind: str, event_id: str, said: dict[str, Any]) -> Publish:
        record, node = case.record, case.node.name
        ratio, lower, upper = record.bounds
        body = DeadlineEvent(
            at_us=case.batch.at_us,
            node=node,
            container=record.container,
            kind=kind,
            request_id=record.request_id,
            replica=record.replica,
            generation=record.generation,
            judged=record.judged,
            met=record.window.met,
            missed=record.window.missed,
            ratio=ratio,
            lower=lower,
            upper=upper,
            guarantee=record.guarantee,
            **said,
        )
        return Publish(self.subjects.deadline_event(node, record.container), body, event_id, f"laxity.deadline.{kind}")

    def _forget_old(self, node: Node) -> None:
        """Keeps a bounded number of closed rings and of records that no ring names any more, the newest ones."""
        closed = [name for name, ring in node.rings.items() if ring.closed]
        for name in closed[:-KEEP_CLOSED]:
            del node.rings[name]
        live = {ring.container for ring in node.rings.values()}
        done = sorted((r.touched_seq, name) for name, r in node.records.items() if name not in live)
        for _, name in done[:-KEEP_CLOSED]:
            del node.records[name]

    # --- checkpoints: the records and the stream sequence that they include, in one write ---

    def _checkpoints(self, wall_us: int) -> list[Effect]:
        return [self._checkpoint(node, wall_us) for node in self.nodes.values() if node.dirty and not node.writing]

    def _checkpoint(self, node: Node, wall_us: int) -> Commit:
        self._commit += 1
        self._commits[self._commit] = node.name
        node.dirty, node.writing = False, True
        value = self.published(node, wall_us).to_json()
        return Commit(self._commit, DEADLINES, (Write(node_key(node.name), value, node.revision),))

    def published(self, node: Node, wall_us: int) -> NodeDeadlines:
        open_tasks: Counter[str] = Counter()
        for ring in node.rings.values():
            open_tasks[ring.container] += len(ring.open)
        state = {
            "rings": {name: ring.dump() for name, ring in node.rings.items()},
            "records": {name: record.dump() for name, record in node.records.items()},
        }
        return NodeDeadlines(
            node=node.name,
            at_us=wall_us,
            stream_seq=node.stream_seq,
            containers=tuple(r.published(open_tasks[name]) for name, r in node.records.items()),
            checkpoint=state,
        )

    def _committed(self, done: CommitDone) -> None:
        node = self.nodes[self._commits.pop(done.commit)]
        node.writing = False
        if done.outcome == CommitOutcome.WRITTEN:
            node.revision = done.revisions[node_key(node.name)]
            return
        self.counters[f"checkpoint_{done.outcome}"] += 1
        node.dirty = True
        for change in done.current:
            self._loaded(change.key, change.value, change.revision)

    def _loaded(self, key: str, value: bytes | None, revision: int) -> None:
        """A checkpoint as the bucket has it: taken over where it is ahead of what is known here."""
        if not key.startswith("node."):
            return
        name = decode(key.removeprefix("node."))
        node = self.nodes.setdefault(name, Node(name))
        if revision <= node.revision and value is not None:
            return
        node.revision = revision
        if value is None:
            return
        try:
            self._restore(node, NodeDeadlines.trusted(value))
        except (FieldError, KeyError, TypeError, ValueError):  # not written by us: the stream is counted again
            self.counters["checkpoints_malformed"] += 1

    def _restore(self, node: Node, saved: NodeDeadlines) -> None:
        if saved.stream_seq > node.stream_seq:
            state: Any = saved.checkpoint
            rings = {ring: Ring.load(s) for ring, s in state["rings"].items()}
            records = {name: Record.load(name, s) for name, s in state["records"].items()}
            node.stream_seq, node.rings, node.records = saved.stream_seq, rings, records

    # --- for tests and for people ---

    def check(self) -> None:
        """Asserts what must always hold."""
        for node in self.nodes.values():
            for ring in node.rings.values():
                assert ring.container in node.records, f"a ring of {node.name} has no record"
                assert all(0 < seq <= ring.high for seq in ring.open), f"open tasks beyond the head: {ring}"
                assert not (ring.closed and ring.open), f"a closed ring has open tasks: {ring}"
            for record in node.records.values():
                assert record.window.met + record.window.missed == min(record.judged, record.window.length)

    def story(self, container: str) -> list[str]:
        """What is known of one container, a line per node that has seen it."""
        found = [(node, node.records[container]) for node in self.nodes.values() if container in node.records]
        return [
            f"{n.name} up to stream sequence {n.stream_seq}: {r.counts}, {r.window}, {r.standing}" for n, r in found
        ]


def _lose_open(case: Case) -> None:
    """The open tasks can have no verdict any more; those judged while they ran keep theirs."""
    case.record.counts["lost"] += sum(not task.overdue for task in case.ring.open.values())
    case.ring.open.clear()


def _rows(batch: TaskBatch) -> Iterator[Row]:
    """Raises IndexError when a row names a ring or a task name that the batch does not list."""
    columns = (batch.ring, batch.kind, batch.seq, batch.begin_seq, batch.task, batch.stamp_us, batch.deadline_us)
    for (ring, kind, seq, begin_seq, task, stamp_us, deadline_us), name in zip(
        zip(*columns, strict=True), batch.name, strict=True
    ):
        if ring < 0 or name < 0:
            raise IndexError(ring)
        yield Row(batch.rings[ring].ring, kind, seq, begin_seq, task, stamp_us, deadline_us, batch.names[name])

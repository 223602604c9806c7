"""The tracker's state machine: task batches in stream order become verdicts, records and warnings; no I/O, no clock.

The first of end and overdue in stream order decides a task. Each record (ring id, sequence, kind) counts once, so a
batch that comes again, or a monitor that reads its rings again, changes nothing; an offline recount of the stream
gives the same verdicts. Every instance judges all tasks; the holder of the lease alone says verdicts and writes
checkpoints, and a verdict is kept, by all, until the stream shows that it was said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from services.deadline_tracker.kept import MatchedTask
from services.deadline_tracker.record import OpenTask, Record, Ring
from services.deadline_tracker.suspects import Suspects
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
    Reconnected,
    Tick,
    WatchReplayed,
    Write,
)
from shared.errors import FieldError
from shared.lease import Tenure
from shared.messages import DeadlineEvent, NodeDeadlines, RingInfo, TaskBatch, TaskEventKind
from shared.subjects import DEADLINES, LEDGER, NODES, Subjects, decode, lease_key, node_key

LEASE = lease_key("deadline-tracker")
CHECKPOINT_US = 1_000_000
"""How often the records that changed are written."""
MOST_NODES = 900
"""Nodes in one write: below the server's 1,000 messages per batch."""
MOST_UNSAID = 500
"""Of one node: with more its checkpoint waits, since it must fit a message (1 MiB)."""
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
    early: dict[str, int] = field(default_factory=dict)
    """Verdicts that another instance said before we counted their batch: id and stream sequence."""

    @property
    def unsaid(self) -> int:
        return sum(len(record.unsaid) for record in self.records.values())

    def running(self) -> Iterator[tuple[str, int, int]]:
        """Container, begin and deadline of each open task."""
        for ring in self.rings.values():
            for task in ring.open.values():
                yield ring.container, task.begin_us, task.deadline_us


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
    """``guarantee`` is judged where a container declares none; ``window`` is the length of the ratio's window;
    ``holder`` names this process, and another takes over when it has not renewed its lease for ``lease_us``."""

    def __init__(self, subjects: Subjects, guarantee: float, window: int, holder: str, lease_us: int) -> None:
        self.subjects = subjects
        self.guarantee = guarantee
        self.window = window
        self.nodes: dict[str, Node] = {}
        self.counters: Counter[str] = Counter()
        self.lease = Tenure(LEASE, holder, lease_us)
        self.suspects = Suspects()
        self._matched: list[MatchedTask] = []
        self._writing: tuple[int, list[Node]] | None = None
        self._commit = 0
        self._written_us: int | None = None
        self._wall_us = 0
        self._replayed = self._following = self._stopping = False
        self._delivered = 0
        """Stream sequence of the last batch that the shell delivered; it only ever grows within one stream."""

    def handle(self, event: object, now_us: int) -> list[Effect]:
        match event:
            case Received(message=TaskBatch() as batch, subject=subject, seq=seq):
                if subject == self.subjects.task_events(batch.node):
                    return self._batch(batch, seq)
                self.counters["batches_of_another_node"] += 1
            case Received(message=DeadlineEvent() as verdict, seq=seq, headers=headers):
                self._was_said(verdict, headers.get("ce-id", ""), seq)
            case Tick(wall_us=wall_us):
                self._wall_us = wall_us
                self.suspects.tick()
                return self._write(now_us)
            case CommitDone() as done:
                return self._committed(done, now_us)
            case KeyChanged(bucket=bucket) as change if bucket == DEADLINES:
                self._heard(change, now_us)
            case KeyChanged(bucket=bucket, key=key, value=value) if bucket in (LEDGER, NODES):
                self.suspects.heard(bucket, key, value)
            case WatchReplayed(bucket=bucket, keys=keys) if bucket == DEADLINES:
                self._replayed = True
                if LEASE not in keys:
                    self.lease.absent()
                return self._write(now_us)
            case Reconnected(gap_us=gap_us):
                self.lease.rebase(gap_us)
            case Draining():
                return self._step_down()
        return []

    def start_seq(self) -> int:
        """First stream sequence that some node has not counted yet; 1 when nothing is known."""
        first = min((node.stream_seq + 1 for node in self.nodes.values()), default=1)
        self._delivered = first - 1
        return first

    def start_seq_of_verdicts(self) -> int:
        """From here on the stream tells which verdicts of the checkpoints were said."""
        unsaid = [seq for node in self.nodes.values() for r in node.records.values() for seq, _ in r.unsaid.values()]
        return min(self.start_seq(), *unsaid) if unsaid else self.start_seq()

    # --- batches ---

    def _batch(self, batch: TaskBatch, seq: int) -> list[Effect]:
        if seq < self._delivered:
            self._another_stream()
        self._delivered, self._following = seq, True
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
        self._matched.clear()
        for row in rows:
            ring = node.rings[row.ring]
            effects += self._row(Case(node, batch, ring, node.records[ring.container], row))
        self._forget_old(node)
        node.early = {event_id: at for event_id, at in node.early.items() if at > seq}
        effects = self.suspects.explained(batch, lambda: self._matched, effects, node.running)
        return [*effects, *self._noisy(node, batch)]

    def _noisy(self, node: Node, batch: TaskBatch) -> Iterator[Publish]:
        """Said by the holder of the lease alone, and not kept: who is noisy is found again."""
        for container, cause in self.suspects.noisy(node.name, batch.watermark_us, node.running):
            record = node.records.get(container)
            if record is not None and self.lease.active:
                event_id = f"{node.name}/{container}/{record.judged}/noisy/{cause.container}"
                said = {"task": None, "deadline_us": None, "because": (cause,)}
                yield self._publish(event_id, self._event(batch, record, "noisy", said))

    def _another_stream(self) -> None:
        """The stream was lost and made anew: its sequences begin again, and what it holds is new to all."""
        self.counters["streams_made_anew"] += 1
        for node in self.nodes.values():
            node.stream_seq, node.early = 0, {}
            for record in node.records.values():
                record.unsaid.clear()

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
        self._matched.append((row.ring, row.begin_seq, task.begin_us, row.stamp_us, task.deadline_us))
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
        self._matched.append((case.row.ring, case.row.seq, task.begin_us, None, task.deadline_us))
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
            effects += self._say(case, "missed", event_id, {**said, "name": task.name, "tardiness_us": tardy})
        if crossed:
            event_id = f"{node}/{record.container}/{record.judged}/{crossed}"
            effects += self._say(case, crossed, event_id, {"task": None, "deadline_us": None})
        return effects

    def _say(self, case: Case, kind: str, event_id: str, said: dict[str, Any]) -> list[Effect]:
        """By the holder of the lease; kept until it is heard, unless it was heard before."""
        if case.node.early.pop(event_id, None) is not None:
            return []
        event = self._event(case.batch, case.record, kind, said)
        case.record.unsaid[event_id] = (case.node.stream_seq, event)
        return [self._publish(event_id, event)] if self.lease.active else []

    def _publish(self, event_id: str, event: DeadlineEvent) -> Publish:
        subject = self.subjects.deadline_event(event.node, event.container)
        return Publish(subject, event, event_id, f"laxity.deadline.{event.kind}")

    def _was_said(self, verdict: DeadlineEvent, event_id: str, seq: int) -> None:
        node = self.nodes.setdefault(verdict.node, Node(verdict.node))
        record = node.records.get(verdict.container)
        if record is not None and event_id in record.unsaid:
            record.said(event_id)
        elif seq > node.stream_seq:
            node.early[event_id] = seq

    def _event(self, batch: TaskBatch, record: Record, kind: str, said: dict[str, Any]) -> DeadlineEvent:
        ratio, lower, upper = record.bounds
        return DeadlineEvent(
            at_us=batch.at_us,
            node=batch.node,
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

    def _forget_old(self, node: Node) -> None:
        """Keeps a bounded number of closed rings and of records that no ring names any more, the newest ones."""
        closed = [name for name, ring in node.rings.items() if ring.closed]
        for name in closed[:-KEEP_CLOSED]:
            del node.rings[name]
        live = {ring.container for ring in node.rings.values()}
        done = sorted((r.touched_seq, name) for name, r in node.records.items() if name not in live)
        for _, name in done[:-KEEP_CLOSED]:
            del node.records[name]

    # --- checkpoints: the records and the stream sequence that they include, in one write with the lease ---

    def _write(self, now_us: int) -> list[Effect]:
        if self._writing or self._stopping or not self._replayed or not self.lease.may_write(now_us):
            return []
        due = self._written_us is None or now_us - self._written_us >= CHECKPOINT_US
        nodes = self._dirty() if due and self.lease.active else []
        if not nodes and not self.lease.due(now_us):
            return []
        self._written_us = now_us if nodes else self._written_us
        return [self._checkpoint(nodes, self.lease.renewal())]

    def _dirty(self) -> list[Node]:
        """The nodes that changed, all in one write: no sequence of one is passed before the others include it."""
        return [node for node in self.nodes.values() if node.dirty and node.unsaid <= MOST_UNSAID][:MOST_NODES]

    def _checkpoint(self, nodes: list[Node], lease: Write) -> Commit:
        self._commit += 1
        self._writing = (self._commit, nodes)
        writes = []
        for node in nodes:
            node.dirty = False
            writes.append(Write(node_key(node.name), self.published(node, self._wall_us).to_json(), node.revision))
        return Commit(self._commit, DEADLINES, (*writes, lease))

    def _step_down(self) -> list[Effect]:
        """Last words: what changed, and the lease, so that a standby need not wait."""
        self._stopping = True
        if self._writing or not self.lease.active:
            return []
        return [self._checkpoint(self._dirty(), self.lease.give_back())]

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

    def _committed(self, done: CommitDone, now_us: int) -> list[Effect]:
        if self._writing is None or done.commit != self._writing[0]:
            return []
        _, nodes = self._writing
        self._writing = None
        if done.outcome != CommitOutcome.WRITTEN:
            self.counters[f"checkpoint_{done.outcome}"] += 1
            self._written_us = None  # tried again at the next tick
            for node in nodes:
                node.dirty = True
            for change in done.current:
                self._heard(change, now_us)
            return []
        for node in nodes:
            node.revision = done.revisions[node_key(node.name)]
        if self._stopping or not self.lease.renewed(done.revisions[LEASE], now_us):
            return []
        records = [record for node in self.nodes.values() for record in node.records.values()]
        return [self._publish(*said) for record in records for said in record.kept()]

    def _heard(self, change: KeyChanged, now_us: int) -> None:
        if change.key == LEASE:
            try:
                self.lease.changed(change, now_us)
            except FieldError:  # not written by us
                self.counters["leases_malformed"] += 1
        else:
            self._loaded(change.key, change.value, change.revision)

    def _loaded(self, key: str, value: bytes | None, revision: int) -> None:
        """A checkpoint as the bucket has it: the beginning of what is known here; who follows the stream knows more."""
        if not key.startswith("node."):
            return
        name = decode(key.removeprefix("node."))
        node = self.nodes.setdefault(name, Node(name))
        if revision <= node.revision and value is not None:
            return
        node.revision = revision
        if value is None or self._following:
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

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

from services.deadline_tracker.judging import Judge, well_formed
from services.deadline_tracker.record import DEADLINE_US, STAMP_US, Record, Ring
from services.deadline_tracker.suspects import Suspects
from shared.deadlines import SlidingWindow
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
from shared.messages import DeadlineEvent, NodeDeadlines, RingInfo, TaskBatch
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
            for task in (*ring.open.values(), *ring.overdue.values()):
                yield ring.container, task[STAMP_US], task[DEADLINE_US]


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
        if not well_formed(batch):
            self.counters["batches_malformed"] += 1
            return []
        known = len(node.rings) + len(node.records)
        effects: list[Effect] = []

        def say(record: Record, kind: str, event_id: str, said: dict[str, Any]) -> None:
            effects.extend(self._say(node, record, event_id, self._event(batch, record, kind, said)))

        judge = Judge(batch, [self._learn(node, info, seq) for info in batch.rings], self.counters, say)
        judge.rows()
        judge.time()
        if judge.rings_closed or len(node.rings) + len(node.records) != known:
            self._forget_old(node)
        if node.early:
            node.early = {event_id: at for event_id, at in node.early.items() if at > seq}
        effects = self.suspects.explained(batch, judge.matched.tasks, effects, node.running)
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

    def _learn(self, node: Node, info: RingInfo, seq: int) -> Ring:
        ring = node.rings.get(info.ring)
        if ring is None or ring.told != info.__dict__:
            record = self._record(node, info.container)
            record.learn(info)
            ring = node.rings.setdefault(info.ring, Ring(info.ring, record))
            ring.told = info.__dict__
        ring.record.touched_seq = seq
        return ring

    def _record(self, node: Node, container: str) -> Record:
        if container not in node.records:
            node.records[container] = Record(container, self.guarantee, SlidingWindow(self.window))
        return node.records[container]

    def _say(self, node: Node, record: Record, event_id: str, event: DeadlineEvent) -> list[Effect]:
        """By the holder of the lease; kept until it is heard, unless it was heard before."""
        if node.early.pop(event_id, None) is not None:
            return []
        record.unsaid[event_id] = (node.stream_seq, event)
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
            distance_to_failure=record.distance_to_failure,
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
            open_tasks[ring.container] += ring.running
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
            records = {name: Record.load(name, s) for name, s in state["records"].items()}
            rings = {name: Ring.load(name, s, records) for name, s in state["rings"].items()}
            node.stream_seq, node.rings, node.records = saved.stream_seq, rings, records

    # --- for tests and for people ---

    def check(self) -> None:
        """Asserts what must always hold."""
        for node in self.nodes.values():
            for ring in node.rings.values():
                assert ring.record is node.records.get(ring.container), f"a ring of {node.name} has no record"
                begun = {**ring.open, **ring.overdue}
                assert len(begun) == ring.running, f"a task is open and overdue: {ring}"
                assert all(0 < seq <= ring.high for seq in begun), f"open tasks beyond the head: {ring}"
            for record in node.records.values():
                assert record.window.met + record.window.missed == min(record.judged, record.window.length)

    def story(self, container: str) -> list[str]:
        """What is known of one container, a line per node that has seen it."""
        found = [(node, node.records[container]) for node in self.nodes.values() if container in node.records]
        return [
            f"{n.name} up to stream sequence {n.stream_seq}: {r.counts}, {r.window}, {r.standing}" for n, r in found
        ]

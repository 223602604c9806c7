"""The tracker's state machine: task batches in stream order become verdicts, records and warnings; no I/O, no clock.

The first of end and overdue in stream order decides a task. Each record (ring id, sequence, kind) counts once, so a
batch that comes again, or a monitor that reads its rings again, changes nothing; an offline recount of the stream
gives the same verdicts. Each node is in one partition, and who holds its lease alone follows its nodes, says their
verdicts and writes their checkpoints; a verdict is kept until the stream shows that it was said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from services.deadline_tracker.bucket import Bucket, Writing, node_of, numbered
from services.deadline_tracker.judging import Judge, well_formed
from services.deadline_tracker.nodes import Node
from services.deadline_tracker.record import Record, Ring
from services.deadline_tracker.shares import Partition, Shares
from services.deadline_tracker.suspects import Rest, Suspects
from shared.deadlines import SlidingWindow
from shared.effects import (
    Commit,
    CommitDone,
    CommitOutcome,
    Disconnected,
    Draining,
    Effect,
    KeyChanged,
    Publish,
    ReadFrom,
    ReadingFrom,
    Received,
    Reconnected,
    Tick,
    Unread,
    WatchBegins,
    WatchReplayed,
    Write,
)
from shared.errors import FieldError
from shared.messages import DeadlineEvent, RingInfo, TaskBatch
from shared.subjects import DEADLINES, LEDGER, NODES, Subjects, decode, encode, node_key

TASKS = "events.task.>"
VERDICTS = "events.deadline.>"
HEARTBEATS = "metrics.*"
CHECKPOINT_US = 1_000_000
"""How often the records that changed are written."""
MOST_NODES = 900
"""Nodes in one write: with the leases below the server's 1,000 messages per batch."""
MOST_UNSAID = 500
"""Of one node: with more its checkpoint waits, since it must fit a message (1 MiB)."""


class Core:
    """``guarantee`` is judged where a container declares none; ``window`` is the length of the ratio's window;
    ``shares`` are the partitions that this process holds, none at first."""

    def __init__(self, subjects: Subjects, guarantee: float, window: int, shares: Shares) -> None:
        self.subjects = subjects
        self.guarantee = guarantee
        self.window = window
        self.shares = shares
        self.nodes: dict[str, Node] = {}
        """Of the partitions that we follow."""
        self.counters: Counter[str] = Counter()
        self.suspects = Suspects()
        self._bucket = Bucket(self.counters)
        self._awaited: list[Node] = []
        """Of the partitions that we are about to follow."""
        self._beginning: set[str] = set()
        """Streams that are to be read from elsewhere, and are not yet."""
        self._writing: Writing | None = None
        self._rest: Rest | None = None
        self._commit = 0
        self._written_us: int | None = None
        self._wall_us = 0
        self._replayed = self._stopping = self._ended = False
        self._delivered = 0
        """Stream sequence of the last batch that the shell delivered; it only grows, but for a ReadingFrom."""
        self._verdict_seq = 0
        """Of the last verdict."""

    def handle(self, event: object, now_us: int) -> list[Effect]:
        rest, self._rest = self._rest, None
        if rest is None:
            return self._handle(event, now_us)
        return [*self._explained(rest), *self._handle(event, now_us)]  # nothing has changed since its batch

    def _handle(self, event: object, now_us: int) -> list[Effect]:
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
                return [*self._speak(), *self._write(now_us)]
            case CommitDone() as done:
                return self._committed(done, now_us)
            case KeyChanged(bucket=bucket) as change if bucket == DEADLINES:
                return self._shown(change, now_us)
            case KeyChanged(bucket=bucket, key=key, value=value) if bucket in (LEDGER, NODES):
                self.suspects.heard(bucket, key, value)
            case Unread(subject=subject, body=body):
                self.suspects.told(decode(subject.rpartition(".")[2]), body)
            case WatchBegins() | WatchReplayed() as said if said.bucket == DEADLINES:
                return self._begins() if isinstance(said, WatchBegins) else self._began(said.keys, now_us)
            case ReadingFrom(subject=subject, start_seq=start_seq):
                return self._reading(subject, start_seq)
            case Disconnected():
                self._replayed = False  # what the bucket has when the connection is back may be older
            case Reconnected(gap_us=gap_us):
                self.shares.rebase(gap_us)
            case Draining():
                self._stopping = True
                return self._last_words() if self._writing is None else []
        return []

    def wants(self, subject: str) -> bool:
        """Whether a batch or a verdict is of a node that we follow, or are about to; else it need not be decoded."""
        return self._hears(subject.split(".", 4)[3])

    def wants_heartbeat(self, subject: str) -> bool:
        """The same of a heartbeat."""
        return self._hears(subject.rpartition(".")[2])

    def _hears(self, token: str) -> bool:
        part = self._partition(token)
        return part is not None and part.heard

    def _partition(self, token: str) -> Partition | None:
        parts = self.shares.parts
        number = numbered(token, len(parts)) if parts else -1
        return parts[number] if number >= 0 else None

    def _speaks(self, node: Node) -> bool:
        return self.shares.parts[node.partition].speaks

    def _nodes_of(self, part: Partition) -> list[Node]:
        return [node for node in self.nodes.values() if node.partition == part.number]

    # --- partitions: taken, read, followed, left ---

    def _begins(self) -> list[Effect]:
        """The bucket is said anew, be it older than before: it is taken as it is, and nothing is written yet. With it
        the leases went back, and what is ours by an older one is taken and read anew."""
        self._replayed = False
        self._bucket.revision = 0
        self.shares.begins()
        for node in (*self.nodes.values(), *self._awaited):
            node.revision = 0
        return []

    def _began(self, keys: frozenset[str], now_us: int) -> list[Effect]:
        self._replayed = True
        self._bucket.replayed(keys)
        if self.shares.replayed(keys):
            self._begin_anew()
        self._leave_lost()
        return self._write(now_us)

    def _shown(self, change: KeyChanged, now_us: int) -> list[Effect]:
        self._bucket.shown(change.key, change.value, change.revision)
        self._heard(change, now_us)
        return self._read_taken()

    def _read_taken(self) -> list[Effect]:
        """Whoever held a partition before us cannot write any more; once the watch has shown all that was written
        until then, its nodes are known, and from where on the stream is to be read."""
        if self._beginning:
            return []
        taken = [part for part in self.shares.parts if part.taken is not None and part.taken <= self._bucket.revision]
        for part in taken:
            part.taken, part.awaited = None, True
            self._awaited += self._bucket.nodes_of(part.number, len(self.shares.parts))
        return self._read_from() if taken else []

    def _read_from(self) -> list[Effect]:
        """Both streams from the first sequence that somebody lacks on; what others have counted already is skipped."""
        starts = [part.counted_seq + 1 for part in self.shares.parts if part.awaited]
        starts += [1 for node in self._awaited if not node.stream_seq]  # its checkpoint could not be read
        unsaid = [node.first_unsaid_seq for node in self._awaited]
        if any(part.followed for part in self.shares.parts):
            starts.append(self._delivered + 1)
            unsaid.append(self._verdict_seq + 1)
        first = min(starts)
        self._beginning = {TASKS, VERDICTS}
        return [ReadFrom(TASKS, first), ReadFrom(VERDICTS, min([first, *unsaid]))]

    def _reading(self, subject: str, start_seq: int) -> list[Effect]:
        self._beginning.remove(subject)
        if subject == VERDICTS:
            self._verdict_seq = start_seq - 1
            return self._read_taken()
        self._delivered = start_seq - 1
        for part in self.shares.parts:
            if part.awaited:
                part.awaited, part.followed = False, True
        self.nodes |= {node.name: node for node in self._awaited}
        self._awaited = []
        return self._read_taken()

    def _speak(self) -> Iterator[Publish]:
        """A tick after a partition is followed: by then most of what was said is heard; the rest is said, in order."""
        for part in self.shares.parts:
            if part.followed and not part.speaks:
                part.speaks = True
                for record in [record for node in self._nodes_of(part) for record in node.records.values()]:
                    yield from (self._publish(*said) for said in record.kept())

    def _leave_lost(self) -> None:
        for part in self.shares.parts:
            if not part.lease.active and (part.heard or part.taken is not None):
                self._leave(part)

    def _leave(self, part: Partition) -> None:
        part.leave()
        for node in self._nodes_of(part):
            del self.nodes[node.name]
            self.suspects.forget(node.name)
        self._awaited = [node for node in self._awaited if node.partition != part.number]

    def _begin_anew(self) -> None:
        """There are as many partitions as the bucket says now; none is ours."""
        for part in self.shares.parts:
            self._leave(part)
        self.shares.begin_anew()

    # --- batches ---

    def _batch(self, batch: TaskBatch, seq: int) -> list[Effect]:
        if seq < self._delivered:
            self._another_stream()
        self._delivered = seq
        node = self.nodes.get(batch.node) or self._new_node(batch.node)
        if node is None:
            return []
        if seq <= node.stream_seq:
            self.counters["batches_again"] += 1
            return []
        node.stream_seq = seq
        node.unsaved_seq = node.unsaved_seq or seq
        if not well_formed(batch):
            self.counters["batches_malformed"] += 1
            return []
        known = len(node.rings) + len(node.records)
        effects: list[Publish] = []

        def say(record: Record, kind: str, event_id: str, said: dict[str, Any]) -> None:
            effects.extend(self._say(node, record, event_id, self._event(batch, record, kind, said)))

        judge = Judge(batch, self._rings(node, batch, seq), self.counters, say)
        judge.rows()
        if judge.rings_closed or len(node.rings) + len(node.records) != known:
            node.forget_old()
        if node.early:
            node.early = {event_id: at for event_id, at in node.early.items() if at > seq}
        ahead, said = self.suspects.parted(batch.node, effects) if effects else ([], effects)
        rest = Rest(batch, judge.matched.tasks, said)
        if not ahead:
            return self._explained(rest)
        self._rest = rest
        return [*ahead, rest]

    def _explained(self, told: Rest) -> list[Effect]:
        node = self.nodes[told.batch.node]
        effects = self.suspects.explained(told.batch, told.tasks, told.said, node.running)
        return [*effects, *self._noisy(node, told.batch)]

    def _noisy(self, node: Node, batch: TaskBatch) -> Iterator[Publish]:
        """Not kept: who is noisy is found again."""
        for container, cause in self.suspects.noisy(node.name, batch.watermark_us, node.running):
            record = node.records.get(container)
            if record is not None and self._speaks(node):
                event_id = f"{node.name}/{container}/{record.judged}/noisy/{cause.container}"
                said = {"task": None, "deadline_us": None, "because": (cause,)}
                yield self._publish(event_id, self._event(batch, record, "noisy", said))

    def _another_stream(self) -> None:
        """The stream was lost and made anew: its sequences begin again, and what it holds is new to all."""
        self.counters["streams_made_anew"] += 1
        for node in self.nodes.values():
            node.another_stream()
        for part in self.shares.parts:
            part.counted_seq = 0
        if self._writing:  # what it says of sequences is of the former stream
            nodes, kept = [(node, 1) for node, _ in self._writing.nodes], [(part, 0) for part, _ in self._writing.kept]
            self._writing = replace(self._writing, nodes=nodes, kept=kept)

    def _new_node(self, name: str) -> Node | None:
        """None of a partition that we do not follow."""
        part = self._partition(encode(name, "node"))
        if part is None or not part.followed:
            return None
        node = self.nodes[name] = Node(name, part.number)
        return node

    def _rings(self, node: Node, batch: TaskBatch, seq: int) -> list[Ring]:
        """Those of the batch, in its order."""
        rings = []
        for info in batch.rings:
            ring = node.rings.get(info.ring)
            if ring is None or (ring.told is not info and ring.told != info):
                ring = self._learn(node, info)
            ring.record.touched_seq = seq
            rings.append(ring)
        return rings

    def _learn(self, node: Node, info: RingInfo) -> Ring:
        record = self._record(node, info.container)
        record.learn(info)
        ring = node.rings.setdefault(info.ring, Ring(info.ring, record))
        ring.told = info
        return ring

    def _record(self, node: Node, container: str) -> Record:
        if container not in node.records:
            node.records[container] = Record(container, self.guarantee, SlidingWindow(self.window))
        return node.records[container]

    def _say(self, node: Node, record: Record, event_id: str, event: DeadlineEvent) -> list[Publish]:
        """Kept until it is heard, unless it was heard before."""
        if node.early.pop(event_id, None) is not None:
            return []
        record.unsaid[event_id] = (node.stream_seq, event)
        return [self._publish(event_id, event)] if self._speaks(node) else []

    def _publish(self, event_id: str, event: DeadlineEvent) -> Publish:
        subject = self.subjects.deadline_event(event.node, event.container)
        return Publish(subject, event, event_id, f"laxity.deadline.{event.kind}")

    def _was_said(self, verdict: DeadlineEvent, event_id: str, seq: int) -> None:
        self._verdict_seq = seq
        node = self.nodes.get(verdict.node) or self._new_node(verdict.node)
        if node is None:
            return
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

    # --- checkpoints: records and the stream sequence that they include, in one write with the leases ---

    def _write(self, now_us: int) -> list[Effect]:
        """Whatever is due, all in one write; nothing while one is under way."""
        if self._writing or self._stopping or not self._replayed:
            return []
        if self.shares.layout_due(now_us):
            return [self._lay_out()]
        if not self.shares.parts:
            return []
        given, taken = self.shares.surplus(now_us), self.shares.free(now_us)
        due = self._written_us is None or now_us - self._written_us >= CHECKPOINT_US
        nodes = self._dirty() if due or given else []
        if not (nodes or given or taken or self.shares.due(now_us)):
            return []
        self._written_us = now_us if nodes else self._written_us
        return [self._checkpoint(nodes, given, taken)]

    def _dirty(self) -> list[Node]:
        """The nodes that changed; those that were written last come last."""
        return [node for node in self.nodes.values() if node.unsaved_seq and node.unsaid <= MOST_UNSAID][:MOST_NODES]

    def _checkpoint(self, nodes: list[Node], given: Sequence[Partition], taken: Sequence[Partition]) -> Commit:
        """Nodes, the leases that we hold, take and give back, and that we live. What is given back is left at once."""
        writes = [Write(node_key(node.name), node.published(self._wall_us).to_json(), node.revision) for node in nodes]
        unsaved = [(node, node.unsaved_seq) for node in nodes]
        for node in nodes:
            node.unsaved_seq = 0
            self.nodes[node.name] = self.nodes.pop(node.name)
        kept = [(part, self._counted(part)) for part in self.shares.held if part not in given]
        kept += [(part, part.lease.stream_seq) for part in taken]
        writes += [part.lease.renewal(seq) for part, seq in kept]
        for part in given:
            writes.append(part.lease.hand_over(self._counted(part)))
            self._leave(part)
        lives = self.shares.ends() if self._stopping else self.shares.lives()
        self._commit += 1
        self._writing = Writing(self._commit, unsaved, kept, lives=lives.key)
        return Commit(self._commit, DEADLINES, (*writes, lives))

    def _counted(self, part: Partition) -> int:
        """Up to where the checkpoints include all that its nodes said, if all without unsaved batches are written."""
        unsaved = (node.unsaved_seq - 1 for node in self._nodes_of(part) if node.unsaved_seq)
        return max(part.counted_seq, min(unsaved, default=self._delivered)) if part.followed else part.counted_seq

    def _lay_out(self) -> Commit:
        """Says how many partitions there are, each to be read from where the first of the former ones stands."""
        former = [max(part.counted_seq, part.lease.stream_seq) for part in self.shares.parts]
        layout = self.shares.layout(min(former, default=self._bucket.counted_seq()))
        self._commit += 1
        self._writing = Writing(self._commit, layout=layout)
        return Commit(self._commit, DEADLINES, layout)

    def _last_words(self) -> list[Effect]:
        """What changed, and all leases, so that others need not wait."""
        if self._ended or not self._replayed:
            return []
        self._ended = True
        return [self._checkpoint(self._dirty(), self.shares.held, [])]

    def _committed(self, done: CommitDone, now_us: int) -> list[Effect]:
        writing = self._writing
        if writing is None or done.commit != writing.commit:
            return []
        self._writing = None
        if done.outcome == CommitOutcome.WRITTEN:
            self._wrote(writing, done, now_us)
        else:
            self._not_written(writing, done, now_us)
        if self._stopping:
            return self._last_words()
        again = self._write(now_us) if done.outcome == CommitOutcome.WRITTEN else []
        return [*self._read_taken(), *again]

    def _wrote(self, writing: Writing, done: CommitDone, now_us: int) -> None:
        for node, _ in writing.nodes:
            node.revision = done.revisions[node_key(node.name)]
        for part, counted_seq in writing.kept:
            if part.lease.renewed(done.revisions[part.lease.key], now_us):
                part.taken = max(done.revisions.values())
            part.counted_seq = counted_seq
        for write in writing.layout:
            self._heard(KeyChanged(DEADLINES, write.key, write.value, done.revisions[write.key]), now_us)
        if writing.lives:
            self.shares.lived(done.revisions[writing.lives], now_us)
        self._leave_lost()

    def _not_written(self, writing: Writing, done: CommitDone, now_us: int) -> None:
        self.counters[f"checkpoint_{done.outcome}"] += 1
        self._written_us = None  # tried again at the next tick
        for node, unsaved_seq in writing.nodes:
            node.unsaved_seq = min(unsaved_seq, node.unsaved_seq or unsaved_seq)
        for change in done.current:
            self._heard(change, now_us)

    def _heard(self, change: KeyChanged, now_us: int) -> None:
        """A key of the bucket as it is now, from the watch, a write of ours, or one that failed."""
        try:
            if self.shares.changed(change, now_us):
                self._begin_anew()
        except FieldError:  # not written by us
            self.counters["leases_malformed"] += 1
        self._leave_lost()
        node = self.nodes.get(name) if (name := node_of(change.key)) else None
        if node is not None and (change.revision > node.revision or change.value is None):
            node.revision = change.revision

    # --- for tests and for people ---

    def check(self) -> None:
        """Asserts what must always hold."""
        for part in self.shares.parts:
            assert part.lease.active or not part.heard, f"partition {part.number} is followed and is not ours"
        for node in self.nodes.values():
            assert self.shares.parts[node.partition].followed, f"{node.name} is of a partition that is not ours"
            node.check()

    def story(self, container: str) -> list[str]:
        """What is known of one container, a line per node that has seen it."""
        found = [(node, node.records[container]) for node in self.nodes.values() if container in node.records]
        return [
            f"{n.name} up to stream sequence {n.stream_seq}: {r.counts}, {r.window}, {r.standing}" for n, r in found
        ]

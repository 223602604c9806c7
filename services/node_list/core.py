"""The node-list's state machine: heartbeats, reservations and warnings in, ordered lists and rt_nodes out; no I/O.

Every instance keeps the whole view and answers rt.nodes; one of them, the holder of the lease, writes rt_nodes and
says node events. Each write carries the lease with its expected revision, so a deposed writer's write fails whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.node_list.learning import Learning
from services.node_list.liveness import Liveness
from services.node_list.nodes import NodeView, Policy
from services.node_list.ranking import Device, Ranking
from shared.effects import (
    Commit,
    CommitDone,
    CommitOutcome,
    Disconnected,
    Draining,
    Effect,
    KeyChanged,
    Publish,
    Received,
    Reconnected,
    Reply,
    Tick,
    WatchReplayed,
    Write,
)
from shared.errors import FieldError
from shared.lease import Tenure
from shared.messages import (
    ClassStanding,
    DeadlineEvent,
    ListedDevice,
    NodeDeadlines,
    NodeEvent,
    NodeFacts,
    NodeMetrics,
    NodeReservations,
    NodesQuery,
    NodesReply,
    PlaceReply,
)
from shared.subjects import DEADLINES, LEDGER, NODES, Subjects, decode, encode, lease_key, node_key

LEASE = lease_key("node-list")
MAX_WRITES = 500
"""Nodes in one write: well below the server's 1,000 messages per batch."""
STALL_US = 1_000_000
"""A timer that comes this much late says that we stood still, not that all nodes fell silent (case T5)."""


class Core:
    """``holder`` names this process; ``tick_us`` is the period of its timer."""

    def __init__(self, subjects: Subjects, policy: Policy, holder: str, lease_us: int, tick_us: int) -> None:
        self.subjects, self.policy = subjects, policy
        self.tick_us = tick_us
        self.lease = Tenure(LEASE, holder, lease_us)
        self.nodes: dict[str, NodeView] = {}
        self.learning = Learning(holder, policy.foreign_context_micro)
        self.lists = {wanted.name: Ranking() for wanted in policy.classes}
        self.counters: Counter[str] = Counter()
        self.revision = 0
        self._replayed: set[str] = set()
        self._writing: tuple[int, dict[str, NodeFacts]] | None = None
        self._commit = 0
        self._ticked_us: int | None = None
        self._wall_us = 0
        self._deaf = False
        """Disconnected: silence says nothing about the nodes."""
        self._stopping = False

    def handle(self, event: object, now_us: int) -> list[Effect]:
        said = self.learning.handle(event, now_us)
        for view in self.learning.concerned(self.nodes.values(), self.policy.classes, now_us):
            self._rejudge(view)
        return [*said, *self._handle(event, now_us)]

    def _handle(self, event: object, now_us: int) -> list[Effect]:
        match event:
            case Received(message=NodeMetrics() as metrics, subject=subject, wall_us=wall_us):
                if subject == self.subjects.metrics(metrics.node):
                    self._heartbeat(metrics, now_us, wall_us)
                else:
                    self.counters["heartbeats_of_another_node"] += 1
            case Received(message=DeadlineEvent() as warning):
                view = self._view(warning.node, now_us)
                view.warning(warning)
                self._rejudge(view)
            case Received(message=NodesQuery() as query, reply=reply):
                return [self._answer(query, reply, now_us)]
            case KeyChanged() as change:
                self._heard(change, now_us)
            case WatchReplayed(bucket=bucket, keys=keys):
                self._replay_done(bucket, keys)
            case Tick(wall_us=wall_us):
                self._tick(now_us, wall_us)
            case Disconnected():
                self._deaf = True
            case Reconnected(gap_us=gap_us):
                self._deaf = False
                self._rebase(gap_us)
            case CommitDone() as done:
                return [*self._committed(done, now_us), *self._write(now_us)]
            case Draining():
                return self._step_down()
        return self._write(now_us)

    # --- what comes in ---

    def _view(self, node: str, now_us: int) -> NodeView:
        """A node's view; one that was never heard starts its grace time now (case T6)."""
        return self.nodes.setdefault(node, NodeView(node, Liveness(now_us)))

    def _heartbeat(self, metrics: NodeMetrics, now_us: int, wall_us: int) -> None:
        self._wall_us = max(self._wall_us, wall_us)
        view = self._view(metrics.node, now_us)
        if not view.heartbeat(metrics, now_us):
            self.counters["heartbeats_out_of_order"] += 1
            return
        self._rejudge(view)

    def _heard(self, change: KeyChanged, now_us: int) -> None:
        try:
            self._changed(change, now_us)
        except FieldError:
            self.counters[f"malformed.{change.bucket}"] += 1

    def _changed(self, change: KeyChanged, now_us: int) -> None:
        if change.bucket == NODES:
            self.revision = max(self.revision, change.revision)
        if change.key == LEASE and change.bucket == NODES:
            self.lease.changed(change, now_us)
        if not change.key.startswith("node."):
            return
        view = self._view(decode(change.key.removeprefix("node.")), now_us)
        if change.bucket == LEDGER:
            view.residents = NodeReservations.trusted(change.value).reservations if change.value else ()
            self._rejudge(view)
        elif change.bucket == DEADLINES and change.value:
            records = NodeDeadlines.trusted(change.value).containers
            view.records(records)
            self.learning.heard(view, records)
            self._rejudge(view)
        elif change.bucket == NODES and change.revision > view.revision:
            view.found(NodeFacts.trusted(change.value) if change.value else None, change.revision)

    def _replay_done(self, bucket: str, keys: frozenset[str]) -> None:
        self._replayed.add(bucket)
        for name, view in self.nodes.items():
            if bucket == LEDGER and node_key(name) not in keys and view.residents:
                view.residents = ()
                self._rejudge(view)
            if bucket == NODES and node_key(name) not in keys:
                view.revision, view.facts, view.dirty = 0, None, True
        if bucket == NODES and LEASE not in keys:
            self.lease.absent()

    # --- time ---

    def _tick(self, now_us: int, wall_us: int) -> None:
        late_us = now_us - self._ticked_us - self.tick_us if self._ticked_us is not None else 0
        self._ticked_us, self._wall_us = now_us, wall_us
        if self._deaf:
            return
        if late_us > STALL_US:
            self._rebase(late_us)
        for view in self.nodes.values():
            before = view.liveness.state
            view.age(now_us, self.policy)
            if view.liveness.state != before:
                self._rejudge(view)

    def _rebase(self, gap_us: int) -> None:
        self.counters["rebased"] += 1
        for view in self.nodes.values():
            view.liveness.rebase(gap_us)
        self.lease.rebase(gap_us)

    # --- the lists ---

    def _rejudge(self, view: NodeView) -> None:
        """Recomputes one node's devices and moves those whose standing changed."""
        view.note_changes(self._wall_us)
        standings = view.judge_devices(self.policy, self.learning.learned)
        if standings == view.standings:
            return
        for uuid in view.standings.keys() - standings.keys():
            for ranking in self.lists.values():
                ranking.drop((view.name, uuid))
        for uuid, by_class in standings.items():
            for name, standing in by_class.items():
                self.lists[name].put((view.name, uuid), standing)
        view.standings, view.dirty = standings, True

    def _answer(self, query: NodesQuery, reply: str, now_us: int) -> Reply:
        wanted = query.deadline_class or self.policy.classes[0].name
        try:
            devices, after = self._page(query, wanted, now_us)
        except FieldError as fault:
            return Reply(reply, PlaceReply.of_error(fault), (400, str(fault)))
        body = NodesReply(revision=self.revision, deadline_class=wanted, devices=tuple(devices), after=after)
        return Reply(reply, body)

    def _page(self, query: NodesQuery, wanted: str, now_us: int) -> tuple[list[ListedDevice], str | None]:
        if wanted not in self.lists:
            raise FieldError("class", wanted, f"one of {', '.join(self.lists)}")
        devices: list[ListedDevice] = []
        try:
            for device in self.lists[wanted].after(_device(query.after)):
                if len(devices) == query.limit:
                    return devices, _cursor(devices[-1])
                if listed := self._listed(device, wanted, query, now_us):
                    devices.append(listed)
        except (KeyError, FieldError):
            raise FieldError("after", query.after, "the after of an earlier reply; that device left the list") from None
        return devices, None

    def _listed(self, device: Device, wanted: str, query: NodesQuery, now_us: int) -> ListedDevice | None:
        view = self.nodes[device[0]]
        standing: ClassStanding = view.standings[device[1]][wanted]
        metrics = next(d for d in view.metrics.devices if d.uuid == device[1]) if view.metrics else None
        if query.standing and standing.standing not in query.standing:
            return None
        if query.models and (metrics is None or metrics.model not in query.models):
            return None
        if query.group and (metrics is None or metrics.group != query.group):
            return None
        return ListedDevice(
            node=device[0],
            uuid=device[1],
            standing=standing.standing,
            slack_us=standing.slack_us,
            reason=standing.reason,
            age_us=now_us - view.liveness.seen_us,
            unproven=standing.unproven,
        )

    # --- writing rt_nodes, by the holder of the lease alone ---

    def _write(self, now_us: int) -> list[Effect]:
        if self._writing or self._stopping or not {NODES, LEDGER, DEADLINES} <= self._replayed:
            return []
        if not self.lease.may_write(now_us):
            return []
        dirty = self._dirty() if self.lease.active else {}
        if not dirty and not self.lease.due(now_us):
            return []
        self._commit += 1
        self._writing = (self._commit, dirty)
        writes = [Write(node_key(name), facts.to_json(), self.nodes[name].revision) for name, facts in dirty.items()]
        return [Commit(self._commit, NODES, (*writes, self.lease.renewal()))]

    def _dirty(self) -> dict[str, NodeFacts]:
        """The facts that differ from what is published, at most one write's worth."""
        found: dict[str, NodeFacts] = {}
        for name, view in self.nodes.items():
            if not view.dirty or len(found) >= MAX_WRITES:
                continue
            view.dirty = False
            facts = view.new_facts(self._wall_us)
            if facts and not _same(facts, view.facts):
                found[name] = facts
        return found

    def _committed(self, done: CommitDone, now_us: int) -> list[Effect]:
        if self._writing is None or done.commit != self._writing[0]:
            return []
        _, written = self._writing
        self._writing = None
        if done.outcome != CommitOutcome.WRITTEN:
            return self._not_written(done, written, now_us)
        became = self.lease.renewed(done.revisions[LEASE], now_us)
        self.revision = max(self.revision, *done.revisions.values())
        effects: list[Effect] = []
        for name, facts in written.items():
            effects += self._say(name, self.nodes[name].written(facts, done.revisions[node_key(name)]))
        return effects + (self._took_over() if became else [])

    def _not_written(self, done: CommitDone, written: dict[str, NodeFacts], now_us: int) -> list[Effect]:
        self.counters[f"write_{done.outcome}"] += 1
        for name in written:
            self.nodes[name].dirty = True
        for change in done.current:
            self._heard(change, now_us)
        return []

    def _took_over(self) -> list[Effect]:
        """What the one before us wrote and may not have said: said again, with the same ids."""
        for view in self.nodes.values():
            view.dirty = True
        return [said for view in self.nodes.values() if view.facts for said in self._say(view.name, view.facts.events)]

    def _say(self, node: str, events: Iterable[NodeEvent]) -> list[Effect]:
        subject = self.subjects.node_event(node)
        return [Publish(subject, event, f"{node}/{event.number}", f"laxity.node.{event.state}") for event in events]

    def _step_down(self) -> list[Effect]:
        """Last words: the lease is given back, so that a standby need not wait for it to run out."""
        self._stopping = True
        if not self.lease.active or self._writing:
            return []
        self._commit += 1
        return [Commit(self._commit, NODES, (self.lease.give_back(),))]

    # --- for tests and for people ---

    def check(self) -> None:
        """Asserts what must always hold."""
        for name, ranking in self.lists.items():
            listed = list(ranking.after(None))
            there = {(view.name, uuid) for view in self.nodes.values() for uuid in view.standings}
            assert set(listed) == there, f"list {name} differs from the devices known"
            assert len(listed) == len(there), f"list {name} names a device twice"

    def story(self, node: str) -> list[str]:
        """What is known of one node."""
        view = self.nodes.get(node)
        if view is None:
            return [f"{node} was never heard of"]
        said = [f"{node} is {view.liveness.state}: {view.liveness.reason or 'all well'}"]
        return said + [f"{uuid}: {by_class}" for uuid, by_class in view.standings.items()]


def _cursor(device: ListedDevice) -> str:
    return f"{encode(device.node)}.{encode(device.uuid)}"


def _device(cursor: str | None) -> Device | None:
    if cursor is None:
        return None
    node, _, uuid = cursor.partition(".")
    return decode(node), decode(uuid)


def _same(new: NodeFacts, old: NodeFacts | None) -> bool:
    """Equal in all but when it was written."""
    return old is not None and new.model_copy(update={"at_us": old.at_us}) == old

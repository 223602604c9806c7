"""The node-list's state machine: heartbeats, reservations and warnings in, ordered lists and rt_nodes out; no I/O.

Every instance keeps the whole view and answers rt.nodes from what is published; one of them, the holder of the lease,
writes rt_nodes and says node events and the changes of the lists. A write of one node is a single message, which the
server takes only while the lease has the revision that we gave it; one of several is a batch that carries the lease. So
a deposed writer's write fails whole. Who takes the lease, or does not know what became of a write, renews it alone and
waits for the watch to bring that: what was written before is known then, and nothing of it can come any more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from services.node_list.answers import answer
from services.node_list.hysteresis import Hysteresis
from services.node_list.learning import Learning
from services.node_list.lists import Lists, Plan
from services.node_list.liveness import Liveness
from services.node_list.nodes import NodeView, Policy
from shared.effects import (
    Commit,
    CommitDone,
    Disconnected,
    Draining,
    Effect,
    KeyChanged,
    Publish,
    Received,
    Reconnected,
    Tick,
    WatchBegins,
    WatchReplayed,
    Write,
)
from shared.errors import FieldError
from shared.lease import Tenure
from shared.lists import Device
from shared.messages import (
    ClassStanding,
    DeadlineEvent,
    Heartbeat,
    KubeNodeFacts,
    ListDelta,
    ListsRecord,
    Message,
    NodeDeadlines,
    NodeEvent,
    NodeFacts,
    NodeReservations,
    NodesQuery,
    RecordInside,
)
from shared.subjects import DEADLINES, LEDGER, LISTS_KEY, NODES, Subjects, decode, lease_key, node_key

Told = TypeVar("Told", bound=Message)
LEASE = lease_key("node-list")
MAX_WRITES = 500
"""Nodes in one write: well below the server's 1,000 messages per batch."""
MAX_DEVICES = 1_000
"""Devices of the nodes in one write: what changes of them must fit one message (1 MiB)."""
STALL_US = 1_000_000
"""A timer that comes this much late says that we stood still, not that all nodes fell silent (case T5)."""


@dataclass(frozen=True, slots=True)
class Writing:
    """The commit in flight."""

    sent: Commit
    nodes: Mapping[str, NodeFacts]
    lists: Plan | None

    def revisions(self, done: CommitDone) -> Mapping[str, int]:
        """What it made of each key; nothing where it was not written. Where that was unknown, its last key tells."""
        current, last = {change.key: change for change in done.current}, self.sent.writes[-1]
        if last.key in current and current[last.key].value == last.value:
            return {write.key: current[write.key].revision for write in self.sent.writes}
        return done.revisions


class Core:
    """``holder`` names this process; ``tick_us`` is the period of its timer."""

    def __init__(self, subjects: Subjects, policy: Policy, holder: str, lease_us: int, tick_us: int) -> None:
        self.subjects, self.policy = subjects, policy
        self.tick_us = tick_us
        self.lease = Tenure(LEASE, holder, lease_us)
        self.nodes: OrderedDict[str, NodeView] = OrderedDict()
        """Who was silent for longest comes first."""
        self.lists = Lists(wanted.name for wanted in policy.classes)
        self.hysteresis = Hysteresis(policy.tight_ratio, policy.return_ratio, policy.return_us)
        self.learning = Learning(holder, policy.foreign_context_micro)
        self.counters: Counter[str] = Counter()
        self._unwritten: OrderedDict[str, None] = OrderedDict()
        """Nodes whose facts may differ from what rt_nodes has."""
        self._replayed: set[str] = set()
        self._writing: Writing | None = None
        self._wrote: dict[str, tuple[bytes, tuple[Message, ...]]] = {}
        """By key, what was to be written last, the lease aside: it comes back by the watch, and need not be read."""
        self._commit = 0
        self._watched = 0
        """The revision of rt_nodes that the watch has brought last."""
        self._behind = 0
        """That of our lease, up to which the watch must come before we write anything else; 0 once it has."""
        self._untold: set[str] | None = None
        """Nodes whose changes may be written and not said; None while somebody else wrote last: then any."""
        self._ticked_us: int | None = None
        self._wall_us = 0
        self._deaf = False
        """Disconnected: silence says nothing about the nodes."""
        self._stopping = False

    def handle(self, event: object, now_us: int) -> list[Effect]:
        said = self.learning.handle(event, now_us)
        for view in self.learning.concerned(self.nodes.values(), self.policy.classes, now_us):
            self._rejudge(view, now_us)
        return [*said, *self._handle(event, now_us)]

    def _handle(self, event: object, now_us: int) -> list[Effect]:
        match event:
            case Received(message=(Heartbeat() | KubeNodeFacts()) as said, subject=subject, wall_us=wall_us):
                self._said(said, subject, now_us, wall_us)
            case Received(message=DeadlineEvent() as warning):
                view = self._view(warning.node, now_us)
                if (devices := view.warning(warning)) is not None:
                    self._rejudge(view, now_us, devices)
            case Received(message=ListDelta() as delta):
                self.lists.heard(delta)
            case Received(message=NodesQuery() as query, reply=reply):
                return [answer(query, reply, self.lists, self.nodes, now_us)]
            case KeyChanged() as change:
                self._heard(change, now_us, watched=True)
            case WatchBegins(bucket=bucket) if bucket == NODES:
                self._begins()
            case WatchReplayed(bucket=bucket, keys=keys):
                self._replay_done(bucket, keys, now_us)
            case Tick(wall_us=wall_us):
                self._tick(now_us, wall_us)
            case Disconnected():
                self._deaf = True
                self._replayed.discard(NODES)  # what is there when the connection is back may be older
            case Reconnected(gap_us=gap_us):
                self._deaf = False
                self._rebase(gap_us, now_us)
            case CommitDone() as done:
                return [*self._committed(done, now_us), *self._write(now_us)]
            case Draining():
                return self._step_down()
        return self._write(now_us)

    # --- what comes in ---

    def _view(self, node: str, now_us: int) -> NodeView:
        """A node's view; one that was never heard starts its grace time now (case T6)."""
        view = self.nodes.get(node)
        if view is None:
            view = self.nodes[node] = NodeView(node, Liveness(now_us))
        return view

    def _said(self, said: Heartbeat | KubeNodeFacts, subject: str, now_us: int, wall_us: int) -> None:
        """Who may speak for a node is decided by subjects."""
        if isinstance(said, KubeNodeFacts):
            self._kube_says(said, now_us, of_it=subject == self.subjects.kube_facts(said.node))
        elif subject == self.subjects.metrics(said.node):
            self._heartbeat(said, now_us, wall_us)
        else:
            self.counters["heartbeats_of_another_node"] += 1

    def _heartbeat(self, metrics: Heartbeat, now_us: int, wall_us: int) -> None:
        self._wall_us = max(self._wall_us, wall_us)
        view = self._view(metrics.node, now_us)
        before = view.liveness.state
        if not view.heartbeat(metrics, now_us):
            self.counters["heartbeats_out_of_order"] += 1
            return
        self.nodes.move_to_end(view.name)
        if view.stale or view.liveness.state != before or view.foreign_us:
            self._rejudge(view, now_us)

    def _kube_says(self, kube: KubeNodeFacts, now_us: int, *, of_it: bool) -> None:
        """It says nothing of whether the node lives; of one that no monitor speaks for there is nothing to say."""
        view = self.nodes.get(kube.node)
        if view is None or not of_it:
            self.counters["kube_facts_of_another_node"] += 1
            return
        view.kube_says(kube)
        if view.stale:
            self._rejudge(view, now_us)

    def _heard(self, change: KeyChanged, now_us: int, *, watched: bool) -> None:
        try:
            if change.bucket == NODES:
                self._published(change, now_us, watched=watched)
            elif change.key.startswith("node."):
                self._changed(change, self._view(decode(change.key.removeprefix("node.")), now_us), now_us)
        except FieldError:
            self.counters[f"malformed.{change.bucket}"] += 1

    def _changed(self, change: KeyChanged, view: NodeView, now_us: int) -> None:
        if change.bucket == LEDGER:
            held = NodeReservations.trusted(change.value).reservations if change.value else ()
            if devices := view.holds(held):
                self._rejudge(view, now_us, devices)
        elif change.value:
            records = NodeDeadlines.trusted(change.value).containers
            self.learning.heard(view, records)
            if view.records(records):
                self._rejudge(view, now_us)

    def _published(self, change: KeyChanged, now_us: int, *, watched: bool) -> None:
        """rt_nodes has it. The lists take it from the watch alone, which brings whole writes in their order."""
        self._watched = change.revision if watched else self._watched
        if change.key == LEASE:
            self.lease.changed(change, now_us)
            self._noted_lease()
        if change.key == LEASE and watched:
            self.lists.whole()
        elif change.key == LISTS_KEY and watched:
            self.lists.found_key(self._value(ListsRecord, change), change.revision)
        elif change.key.startswith("node."):
            self._published_node(change, now_us, watched=watched)

    def _published_node(self, change: KeyChanged, now_us: int, *, watched: bool) -> None:
        view = self._view(decode(change.key.removeprefix("node.")), now_us)
        facts = self._value(NodeFacts, change)
        if watched and self.lists.found(view.name, facts, change.revision):
            self._by_whom(view, change, facts)
        if change.revision > view.revision:
            view.found(facts, change.revision)
        inside = self._value(RecordInside, change) if watched and facts else None
        if inside and inside.lists:
            self.lists.found_record(inside.lists, change.revision)

    def _value(self, model: type[Told], change: KeyChanged) -> Told | None:
        """What a key of our own says; one that cannot be read is as good as none, and written anew."""
        body, wrote = self._wrote.get(change.key, (None, ()))
        if body == change.value and (known := next((each for each in wrote if isinstance(each, model)), None)):
            return known
        try:
            return model.trusted(change.value) if change.value else None
        except FieldError:
            self.counters[f"malformed.{change.bucket}"] += 1
            return None

    def _noted_lease(self) -> None:
        """Whoever has taken it may have written any node since."""
        if not self.lease.ours:
            self._untold, self._behind, self.lists.foreign = None, 0, False

    def _by_whom(self, view: NodeView, change: KeyChanged, facts: NodeFacts | None) -> None:
        """While we are the writer, nobody else should write a node."""
        wrote = self._wrote.get(change.key, (None,))[0]
        if self._untold is not None and change.value != wrote and facts != view.facts:
            self.lists.foreign = True
            self._mark(view)

    def _mark(self, view: NodeView) -> None:
        view.dirty = True
        self._unwritten[view.name] = None

    def _begins(self) -> None:
        """What rt_nodes has is said anew, be it older than before: it is taken as it is, and nothing is written yet."""
        self._replayed.discard(NODES)
        self._watched = 0
        self.lease.begins()
        self.lists.begins()
        for view in self.nodes.values():
            view.revision = 0

    def _replay_done(self, bucket: str, keys: frozenset[str], now_us: int) -> None:
        self._replayed.add(bucket)
        for name, view in self.nodes.items():
            if bucket == LEDGER and node_key(name) not in keys and (devices := view.holds(())):
                self._rejudge(view, now_us, devices)
            if bucket == NODES and node_key(name) not in keys:
                view.revision, view.facts = 0, None
                self.lists.absent(name)
                self._mark(view)
        if bucket == NODES:
            self._replayed_nodes(keys)

    def _replayed_nodes(self, keys: frozenset[str]) -> None:
        if LEASE not in keys:
            self.lease.absent()
            self._noted_lease()
        if LISTS_KEY not in keys:
            self.lists.lost()
        self.lists.replayed()

    # --- time ---

    def _tick(self, now_us: int, wall_us: int) -> None:
        late_us = now_us - self._ticked_us - self.tick_us if self._ticked_us is not None else 0
        self._ticked_us, self._wall_us = now_us, wall_us
        if self._deaf:
            return
        if late_us > STALL_US:
            self._rebase(late_us, now_us)
        waited = self.hysteresis.due(now_us)
        for view in self.nodes.values():
            if now_us - view.liveness.seen_us <= self.policy.grace_us:
                break
            before = view.liveness.state
            view.age(now_us, self.policy)
            if view.liveness.state != before:
                waited.add(view.name)
        for view in [self.nodes[name] for name in sorted(waited)]:
            self._rejudge(view, now_us)

    def _rebase(self, gap_us: int, now_us: int) -> None:
        self.counters["rebased"] += 1
        for view in self.nodes.values():
            view.liveness.rebase(gap_us, now_us)
        self.lease.rebase(gap_us)

    # --- the lists ---

    def _rejudge(self, view: NodeView, now_us: int, devices: Collection[str] | None = None) -> None:
        """Recomputes one node's devices, or those alone; what differs from rt_nodes is for the next write."""
        view.note_changes(self._wall_us)
        found = view.judge_devices(self.policy, self.learning.learned, devices)
        judged = {uuid: self._settled((view.name, uuid), by_class, now_us) for uuid, by_class in found.items()}
        standings = judged if devices is None else view.standings | judged
        for uuid in view.standings.keys() - standings.keys():
            self.hysteresis.forget((view.name, uuid))
        if view.dirty or standings != view.standings:
            view.standings = standings
            self._mark(view)

    def _settled(self, device: Device, found: dict[str, ClassStanding], now_us: int) -> dict[str, ClassStanding]:
        """As found, but for what stands too near to an edge to come back over it."""
        settle, rankings = self.hysteresis.settle, self.lists.rankings
        return {
            (name := wanted.name): settle(device, wanted, rankings[name].of(device), found[name], now_us)
            for wanted in self.policy.classes
        }

    # --- writing rt_nodes, by the holder of the lease alone ---

    def _write(self, now_us: int) -> list[Effect]:
        if not (self._unwritten or self.lists.foreign or self._behind or self.lease.due(now_us)):
            return []
        if self._writing or self._stopping or not {NODES, LEDGER, DEADLINES} <= self._replayed:
            return []
        if not self.lease.may_write(now_us) or (self.lease.active and self._watched < self._behind):
            return []
        if self.lease.due(now_us):
            return [self._send({}, None)]
        said = self._caught_up() if self._behind else []
        nodes = self._changed_facts()
        lists = self.lists.plan(nodes, self._wall_us, f"{self.lease.holder}/{self._commit}")
        if nodes or lists:
            self._wrote = {}
            said.append(self._send(nodes, lists))
        return said

    def _send(self, nodes: Mapping[str, NodeFacts], lists: Plan | None) -> Commit:
        self._commit += 1
        commit = Commit(self._commit, NODES, tuple(self._writes(nodes, lists)))
        self._writing = Writing(commit, nodes, lists)
        return commit

    def _writes(self, nodes: Mapping[str, NodeFacts], lists: Plan | None) -> Iterator[Write]:
        """The lease alone where there is nothing else."""
        if lists and self.lists.newest and lists.fits_a_node and len(nodes) == 1:
            (facts,) = nodes.values()
            yield self._alone(facts, lists.record)
            return
        for name, facts in nodes.items():
            yield self._put(node_key(name), facts, self.nodes[name].revision)
        if lists:
            yield self._put(LISTS_KEY, lists.record, self.lists.key_revision)
        yield self.lease.renewal()

    def _put(self, key: str, value: Message, expected: int) -> Write:
        body = value.to_json()
        self._wrote[key] = body, (value,)
        return Write(key, body, expected)

    def _alone(self, facts: NodeFacts, record: ListsRecord) -> Write:
        """With file storage the server forces each batch to its disk, and a single message not."""
        key, inside = node_key(facts.node), RecordInside(lists=record)
        body = facts.to_json()[:-1] + b"," + inside.to_json()[1:]
        self._wrote[key] = body, (facts, inside)
        return Write(key, body, self.lease.revision, fence=LEASE)

    def _changed_facts(self) -> dict[str, NodeFacts]:
        """The facts that differ from what is published, at most one write's worth."""
        found: dict[str, NodeFacts] = {}
        devices = 0
        while self._unwritten and len(found) < MAX_WRITES and devices < MAX_DEVICES:
            view = self.nodes[self._unwritten.popitem(last=False)[0]]
            view.dirty = False
            facts = view.new_facts(self._wall_us, self.policy.tolerated)
            if facts and not _same(facts, view.facts):
                found[view.name] = facts
                devices += len(facts.devices)
        return found

    def _committed(self, done: CommitDone, now_us: int) -> list[Effect]:
        if self._writing is None or done.commit != self._writing.sent.commit:
            return []
        written, self._writing = self._writing, None
        revisions = written.revisions(done)
        if not revisions:
            return self._not_written(done, written, now_us)
        if LEASE in revisions and self.lease.renewed(revisions[LEASE], now_us):
            self._behind = revisions[LEASE]
        effects: list[Effect] = []
        for name, facts in written.nodes.items():
            revision = revisions[node_key(name)]
            effects += self._say(name, self.nodes[name].written(facts, revision))
            self.lists.written(name, facts, revision)
        if written.lists:
            inside = LISTS_KEY not in revisions
            revision = max(revisions.values()) if inside else revisions[LISTS_KEY]
            self.lists.written_record(written.lists, revision, inside=inside)
            effects += map(self._say_change, written.lists.deltas)
        self.lists.whole()
        return effects

    def _not_written(self, done: CommitDone, written: Writing, now_us: int) -> list[Effect]:
        self.counters[f"write_{done.outcome}"] += 1
        for name in written.nodes:
            self._mark(self.nodes[name])
        self.lease.doubt()
        if self._untold is not None:
            self._untold.update(written.nodes)
        for change in done.current:
            self._heard(change, now_us, watched=False)
        return []

    def _caught_up(self) -> list[Effect]:
        """What was written before our lease is all known: what may not have been said of it is, with the same ids."""
        names = self.nodes if self._untold is None else self._untold
        views = [self.nodes[name] for name in names]
        self._untold, self._behind = set(), 0
        self.lists.take_over()
        for view in views:
            self._mark(view)
        facts = [view.facts for view in views if view.facts]
        states = [said for each in facts for said in self._say(each.node, each.events)]
        return [*states, *map(self._say_change, self.lists.unsaid())]

    def _say_change(self, delta: ListDelta) -> Publish:
        event_id = f"list/{delta.deadline_class}/{delta.start_id}/{delta.revision}"
        return Publish(self.subjects.list_event(delta.deadline_class), delta, event_id, "laxity.list.changed")

    def _say(self, node: str, events: Iterable[NodeEvent]) -> list[Effect]:
        subject = self.subjects.node_event(node)
        return [Publish(subject, event, f"{node}/{event.number}", f"laxity.node.{event.state}") for event in events]

    def _step_down(self) -> list[Effect]:
        """Last words: the lease is given back, so that a standby need not wait for it to run out."""
        self._stopping = True
        if not self.lease.active or self._writing or NODES not in self._replayed:
            return []
        self._commit += 1
        return [Commit(self._commit, NODES, (self.lease.give_back(),))]

    # --- for tests and for people ---

    def check(self) -> None:
        """Asserts what must always hold."""
        seen_us = [view.liveness.seen_us for view in self.nodes.values()]
        assert seen_us == sorted(seen_us), "nodes are not in the order in which they were heard"
        for name, ranking in self.lists.rankings.items():
            keys = list(ranking.after(None))
            listed = [(node, uuid) for _, _, node, uuid in keys]
            devices = [(node, each) for node, known in self.lists.devices.items() for each in known.values()]
            there = {(node, device.uuid) for node, device in devices if name in device.classes}
            assert set(listed) == there, f"list {name} differs from the devices in rt_nodes"
            assert len(listed) == len(there), f"list {name} names a device twice"
            assert keys == sorted(keys), f"list {name} is not in order"

    def story(self, node: str) -> list[str]:
        """What is known of one node."""
        view = self.nodes.get(node)
        if view is None:
            return [f"{node} was never heard of"]
        said = [f"{node} is {view.liveness.state}: {view.liveness.reason or 'all well'}"]
        return said + [f"{uuid}: {by_class}" for uuid, by_class in view.standings.items()]


def _same(new: NodeFacts, old: NodeFacts | None) -> bool:
    """Equal in all but when it was written."""
    return old is not None and new.model_copy(update={"at_us": old.at_us}) == old

"""Whoever follows a list has exactly the list: against rt_nodes itself, with lost, doubled and late messages, writers
that die, are deposed or never learn whether they wrote, writes that come late or never, instances that lag, and a
server that comes back with an older bucket."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.node_list.core import LEASE, Core
from services.node_list.nodes import Policy
from shared.effects import (
    Commit,
    CommitDone,
    CommitOutcome,
    Disconnected,
    KeyChanged,
    Publish,
    Received,
    Reconnected,
    Reply,
    Tick,
    WatchBegins,
    WatchReplayed,
)
from shared.lists import Device, Follower, Listed
from shared.messages import DeviceFacts, ListDelta, NodeFacts, NodeMetrics, NodeReservations, NodesReply
from shared.subjects import DEADLINES, LEDGER, NODES, Subjects, node_key
from tests.unit.test_node_list_alone import record_in
from tests.unit.test_node_list_core import CLASSES, SECOND, device, reservation

POLICY = Policy(CLASSES, 3_500_000, 30_000_000, 0.1, 20_000, return_ratio=0.05, return_us=5 * SECOND)
NAMES = ("n1", "n2", "n3")
WANTED = CLASSES[0].name
PAGE = 2
Moment = tuple[str, int]
"""Numbering and revision."""


@dataclass
class Instance:
    core: Core
    seen: int = 0
    """Entries of the bucket's log that its watch has brought."""
    commits: list[Commit] = field(default_factory=list)
    done: list[CommitDone] = field(default_factory=list)
    """Answers of the server that are still on their way."""
    outbox: list[Publish] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    cut_off: bool = False
    """Its connection was lost, and its watch has not begun anew."""


class World:
    """rt_nodes with its log, the stream of events, instances of the node-list, and one follower."""

    def __init__(self, seed: int, *, rewinds: bool = False) -> None:
        self.chance, self.rewinds = Random(seed), rewinds
        self.ended: set[str] = set()
        """Numberings of which revisions were lost."""
        self.now_us = 10 * SECOND
        self.counter = 0
        self.log: list[KeyChanged] = []
        self.keys: dict[str, KeyChanged] = {}
        self.whole = [0]
        """Lengths that the log had between two writes: a batch is lost whole or not."""
        self.late: list[Commit] = []
        """On their way to the server, when whoever sent them has given up waiting."""
        self.landed: Counter[str] = Counter()
        self.stream: dict[str, ListDelta] = {}
        self.lists: dict[Moment, dict[Device, Listed]] = {}
        """What each revision of the list is, read from rt_nodes."""
        self.follower = Follower(WANTED, limit=PAGE)
        self.starts = 0
        self.instances = [self.started(), self.started()]

    def started(self) -> Instance:
        self.starts += 1
        it = Instance(Core(Subjects(), POLICY, f"i{self.starts}", lease_us=3 * SECOND, tick_us=250_000), len(self.log))
        for bucket in (LEDGER, DEADLINES):
            self.tell(it, WatchReplayed(bucket, frozenset()))
        self.replay(it)
        return it

    def replay(self, it: Instance) -> None:
        self.tell(it, WatchBegins(NODES))
        for change in sorted(self.keys.values(), key=lambda change: change.revision):
            self.tell(it, change)
        self.tell(it, WatchReplayed(NODES, frozenset(self.keys)))
        it.seen = len(self.log)

    def tell(self, it: Instance, event: object) -> None:
        for effect in it.core.handle(event, self.now_us):
            match effect:
                case Commit():
                    it.commits.append(effect)
                case Publish(body=ListDelta()):
                    it.outbox.append(effect)
                case Reply():
                    it.replies.append(effect)
        it.core.check()

    # --- what may happen ---

    def step(self) -> None:
        it = self.chance.choice(self.instances)
        happens: list[Any] = [self.beat, self.beat, self.hold, self.hold, self.time, self.say, self.say, self.land]
        happens += 4 * [self.commit, self.answer, self.watch] + 3 * [self.ask]
        happens += [self.kill] if self.chance.random() < 0.2 else []
        happens += [self.rewind] if self.rewinds and self.chance.random() < 0.2 else []
        self.chance.choice(happens)(it)
        self.compare()

    def beat(self, _: Instance) -> None:
        self.counter += 1
        uuids = self.chance.choice([("g0", "g1"), ("g0", "g1"), ("g0",)])
        devices = [device(uuid, healthy=self.chance.random() < 0.9, reason="sick") for uuid in uuids]
        said = {"node": self.chance.choice(NAMES), "devices": tuple(devices), "start_id": "s", "counter": self.counter}
        usual = {"at_us": 0, "mono_us": 0, "period_us": SECOND, "cpu_milli": 2000, "memory_mib": 1000}
        metrics = NodeMetrics.model_validate(said | usual)
        for it in self.instances:
            if self.chance.random() < 0.9:
                self.tell(it, Received(f"rt.metrics.{metrics.node}", metrics))

    def hold(self, _: Instance) -> None:
        self.counter += 1
        node, runtime_us = self.chance.choice(NAMES), self.chance.choice([1_000, 12_000, 31_000])
        held = [reservation("q", "g0", runtime_us=runtime_us)] if self.chance.random() < 0.7 else []
        value = NodeReservations(node=node, reservations=tuple(held)).to_json()
        for it in self.instances:
            self.tell(it, KeyChanged(LEDGER, node_key(node), value, self.counter))

    def time(self, _: Instance) -> None:
        for _quarter in range(self.chance.choice([1, 1, 4, 14])):
            self.now_us += 250_000
            for it in self.instances:
                self.tell(it, Tick("age", self.chance.randrange(1 << 50)))

    def rewind(self, _: Instance) -> None:
        """The server comes back with rt_nodes as it was before, or empty; it gives the lost revisions again."""
        if (record := record_in(self.keys.values())) is not None:
            self.ended.add(record.start_id)
        self.whole = self.whole[: self.chance.choice([1, self.chance.randint(1, len(self.whole))])]
        self.log = self.log[: self.whole[-1]]
        self.keys = {change.key: change for change in self.log}
        self.late.clear()
        for it in self.instances:
            while it.done:  # had come before the connection was lost
                self.answer(it)
            self.tell(it, Disconnected())
            unknown = [CommitDone(c.commit, CommitOutcome.UNKNOWN, current=self.current(c)) for c in it.commits]
            it.done, it.commits, it.cut_off = unknown, [], True

    def watch(self, it: Instance) -> None:
        if it.cut_off:
            it.cut_off = False
            self.tell(it, Reconnected(0))
            self.replay(it)
        for _ in range(self.chance.choice([1, 3, 99])):
            if it.seen < len(self.log):
                change = self.log[it.seen]
                it.seen += 1
                # of a key that was written again before the server came to it, the bucket has the last alone
                if self.keys[change.key] is change:
                    self.tell(it, change)

    def commit(self, it: Instance) -> None:
        if it.commits:
            commit = it.commits.pop(0)
            if self.chance.random() < 0.85:
                it.done.append(self.written(commit, known=self.chance.random() < 0.85))
            else:
                self.late.append(commit)
                it.done.append(CommitDone(commit.commit, CommitOutcome.UNKNOWN, current=self.current(commit)))

    def answer(self, it: Instance) -> None:
        if it.done:
            self.tell(it, it.done.pop(0))

    def land(self, _: Instance) -> None:
        if self.late:
            commit = self.late.pop(self.chance.randrange(len(self.late)))
            if self.written(commit, known=True).revisions:
                self.landed["alone" if commit.writes[0].fence else "with the lease"] += 1

    def current(self, commit: Commit) -> tuple[KeyChanged, ...]:
        keys = [key for write in commit.writes for key in (write.key, write.fence) if key]
        return tuple(self.keys.get(key, KeyChanged(NODES, key, None, 0)) for key in keys)

    def written(self, commit: Commit, *, known: bool) -> CommitDone:
        revisions = {key: change.revision for key, change in self.keys.items()}
        if any(revisions.get(write.fence or write.key, 0) != write.expected for write in commit.writes):
            return CommitDone(commit.commit, CommitOutcome.CONFLICT, current=self.current(commit))
        for write in commit.writes:
            self.keys[write.key] = KeyChanged(NODES, write.key, write.value, len(self.log) + 1)
            self.log.append(self.keys[write.key])
        self.whole.append(len(self.log))
        self.note()
        if not known:
            return CommitDone(commit.commit, CommitOutcome.UNKNOWN, current=self.current(commit))
        return CommitDone(
            commit.commit, CommitOutcome.WRITTEN, {w.key: self.keys[w.key].revision for w in commit.writes}
        )

    def note(self) -> None:
        """One revision is one list, whoever writes it."""
        if record := record_in(self.keys.values()):
            published = self.published()
            known = self.lists.setdefault((record.start_id, record.revisions.get(WANTED, 0)), published)
            assert known == published, "two lists under one revision"

    def published(self) -> dict[Device, Listed]:
        values = [change.value for key, change in self.keys.items() if key.startswith("node.")]
        facts = [NodeFacts.trusted(value or b"") for value in values]
        return listed((each.node, device) for each in facts for device in each.devices)

    def say(self, it: Instance) -> None:
        """The stream takes an event once; the follower hears it not at all, once or twice."""
        if not it.outbox:
            return
        event = it.outbox.pop(0)
        assert isinstance(event.body, ListDelta)
        if event.event_id not in self.stream:
            self.stream[event.event_id] = event.body
            for each in self.instances:
                self.tell(each, Received(event.subject, event.body))
        for _ in range(self.chance.choice([0, 1, 1, 1, 2])):
            self.follower.hear(event.body)
        if self.chance.random() < 0.1:  # long after
            self.follower.hear(self.chance.choice([d for d in self.stream.values() if d.deadline_class == WANTED]))

    def ask(self, it: Instance) -> None:
        if self.follower.wants is not None:
            self.tell(it, Received("rt.nodes", self.follower.wants, reply="_INBOX.1"))
            body = it.replies.pop().body
            assert isinstance(body, NodesReply)
            self.follower.read(body)

    def kill(self, it: Instance) -> None:
        """With all that it had still to say; another takes its place. Who starts cannot know of what was lost."""
        record = record_in(self.keys.values())
        if self.ended and (record is None or record.start_id in self.ended):
            return
        self.instances[self.instances.index(it)] = self.started()

    # --- what must hold ---

    def compare(self) -> None:
        for it in self.instances:
            lists, devices = it.core.lists, it.core.lists.devices
            if lists.record is not None:
                has = listed((node, device) for node, known in devices.items() for device in known.values())
                assert self.lists[lists.record.start_id, lists.revision(WANTED)] == has
        follower = self.follower
        if follower.wants is None and follower.start_id is not None:
            assert self.lists[follower.start_id, follower.revision] == follower.devices

    def settle(self) -> None:
        """Everything arrives, and somebody writes."""
        while self.late:
            self.land(self.instances[0])
        for _ in range(20):
            self.now_us += 250_000
            for it in self.instances:
                self.tell(it, Tick("age", 0))
                while it.commits or it.done or it.outbox or it.seen < len(self.log) or it.cut_off:
                    self.commit(it)
                    self.answer(it)
                    self.say(it)
                    self.watch(it)
        while self.follower.wants is not None:
            self.ask(self.instances[0])
        self.compare()


def listed(devices: Iterable[tuple[str, DeviceFacts]]) -> dict[Device, Listed]:
    return {
        (node, one.uuid): Listed((said := one.classes[WANTED]).standing, said.slack_us, said.reason, said.unproven)
        for node, one in devices
    }


@given(st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
def test_a_follower_has_exactly_the_list_when_rt_nodes_goes_back(seed: int) -> None:
    world = World(seed, rewinds=True)
    for _ in range(300):
        world.step()
    world.settle()
    for delta in world.stream.values():  # should the last one have been lost
        if delta.deadline_class == WANTED:
            world.follower.hear(delta)
    world.settle()
    follower, record = world.follower, record_in(world.keys.values())
    assert record is not None
    assert (record.start_id, record.revisions.get(WANTED, 0)) == (follower.start_id, follower.revision)
    assert world.published() == follower.devices
    assert [True] == [it.core.lease.active for it in world.instances if it.core.lease.active]


@given(st.integers(0, 1 << 32))
@example(18)  # a message of one node comes when its writer is deposed
@example(24)  # a successor has the lease before its watch has brought the last write of the one before it
@example(46)  # a key is written again before a watch has come to it
@example(9)  # a writer goes on while a write of its own, given up for lost, is still to come
@settings(max_examples=25, deadline=None)
def test_a_follower_has_exactly_the_list_whatever_is_lost_or_doubled_and_whoever_writes(seed: int) -> None:
    world = World(seed)
    for _ in range(300):
        world.step()
    world.settle()
    # what was heard is made sure of by a last change, should the last one have been lost
    world.beat(world.instances[0])
    world.settle()
    said = defaultdict(list)
    for delta in world.stream.values():
        said[delta.deadline_class, delta.start_id].append(delta.revision)
    for revisions in said.values():
        assert list(range(1, len(revisions) + 1)) == sorted(revisions), "a change was written and never said"


def test_the_places_that_changes_tell_are_those_of_the_list() -> None:
    world = World(7)
    for _ in range(600):
        world.step()
    world.settle()
    told = 0
    for delta in world.stream.values():
        if delta.deadline_class != WANTED:
            continue
        follower = Follower(WANTED, devices=world.lists[delta.start_id, delta.revision])
        places = {at: place for place, (at, _) in enumerate(follower.ordered(), 1)}
        for change in delta.changes:
            told += 1
            assert places.get((change.node, change.uuid)) == change.place
    assert told > 20


@pytest.mark.parametrize("lost", [True, False])
def test_a_gap_makes_the_list_be_read_again_and_a_repeat_does_not(lost: bool) -> None:
    follower = Follower(WANTED)
    follower.read(NodesReply(revision=3, deadline_class=WANTED, devices=(), after=None, start_id="s"))
    follower.hear(ListDelta(at_us=0, deadline_class=WANTED, start_id="s", revision=5 if lost else 3, changes=()))
    assert (follower.wants is not None) == lost


def test_a_bucket_that_was_lost_begins_another_numbering_and_is_read_again() -> None:
    follower = Follower(WANTED)
    follower.read(NodesReply(revision=3, deadline_class=WANTED, devices=(), after=None, start_id="s"))
    follower.hear(ListDelta(at_us=0, deadline_class=WANTED, start_id="t", revision=1, changes=()))
    follower.read(NodesReply(revision=1, deadline_class=WANTED, devices=(), after=None, start_id="t"))
    assert (follower.wants, follower.start_id, follower.revision) == (None, "t", 1)


def test_every_write_is_fenced_by_the_lease_which_is_the_last_of_a_batch() -> None:
    """Whoever sees the lease renewed has seen what was written with it."""
    world, seen = World(3), set[tuple[int, str]]()
    while len(seen) < 3:
        world.step()
        for commit in [commit for it in world.instances for commit in it.commits]:
            last = commit.writes[-1]
            assert LEASE in (last.key, last.fence)
            seen.add((min(len(commit.writes), 2), last.key))
    assert {(1, LEASE), (2, LEASE)} < seen

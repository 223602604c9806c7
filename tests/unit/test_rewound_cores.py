"""What a core makes of a bucket that is said anew: nothing where it is the same, and its word where it is older."""

from __future__ import annotations

import pytest

from services.node_list.core import LEASE
from services.placer.core.following import Following
from services.placer.core.ledger import Ledger
from shared.effects import Disconnected, KeyChanged, Received, Reconnected, WatchBegins, WatchReplayed
from shared.lease import Tenure
from shared.messages import LedgerIdentity
from shared.subjects import LEARNED, LEDGER, NODES
from tests.placer_world import World as Placers
from tests.unit.test_node_list_alone import ready, record
from tests.unit.test_node_list_core import Harness, device, reservation
from tests.unit.test_node_list_learning import SIXTY, resident
from tests.unit.test_node_list_learning import World as Learners

Bucket = dict[str, tuple[bytes | None, int]]


def said_anew(it: Harness, bucket: Bucket) -> None:
    it.bucket = dict(bucket)
    it.tell(Disconnected())
    it.tell(Reconnected(0))
    it.tell(WatchBegins(NODES))
    for key, (value, revision) in sorted(bucket.items(), key=lambda item: item[1][1]):
        it.tell(KeyChanged(NODES, key, value, revision))
    it.tell(WatchReplayed(NODES, frozenset(bucket)))


def test_the_same_nodes_said_anew_are_no_reason_to_write_or_to_say_anything() -> None:
    it = ready("n1", "n2")
    before, told = dict(it.bucket), (len(it.changes), len(it.said))
    said_anew(it, it.bucket)
    it.wait(250_000, beating=("n1", "n2"))
    assert (before, told) == (it.bucket, (len(it.changes), len(it.said)))


@pytest.mark.parametrize("events", [(WatchBegins(NODES),), (Disconnected(), Reconnected(0))])
def test_nothing_is_written_before_all_is_said(events: tuple[object, ...]) -> None:
    it = ready()
    before = dict(it.bucket)
    for event in events:
        it.tell(event)
    it.hold("n1", reservation("q1", "g0"))
    it.wait(3_000_000, beating=("n1",))
    assert before == it.bucket


def test_lists_and_events_of_a_node_are_numbered_on_where_rt_nodes_went_back() -> None:
    it = ready()
    older = dict(it.bucket)
    it.beat("n1", device("g0", healthy=False, reason="sick"))
    it.beat("n1", device("g0", healthy=False, reason="sick"))
    it.wait(1_250_000, beating=())
    was, numbers = record(it), [event.event_id for event in it.said]
    said_anew(it, older)
    it.beat("n1", device("g0"), times=1)
    assert was.start_id != record(it).start_id
    assert {delta.start_id for _, delta in it.changes[-2:]} == {record(it).start_id}
    assert not it.conflicts
    assert "device_back" == it.said[-1].body.state
    assert it.said[-1].event_id not in numbers


@pytest.mark.parametrize("heard", [False, True])
def test_a_numbering_of_which_more_was_heard_than_rt_nodes_knows_is_not_gone_on_with(heard: bool) -> None:
    it = ready()
    older = dict(it.bucket)
    it.hold("n1", reservation("q1", "g0"))
    second = Harness("b", older)
    second.beat("n1", device("g0"), times=2)
    for _, delta in it.changes if heard else ():
        second.tell(Received("rt.events.list.x", delta))
    second.wait(3_500_000, beating=("n1",))
    second.hold("n1", reservation("q2", "g0", 30_000))
    assert second.core.lease.active
    assert heard == (record(second).start_id != record(it).start_id)


@pytest.mark.parametrize("older", [False, True])
def test_a_lease_of_ours_is_taken_anew_where_it_came_back_older(older: bool) -> None:
    it = ready()
    at = it.bucket[LEASE]
    it.wait(1_500_000, beating=("n1",))
    assert it.bucket[LEASE][1] > at[1]
    bucket = it.bucket | ({LEASE: at} if older else {})
    it.tell(WatchBegins(NODES))
    it.tell(KeyChanged(NODES, LEASE, *bucket[LEASE]))
    assert it.core.lease.active != older


def test_a_lease_of_another_is_believed_whatever_its_revision() -> None:
    it, other = Tenure(LEASE, "a", 3), Tenure(LEASE, "b", 3)
    it.renewed(500, 0)
    it.changed(KeyChanged(NODES, LEASE, other.renewal().value, 1), 0)
    assert it.ours
    it.begins()
    it.changed(KeyChanged(NODES, LEASE, other.renewal().value, 1), 0)
    assert (it.ours, it.active, it.revision) == (False, False, 1)


def test_what_is_new_of_a_profile_outlives_a_watch_that_begins_anew() -> None:
    it = Learners()
    it.it.hold("n1", resident("a", "detector"))
    for _ in range(2):
        it.hear(a=SIXTY)
    assert 60 == it.learned("detector")
    it.hear(a=SIXTY[:40])
    it.learning.handle(WatchBegins(LEARNED), it.it.now_us)
    for key, (value, revision) in it.bucket.items():
        it.learning.handle(KeyChanged(LEARNED, key, value, revision), it.it.now_us)
    it.learning.handle(WatchReplayed(LEARNED, frozenset(it.bucket)), it.it.now_us)
    it.hear(a=SIXTY[:20])
    assert 120 == it.learned("detector")


def test_a_read_that_ends_while_the_ledger_is_not_heard_does_not_make_a_placer_decide() -> None:
    following, ledger = Following(), Ledger()
    change = KeyChanged(LEDGER, "ledger", LedgerIdentity(ledger_id="x", created_at_us=0).to_json(), 5)
    ledger.observe(change, 0)
    assert ("ledger",) == following.replayed(WatchReplayed(LEDGER, frozenset()), ledger)
    following.begins()
    following.read((change,))
    assert not following.ok


def test_leases_that_the_server_lost_stop_no_placer_and_raise_no_alarm() -> None:
    world = Placers()
    world.add_node("n1", 8)
    for name in (world.placer(), world.placer()):
        world.pass_time(2)
        assert world.placers[name].health == "ok"
    world.pass_time(20)
    world.ledger.rewind_leases(1_000)
    for name in world.placers:
        world.replay(name)
        assert world.placers[name].delivery.told <= world.ledger.seq, "what is written next was not told"
    world.pass_time(1)
    assert "placed" == world.place("p1").outcome
    world.pass_time(20)
    assert ["ok", "ok"] == [core.health for core in world.placers.values()]
    assert "placed" == world.place("p2", request_id="b").outcome

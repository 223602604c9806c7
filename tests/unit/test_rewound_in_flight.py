"""What is under way while a bucket goes back: a commit that was seen written, last words, an acceptance."""

from __future__ import annotations

import pytest

from services.placer.core.following import Following
from services.placer.core.ledger import Ledger
from shared.effects import (
    Commit,
    CommitDone,
    CommitOutcome,
    Disconnected,
    Draining,
    KeyChanged,
    Reconnected,
    Tick,
    WatchBegins,
    WatchReplayed,
)
from shared.messages import Lease, LedgerIdentity
from shared.subjects import LEDGER
from tests.placer_world import WALL, World, request
from tests.unit.test_node_list_alone import ready


def one_placer() -> tuple[World, str]:
    world = World()
    world.add_node("n1", 8)
    name = world.placer()
    world.pass_time(16)
    return world, name


def taken_out(world: World) -> Commit:
    """The commit under way: its answer is the test's."""
    while not any(isinstance(task.effect, Commit) for task in world.tasks):
        world.step_task()
    task = next(task for task in world.tasks if isinstance(task.effect, Commit))
    world.tasks.remove(task)
    return task.effect


def beat(world: World, name: str) -> Commit:
    world.now += 2_000_000
    world.tell(name, Tick("beat", WALL + world.now))
    return taken_out(world)


def cut_off(world: World, name: str) -> None:
    """After its watch has shown all that there is."""
    while world.step_watch(name):
        pass
    world.tell(name, Disconnected())
    world.tell(name, Reconnected(0))


def unknown(world: World, commit: Commit) -> CommitDone:
    current = world.ledger.read([write.key for write in commit.writes])
    return CommitDone(commit.commit, CommitOutcome.UNKNOWN, current=current)


@pytest.mark.parametrize("answered", ["before it begins", "at the beginning", "at the end", "after it"])
def test_a_renewal_that_was_seen_and_then_lost_holds_no_placer_up(answered: str) -> None:
    world, name = one_placer()
    commit = beat(world, name)
    world.ledger.commit(commit)
    cut_off(world, name)
    world.ledger.rewind_leases(6)
    end = unknown(world, commit)
    steps = [WatchBegins(LEDGER), *world.ledger.replay(), WatchReplayed(LEDGER, world.ledger.keys())]
    place = {"before it begins": 0, "at the beginning": 1, "at the end": len(steps) - 1, "after it": len(steps)}
    steps.insert(place[answered], end)
    world.watched[name] = len(world.ledger.log)
    for event in steps:
        world.tell(name, event)
    world.pass_time(10)
    assert "placed" == world.place(name).outcome
    assert world.placers[name].counters["commits.conflict"] <= 2


def test_what_was_seen_placed_and_then_lost_is_placed_again_and_not_only_told() -> None:
    world, name = one_placer()
    values, entries, seq = dict(world.ledger.values), len(world.ledger.log), world.ledger.seq
    reply = world.ask(name, request(request_id="lost"))
    commit = taken_out(world)
    world.ledger.commit(commit)
    cut_off(world, name)
    world.ledger.values, world.ledger.seq = values, seq
    del world.ledger.log[entries:]
    end = unknown(world, commit)
    world.replay(name)
    world.tell(name, end)
    assert "placed" == world.answer(reply).outcome
    assert world.has_key("lost")


def test_a_lease_is_never_told_beyond_a_ledger_that_went_back_under_a_renewal() -> None:
    world, name = one_placer()
    commit = beat(world, name)
    cut_off(world, name)
    world.ledger.rewind_leases(12)
    world.tell(name, unknown(world, commit))
    world.replay(name)
    (lease,) = [write.value for write in taken_out(world).writes if write.key == f"lease.{name}"]
    assert lease is not None
    assert Lease.trusted(lease).told <= world.ledger.seq


@pytest.mark.parametrize("whole", [False, True])
def test_an_acceptance_makes_a_placer_decide_only_on_a_whole_ledger(whole: bool) -> None:
    following, ledger = Following(), Ledger()
    first = KeyChanged(LEDGER, "ledger", LedgerIdentity(ledger_id="x", created_at_us=0).to_json(), 5)
    ledger.observe(first, 0)
    following.identity(ledger)
    following.heard(first)
    following.replayed(WatchReplayed(LEDGER, frozenset({"ledger"})), ledger)
    following.stop("another one", ledger)
    if not whole:
        following.begins()
    accepted = KeyChanged(LEDGER, "ledger", LedgerIdentity(ledger_id="x", created_at_us=1).to_json(), 6)
    ledger.observe(accepted, 0)
    following.heard(accepted)
    following.identity(ledger)
    assert (None, whole) == (following.alarm, following.ok)
    following.replayed(WatchReplayed(LEDGER, frozenset({"ledger"})), ledger)
    assert following.ok


def test_a_node_list_that_hears_nothing_says_no_last_words() -> None:
    it = ready()
    it.tell(Disconnected())
    assert not [effect for effect in it.core.handle(Draining(), it.now_us) if isinstance(effect, Commit)]

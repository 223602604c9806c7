"""Leases, the leader, taking over, and the recovery path: who acts when somebody is gone."""

from __future__ import annotations

from services.placer.core.containers import PlaceStreamAt
from services.placer.core.leases import Leases
from services.placer.core.ledger import LEADER, Ledger
from services.placer.core.recovery import Recovery
from services.placer.core.telling import Deliver, Delivered
from shared.effects import Commit, Disconnected, KeyChanged, Received, Reconnected, Tick
from shared.messages import Lease, PlaceRequest, State
from shared.subjects import LEDGER, lease_key
from tests.placer_world import SECOND, WALL, World, request


def two_placers() -> World:
    """One node; p1 leads, p2 does not."""
    world = World()
    world.add_node("n1", 2)
    world.placer("p1")
    world.pass_time(2)
    world.placer("p2")
    world.pass_time(2)
    assert world.leader() == "p1"
    return world


def leases_of(world: World) -> set[str]:
    return {key for key in world.ledger.keys() if key.startswith("lease.")}  # noqa: SIM118  # a method of its own


# --- leases ---


def seen(ledger: Ledger, holder: str, counter: int, now_us: int) -> None:
    value = Lease(holder=holder, counter=counter, ttl_us=3 * SECOND).to_json()
    ledger.observe(KeyChanged(LEDGER, lease_key(holder), value, counter), now_us)


def test_T1_T2_a_lease_runs_out_by_the_observers_own_clock_since_it_saw_it_change() -> None:
    ledger = Ledger()
    leases = Leases(ledger, 3 * SECOND)
    seen(ledger, "p", 1, 100 * SECOND)

    assert leases.alive("p", 103 * SECOND - 1)
    assert not leases.alive("p", 103 * SECOND)
    seen(ledger, "p", 2, 104 * SECOND)
    assert leases.alive("p", 106 * SECOND)


def test_the_same_revision_seen_again_renews_nothing() -> None:
    ledger = Ledger()
    leases = Leases(ledger, 3 * SECOND)
    seen(ledger, "p", 1, 100 * SECOND)
    seen(ledger, "p", 1, 102 * SECOND)

    assert not leases.alive("p", 103 * SECOND)


def test_T6_an_observer_that_just_started_grants_everyone_a_full_time_to_live() -> None:
    ledger = Ledger()
    leases = Leases(ledger, 3 * SECOND)
    seen(ledger, "p", 1, 100 * SECOND)
    leases.grant(150 * SECOND)

    assert leases.alive("p", 153 * SECOND - 1)
    assert not leases.alive("p", 153 * SECOND)


def test_an_owner_without_a_lease_gets_a_time_to_live_from_when_it_is_first_asked_about() -> None:
    leases = Leases(Ledger(), 3 * SECOND)

    assert leases.alive("p", 100 * SECOND)
    assert not leases.alive("p", 103 * SECOND)


def test_a_lease_that_was_deleted_is_over_at_once() -> None:
    ledger = Ledger()
    leases = Leases(ledger, 3 * SECOND)
    seen(ledger, "p", 1, 100 * SECOND)
    ledger.observe(KeyChanged(LEDGER, lease_key("p"), None, 2), 100 * SECOND)

    assert not leases.alive("p", 100 * SECOND)


def test_a_lease_that_was_given_up_is_over_at_once_and_stays_for_its_time() -> None:
    """What its holder had under way may still arrive."""
    ledger = Ledger()
    leases = Leases(ledger, 3 * SECOND)
    value = Lease(holder="p", counter=1, ttl_us=0).to_json()
    ledger.observe(KeyChanged(LEDGER, lease_key("p"), value, 1), 100 * SECOND)

    assert not leases.alive("p", 100 * SECOND)
    assert [] == leases.expired(103 * SECOND - 1)
    assert ["p"] == leases.expired(103 * SECOND)


# --- the leader ---


def test_there_is_one_leader_and_another_takes_over_when_its_lease_has_run_out() -> None:
    world = two_placers()
    world.kill("p1")
    world.pass_time(2)
    assert not world.placers["p2"].leader.leads
    world.pass_time(3)

    assert "p2" == world.leader()


def test_a_clean_stop_gives_up_both_leases_so_that_nobody_waits() -> None:
    world = two_placers()
    world.place("p1")
    world.stop("p1")
    assert {"lease.p1", "lease.p2"} == leases_of(world)
    world.pass_time(2.4)

    assert "p2" == world.leader()
    assert "p2" == world.record("a").owner
    world.pass_time(2)
    assert {"lease.leader", "lease.p2"} == leases_of(world)
    world.check_settled()


def test_P22_a_deposed_leader_fails_by_the_leaders_key_that_its_batch_carries() -> None:
    world = two_placers()
    world.place("p1", gpu={"count": 2})
    world.place("p1", request_id="b", queue=True)
    old = world.placers["p1"]
    value = Lease(holder="p2", counter=1000, ttl_us=3 * SECOND).to_json()
    world.ledger.put("lease.leader", value)
    world.ledger.put("node.n1", b'{"node":"n1","reservations":[]}')  # room, as p1 will see it
    world.tell("p1", world.ledger.log[-1])
    world.now += SECOND
    world.tell("p1", Tick("soon", WALL + world.now))
    before = world.record("b")
    commit = next(task for task in world.tasks if isinstance(task.effect, Commit))
    assert "lease.leader" in {write.key for write in commit.effect.writes}
    done = world.ledger.commit(commit.effect)
    world.tasks.remove(commit)

    assert "conflict" == done.outcome
    world.tell("p1", done)
    assert before == world.record("b")
    assert not old.leader.leads


def test_every_batch_of_the_leader_renews_its_lease() -> None:
    world = two_placers()
    before = world.ledger.revision("lease.leader")
    world.pass_time(1)

    assert before < world.ledger.revision("lease.leader")


def test_the_leader_takes_over_what_a_dead_placer_owned_and_deletes_its_lease_last() -> None:
    world = two_placers()
    world.place("p2")
    assert "p2" == world.record("a").owner
    world.kill("p2")
    world.pass_time(5)

    assert "p1" == world.record("a").owner
    assert State.STARTED == world.record("a").state
    assert {"lease.leader", "lease.p1"} == leases_of(world)
    assert [1] == list(world.executed.values())


def test_a_start_in_hand_of_a_dead_placer_is_carried_out_by_the_leader() -> None:
    world = two_placers()
    world.ask("p2", request())
    world.step_task()
    world.kill("p2")
    assert State.PLACED == world.record("a").state
    world.pass_time(8)

    assert State.STARTED == world.record("a").state
    world.check_settled()


def test_last_words_that_a_dead_placer_left_unsaid_are_said_by_the_leader() -> None:
    world = two_placers()
    world.ask("p2", request(gpu={"count": 9}))
    commit = world.tasks[0]
    world.ledger.commit(commit.effect)
    world.kill("p2")
    assert {} == world.told("a")
    world.pass_time(6)

    assert {1: "accepted", 2: "rejected"} == world.told("a")


def beat(world: World, name: str, *, watching: bool = True) -> Deliver | None:
    """One second later; what this placer asks to be delivered now, which is not done."""
    world.now += SECOND
    world.tell(name, Tick("beat", WALL + world.now))
    delivering = [task for task in world.tasks if isinstance(task.effect, Deliver)]
    for task in delivering:
        world.tasks.remove(task)
    while world.tasks:
        world.step_task()
    if watching:
        world.settle()
    return delivering[0].effect if delivering else None


def told_up_to(world: World, name: str) -> int:
    value, _ = world.ledger.values[f"lease.{name}"]
    assert value is not None
    return Lease.trusted(value).told


def test_a_lease_says_that_something_was_told_only_when_the_stream_has_it() -> None:
    world = two_placers()
    world.place("p2", gpu={"count": 9})
    written = world.ledger.revision("request.a")
    deliver = beat(world, "p2")
    assert deliver is not None
    assert None is beat(world, "p2")
    assert told_up_to(world, "p2") < written <= deliver.revision
    world.tell("p2", Delivered(deliver.revision, deliver.gone))
    beat(world, "p2")

    assert deliver.revision == told_up_to(world, "p2")


def test_what_is_in_flight_is_not_told_though_the_watch_has_shown_it() -> None:
    world = two_placers()
    world.ask("p2", request(gpu={"count": 9}))
    world.ledger.commit(world.tasks.popleft().effect)
    while world.step_watch("p2"):
        pass
    deliver = beat(world, "p2")

    assert deliver is not None
    assert deliver.revision < world.ledger.revision("request.a")


def test_a_leader_whose_watch_is_behind_drops_no_lease() -> None:
    """The last words of the dead may be among what it has not seen."""
    world = two_placers()
    world.kill("p2")
    world.pass_time(1)
    gone = []
    for watching in (False, False, True, True):
        deliver = beat(world, "p1", watching=watching)
        assert deliver is not None
        gone.append(deliver.gone)
        world.tell("p1", Delivered(deliver.revision, ()))

    assert [(), (), (), ("p2",)] == gone


def test_T5_a_placer_that_was_stopped_for_a_while_declares_nobody_dead() -> None:
    world = two_placers()
    world.place("p2")
    world.now += 60 * SECOND
    world.tell("p2", Tick("beat", WALL + world.now))
    world.tell("p1", Tick("beat", WALL + world.now))
    world.settle()
    world.pass_time(2)

    assert "p2" == world.record("a").owner
    assert {"lease.leader", "lease.p1", "lease.p2"} == leases_of(world)


def test_a_placer_that_was_cut_off_decides_only_when_it_has_seen_the_ledger_again() -> None:
    world = two_placers()
    world.tell("p2", Disconnected())
    reply = world.ask("p2", request())
    world.settle()
    assert [] == world.replies[reply]
    world.tell("p2", Reconnected(1))
    world.replay("p2")

    assert "placed" == world.answer(reply).outcome


def test_a_placer_whose_lease_was_deleted_while_it_hung_writes_a_new_one() -> None:
    world = two_placers()
    world.ledger.put("lease.p2", None)
    world.pass_time(2)

    assert "lease.p2" in leases_of(world)


def test_the_lease_of_the_leader_is_not_one_of_a_placer() -> None:
    ledger = Ledger()
    leases = Leases(ledger, 3 * SECOND)
    seen(ledger, LEADER, 1, 0)

    assert not leases.others_alive("p", 0)
    assert [] == leases.expired(100 * SECOND)


# --- the recovery path ---


def stored(world: World, placer: str, message: PlaceRequest, seq: int = 50) -> None:
    world.tell(placer, Received("rt.place", message, seq=seq, ack=seq))


def acked(world: World) -> list[int]:
    return [ack.token for ack in world.acks if ack.delay_us is None]


def test_a_stored_copy_is_acknowledged_once_the_ledger_has_its_key() -> None:
    world = two_placers()
    stored(world, "p2", request())
    assert [] == acked(world)
    world.place("p1")

    assert [50] == acked(world)
    stored(world, "p1", request(), 51)
    assert [50, 51] == acked(world)


def test_B14_a_copy_that_nobody_decides_is_decided_after_the_grace_once() -> None:
    world = two_placers()
    stored(world, "p2", request())
    world.pass_time(4.8)
    assert not world.has_key("a")
    world.pass_time(0.4)

    assert State.STARTED == world.record("a").state
    assert [50] == acked(world)
    assert {} == {to: said for to, said in world.replies.items() if said}


def test_B19_a_copy_delivered_again_keeps_its_grace_and_the_newest_token() -> None:
    world = two_placers()
    stored(world, "p2", request())
    world.pass_time(4)
    world.tell("p2", Received("rt.place", request(), seq=50, ack=77, redelivered=True))
    world.pass_time(1.2)

    assert [77] == acked(world)
    assert State.STARTED == world.record("a").state


def test_copies_without_an_id_and_questions_about_now_are_acknowledged_at_sight() -> None:
    world = two_placers()
    for number, body in enumerate(({"request_id": None}, {"hold_us": 1}, {"dry_run": True}), 1):
        stored(world, "p1", request(**body), number)

    assert [1, 2, 3] == acked(world)
    assert {"replay.no_id": 1, "replay.for_now": 2} == {
        name: count for name, count in world.placers["p1"].counters.items() if name.startswith("replay")
    }


def test_a_copy_that_is_an_error_is_acknowledged_whatever_the_outcome() -> None:
    world = two_placers()
    stored(world, "p1", request(strategy="no-such"))
    world.pass_time(6)

    assert [50] == acked(world)
    assert not world.has_key("a")


def test_a_placer_alone_decides_at_once_what_was_stored_before_its_start() -> None:
    world = World()
    world.add_node("n1", 2)
    world.placer("p1")
    world.tell("p1", PlaceStreamAt(50))
    stored(world, "p1", request(), 50)
    stored(world, "p1", request(request_id="b"), 51)
    world.pass_time(0.4)

    assert (True, False) == (world.has_key("a"), world.has_key("b"))


def test_with_another_placer_alive_it_waits_for_the_grace() -> None:
    world = two_placers()
    world.tell("p2", PlaceStreamAt(50))
    stored(world, "p2", request(), 50)
    world.pass_time(2)

    assert not world.has_key("a")


def test_a_placer_that_stops_gives_its_copies_back_at_once() -> None:
    world = two_placers()
    stored(world, "p2", request())
    world.stop("p2")

    assert [(50, 0)] == [(ack.token, ack.delay_us) for ack in world.acks]


def test_two_messages_with_one_id_are_one_copy_and_both_are_acknowledged_at_its_end() -> None:
    recovery = Recovery(SECOND)
    for seq in (1, 2, 1):
        recovery.keep(Received("", request(), seq=seq, ack=seq + 10), request(), 0)
    (copy,) = recovery.due(SECOND, lambda seq: False)

    assert (11, 12) == copy.acks
    assert 0 == len(recovery)

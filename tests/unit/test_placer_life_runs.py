"""The rest of the table "Life of a request" (DESIGN §5): holds, starts, ends, gangs, and what is said of them."""

from __future__ import annotations

import pytest

from services.placer.core.containers import Cause, Start
from services.placer.core.intents import Rules
from shared.effects import Received, Tick
from shared.messages import ConfirmRequest, PlaceEvent, Reservation, State
from tests.placer_world import SECOND, WALL, World, led, request


@pytest.fixture
def world() -> World:
    return led(n1=1)


# --- holds ---


def test_a_confirmed_hold_is_placed_and_started_by_who_was_asked(world: World) -> None:
    world.place("p1", hold_us=30 * SECOND)
    world.placer("p2")
    said = world.confirm("p2", "a", 1)

    assert ("placed", 1) == (said.outcome, said.generation)
    assert "p2" == world.record("a").owner
    assert ["accepted", "held", "placed", "started"] == world.states("a")


def test_confirm_asked_again_answers_the_same_and_starts_nothing_again(world: World) -> None:
    world.place("p1", hold_us=30 * SECOND)
    replies = [world.ask("p1", _confirm(1)) for _ in range(2)]
    first, second = (world.answer(reply) for reply in replies)

    assert first == second
    assert 1 == len(world.running())
    assert "started" == world.confirm("p1", "a", 1).outcome


def test_confirm_of_another_generation_is_an_error(world: World) -> None:
    world.place("p1", hold_us=30 * SECOND)
    said = world.confirm("p1", "a", 2)

    assert said.error is not None
    assert ("generation", "2", "1, the present one") == (said.error.field, said.error.found, said.error.allowed)


def test_confirm_of_an_unknown_id_answers_unknown(world: World) -> None:
    assert "unknown" == world.confirm("p1", "a", 1).outcome


def test_a_hold_that_is_not_confirmed_expires_but_not_for_good(world: World) -> None:
    world.place("p1", hold_us=2 * SECOND)
    world.pass_time(3)

    assert ["accepted", "held", "expired"] == world.states("a")
    assert not world.record("a").final
    assert [] == world.held_on()
    assert "expired" == world.confirm("p1", "a", 1).outcome
    again = world.place("p1", hold_us=2 * SECOND)
    assert ("held", 2) == (again.outcome, again.generation)
    assert "placed" == world.confirm("p1", "a", 2).outcome


def test_a_repeat_of_an_unconfirmed_hold_makes_a_new_one_and_the_old_one_ends(world: World) -> None:
    world.place("p1", gpu={"share": 1}, hold_us=30 * SECOND)
    again = world.place("p1", gpu={"share": 1}, hold_us=30 * SECOND)

    assert ("held", 2) == (again.outcome, again.generation)
    assert [("a", 0, 2)] == world.held_on()
    assert "error" == world.confirm("p1", "a", 1).outcome


def test_a_hold_moves_when_its_node_is_no_longer_a_candidate(world: World) -> None:
    world.add_node("n2")
    world.place("p1", hold_us=30 * SECOND, candidates=["n1"])
    again = world.place("p1", hold_us=30 * SECOND, candidates=["n2"])

    assert ["n2"] == [place.node for place in again.placements]
    assert [] == world.held_on("n1")


def test_a_new_hold_that_is_refused_leaves_the_old_one_to_run_out(world: World) -> None:
    world.place("p1", hold_us=3 * SECOND)
    said = world.place("p1", hold_us=3 * SECOND, candidates=["n9"])

    assert "rejected" == said.outcome
    assert [("a", 0, 1)] == world.held_on()
    world.pass_time(4)
    assert [] == world.held_on()


# --- starts and ends ---


def test_a_failed_start_waits_with_its_node_set_aside_and_goes_elsewhere(world: World) -> None:
    """P2: exclude, back off, give the reason."""
    world.generations_fail["a"] = 1
    world.place("p1")
    waits = world.record("a")
    assert (State.WAITING, ("n1",), 1, 1_000_000) == (waits.state, waits.set_aside, waits.tries, waits.backoff_us)
    assert "start on n1 failed: no such image" == waits.steps[-1].detail
    assert [] == world.held_on()
    world.add_node("n2")
    world.pass_time(0.6)
    assert State.WAITING == world.record("a").state
    world.pass_time(1)

    assert ["accepted", "placed", "waiting", "placed", "started"] == world.states("a")
    assert [("n2", 2)] == [(each.node, each.generation) for each in world.record("a").replicas]


def test_a_node_that_failed_is_tried_again_where_no_other_will_do(world: World) -> None:
    world.generations_fail["a"] = 1
    world.place("p1")
    world.pass_time(2)

    assert [("n1", 2)] == [(each.node, each.generation) for each in world.record("a").replicas]


def test_a_start_that_fails_too_often_fails_the_request(world: World) -> None:
    world.generations_fail["a"] = 9
    world.place("p1")
    world.pass_time(60)

    assert ["accepted", *["placed", "waiting"] * 4, "placed", "failed"] == world.states("a")
    assert world.record("a").final
    assert [] == world.held_on()


def test_a_container_that_ends_is_exited_with_its_code(world: World) -> None:
    world.place("p1")
    world.end(world.running()[0], 3)
    world.pass_time(3)

    assert ["accepted", "placed", "started", "exited"] == world.states("a")
    assert (3, True) == (world.record("a").exit_code, world.record("a").final)
    assert [] == world.held_on()
    assert {} == world.boxes, "what is left of it is removed once the ledger has its exit code"


@pytest.mark.parametrize(("code", "state"), [(1, "started"), (0, "exited")])
def test_restart_on_failure_means_a_new_generation_after_a_code_other_than_0(
    world: World, code: int, state: str
) -> None:
    world.place("p1", restart="on_failure")
    world.end(world.running()[0], code)
    world.pass_time(3)

    assert state == world.record("a").state
    assert [2 if code else 1] == [each.generation for each in world.record("a").replicas]


def steps(world: World) -> list[PlaceEvent]:
    return [each.body for each in world.events if isinstance(each.body, PlaceEvent)]


def test_what_a_container_ended_of_is_in_its_record_its_event_and_its_detail(world: World) -> None:
    world.place("p1")
    world.end(world.running()[0], 137, cause=Cause("Evicted", "the node was low on memory"))
    world.pass_time(3)

    assert ("Evicted", "Evicted") == (world.record("a").end_reason, world.record("a").replicas[0].end_reason)
    event = steps(world)[-1]
    assert ("exited", 137, "Evicted") == (event.state, event.exit_code, event.end_reason)
    assert "exit code 137 (Evicted: the node was low on memory)" in str(event.detail)


def test_one_that_waits_to_be_started_again_says_how_it_ended_and_the_next_one_does_not(world: World) -> None:
    world.place("p1", restart="on_failure")
    world.end(world.running()[0], 137, cause=Cause("OOMKilled"))
    world.pass_time(3)

    waiting, *after = steps(world)[3:]
    assert ("waiting", 137, "OOMKilled") == (waiting.state, waiting.exit_code, waiting.end_reason)
    assert [("placed", None), ("started", None)] == [(event.state, event.end_reason) for event in after]


def test_of_several_the_first_that_failed_says_why(world: World) -> None:
    world.place("p1", replicas=3, gpu={"share": 0.1})
    first, second, third = world.running()
    world.end(second, 139, cause=Cause("SIGSEGV"))
    world.end(third, 1, cause=Cause("Error"))
    world.end(first, 0, cause=Cause("EvictionByEvictionAPI"))
    world.pass_time(3)

    assert (139, "SIGSEGV") == (world.record("a").exit_code, world.record("a").end_reason)


def test_restarts_back_off(world: World) -> None:
    world.place("p1", restart="on_failure")
    waits = []
    for _ in range(3):
        world.end(world.running()[0], 1)
        world.settle()
        waits.append(world.record("a").backoff_us)
        world.pass_time(8)

    assert [1_000_000, 2_000_000, 4_000_000] == waits
    assert 60_000_000 == Rules().backoff_us(50)


def test_a_container_that_vanished_without_a_trace_has_an_unknown_exit_code(world: World) -> None:
    world.place("p1")
    world.boxes.clear()
    world.pass_time(4)

    assert (State.EXITED, None) == (world.record("a").state, world.record("a").exit_code)
    assert "unknown exit code" in str(world.record("a").steps[-1].detail)


def test_an_end_that_only_a_list_shows_is_found(world: World) -> None:
    world.place("p1")
    world.end(world.running()[0], 7, told=False)
    world.pass_time(4)

    assert (State.EXITED, 7) == (world.record("a").state, world.record("a").exit_code)


def test_a_silent_node_proves_nothing(world: World) -> None:
    world.place("p1")
    world.silent_nodes.add("n1")
    world.pass_time(30)

    assert State.STARTED == world.record("a").state
    assert [("a", 0, 1)] == world.held_on()


# --- gangs ---


def test_a_gang_is_placed_when_all_are_and_started_when_all_are(world: World) -> None:
    world.add_node("n2")
    said = world.place("p1", replicas=4)

    assert [0, 1, 2, 3] == [place.replica for place in said.placements]
    assert ["accepted", "placed", "started"] == world.states("a")
    world.check_settled()


def test_P13_a_gang_that_does_not_fit_whole_takes_nothing(world: World) -> None:
    assert "rejected" == world.place("p1", replicas=3).outcome
    assert [] == world.held_on()


def test_a_gang_is_exited_when_all_have(world: World) -> None:
    world.place("p1", replicas=2)
    first, second = world.running()
    world.end(first, 0)
    world.pass_time(3)
    assert State.STARTED == world.record("a").state
    assert 1 == len(world.held_on())
    world.end(second, 4)
    world.settle()

    assert (State.EXITED, 4) == (world.record("a").state, world.record("a").exit_code)


def test_one_replica_that_fails_for_good_stops_the_others(world: World) -> None:
    world.rules = Rules(most_tries=1)
    world.stop("p1")
    world.placer("p2")
    world.pass_time(2)
    world.ask("p2", request(replicas=2))
    world.step_task()
    starts = [task for task in world.tasks if isinstance(task.effect, Start)]
    assert 2 == len(starts)
    world.tasks.remove(starts[1])
    world.settle()
    world.generations_fail["a"] = 1
    world.tasks.append(starts[1])
    world.settle()

    assert ["accepted", "placed", "stopping", "failed"] == world.states("a")
    assert [] == world.running()
    assert [] == world.held_on()


def test_one_replica_of_a_gang_that_waits_is_placed_again_alone(world: World) -> None:
    world.place("p1", replicas=2, restart="on_failure")
    world.end(world.running()[1], 1)
    world.pass_time(3)

    assert [1, 2] == [each.generation for each in world.record("a").replicas]
    assert State.STARTED == world.record("a").state
    world.check_settled()


def test_a_gang_over_as_many_nodes_as_a_batch_can_write_is_one_batch() -> None:
    world = World(checking=False)
    for number in range(999):
        world.add_node(f"n{number}", 0)
    world.placer("p1")
    world.settle()
    reply = world.ask("p1", request(gpu=None, cpu_milli=64_000, replicas=999))
    world.step_task()

    assert ["placed"] == [said.outcome for said in world.replies[reply]]


# --- replies, ids, warnings ---


def test_an_id_is_made_up_where_none_is_given(world: World) -> None:
    said = [world.place("p1", request_id=None).request_id for _ in range(2)]

    assert ["p1-1", "p1-2"] == said


def test_a_field_that_nobody_knows_comes_back_as_a_warning(world: World) -> None:
    body = request()
    raw = body.to_json()[:-1] + b',"prioritty":1}'
    world.tell("p1", Received("rt.place", body, reply="_INBOX.x", raw=raw))

    assert ("unknown field: prioritty",) == world.answer("_INBOX.x").warnings


def test_the_steps_of_a_request_are_its_events_with_ids_from_ledger_request_and_step(world: World) -> None:
    world.place("p1")

    ids = [(event.event_id, event.event_type) for event in world.events]
    assert [
        ("ledger-p1/a/1", "laxity.place.accepted"),
        ("ledger-p1/a/2", "laxity.place.placed"),
        ("ledger-p1/a/3", "laxity.place.started"),
    ] == ids


def test_a_story_tells_the_steps_and_what_was_done(world: World) -> None:
    world.generations_fail["a"] = 1
    world.place("p1")
    story = "\n".join(world.placers["p1"].story("a"))

    assert "step 3: waiting, generation 1, start on n1 failed: no such image" in story
    assert "start failed: no such image" in story


def test_final_records_leave_the_view_after_their_time(world: World) -> None:
    world.place("p1", gpu={"count": 9})
    core = world.placers["p1"]
    world.now += 86_401 * SECOND
    world.tell("p1", Tick("beat", WALL + world.now))

    assert "a" not in core.ledger.records


def _confirm(generation: int) -> ConfirmRequest:
    return ConfirmRequest(request_id="a", generation=generation)


def test_reservations_carry_everything_from_which_an_account_can_be_rebuilt(world: World) -> None:
    world.place("p1", cpu_milli=500, memory_mib=64, gpu={"share": 0.25, "memory_mib": 1024}, priority=2)

    (held,) = world.reservations()["n1"]
    expected = Reservation(
        request_id="a",
        replica=0,
        generation=1,
        devices=("n1-gpu-0",),
        share_micro=250_000,
        device_memory_mib=1024,
        cpu_milli=500,
        memory_mib=64,
        priority=2,
    )
    assert expected == held

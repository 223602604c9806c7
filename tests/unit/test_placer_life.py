"""Rows of the table "Life of a request" (DESIGN §5): new requests, repeats, what waits, what is released."""

from __future__ import annotations

import pytest

from services.placer.core.containers import Start
from shared.messages import ReleaseRequest, State
from tests.placer_world import SECOND, SUBJECTS, WALL, World, led, request


@pytest.fixture
def world() -> World:
    return led(n1=1)


# --- from nothing ---


def test_what_fits_is_placed_and_started(world: World) -> None:
    said = world.place("p1")

    assert ("placed", False, 1) == (said.outcome, said.duplicate, said.generation)
    assert [("n1", ("n1-gpu-0",), 0.5)] == [(p.node, p.devices, p.share) for p in said.placements]
    assert ["accepted", "placed", "started"] == world.states("a")
    assert [("a", 0, 1)] == world.held_on()
    world.check_settled()


def test_what_fits_is_held_with_hold_us_and_nothing_starts(world: World) -> None:
    said = world.place("p1", hold_us=30 * SECOND)

    assert ("held", 1) == (said.outcome, said.generation)
    assert ["accepted", "held"] == world.states("a")
    assert [("a", 0, 1)] == world.held_on()
    assert [] == world.running()


def test_the_reply_comes_after_the_ledger_has_it(world: World) -> None:
    """P1: the ledger is updated before the reply."""
    reply = world.ask("p1", request())

    assert [] == world.replies[reply]
    assert not world.has_key("a")
    world.step_task()
    assert world.has_key("a")
    assert ["placed"] == [said.outcome for said in world.replies[reply]]


def test_what_does_not_fit_now_is_queued_with_its_position_and_reasons(world: World) -> None:
    world.place("p1", gpu={"share": 1})
    first = world.place("p1", request_id="b", queue=True)
    second = world.place("p1", request_id="c", queue=True)

    assert [("queued", 1), ("queued", 2)] == [(first.outcome, first.position), (second.outcome, second.position)]
    assert ["not_now.share"] == [reason.code for reason in first.reasons]
    assert first.would_fit_if
    assert ["accepted", "queued"] == world.states("b")


def test_what_does_not_fit_now_without_queue_is_rejected_for_good(world: World) -> None:
    world.place("p1", gpu={"share": 1})
    said = world.place("p1", request_id="b")

    assert "rejected" == said.outcome
    assert said.reasons
    assert ["accepted", "rejected"] == world.states("b")
    assert world.record("b").final


def test_what_can_never_fit_is_rejected_though_it_would_queue(world: World) -> None:
    said = world.place("p1", gpu={"count": 5}, queue=True)

    assert "rejected" == said.outcome
    assert said.reasons[0].code.startswith("never.")


@pytest.mark.parametrize("body", [{"hold_us": SECOND}, {"dry_run": True}, {"strategy": "no-such"}])
def test_a_refused_hold_a_dry_run_and_an_error_leave_no_key_and_no_event(world: World, body: dict[str, object]) -> None:
    world.place("p1", gpu={"share": 1})
    before = world.ledger.seq
    world.place("p1", request_id="b", **body)

    assert before == world.ledger.seq
    assert [] == world.states("b")


def test_an_unknown_strategy_is_an_error_that_names_the_field(world: World) -> None:
    said = world.place("p1", strategy="no-such")

    assert said.error is not None
    assert ("error", "strategy", "no-such") == (said.outcome, said.error.field, said.error.found)
    assert "binpack" in said.error.allowed


def test_a_dry_run_answers_what_would_come_and_how_many_more_would_fit(world: World) -> None:
    said = world.place("p1", dry_run=True)

    assert ("placed", True, 2, None) == (said.outcome, said.dry_run, said.fits_more, said.fits_by_size)
    assert [] == world.running()


def test_a_dry_run_with_fixed_sizes_answers_how_many_more_of_each_would_fit(world: World) -> None:
    said = world.place("p1", dry_run=True, strategy="slot")

    assert {1, 2, 4, 8} == set(said.fits_by_size or {})


@pytest.mark.parametrize(("queue", "key"), [(True, True), (False, True)])
def test_a_request_whose_time_is_over_is_expired_and_not_placed(world: World, queue: bool, key: bool) -> None:
    said = world.place("p1", place_by_us=WALL + world.now - 1, queue=queue)

    assert "expired" == said.outcome
    assert ["accepted", "expired"] == world.states("a")
    assert key == world.record("a").final


# --- repeats ---


def test_a_repeat_answers_the_present_state_as_a_duplicate_from_any_placer(world: World) -> None:
    first = world.place("p1")
    world.placer("p2")
    again = world.place("p2")

    assert ("started", True) == (again.outcome, again.duplicate)
    assert [p.devices for p in first.placements] == [p.devices for p in again.placements]
    assert 1 == len(world.running())


def test_B15_a_repeat_within_one_batch_gets_its_own_answer(world: World) -> None:
    replies = [world.ask("p1", request()) for _ in range(3)]

    assert [False, True, True] == [world.answer(reply).duplicate for reply in replies]


def test_the_same_id_with_another_body_is_an_error_on_request_id(world: World) -> None:
    world.place("p1")
    said = world.place("p1", cpu_milli=1)

    assert said.error is not None
    assert ("error", "request_id") == (said.outcome, said.error.field)


def test_candidates_are_not_part_of_what_is_compared(world: World) -> None:
    world.place("p1")

    assert world.place("p1", candidates=["n1"]).duplicate


def test_B16_a_repeat_long_after_the_transport_forgot_it_is_still_a_duplicate(world: World) -> None:
    world.place("p1")
    world.release("p1", "a")
    world.pass_time(600)

    assert ("released", True) == (world.place("p1").outcome, world.place("p1").duplicate)


# --- queued ---


def test_a_queued_request_is_placed_by_the_leader_once_it_fits(world: World) -> None:
    world.place("p1", gpu={"share": 1})
    world.place("p1", request_id="b", queue=True)
    world.release("p1", "a")
    world.pass_time(1)

    assert ["accepted", "queued", "placed", "started"] == world.states("b")
    world.check_settled()


def test_a_queued_hold_becomes_a_hold(world: World) -> None:
    world.place("p1", gpu={"share": 1})
    world.place("p1", request_id="b", queue=True, hold_us=60 * SECOND)
    world.release("p1", "a")
    world.pass_time(1)

    assert ["accepted", "queued", "held"] == world.states("b")


def test_waiting_requests_go_by_priority_then_place_by_then_arrival(world: World) -> None:
    world.place("p1", gpu={"share": 1})
    late = WALL + world.now + 500 * SECOND
    for name, body in (
        ("last", {"priority": -1}),
        ("third", {}),
        ("second", {"place_by_us": late}),
        ("first", {"priority": 5}),
    ):
        world.pass_time(0.2)
        world.place("p1", request_id=name, queue=True, gpu={"share": 1}, **body)
    order = []
    for before in ("a", "first", "second", "third"):
        world.release("p1", before)
        world.pass_time(1)
        order += [name for name, record in world.records().items() if record.state == State.STARTED]

    assert ["first", "second", "third", "last"] == order


def test_a_queued_request_expires_when_its_time_is_over(world: World) -> None:
    world.place("p1", gpu={"share": 1})
    world.place("p1", request_id="b", queue=True, place_by_us=WALL + world.now + 3 * SECOND)
    world.pass_time(2)
    assert State.QUEUED == world.record("b").state
    world.pass_time(2)

    assert ["accepted", "queued", "expired"] == world.states("b")
    assert world.record("b").final


def test_P2_a_waiting_request_is_not_tried_again_and_again_without_a_change(world: World) -> None:
    world.place("p1", gpu={"share": 1})
    world.place("p1", request_id="b", queue=True)
    world.pass_time(1)
    core = world.placers["p1"]

    assert [] == core.leader.soon(world.now, WALL + world.now)
    core.leader.queue.node_changed("n1")
    assert 1 == len(core.leader.soon(world.now, WALL + world.now))


def test_P28_a_request_that_waits_long_says_so_once(world: World) -> None:
    world.place("p1", gpu={"share": 1})
    world.place("p1", request_id="b", queue=True)
    world.pass_time(120)
    events = [event for event in world.events if event.subject == SUBJECTS.place_event("b")]

    assert ["accepted", "queued"] == [event.body.state for event in events]
    assert "0.5" in events[1].body.reasons[0].message


# --- release ---


def test_release_of_what_is_queued_is_final_at_once(world: World) -> None:
    world.place("p1", gpu={"share": 1})
    world.place("p1", request_id="b", queue=True)

    assert "released" == world.release("p1", "b").outcome
    assert ["accepted", "queued", "released"] == world.states("b")


def test_release_of_a_hold_frees_its_reservation(world: World) -> None:
    world.place("p1", hold_us=60 * SECOND)

    assert "released" == world.release("p1", "a").outcome
    assert [] == world.held_on()


def test_release_of_what_waits_after_a_failed_start_is_final_at_once(world: World) -> None:
    world.generations_fail["a"] = 1
    world.place("p1")

    assert "released" == world.release("p1", "a").outcome
    world.pass_time(5)
    assert ["accepted", "placed", "waiting", "released"] == world.states("a")


def test_release_of_what_runs_keeps_the_reservation_until_it_is_gone(world: World) -> None:
    world.place("p1")
    reply = world.ask("p1", ReleaseRequest(request_id="a"))
    world.step_task()

    assert ["stopping"] == [said.outcome for said in world.replies[reply]]
    assert [("a", 0, 1)] == world.held_on()
    world.settle()
    assert ["accepted", "placed", "started", "stopping", "released"] == world.states("a")
    assert [] == world.held_on()
    assert [] == world.running()


def test_release_by_another_placer_is_carried_out_by_the_owner(world: World) -> None:
    world.place("p1")
    world.placer("p2")

    assert "stopping" == world.release("p2", "a").outcome
    assert "p1" == world.record("a").owner
    assert State.RELEASED == world.record("a").state


def test_a_stop_that_fails_is_tried_again_and_the_reservation_stays(world: World) -> None:
    world.place("p1")
    world.silent_nodes.add("n1")
    world.release("p1", "a")
    world.pass_time(5)
    assert [("a", 0, 1)] == world.held_on()
    world.silent_nodes.clear()
    world.pass_time(2)

    assert [] == world.held_on()
    assert State.RELEASED == world.record("a").state


def test_release_while_it_starts_stops_it_after_its_start(world: World) -> None:
    world.ask("p1", request())
    world.step_task()
    start = next(task for task in world.tasks if isinstance(task.effect, Start))
    world.tasks.remove(start)
    assert "stopping" == world.release("p1", "a").outcome
    assert State.STOPPING == world.record("a").state
    world.tasks.append(start)
    world.settle()

    assert [] == world.running()
    assert State.RELEASED == world.record("a").state


def test_release_of_an_unknown_id_answers_unknown_and_a_copy_under_way_finds_it_released(world: World) -> None:
    assert "unknown" == world.release("p1", "a").outcome
    assert ["released"] == world.states("a")

    assert ("released", True) == ((said := world.place("p1")).outcome, said.duplicate)
    assert [] == world.running()


@pytest.mark.parametrize("final", ["released", "rejected", "exited"])
def test_release_of_a_final_state_answers_that_state(world: World, final: str) -> None:
    if final == "rejected":
        world.place("p1", gpu={"count": 9})
    else:
        world.place("p1")
    if final == "exited":
        world.end(world.running()[0], 0)
        world.settle()
    if final == "released":
        world.release("p1", "a")

    assert final == world.release("p1", "a").outcome

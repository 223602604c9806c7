"""Each row of the table "Life of a request" (DESIGN §5), on one or two placers and a ledger in memory."""

from __future__ import annotations

import pytest
from placer_world import SECOND, SUBJECTS, WALL, World, request

from services.placer.core.containers import Start
from services.placer.core.intents import Rules
from shared.effects import Received, Tick
from shared.messages import ConfirmRequest, ReleaseRequest, Reservation, State


@pytest.fixture
def world() -> World:
    """One node with one device, one placer that leads."""
    world = World()
    world.add_node("n1")
    world.placer("p1")
    world.pass_time(2)
    assert world.leader() == "p1"
    return world


def held_on(world: World, node: str = "n1") -> list[tuple[str, int, int]]:
    return [(r.request_id, r.replica, r.generation) for r in world.reservations().get(node, ())]


# --- from nothing ---


def test_what_fits_is_placed_and_started(world: World) -> None:
    said = world.place("p1")

    assert ("placed", False, 1) == (said.outcome, said.duplicate, said.generation)
    assert [("n1", ("n1-gpu-0",), 0.5)] == [(p.node, p.devices, p.share) for p in said.placements]
    assert ["accepted", "placed", "started"] == world.states("a")
    assert [("a", 0, 1)] == held_on(world)
    world.check_settled()


def test_what_fits_is_held_with_hold_us_and_nothing_starts(world: World) -> None:
    said = world.place("p1", hold_us=30 * SECOND)

    assert ("held", 1) == (said.outcome, said.generation)
    assert ["accepted", "held"] == world.states("a")
    assert [("a", 0, 1)] == held_on(world)
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

    assert ("placed", True, 2) == (said.outcome, said.dry_run, said.fits_more)
    assert [] == world.running()


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
    core.leader.something_changed()
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
    assert [] == held_on(world)


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
    assert [("a", 0, 1)] == held_on(world)
    world.settle()
    assert ["accepted", "placed", "started", "stopping", "released"] == world.states("a")
    assert [] == held_on(world)
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
    assert [("a", 0, 1)] == held_on(world)
    world.silent_nodes.clear()
    world.pass_time(2)

    assert [] == held_on(world)
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
    assert [] == held_on(world)
    assert "expired" == world.confirm("p1", "a", 1).outcome
    again = world.place("p1", hold_us=2 * SECOND)
    assert ("held", 2) == (again.outcome, again.generation)
    assert "placed" == world.confirm("p1", "a", 2).outcome


def test_a_repeat_of_an_unconfirmed_hold_makes_a_new_one_and_the_old_one_ends(world: World) -> None:
    world.place("p1", gpu={"share": 1}, hold_us=30 * SECOND)
    again = world.place("p1", gpu={"share": 1}, hold_us=30 * SECOND)

    assert ("held", 2) == (again.outcome, again.generation)
    assert [("a", 0, 2)] == held_on(world)
    assert "error" == world.confirm("p1", "a", 1).outcome


def test_a_hold_moves_when_its_node_is_no_longer_a_candidate(world: World) -> None:
    world.add_node("n2")
    world.place("p1", hold_us=30 * SECOND, candidates=["n1"])
    again = world.place("p1", hold_us=30 * SECOND, candidates=["n2"])

    assert ["n2"] == [place.node for place in again.placements]
    assert [] == held_on(world, "n1")


def test_a_new_hold_that_is_refused_leaves_the_old_one_to_run_out(world: World) -> None:
    world.place("p1", hold_us=3 * SECOND)
    said = world.place("p1", hold_us=3 * SECOND, candidates=["n9"])

    assert "rejected" == said.outcome
    assert [("a", 0, 1)] == held_on(world)
    world.pass_time(4)
    assert [] == held_on(world)


# --- starts and ends ---


def test_a_failed_start_waits_with_its_node_set_aside_and_goes_elsewhere(world: World) -> None:
    """P2: exclude, back off, give the reason."""
    world.generations_fail["a"] = 1
    world.place("p1")
    waits = world.record("a")
    assert (State.WAITING, ("n1",), 1, 1_000_000) == (waits.state, waits.set_aside, waits.tries, waits.backoff_us)
    assert "start on n1 failed: no such image" == waits.steps[-1].detail
    assert [] == held_on(world)
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
    assert [] == held_on(world)


def test_a_container_that_ends_is_exited_with_its_code(world: World) -> None:
    world.place("p1")
    world.end(world.running()[0], 3)
    world.pass_time(3)

    assert ["accepted", "placed", "started", "exited"] == world.states("a")
    assert (3, True) == (world.record("a").exit_code, world.record("a").final)
    assert [] == held_on(world)
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
    assert [("a", 0, 1)] == held_on(world)


# --- gangs ---


def test_a_gang_is_placed_when_all_are_and_started_when_all_are(world: World) -> None:
    world.add_node("n2")
    said = world.place("p1", replicas=4)

    assert [0, 1, 2, 3] == [place.replica for place in said.placements]
    assert ["accepted", "placed", "started"] == world.states("a")
    world.check_settled()


def test_P13_a_gang_that_does_not_fit_whole_takes_nothing(world: World) -> None:
    assert "rejected" == world.place("p1", replicas=3).outcome
    assert [] == held_on(world)


def test_a_gang_is_exited_when_all_have(world: World) -> None:
    world.place("p1", replicas=2)
    first, second = world.running()
    world.end(first, 0)
    world.pass_time(3)
    assert State.STARTED == world.record("a").state
    assert 1 == len(held_on(world))
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
    assert [] == held_on(world)


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

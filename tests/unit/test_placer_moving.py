"""Moves as they are carried out: what is reserved when, what comes of each way in which one can end, and who begins."""

from __future__ import annotations

import re
from typing import Any

import pytest

from services.placer.core.containers import Start, StartFailed, Stop
from services.placer.core.intents import Rules
from services.placer.core.records import moving
from shared.effects import Tick
from shared.messages import (
    ClassStanding,
    DefragmentRequest,
    DeviceStanding,
    PlaceEvent,
    Regime,
    ReleaseRequest,
    ResizeRequest,
    State,
)
from tests.placer_world import SECOND, SUBJECTS, WALL, World, facts

WIDE = {"request_id": "wide", "gpu": {"count": 2}, "queue": True}


def fragmented(rules: Rules | None = None, placers: int = 1, **body: Any) -> World:
    """Two nodes of two devices, on each a container with one of them, and `wide`, which waits for both of a node."""
    world = World(rules=rules or Rules())
    for name in ("n1", "n2"):
        world.add_node(name, 2)
    for _ in range(placers):
        world.placer()
    world.pass_time(2)
    for request_id in ("c", "d"):
        world.place("p1", **({"request_id": request_id, "gpu": {"share": 1.0}, "strategy": "spread"} | body))
    world.pass_time(2)
    assert State.QUEUED == world.place("p1", **WIDE).outcome
    return world


def until(world: World, *effects: type) -> None:
    """Everything, up to such an effect that a backend has in hand."""
    for _ in range(1_000):
        if world.tasks and isinstance(world.tasks[0].effect, effects):
            return
        if world.tasks:
            world.step_task()
        elif not any(world.step_watch(name) for name in list(world.placers)):
            world.now += SECOND // 5
            for name in list(world.placers):
                world.tell(name, Tick("soon", WALL + world.now))
    raise AssertionError(f"none of {effects}")


def begun(**more: Any) -> tuple[World, str]:
    """A move up to its start, and the request that moves from n1 to n2."""
    world = fragmented(**more)
    world.ask("p1", DefragmentRequest(request_id="wide"))
    until(world, Start)
    (name,) = [record.request_id for record in world.records().values() if moving(record)]
    assert ([("n1", 1), ("n2", 2)], [("n1", 1)]) == (reserved(world, name), run(world, name))
    return world, name


def reserved(world: World, request_id: str) -> list[tuple[str, int]]:
    """Node and generation of everything that is reserved for it."""
    held = ((node, each) for node, those in world.reservations().items() for each in those)
    return sorted((node, each.generation) for node, each in held if each.request_id == request_id)


def run(world: World, request_id: str) -> list[tuple[str, int]]:
    """Node and generation of every container of it that runs."""
    labels = (world.boxes[name].labels for name in world.running(request_id))
    return sorted((each.node, each.reservation.generation) for each in labels)


def is_at(world: World, request_id: str) -> tuple[str, str | None, int]:
    (replica,) = world.record(request_id).replicas
    return replica.state, replica.node, replica.generation


def moves_told(world: World, request_id: str) -> list[str]:
    """What was told of moves: the word, where from and to but for the devices, and why not."""
    bodies = [event.body for event in world.events if event.subject == SUBJECTS.place_event(request_id)]
    told = {body.step: body for body in bodies if isinstance(body, PlaceEvent) and body.state.startswith("mov")}
    return [f"{each.state}: {re.sub(r' [(]n.-gpu-.[)]', '', each.detail or '')}" for each in told.values()]


FROM_TO = "replica 0 from n1 to n2"


def test_a_container_starts_at_its_new_place_before_it_stops_at_the_old_one() -> None:
    world, name = begun()
    assert (State.STARTED, "n1", 1) == is_at(world, name)
    until(world, Stop)
    assert (State.STARTED, "n2", 2) == is_at(world, name)
    assert [("n1", 1), ("n2", 2)] == reserved(world, name) == run(world, name)
    world.pass_time(2)
    assert [("n2", 2)] == reserved(world, name) == run(world, name)
    assert [f"moving: {FROM_TO}, so that wide fits", f"moved: {FROM_TO}"] == moves_told(world, name)
    assert (State.STARTED, "n1", 1) == is_at(world, "wide")
    world.check_settled()


def test_the_events_of_a_move_show_both_places() -> None:
    world, name = begun()
    world.pass_time(2)
    bodies = [event.body for event in world.events if event.subject == SUBJECTS.place_event(name)]
    told = [body for body in bodies if isinstance(body, PlaceEvent) and body.state in {"moving", "moved"}]
    began, moved = told
    assert [("n1", 1)] == [(each.node, each.generation) for each in began.placements]
    assert ([("n2", 2)], 2) == ([(each.node, each.generation) for each in moved.placements], moved.generation)
    assert began.moves == moved.moves
    assert [("n1", "n2")] == [(each.from_node, each.node) for each in moved.moves]


def test_the_answer_names_the_moves_and_the_request_starts_by_the_ordinary_queue() -> None:
    world = fragmented()
    reply = world.defragment("p1", "wide")
    (move,) = reply.moves
    assert (State.QUEUED, "wide", 1, "n1", "n2") == (
        reply.outcome,
        reply.request_id,
        reply.position,
        move.from_node,
        move.node,
    )
    world.pass_time(2)
    assert ["accepted", "queued", "placed", "started"] == world.states("wide")


def test_a_move_whose_start_fails_leaves_the_container_where_it_is() -> None:
    world = fragmented()
    world.generations_fail |= {"c": 9, "d": 9}
    world.defragment("p1", "wide")
    world.pass_time(3)
    told = {name: moves_told(world, name) for name in ("c", "d")}
    (name,) = [name for name, said in told.items() if said]
    assert [f"moving: {FROM_TO}, so that wide fits", f"move_failed: {FROM_TO}: no such image"] == told[name]
    assert (State.STARTED, "n1", 1) == is_at(world, name)
    assert [("n1", 1)] == reserved(world, name) == run(world, name)
    assert State.QUEUED == world.record("wide").state
    world.check_settled()


def test_a_move_that_failed_may_be_asked_for_again_and_is_a_new_generation() -> None:
    world = fragmented()
    world.generations_fail |= {"c": 2, "d": 2}
    world.defragment("p1", "wide")
    world.pass_time(3)
    world.defragment("p1", "wide")
    world.pass_time(3)
    assert ["started", "started", "started"] == [world.record(name).state for name in ("c", "d", "wide")]
    assert [1, 3] == sorted(world.record(name).replicas[0].generation for name in ("c", "d"))
    world.check_settled()


def test_what_ends_at_its_new_place_before_it_was_seen_to_run_has_not_moved() -> None:
    world, name = begun()
    task = world.tasks.popleft()
    started = world._start(task.effect)
    (new,) = [box for box in world.boxes.values() if box.labels.reservation.generation == 2]
    world.end(new.labels.container, 7, told=False)
    world.tell("p1", type(started)(new.found()))
    world.pass_time(5)
    assert f"move_failed: {FROM_TO}: it ended there with exit code 7" == moves_told(world, name)[1]
    assert (State.STARTED, "n1", 1) == is_at(world, name)
    world.check_settled()


def test_a_start_that_was_given_up_and_runs_after_all_is_stopped() -> None:
    world, name = begun()
    effect = world.tasks.popleft().effect
    world._start(effect)
    world.tell("p1", StartFailed(effect.labels.node, effect.labels.container, "not running in time"))
    world.pass_time(5)
    assert [("n1", 1)] == reserved(world, name) == run(world, name)
    assert [] == world.bus_events()


@pytest.mark.parametrize(
    "restart, states", [("never", ["stopping", "exited"]), ("on_failure", ["waiting", "placed", "started"])]
)
def test_what_ends_while_it_moves_ends_as_it_would_have_without_the_move(restart: str, states: list[str]) -> None:
    world, name = begun(restart=restart)
    (old,) = world.running(name)
    world.end(old, 3)
    world.pass_time(10)
    assert ["moving", "move_failed", *states] == world.states(name)[3:]
    assert f"move_failed: {FROM_TO}: it ended with exit code 3" == moves_told(world, name)[1]
    record = world.record(name)
    assert 3 == (record.exit_code if restart == "never" else record.replicas[0].generation)
    world.check_settled()


def test_what_ends_right_after_it_moved_is_final_once_the_old_place_is_free() -> None:
    world, name = begun()
    until(world, Stop)
    world.silent_nodes.add("n1")
    (new,) = [each for each in world.running(name) if world.boxes[each].labels.node == "n2"]
    world.end(new, 0)
    world.pass_time(5)
    assert (State.STOPPING, [("n1", 1)]) == (world.record(name).state, reserved(world, name))
    world.silent_nodes.clear()
    world.pass_time(5)
    assert (State.EXITED, 0) == (world.record(name).state, world.record(name).exit_code)
    assert ["stopping", "exited"] == world.states(name)[-2:]
    world.check_settled()


@pytest.mark.parametrize("effect", [Start, Stop])
@pytest.mark.parametrize("silent", ["n1", "n2"])
def test_a_release_stops_both(effect: type, silent: str) -> None:
    """Where one place does not answer, what it has stays reserved."""
    world, name = begun()
    until(world, effect)
    world.silent_nodes.add(silent)
    assert State.STOPPING == world.release("p1", name).outcome
    world.pass_time(5)
    assert State.STOPPING == world.record(name).state
    assert silent in dict(reserved(world, name))
    world.silent_nodes.clear()
    world.pass_time(5)
    assert (State.RELEASED, [], []) == (world.record(name).state, reserved(world, name), run(world, name))
    world.check_settled()


def test_a_place_is_not_given_back_while_a_start_there_is_under_way() -> None:
    """Lists show nothing of it until it is done."""
    world, name = begun()
    effect = world.tasks.popleft().effect
    world.release("p1", name)
    world.pass_time(5)
    assert (State.STOPPING, [("n2", 2)]) == (world.record(name).state, reserved(world, name))
    world.tell("p1", world._start(effect))
    world.pass_time(5)
    assert (State.RELEASED, []) == (world.record(name).state, run(world, name))
    world.check_settled()


@pytest.mark.parametrize("effect", [Start, Stop])
@pytest.mark.parametrize("tasks", ["lost", "done"])
def test_a_move_whose_owner_dies_is_finished_by_the_next_leader(effect: type, tasks: str) -> None:
    world, name = begun(placers=2)
    until(world, effect)
    world.kill(world.tasks[0].placer, tasks=tasks)
    world.pass_time(12)
    assert (State.STARTED, "n2", 2) == is_at(world, name)
    assert State.STARTED == world.record("wide").state
    assert [f"moving: {FROM_TO}, so that wide fits", f"moved: {FROM_TO}"] == moves_told(world, name)
    world.check_settled()


def test_what_moves_is_not_resized() -> None:
    world, name = begun()
    reply = world.ask("p1", ResizeRequest(request_id=name, cpu_milli=500))
    until(world, Stop)
    (said,) = world.replies[reply]
    assert said.error is not None
    assert f"{name}, which is being moved" == said.error.found
    world.pass_time(2)
    assert "resizing" == world.resize("p1", name, cpu_milli=500).outcome
    world.check_settled()


def test_on_one_node_it_moves_from_one_device_to_the_other() -> None:
    world = World()
    world.add_node("n1", 2)
    world.placer("p1")
    world.pass_time(2)
    for request_id in ("left", "right"):
        world.place("p1", request_id=request_id, strategy="spread")
    world.pass_time(2)
    world.place("p1", request_id="whole", gpu={"share": 1.0}, queue=True)
    (move,) = world.defragment("p1", "whole").moves
    assert (move.from_node, set()) == (move.node, set(move.from_devices) & set(move.devices))
    world.pass_time(3)
    assert ["started"] * 3 == [world.record(name).state for name in ("left", "right", "whole")]
    world.check_settled()


def test_the_moves_of_a_plan_are_made_one_after_another() -> None:
    world = World()
    for name in ("n1", "n2", "n3"):
        world.add_node(name, 4)
    world.placer("p1")
    world.pass_time(2)
    for number in range(6):
        world.place("p1", request_id=f"r{number}", gpu={"share": 1.0}, strategy="spread", replicas=1)
    world.pass_time(2)
    world.place("p1", request_id="wide", gpu={"count": 4}, queue=True)
    assert 2 == len(world.defragment("p1", "wide").moves)
    most = 0
    while world.record("wide").state == State.QUEUED:
        until(world, Start, Stop)
        most = max(most, sum(moving(record) for record in world.records().values()))
        world.step_task()
    assert 1 == most
    world.pass_time(2)
    assert State.STARTED == world.record("wide").state
    assert 2 == sum("moved" in world.states(f"r{number}") for number in range(6))
    world.check_settled()


def test_of_a_gang_one_replica_moves_at_a_time_and_the_others_are_known() -> None:
    world = World()
    for name in ("n1", "n2"):
        world.add_node(name, 3)
    world.placer("p1")
    world.pass_time(2)
    world.place("p1", request_id="gang", gpu={"share": 1.0}, replicas=4, strategy="spread")
    world.pass_time(2)
    world.place("p1", request_id="wide", gpu={"count": 2}, queue=True)
    assert 1 == len(world.defragment("p1", "wide").moves)
    world.pass_time(3)
    assert ["moving", "moved"] == world.states("gang")[3:]
    assert [1, 3] == sorted(len(reserved_on(world, node, "gang")) for node in ("n1", "n2"))
    assert State.STARTED == world.record("wide").state
    world.check_settled()


def reserved_on(world: World, node: str, request_id: str) -> list[int]:
    return [each.replica for each in world.reservations()[node] if each.request_id == request_id]


# --- what is asked for ---


def test_what_waits_for_no_room_is_not_helped() -> None:
    world = fragmented()
    assert "unknown" == world.defragment("p1", "nobody").outcome
    error = world.defragment("p1", "c").error
    assert error is not None
    assert ("request_id", "c, which is started", "one that waits for room") == (
        error.field,
        error.found,
        error.allowed,
    )


def test_where_no_plan_is_found_the_answer_says_why_it_waits_and_nothing_moves() -> None:
    world = fragmented(candidates=["n1", "n2"])
    world.place("p1", request_id="e", gpu={"share": 1.0})
    world.place("p1", request_id="f", gpu={"share": 1.0})
    world.pass_time(2)
    reply = world.defragment("p1", "wide")
    assert (State.QUEUED, ()) == (reply.outcome, reply.moves)
    assert ["not_now.share"] == [reason.code for reason in reply.reasons]
    world.pass_time(2)
    assert [] == moves_told(world, "c") + moves_told(world, "d")


def test_pods_that_were_bound_stay() -> None:
    world = fragmented(pods=[{"namespace": "default", "name": "pod", "uid": "1"}])
    assert State.STARTED == world.record("c").state
    assert () == world.defragment("p1", "wide").moves


def test_a_placer_that_does_not_lead_is_asked_as_well() -> None:
    world = fragmented(placers=2)
    other = next(name for name in world.placers if name != world.leader())
    assert 1 == len(world.defragment(other, "wide").moves)
    world.pass_time(3)
    assert State.STARTED == world.record("wide").state


def test_one_that_was_released_meanwhile_moves_nobody() -> None:
    world = fragmented()
    world.ask("p1", DefragmentRequest(request_id="wide"))
    world.ask("p1", ReleaseRequest(request_id="wide"))
    world.pass_time(3)
    assert [] == moves_told(world, "c") + moves_told(world, "d")


# --- by policy ---


def test_nobody_moves_unasked_where_the_policy_is_off() -> None:
    world = fragmented()
    world.pass_time(20)
    assert State.QUEUED == world.record("wide").state


def test_by_policy_others_move_for_the_first_that_waits() -> None:
    world = fragmented(Rules(defragment="waiting"))
    world.pass_time(10)
    assert State.STARTED == world.record("wide").state
    world.check_settled()


@pytest.mark.parametrize("rest_us, state", [(600 * SECOND, State.QUEUED), (0, State.STARTED)])
def test_by_policy_who_has_moved_rests(rest_us: int, state: State) -> None:
    """After the first wide one left and the other container came to the first node, it is all as it was before."""
    world = fragmented(Rules(defragment="waiting", move_rest_us=rest_us))
    world.pass_time(10)
    moved = next(name for name in ("c", "d") if moves_told(world, name))
    stays = next(name for name in ("c", "d") if name != moved)
    world.release("p1", stays)
    world.pass_time(2)
    world.place("p1", request_id="e", gpu={"share": 1.0}, candidates=["n2"])
    world.pass_time(2)
    world.release("p1", "wide")
    world.pass_time(2)
    world.release("p1", "e")
    world.place("p1", request_id="f", gpu={"share": 1.0}, candidates=["n1"])
    world.pass_time(2)
    world.place("p1", request_id="again", gpu={"count": 2}, queue=True)
    world.pass_time(10)
    assert state == world.record("again").state


# --- away from a device at risk ---


def on_risk(rules: Rules | None = None, *nodes: tuple[str, int], **body: Any) -> World:
    """`c`, which is to be moved, on the first of the nodes."""
    world = World(rules=rules or Rules())
    for name, devices in nodes or (("n1", 1), ("n2", 1)):
        world.add_node(name, devices)
    world.placer("p1")
    world.pass_time(2)
    world.place("p1", **({"request_id": "c", "candidates": ["n1"], "on_risk": "move"} | body))
    world.pass_time(2)
    return world


def warn(world: World, *uuids: str) -> None:
    """The node list says that somebody misses a guarantee on these devices, and of no others."""
    for found in list(world.facts.values()):
        standings = {uuid: AT_RISK if uuid in uuids else TIGHT for uuid in (device.uuid for device in found.devices)}
        devices = [each.model_copy(update={"classes": {"interactive": standings[each.uuid]}}) for each in found.devices]
        world.set_facts(found.model_copy(update={"devices": tuple(devices)}))
    world.pass_time(10)


AT_RISK = ClassStanding(standing=DeviceStanding.AT_RISK, slack_us=None)
TIGHT = ClassStanding(standing=DeviceStanding.TIGHT, slack_us=1)


def test_who_asked_for_it_leaves_a_device_at_risk() -> None:
    world = on_risk(candidates=None)
    (replica,) = world.record("c").replicas
    warn(world, *replica.devices)
    assert (State.STARTED, "n2" if replica.node == "n1" else "n1", 2) == is_at(world, "c")
    assert moves_told(world, "c")[0].endswith(", since a guarantee is missed where it is")
    world.check_settled()


def test_on_one_node_it_goes_to_a_device_that_is_not_at_risk() -> None:
    world = on_risk(None, ("n1", 3))
    (replica,) = world.record("c").replicas
    others = [f"n1-gpu-{number}" for number in range(3) if f"n1-gpu-{number}" not in replica.devices]
    warn(world, *replica.devices, others[0])
    (replica,) = world.record("c").replicas
    assert (others[1],) == replica.devices


@pytest.mark.parametrize("body", [{"on_risk": "notify", "candidates": None}, {}], ids=["notify", "nowhere_to_go"])
def test_all_others_stay(body: dict[str, Any]) -> None:
    world = on_risk(**body)
    (replica,) = world.record("c").replicas
    warn(world, *replica.devices)
    assert 1 == is_at(world, "c")[2]


@pytest.mark.parametrize("kind, generation", [("hard", 1), ("firm", 2)])
def test_hard_ones_stay_where_they_were_admitted(kind: str, generation: int) -> None:
    world = World()
    for name in ("n1", "n2"):
        plain = facts(name)
        devices = tuple(each.model_copy(update={"regime": Regime.EXCLUSIVE}) for each in plain.devices)
        world.set_facts(plain.model_copy(update={"devices": devices}))
    world.placer("p1")
    world.pass_time(2)
    timing = {"deadline_us": 50_000, "period_us": 100_000, "runtime_us": 1_000, "kind": kind}
    world.place("p1", request_id="c", gpu={"share": 1.0}, on_risk="move", realtime=timing)
    world.pass_time(2)
    (replica,) = world.record("c").replicas
    warn(world, *replica.devices)
    assert generation == is_at(world, "c")[2]


def test_who_has_left_one_rests_before_it_leaves_the_next() -> None:
    world = on_risk(Rules(move_rest_us=60 * SECOND), candidates=None)
    for generation in (2, 2, 3):
        (replica,) = world.record("c").replicas
        warn(world, *replica.devices)
        assert generation == is_at(world, "c")[2]
        if generation == 2:
            world.pass_time(20)

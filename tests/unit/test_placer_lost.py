"""Nodes and devices that are lost: who is placed again and when, what stays counted, what comes of it meanwhile."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from services.placer.core.containers import Start
from services.placer.core.intents import Rules
from shared.messages import NodeState, PlaceEvent, Regime, State
from tests.placer_world import SECOND, SUBJECTS, World, facts
from tests.unit.test_placer_moving import begun

GRACE_S = 6
AGAIN = {"restart": "on_failure"}


def cluster(nodes: int = 3, placers: int = 1, regime: Regime = Regime.TIME_SLICED, **rules: Any) -> World:
    """Nodes of two devices each."""
    world = World(rules=Rules(lost_grace_us=GRACE_S * SECOND, **rules))
    for number in range(1, nodes + 1):
        plain = facts(f"n{number}", 2)
        devices = tuple(device.model_copy(update={"regime": regime}) for device in plain.devices)
        world.set_facts(plain.model_copy(update={"devices": devices}))
    for _ in range(placers):
        world.placer()
    world.pass_time(2)
    return world


def say(world: World, node: str, state: NodeState) -> None:
    """What the node list says of a node."""
    world.set_facts(world.facts[node].model_copy(update={"state": state}))


def lose(world: World, *nodes: str, silent: bool = True) -> None:
    """`silent`: the backend does not answer either."""
    for node in nodes:
        say(world, node, NodeState.LOST)
        world.silent_nodes |= {node} if silent else set()


def back(world: World, node: str) -> None:
    say(world, node, NodeState.READY)
    world.silent_nodes.discard(node)


def run_on(world: World, node: str, request_id: str = "a", **body: Any) -> None:
    """Started there, and free to go elsewhere afterwards."""
    others = [each for each in world.facts if each != node]
    for each in others:
        say(world, each, NodeState.UNREACHABLE)
    world.place(next(iter(world.placers)), request_id=request_id, **body)
    world.settle()
    for each in others:
        say(world, each, NodeState.READY)
    assert (State.STARTED, node) == (world.record(request_id).state, world.record(request_id).replicas[0].node)


def places(world: World, request_id: str = "a") -> list[tuple[str, int]]:
    """Node and generation of everything that is reserved for it."""
    held = ((node, each) for node, those in world.reservations().items() for each in those)
    return sorted((node, each.generation) for node, each in held if each.request_id == request_id)


def runs(world: World, request_id: str = "a") -> list[tuple[str, int]]:
    labels = (world.boxes[name].labels for name in world.running(request_id))
    return sorted((each.node, each.reservation.generation) for each in labels)


def details(world: World, request_id: str = "a") -> list[str]:
    return [step.detail for step in world.record(request_id).steps if step.detail]


def test_who_was_on_a_lost_node_is_placed_again_after_the_grace_and_the_lost_place_stays_counted() -> None:
    world = cluster()
    run_on(world, "n1", **AGAIN)
    lose(world, "n1")
    world.pass_time(GRACE_S - 1)
    assert [("n1", 1)] == places(world)
    world.pass_time(6)
    assert (State.STARTED, 2) == (world.record("a").state, world.record("a").replicas[0].generation)
    (new,) = [node for node, generation in places(world) if generation == 2]
    assert [("n1", 1), (new, 2)] == places(world) == runs(world)
    assert ["accepted", "placed", "started", "waiting", "placed", "started"] == world.states("a")
    assert ["n1 is lost: replica 0 goes elsewhere, and is stopped there once that answers"] == details(world)


def test_a_lost_node_that_is_back_ends_what_was_placed_again_and_gives_its_reservation_back() -> None:
    world = cluster()
    run_on(world, "n1", **AGAIN)
    lose(world, "n1")
    world.pass_time(GRACE_S + 5)
    back(world, "n1")
    world.pass_time(5)
    assert 1 == len(runs(world))
    assert [(node, 2) for node, _ in runs(world)] == places(world) == runs(world)
    assert "n1" != runs(world)[0][0]
    world.check_settled()


def test_a_container_that_ended_on_the_lost_node_changes_nothing_of_the_new_one() -> None:
    world = cluster()
    run_on(world, "n1", **AGAIN)
    (old,) = world.running("a")
    lose(world, "n1")
    world.pass_time(GRACE_S + 5)
    world.end(old, 3, told=False)
    back(world, "n1")
    world.pass_time(5)
    assert (State.STARTED, 2) == (world.record("a").state, world.record("a").replicas[0].generation)
    assert [] == [name for name in world.boxes if name == old]
    world.check_settled()


def test_a_node_that_was_back_in_between_gets_the_whole_grace_again() -> None:
    world = cluster()
    run_on(world, "n1", **AGAIN)
    lose(world, "n1")
    world.pass_time(GRACE_S - 2)
    back(world, "n1")
    world.pass_time(2)
    lose(world, "n1")
    world.pass_time(GRACE_S - 2)
    assert [("n1", 1)] == places(world)
    world.pass_time(6)
    assert 2 == len(places(world))


@pytest.mark.parametrize(
    "body, again",
    [({}, True), ({"on_lost": "stay"}, False), ({"on_lost": "stay", "restart": "on_failure"}, False)],
    ids=["usual", "stays", "stays_and_restarts"],
)
def test_who_says_that_it_may_never_run_twice_is_not_placed_again(body: dict[str, Any], again: bool) -> None:
    """It stays where it is: nobody knows that it has ended."""
    world = cluster()
    run_on(world, "n1", **body)
    lose(world, "n1")
    world.pass_time(GRACE_S + 6)
    assert (2 if again else 1) == len(places(world))
    assert State.STARTED == world.record("a").state


def test_hard_containers_of_a_lost_node_are_placed_again_too() -> None:
    world = cluster(regime=Regime.EXCLUSIVE)
    realtime = {"deadline_us": 50_000, "runtime_us": 1_000, "kind": "hard"}
    run_on(world, "n1", realtime=realtime, gpu={"share": 1.0}, **AGAIN)
    lose(world, "n1")
    world.pass_time(GRACE_S + 6)
    assert [1, 2] == sorted(generation for _, generation in places(world))


def test_what_fits_nowhere_waits_with_the_reason_and_starts_once_there_is_room() -> None:
    world = cluster(nodes=2)
    run_on(world, "n2", "b", gpu={"count": 2})
    run_on(world, "n1", gpu={"count": 2}, **AGAIN)
    say(world, "n2", NodeState.READY)
    world.add_node("n3", 1)
    lose(world, "n1")
    world.pass_time(GRACE_S + 5)
    record = world.record("a")
    assert (State.WAITING, [("n1", 1)]) == (record.state, places(world))
    assert {"excluded.lost", "not_now.share"} <= {reason.code for reason in record.reasons}
    told = [e.body for e in world.events if e.subject == SUBJECTS.place_event("a") and isinstance(e.body, PlaceEvent)]
    assert record.reasons == told[-1].reasons
    world.release("p1", "b")
    world.pass_time(3)
    assert [("n1", 1), ("n2", 2)] == places(world) == runs(world)


def test_one_that_waits_goes_back_to_its_node_when_that_is_back_as_a_new_generation() -> None:
    world = cluster(nodes=2)
    run_on(world, "n1", gpu={"count": 2}, **AGAIN)
    run_on(world, "n2", "b", gpu={"count": 2})
    lose(world, "n1")
    world.pass_time(GRACE_S + 5)
    assert State.WAITING == world.record("a").state
    back(world, "n1")
    world.pass_time(5)
    assert [("n1", 2)] == places(world) == runs(world)
    world.check_settled()


def test_one_replica_of_a_gang_is_placed_again_alone() -> None:
    world = cluster()
    world.place("p1", replicas=2, spread_over="node", **AGAIN)
    world.settle()
    lost, kept = world.record("a").replicas
    assert lost.node is not None
    lose(world, lost.node)
    world.pass_time(GRACE_S + 6)
    assert [2, 1] == [each.generation for each in world.record("a").replicas]
    assert kept == world.record("a").replicas[1]
    assert State.STARTED == world.record("a").state
    back(world, lost.node)
    world.pass_time(5)
    assert 2 == len(places(world)) == len(runs(world))
    world.check_settled()


def test_where_the_backend_answers_it_starts_elsewhere_before_it_stops() -> None:
    """Only its monitor is silent: it runs on until the other one runs."""
    world = cluster()
    run_on(world, "n1", **AGAIN)
    lose(world, "n1", silent=False)
    world.pass_time(GRACE_S + 6)
    assert ["accepted", "placed", "started", "moving", "moved"] == world.states("a")
    assert [2] == [generation for _, generation in places(world)]
    assert places(world) == runs(world)
    assert details(world)[0].endswith("since n1 is lost")
    world.check_settled()


def test_where_the_backend_answers_and_nothing_else_fits_it_runs_on() -> None:
    world = cluster(nodes=2)
    run_on(world, "n1", gpu={"count": 2}, **AGAIN)
    run_on(world, "n2", "b", gpu={"count": 2})
    lose(world, "n1", silent=False)
    world.pass_time(GRACE_S + 6)
    assert (State.STARTED, [("n1", 1)]) == (world.record("a").state, runs(world))


def test_a_second_loss_waits_for_the_end_of_the_first_one() -> None:
    """No replica has more than two places."""
    world = cluster(nodes=5)
    run_on(world, "n1", **AGAIN)
    lose(world, "n1")
    world.pass_time(GRACE_S + 6)
    (second,) = [node for node, generation in places(world) if generation == 2]
    lose(world, second)
    world.pass_time(GRACE_S + 6)
    assert [("n1", 1), (second, 2)] == places(world)
    back(world, "n1")
    world.pass_time(6)
    assert {2: second} == {generation: node for node, generation in places(world) if generation < 3}
    assert 2 == len(places(world))
    back(world, second)
    world.pass_time(5)
    world.check_settled()


# --- the rest of its life, while the lost place is counted ---


def twice(world: World | None = None, **body: Any) -> World:
    """Generation 2 runs elsewhere, generation 1 is on n1, which is lost."""
    world = world or cluster()
    run_on(world, "n1", **(AGAIN | body))
    lose(world, "n1")
    world.pass_time(GRACE_S + 6)
    assert [1, 2] == sorted(generation for _, generation in places(world))
    return world


def newest(world: World) -> str:
    return max(world.running("a"), key=lambda name: world.boxes[name].labels.reservation.generation)


def test_a_request_that_has_ended_is_stopping_until_the_lost_place_is_free() -> None:
    world = twice()
    world.end(newest(world), 0)
    world.pass_time(3)
    assert (State.STOPPING, [("n1", 1)]) == (world.record("a").state, places(world))
    back(world, "n1")
    world.pass_time(5)
    assert (State.EXITED, 0, []) == (world.record("a").state, world.record("a").exit_code, places(world))
    world.check_settled()


def test_one_that_fails_is_started_again_while_the_lost_place_is_counted() -> None:
    world = twice()
    world.end(newest(world), 1)
    world.pass_time(5)
    assert [1, 3] == sorted(generation for _, generation in places(world))
    assert State.STARTED == world.record("a").state
    back(world, "n1")
    world.pass_time(5)
    assert [3] == [generation for _, generation in places(world)]
    world.check_settled()


def test_a_release_frees_what_answers_at_once_and_the_lost_place_once_it_does() -> None:
    world = twice()
    assert State.STOPPING == world.release("p1", "a").outcome
    world.pass_time(3)
    assert (State.STOPPING, [("n1", 1)]) == (world.record("a").state, places(world))
    back(world, "n1")
    world.pass_time(5)
    assert (State.RELEASED, []) == (world.record("a").state, places(world))
    world.check_settled()


def test_a_release_of_one_that_waits_for_another_place_is_stopping_too() -> None:
    world = cluster(nodes=2)
    run_on(world, "n1", gpu={"count": 2}, **AGAIN)
    run_on(world, "n2", "b", gpu={"count": 2})
    lose(world, "n1")
    world.pass_time(GRACE_S + 5)
    assert State.STOPPING == world.release("p1", "a").outcome
    back(world, "n1")
    world.pass_time(5)
    assert (State.RELEASED, [], []) == (world.record("a").state, places(world), runs(world))
    world.check_settled()


def test_starts_that_fail_for_good_fail_the_request_once_the_lost_place_is_free() -> None:
    world = cluster(most_tries=2)
    run_on(world, "n1", **AGAIN)
    world.generations_fail["a"] = 9
    lose(world, "n1")
    world.pass_time(GRACE_S + 10)
    assert (State.STOPPING, [("n1", 1)]) == (world.record("a").state, places(world))
    back(world, "n1")
    world.pass_time(5)
    assert (State.FAILED, []) == (world.record("a").state, places(world))
    world.check_settled()


def test_what_a_resized_container_has_on_the_lost_node_stays_counted_as_it_is() -> None:
    """The new one has the size that was asked for last; the old one may have either while its engine is silent."""
    world = cluster()
    run_on(world, "n1", cpu_milli=4_000, **AGAIN)
    world.silent_nodes.add("n1")
    world.resize("p1", "a", cpu_milli=1_000)
    lose(world, "n1")
    world.pass_time(GRACE_S + 6)
    sizes = {each.generation: each.cpu_milli for held in world.reservations().values() for each in held}
    assert {1: 4_000, 2: 1_000} == sizes
    back(world, "n1")
    world.pass_time(5)
    world.check_settled()


def test_a_move_to_a_node_that_is_lost_meanwhile_is_called_off() -> None:
    world, name = begun(rules=Rules(lost_grace_us=GRACE_S * SECOND))
    effect = world.tasks.popleft().effect
    assert isinstance(effect, Start)
    world.kill("p1")
    world.placer("p9")
    lose(world, "n2")
    world.add_node("n3", 1)
    for _ in range(GRACE_S + 10):
        world.tasks = deque(task for task in world.tasks if not isinstance(task.effect, Start))
        world.pass_time(1)
    (replica,) = world.record(name).replicas
    assert ("n1", 1, None) == (replica.node, replica.generation, replica.to)


# --- lost devices ---


def break_device(world: World, node: str, request_id: str = "a") -> None:
    (bad,) = world.record(request_id).replicas[0].devices
    devices = tuple(
        each.model_copy(update={"healthy": False, "reason": "xid 79"}) if each.uuid == bad else each
        for each in world.facts[node].devices
    )
    update = {"devices": devices, "state": NodeState.DEGRADED}
    world.set_facts(world.facts[node].model_copy(update=update))


@pytest.mark.parametrize("kind", ["soft", "firm", "hard"])
@pytest.mark.parametrize("on_risk, generation", [("notify", 1), ("move", 2)])
def test_from_a_lost_device_who_asked_for_it_moves_also_a_hard_one(kind: str, on_risk: str, generation: int) -> None:
    world = cluster(regime=Regime.EXCLUSIVE)
    realtime = {"deadline_us": 50_000, "runtime_us": 1_000, "kind": kind}
    run_on(world, "n1", realtime=realtime, on_risk=on_risk, gpu={"share": 1.0}, **AGAIN)
    (bad,) = world.record("a").replicas[0].devices
    break_device(world, "n1")
    world.pass_time(GRACE_S - 1)
    assert [("n1", 1)] == places(world)
    world.pass_time(5)
    (replica,) = world.record("a").replicas
    assert generation == replica.generation
    assert (on_risk == "move") == ((bad,) != replica.devices)
    if on_risk == "move":
        assert details(world)[0].endswith(f"since {bad} is not healthy: xid 79")
    world.check_settled()


def test_a_device_that_its_node_does_not_list_any_more_is_lost_too() -> None:
    world = cluster()
    run_on(world, "n1", on_risk="move")
    (bad,) = world.record("a").replicas[0].devices
    kept = tuple(each for each in world.facts["n1"].devices if each.uuid != bad)
    world.set_facts(world.facts["n1"].model_copy(update={"devices": kept}))
    world.pass_time(GRACE_S + 4)
    assert details(world)[0].endswith(f"since {bad} is not there any more")
    assert [2] == [generation for _, generation in places(world)]
    world.check_settled()


def test_a_device_that_is_well_again_in_time_moves_nobody() -> None:
    world = cluster()
    run_on(world, "n1", on_risk="move")
    well = world.facts["n1"]
    for _ in range(2):
        break_device(world, "n1")
        world.pass_time(GRACE_S - 2)
        world.set_facts(well)
        world.pass_time(2)
    assert [("n1", 1)] == places(world) == runs(world)


# --- how many, and when not ---


def test_so_many_are_placed_again_in_a_second_the_most_important_first() -> None:
    world = cluster(lost_at_once=1)
    for number, name in enumerate("abcd"):
        run_on(world, "n1", name, priority=number, **AGAIN)
    lose(world, "n1")
    seen: list[str] = []
    for _ in range(GRACE_S + 10):
        world.pass_time(1)
        now = [name for name in "abcd" if len(world.record(name).steps) > 3 and name not in seen]
        assert len(now) <= 1
        seen += now
    assert ["d", "c", "b", "a"] == seen


@pytest.mark.parametrize("lost, again", [(2, True), (3, False)])
def test_where_too_many_nodes_are_lost_at_once_nobody_is_placed_again_and_an_alarm_says_so(
    lost: int, again: bool
) -> None:
    world = cluster(nodes=4)
    run_on(world, "n1", **AGAIN)
    lose(world, *[f"n{number}" for number in range(1, lost + 1)])
    world.pass_time(GRACE_S + 6)
    assert (2 if again else 1) == len(places(world))
    assert ([] if again else ["nodes_lost"]) == world.bus_events()
    if not again:
        for number in range(2, lost + 1):
            back(world, f"n{number}")
        world.pass_time(GRACE_S - 2)
        assert [("n1", 1)] == places(world), "its grace begins anew"
        world.pass_time(6)
        assert 2 == len(places(world))


def test_zero_at_once_places_nobody_again() -> None:
    world = cluster(lost_at_once=0)
    run_on(world, "n1", **AGAIN)
    lose(world, "n1")
    world.pass_time(GRACE_S + 6)
    assert [("n1", 1)] == places(world)


def test_a_node_of_which_nothing_is_known_is_not_lost() -> None:
    world = cluster()
    run_on(world, "n1", **AGAIN)
    world.silent_nodes.add("n1")
    del world.facts["n1"]
    world.kill("p1")
    world.placer("p2")
    world.pass_time(GRACE_S + 6)
    assert [("n1", 1)] == places(world)


def test_a_new_leader_counts_the_grace_anew_and_finishes_what_the_old_one_began() -> None:
    world = cluster(placers=2)
    run_on(world, "n1", **AGAIN)
    lose(world, "n1")
    world.pass_time(GRACE_S - 2)
    leader = world.leader()
    assert leader is not None
    world.kill(leader)
    world.pass_time(GRACE_S - 2)
    assert [("n1", 1)] == places(world)
    world.pass_time(12)
    assert [1, 2] == sorted(generation for _, generation in places(world))

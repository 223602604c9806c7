"""Pods that exist already: held for their scheduler, bound once confirmed, and answered once that is known."""

from __future__ import annotations

from typing import Any

import pytest

from services.placer.core.containers import StartFailed, StartUnknown
from shared.messages import ConfirmRequest, PlaceReply
from tests.placer_world import SECOND, Box, World, led

POD = {"namespace": "default", "name": "web-1", "uid": "u-1"}
HOLD: dict[str, Any] = {"request_id": "u-1", "command": None, "pods": [POD], "hold_us": 30 * SECOND}


@pytest.fixture
def world() -> World:
    return led(n1=1, n2=1)


def begin(world: World, **more: Any) -> str:
    """Hold, confirm and commit: the start is the next thing to do; where the answer will be."""
    held = world.place("p1", **HOLD, **more)
    assert held.generation is not None
    reply = world.ask("p1", ConfirmRequest(request_id="u-1", generation=held.generation))
    world.step_task()
    return reply


def end_start(world: World, end: type[StartFailed] | type[StartUnknown], why: str, *, bound: bool = False) -> None:
    """The start under way ends so; the pod is bound nevertheless where that is said."""
    (task,) = [each for each in world.tasks if type(each.effect).__name__ == "Start"]
    world.tasks.remove(task)
    labels = task.effect.labels
    if bound:
        world.boxes[labels.container] = Box(labels)
    world.tell("p1", end(labels.node, labels.container, why))


def test_a_confirmation_is_answered_once_the_pod_is_bound(world: World) -> None:
    reply = begin(world, candidates=["n2"])

    assert "placed" == world.record("u-1").state
    assert [] == world.replies[reply]
    said = world.answer(reply)
    assert ("started", ["n2"]) == (said.outcome, [each.node for each in said.placements])
    assert "started" == world.confirm("p1", "u-1", 1).outcome


def test_a_binding_that_is_refused_is_a_hold_that_is_over_and_another_one_may_follow(world: World) -> None:
    reply = begin(world, candidates=["n1"])
    end_start(world, StartFailed, "already assigned to node n7")
    said = world.answer(reply)

    assert ("expired", ["not_now.binding"]) == (said.outcome, [each.code for each in said.reasons])
    assert "already assigned to node n7" in said.reasons[0].message
    assert not world.record("u-1").final
    assert [] == [held for node in world.reservations().values() for held in node]
    world.pass_time(5)
    assert "expired" == world.record("u-1").state, "its scheduler asks, nobody else tries elsewhere"
    again = world.place("p1", **HOLD, candidates=["n2"])
    assert ("held", 2, "n2") == (again.outcome, again.generation, again.placements[0].node)
    assert "started" == world.confirm("p1", "u-1", 2).outcome
    world.check_settled()


@pytest.mark.parametrize("bound", [True, False])
def test_a_binding_of_which_nobody_knows_the_end_keeps_its_place_until_what_runs_is_listed(
    world: World, bound: bool
) -> None:
    reply = begin(world, candidates=["n1"])
    world.silent_nodes.add("n1")
    end_start(world, StartUnknown, "the API server does not answer", bound=bound)
    world.pass_time(20)

    assert ("placed", [("u-1", 0, 1)], []) == (world.record("u-1").state, world.held_on("n1"), world.replies[reply])
    world.silent_nodes.clear()
    world.pass_time(5)
    assert ["started"] == [said.outcome for said in world.replies[reply]]
    assert (1, 1) == (world.record("u-1").replicas[0].generation, world.placers["p1"].counters["starts.unknown"])
    world.check_settled()


def test_whoever_asks_again_while_it_is_being_bound_waits_as_well_and_each_is_answered_once(world: World) -> None:
    first = begin(world)
    second = world.ask("p1", ConfirmRequest(request_id="u-1", generation=1))

    assert ([], []) == (world.replies[first], world.replies[second])
    assert ["started", "started"] == [world.answer(reply).outcome for reply in (first, second)]


def test_a_release_while_it_is_being_bound_answers_who_waits(world: World) -> None:
    reply = begin(world)
    said: PlaceReply = world.release("p1", "u-1")

    assert said.outcome in {"stopping", "released"}
    assert 1 == len(world.replies[reply])
    world.pass_time(5)
    assert "released" == world.record("u-1").state
    assert [] == world.running()


def test_whoever_waits_is_told_where_another_placer_carries_it_out(world: World) -> None:
    """The one that confirmed dies after its commit: who takes over binds it, and whoever asked that one hears of it."""
    begin(world)
    world.placer("p2")
    world.kill("p1")
    reply = world.ask("p2", ConfirmRequest(request_id="u-1", generation=1))
    world.pass_time(1)

    assert [] == world.replies[reply]
    world.pass_time(8)
    assert ["started"] == [said.outcome for said in world.replies[reply]]

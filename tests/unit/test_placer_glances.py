"""Looks at what a backend knows without asking: what is there is taken from them, what is missing is asked for."""

from __future__ import annotations

import pytest

from services.placer.core.containers import Found, Listed, ListNode
from shared.effects import Tick
from shared.messages import NodeState, State
from tests.placer_world import WALL, World, led
from tests.unit.test_placer_life_reconcile import rebuilt, stray


@pytest.fixture
def world() -> World:
    """Its backends have looked once, at nothing."""
    world = led(n1=2)
    world.look()
    return world


def asked(world: World) -> list[ListNode]:
    """What the leader asks of backends in one round; the last of it is not answered yet."""
    effects: list[ListNode] = []
    world.tell("p1", Tick("list", WALL + world.now))
    while world.tasks:
        task = world.tasks[0]
        if isinstance(task.effect, ListNode):
            effects.append(task.effect)
        world.step_task()
    world.settle()
    return effects


def test_where_all_is_as_it_should_be_a_glance_is_enough(world: World) -> None:
    world.place("p1")
    world.now += 1
    world.look()

    assert [ListNode("n1", glance=True)] == asked(world)
    assert State.STARTED == world.record("a").state


def test_what_a_glance_does_not_show_is_asked_for_and_found(world: World) -> None:
    world.place("p1")
    world.now += 1

    assert [ListNode("n1", glance=True), ListNode("n1")] == asked(world)
    assert State.STARTED == world.record("a").state


def test_what_is_not_there_when_it_is_asked_for_has_ended(world: World) -> None:
    world.place("p1")
    world.boxes.clear()
    world.now += 1
    world.tell("p1", Listed("n1", (), complete=False))
    world.settle()
    assert State.STARTED == world.record("a").state

    assert [ListNode("n1", glance=True), ListNode("n1")] == asked(world)
    assert State.EXITED == world.record("a").state


def test_what_a_glance_shows_to_have_ended_has_ended(world: World) -> None:
    world.place("p1")
    (name,) = world.boxes
    world.end(name, 3, told=False)
    world.now += 1
    world.look()

    assert [ListNode("n1", glance=True)] == asked(world)
    assert (State.EXITED, 3) == (world.record("a").state, world.record("a").exit_code)


def test_a_hold_is_missed_by_nobody(world: World) -> None:
    world.place("p1", hold_us=60_000_000)
    world.now += 1

    assert [ListNode("n1", glance=True)] == asked(world)


def test_what_is_reserved_for_an_unexplained_container_is_given_back_once_it_is_asked_for(world: World) -> None:
    name = stray(world)
    world.look()
    assert [ListNode("n1", glance=True)] == asked(world)
    assert [name] == rebuilt(world)
    world.shown = ()

    assert ListNode("n1") in asked(world)
    assert [name] == rebuilt(world), "a glance has missed it"
    world.boxes.clear()
    asked(world)
    assert [] == rebuilt(world)


def test_of_a_lost_node_it_matters_whether_its_backend_answers(world: World) -> None:
    world.add_node("n2", 1)
    world.add_node("n3", 1)
    world.pass_time(3)
    world.set_facts(world.facts["n1"].model_copy(update={"state": NodeState.LOST}))
    world.tell("p1", Tick("beat", WALL + world.now))

    assert {ListNode("n1"), ListNode("n2", glance=True), ListNode("n3", glance=True)} == set(asked(world))


def test_a_glance_is_no_answer_of_a_lost_nodes_backend(world: World) -> None:
    for node in ("n2", "n3"):
        world.add_node(node, 1)
    world.pass_time(3)
    world.set_facts(world.facts["n1"].model_copy(update={"state": NodeState.LOST}))
    world.tell("p1", Tick("beat", WALL + world.now))
    losses = world.placers["p1"].leader.losses
    world.tell("p1", Listed("n1", (), complete=False))
    assert ["n1"] == losses.unheard
    world.tell("p1", Listed("n1", ()))
    assert [] == losses.unheard


def test_a_glance_that_was_true_once_stops_nothing_that_should_run(world: World) -> None:
    """It shows a container of a generation before the present one, which is gone by now."""
    world.generations_fail["a"] = 1
    world.place("p1")
    world.pass_time(3)
    name = stray(world, request_id="a", generation=1)
    before: tuple[Found, ...] = tuple(box.found() for box in world.boxes.values())
    world.pass_time(3)
    assert name not in world.boxes
    world.shown = before

    asked(world)
    assert State.STARTED == world.record("a").state
    assert 1 == len(world.running("a"))

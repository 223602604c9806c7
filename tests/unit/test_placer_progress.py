"""What a core does with starts that take long, and what it tells backends of the devices that a container is given."""

from __future__ import annotations

import pytest

from services.placer.core.containers import Progress, Start
from shared.effects import Publish
from shared.messages import PlaceEvent, Regime
from tests.placer_world import SECOND, WALL, World, facts, led, request


@pytest.fixture
def world() -> World:
    return led(n1=1)


def starting(world: World) -> Start:
    """Ask for a container, and go on until its start is in hand."""
    world.ask("p1", request())
    while not world.tasks or not isinstance(world.tasks[0].effect, Start):
        if world.tasks:
            world.step_task()
        else:
            assert world.step_watch("p1")
    start = world.tasks[0].effect
    assert isinstance(start, Start)
    return start


def pulls(world: World) -> list[Publish]:
    return [e for e in world.events if isinstance(e.body, PlaceEvent) and e.body.state == "pulling"]


def test_how_far_a_pull_is_becomes_an_event_of_the_request_and_no_step_of_its_record(world: World) -> None:
    start = starting(world)
    before = world.record("a")
    for text in ("image a: 1 of 9 MiB, 0 of 2 layers", "image a: 9 of 9 MiB, 2 of 2 layers, pulled"):
        world.tell("p1", Progress(start.labels, text))
    told = pulls(world)
    bodies = [event.body for event in told if isinstance(event.body, PlaceEvent)]
    assert [(0, 1, "image a: 1 of 9 MiB, 0 of 2 layers")] == [(e.step, e.generation, e.detail) for e in bodies[:1]]
    assert {"rt.events.place.a"} == {event.subject for event in told}
    assert 2 == len({event.event_id for event in told})
    assert WALL + world.now - SECOND <= bodies[0].at_us <= WALL + world.now
    assert before == world.record("a")
    world.settle()
    assert ["accepted", "placed", "pulling", "pulling", "started"] == world.states("a")


def test_the_id_of_such_an_event_is_that_of_no_step_and_of_no_other_placer(world: World) -> None:
    world.tell("p1", Progress(starting(world).labels, "image a: unknown size, unknown layers"))
    (event,) = pulls(world)
    assert event.event_id.endswith("/a/pulling/p1/1")


def test_progress_of_a_start_that_is_no_longer_in_hand_is_not_told(world: World) -> None:
    start = starting(world)
    world.settle()
    world.tell("p1", Progress(start.labels, "image a: 9 of 9 MiB, 2 of 2 layers"))
    assert [] == pulls(world)


def test_a_start_says_how_its_devices_are_shared_as_the_node_declares_it_now(world: World) -> None:
    assert (Regime.TIME_SLICED,) == starting(world).regimes
    declared = facts("n1", 1)
    mps = declared.model_copy(
        update={"devices": tuple(d.model_copy(update={"regime": Regime.MPS}) for d in declared.devices)}
    )
    other = World()
    other.set_facts(mps)
    other.placer("p1")
    other.pass_time(2)
    assert (Regime.MPS,) == starting(other).regimes

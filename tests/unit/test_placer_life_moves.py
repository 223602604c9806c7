"""Who could be moved, as the ledger has it, and what a placer says about it."""

from __future__ import annotations

from typing import Any

import pytest

from shared.messages import PlaceReply, Regime, State
from tests.placer_world import World, facts


def two_nodes(regime: Regime = Regime.TIME_SLICED) -> World:
    """Of two devices each."""
    world = World()
    for name in ("n1", "n2"):
        plain = facts(name, 2)
        devices = tuple(device.model_copy(update={"regime": regime}) for device in plain.devices)
        world.set_facts(plain.model_copy(update={"devices": devices}))
    world.placer("p1")
    world.pass_time(2)
    return world


def put_one_on_each(world: World, **body: Any) -> None:
    for request_id in ("c", "d"):
        world.place("p1", request_id=request_id, **({"gpu": {"share": 1.0}, "strategy": "spread"} | body))
    world.settle()
    assert {"n1": 1, "n2": 1} == {node: len(held) for node, held in world.reservations().items()}


def wide(world: World, **body: Any) -> PlaceReply:
    """What becomes of a request for both devices of a node."""
    return world.place("p1", request_id="wide", gpu={"count": 2}, **body)


@pytest.fixture
def world() -> World:
    return two_nodes()


def test_a_dry_run_of_what_does_not_fit_names_the_moves_and_changes_nothing(world: World) -> None:
    put_one_on_each(world)
    before = world.reservations()
    reply = wide(world, dry_run=True)
    (move,) = reply.moves
    assert (before["n1"][0].request_id, 0) == (move.request_id, move.replica)
    assert ("n1", before["n1"][0].devices, "n2") == (move.from_node, move.from_devices, move.node)
    assert not set(before["n2"][0].devices) & set(move.devices)
    assert f"{move.request_id}/0 moves from n1 to n2" in reply.would_fit_if
    assert before == world.reservations()


def test_what_may_only_be_where_it_is_is_not_moved(world: World) -> None:
    for request_id, node in (("c", "n1"), ("d", "n2")):
        world.place("p1", request_id=request_id, gpu={"share": 1.0}, candidates=[node])
    assert () == wide(world, dry_run=True).moves


def test_a_dry_run_of_what_fits_names_no_moves(world: World) -> None:
    put_one_on_each(world)
    reply = world.place("p1", request_id="small", dry_run=True)
    assert () == reply.moves
    assert reply.score is not None
    assert reply.runner_up is not None


def test_what_is_only_held_could_not_be_moved(world: World) -> None:
    put_one_on_each(world, hold_us=60_000_000)
    assert State.HELD == world.record("c").state
    assert () == wide(world, dry_run=True).moves


def test_a_waiting_request_is_told_the_move_that_would_help(world: World) -> None:
    put_one_on_each(world)
    reply = wide(world, queue=True)
    assert State.QUEUED == reply.outcome
    assert f"{world.reservations()['n1'][0].request_id}/0 moves from n1 to n2" in reply.would_fit_if


@pytest.mark.parametrize("kind, moves", [("hard", 0), ("firm", 1)])
def test_hard_containers_are_in_no_plan(kind: str, moves: int) -> None:
    world = two_nodes(Regime.EXCLUSIVE)
    put_one_on_each(world, realtime={"deadline_us": 50_000, "runtime_us": 1_000, "kind": kind})
    assert moves == len(wide(world, dry_run=True).moves)


def test_the_other_replicas_of_a_gang_are_known_when_one_of_it_moves(world: World) -> None:
    """`c` is two replicas spread over nodes: where one goes depends on where the other is."""
    world.place("p1", request_id="c", gpu={"share": 1.0}, replicas=2, spread_over="node")
    world.settle()
    (move,) = wide(world, dry_run=True).moves
    assert "c" == move.request_id
    assert {"n1", "n2"} == {move.from_node, move.node}

"""Nodes of which an operator says that they are gone: what is given back, what ends, and what comes of who returns."""

from __future__ import annotations

from shared.messages import GoneRequest, NodeState, PlaceReply, State
from tests.placer_world import SECOND, World
from tests.unit.test_placer_lost import AGAIN, back, cluster, details, lose, places, run_on, runs, say, twice
from tests.unit.test_placer_moving import begun


def gone(world: World, node: str) -> PlaceReply:
    return world.answer(world.ask("p1", GoneRequest(node=node)))


def test_a_node_that_is_gone_gives_back_all_that_is_reserved_there() -> None:
    world = cluster()
    run_on(world, "n1", "job")
    run_on(world, "n1", "service", **AGAIN)
    run_on(world, "n1", "leaves")
    lose(world, "n1")
    world.release("p1", "leaves")
    reply = gone(world, "n1")
    assert ("gone", 3) == (reply.outcome, reply.freed)
    assert () == world.reservations()["n1"]
    job = world.record("job")
    assert (State.EXITED, None, "NodeLost") == (job.state, job.exit_code, job.end_reason)
    assert ["replica 0 ended on n1 with its node, which is gone, an operator says"] == details(world, "job")
    assert State.RELEASED == world.record("leaves").state
    world.pass_time(3)
    assert (State.STARTED, 2) == (world.record("service").state, world.record("service").replicas[0].generation)


def test_a_node_that_is_gone_no_longer_counts_what_was_placed_again() -> None:
    world = twice()
    assert 1 == gone(world, "n1").freed
    assert [2] == [generation for _, generation in places(world)]
    assert State.STARTED == world.record("a").state
    assert 0 == gone(world, "n1").freed


def test_a_node_that_was_said_to_be_gone_and_is_back_runs_nothing_of_before() -> None:
    world = cluster()
    run_on(world, "n1", "job")
    run_on(world, "n1", "service", **AGAIN)
    lose(world, "n1")
    gone(world, "n1")
    world.pass_time(3)
    back(world, "n1")
    world.pass_time(5)
    assert ([], [2]) == (runs(world, "job"), [generation for _, generation in runs(world, "service")])
    world.check_settled()


def test_a_node_that_lives_is_not_gone() -> None:
    world = cluster()
    run_on(world, "n1")
    reply = gone(world, "n1")
    assert reply.error is not None
    assert ("node", "n1, which is ready") == (reply.error.field, reply.error.found)
    assert [("n1", 1)] == places(world)


def test_a_hold_on_a_node_that_is_gone_runs_out_by_itself() -> None:
    world = cluster()
    world.place("p1", hold_us=5 * SECOND)
    node = world.record("a").replicas[0].node
    assert node is not None
    lose(world, node)
    assert 0 == gone(world, node).freed
    world.pass_time(7)
    assert (State.EXPIRED, []) == (world.record("a").state, places(world))


def test_a_move_from_or_to_a_node_that_is_gone_ends_with_it() -> None:
    for node, state, replica_at in (("n1", State.STOPPING, None), ("n2", State.STARTED, "n1")):
        world, name = begun()
        say(world, node, NodeState.LOST)
        reply = world.ask("p1", GoneRequest(node=node))
        while not world.replies[reply]:
            if not any(world.step_watch(each) for each in list(world.placers)):
                world.step_task(1 if len(world.tasks) > 1 else 0)
        (replica,) = world.record(name).replicas
        assert (state, replica_at) == (world.record(name).state, replica.node)

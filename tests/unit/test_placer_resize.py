"""Another size for a request, as far as the core goes: what is reserved when, who is refused, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from services.placer.core.capabilities import OTHERS, Capabilities
from services.placer.core.containers import Resize
from services.placer.core.intents import Rules
from shared.errors import FieldError
from shared.messages import NodeState, PlaceEvent, ResizeRequest, Size, State
from tests.placer_world import SECOND, World, request


@pytest.fixture
def world() -> World:
    """One node with 4,000 milli and 4,096 MiB, one placer that leads."""
    world = World()
    world.add_node("n1", 2, cpu_milli=4_000, memory_mib=4_096)
    world.placer("p1")
    world.pass_time(2)
    assert world.leader() == "p1"
    return world


def place(world: World, **body: Any) -> None:
    world.place("p1", **({"gpu": None, "cpu_milli": 1_000, "memory_mib": 1_024} | body))


def size(cpu_milli: int, memory_mib: int) -> Size:
    return Size(cpu_milli=cpu_milli, memory_mib=memory_mib)


def reserved(world: World, node: str = "n1") -> list[tuple[int, int]]:
    return [(held.cpu_milli, held.memory_mib) for held in world.reservations().get(node, ())]


def limits(world: World, request_id: str = "a") -> list[Size | None]:
    return [world.boxes[name].limits for name in world.running(request_id)]


def until_resize(world: World) -> None:
    """Everything, up to a resize that an engine has in hand."""
    while not isinstance(world.tasks[0].effect, Resize):
        world.step_task()


@pytest.mark.parametrize(
    "wanted, meanwhile, afterwards",
    [
        ({"cpu_milli": 2_000, "memory_mib": 2_048}, (2_000, 2_048), (2_000, 2_048)),
        ({"cpu_milli": 500, "memory_mib": 512}, (1_000, 1_024), (500, 512)),
        ({"cpu_milli": 2_000, "memory_mib": 512}, (2_000, 1_024), (2_000, 512)),
        ({"cpu_milli": 500}, (1_000, 1_024), (500, 1_024)),
        ({"memory_mib": 4_096}, (1_000, 4_096), (1_000, 4_096)),
    ],
    ids=["grows", "shrinks", "both ways at once", "cpu alone", "memory alone"],
)
def test_the_larger_of_both_is_reserved_until_the_engine_has_done_it(
    world: World, wanted: dict[str, int], meanwhile: tuple[int, int], afterwards: tuple[int, int]
) -> None:
    place(world)
    reply = world.ask("p1", ResizeRequest(request_id="a", **wanted))
    until_resize(world)
    said = world.replies[reply][0]

    assert ("resizing", *afterwards) == (said.outcome, said.cpu_milli, said.memory_mib)
    assert [meanwhile] == reserved(world)
    world.settle()
    assert [afterwards] == reserved(world)
    assert [size(*afterwards)] == limits(world)
    assert ["accepted", "placed", "started", "resizing", "resized"] == world.states("a")
    assert State.STARTED == world.record("a").state
    assert 1 == world.resizes


def test_the_steps_say_from_what_to_what(world: World) -> None:
    place(world)
    world.resize("p1", "a", cpu_milli=1_500)
    world.settle()
    details = [step.detail for step in world.record("a").steps[-2:]]

    assert "from cpu 1000 milli, memory 1024 MiB to cpu 1500 milli, memory 1024 MiB" == details[0]
    assert "cpu 1500 milli, memory 1024 MiB" == details[1]


def test_asked_again_it_is_done_already_and_nothing_is_written(world: World) -> None:
    place(world)
    world.resize("p1", "a", cpu_milli=1_500)
    world.settle()
    before = world.record("a")

    assert "resized" == world.resize("p1", "a", cpu_milli=1_500).outcome
    assert before == world.record("a")
    assert 1 == world.resizes


def test_what_does_not_fit_on_its_node_is_refused_in_numbers_and_changes_nothing(world: World) -> None:
    place(world)
    place(world, request_id="b", cpu_milli=2_500, memory_mib=0)
    before = world.record("a")
    said = world.resize("p1", "a", cpu_milli=2_000)

    assert "rejected" == said.outcome
    assert [("not_now.cpu", "needs 2000 milli CPU on one node, largest free is 1500 (n1)")] == [
        (reason.code, reason.message) for reason in said.reasons
    ]
    assert before == world.record("a")
    assert "resizing" == world.resize("p1", "a", cpu_milli=1_500).outcome


def test_more_than_the_node_has_is_never(world: World) -> None:
    place(world)

    assert ["never.node_memory"] == [r.code for r in world.resize("p1", "a", memory_mib=4_097).reasons]


def test_all_replicas_of_a_node_must_fit_together(world: World) -> None:
    place(world, replicas=2)
    world.add_node("n2")

    assert "rejected" == world.resize("p1", "a", cpu_milli=2_001).outcome
    assert "resizing" == world.resize("p1", "a", cpu_milli=2_000).outcome
    world.settle()
    assert [size(2_000, 1_024)] * 2 == limits(world)
    assert ["resizing", "resized"] == world.states("a")[-2:]


def test_a_request_may_shrink_on_a_node_that_promises_too_much(world: World) -> None:
    place(world, cpu_milli=4_000)
    world.checking = False
    world.add_node("n1", 2, cpu_milli=2_000, memory_mib=4_096)

    assert "resizing" == world.resize("p1", "a", cpu_milli=3_000).outcome
    assert "rejected" == world.resize("p1", "a", cpu_milli=3_500).outcome


def test_a_backend_that_cannot_is_named(world: World) -> None:
    place(world)
    core = world.placers["p1"]
    object.__setattr__(core.chooser, "capabilities", {OTHERS: Capabilities()})
    said = world.resize("p1", "a", cpu_milli=500)

    assert ("rejected", "never.backend") == (said.outcome, said.reasons[0].code)
    assert "resize cannot be honoured by the backend of n1" == said.reasons[0].message


def test_an_engine_that_refuses_leaves_the_old_size_to_all_that_comes(world: World) -> None:
    place(world, restart="on_failure")
    world.most_memory_mib = 2_000
    world.resize("p1", "a", cpu_milli=2_000, memory_mib=2_048)
    world.settle()
    detail = world.record("a").steps[-1].detail

    assert "replica 0 on n1 stays at cpu 1000 milli, memory 1024 MiB: too much" == detail
    assert "resize_failed" == world.states("a")[-1]
    assert [(1_000, 1_024)] == reserved(world)
    world.end(world.running("a")[0], 1)
    world.pass_time(3)
    assert [(1_000, 1_024)] == reserved(world)
    assert "started" == world.record("a").state


def test_where_one_replica_is_refused_the_others_keep_what_they_got(world: World) -> None:
    world.add_node("n2")
    place(world, replicas=2, spread_over="node")
    world.ask("p1", ResizeRequest(request_id="a", memory_mib=2_048))
    until_resize(world)
    world.step_task()
    world.most_memory_mib = 0
    world.settle()
    held = sorted(reserved(world, "n1") + reserved(world, "n2"))

    assert [(1_000, 1_024), (1_000, 2_048)] == held
    assert ["resizing", "resize_failed"] == world.states("a")[-2:]
    world.most_memory_mib = None
    assert "resizing" == world.resize("p1", "a", memory_mib=2_048).outcome
    world.settle()
    assert [(1_000, 2_048)] * 2 == reserved(world, "n1") + reserved(world, "n2")
    assert "resized" == world.states("a")[-1]


def test_while_an_engine_is_silent_both_sizes_stay_reserved_and_it_is_asked_again(world: World) -> None:
    place(world)
    world.silent_nodes = {"n1"}
    world.resize("p1", "a", cpu_milli=500, memory_mib=2_048)
    world.pass_time(3)

    assert [(1_000, 2_048)] == reserved(world)
    assert world.resizes > 1
    world.silent_nodes = set()
    world.pass_time(2)
    assert [(500, 2_048)] == reserved(world)
    assert "resized" == world.states("a")[-1]


def test_a_second_size_meanwhile_keeps_the_largest_of_the_three_reserved(world: World) -> None:
    place(world)
    world.ask("p1", ResizeRequest(request_id="a", cpu_milli=3_000))
    until_resize(world)
    world.ask("p1", ResizeRequest(request_id="a", cpu_milli=2_000))
    first = world.tasks.popleft()
    while world.tasks:
        world.step_task()

    assert [(3_000, 1_024)] == reserved(world)
    world.tasks.append(first)
    world.settle()
    assert [(2_000, 1_024)] == reserved(world)
    assert [size(2_000, 1_024)] == limits(world)


def test_one_whose_start_is_under_way_is_resized_once_it_runs(world: World) -> None:
    reply = world.ask("p1", request(gpu=None, cpu_milli=1_000))
    world.step_task()
    start = world.tasks.pop()
    assert "resizing" == world.resize("p1", "a", cpu_milli=2_000).outcome
    assert 0 == world.resizes
    world.tasks.append(start)
    world.settle()

    assert "placed" == world.answer(reply).outcome
    assert [size(2_000, 0)] == limits(world)
    assert ["accepted", "placed", "resizing", "started", "resized"] == world.states("a")


def test_a_container_that_is_started_anew_gets_the_new_size(world: World) -> None:
    place(world, restart="on_failure")
    world.resize("p1", "a", cpu_milli=2_000)
    world.settle()
    world.end(world.running("a")[0], 1)
    world.pass_time(3)
    (again,) = world.running("a")
    held = world.boxes[again].labels.reservation

    assert (2, 2_000, 1_024) == (held.generation, held.cpu_milli, held.memory_mib)
    assert [(2_000, 1_024)] == reserved(world)


def test_one_that_waits_starts_with_its_new_size_and_no_engine_is_asked(world: World) -> None:
    place(world, cpu_milli=4_000)
    place(world, request_id="b", cpu_milli=4_000, queue=True)
    said = world.resize("p1", "b", cpu_milli=3_000)
    world.release("p1", "a")
    world.pass_time(1)

    assert ("resized", 3_000) == (said.outcome, said.cpu_milli)
    assert [(3_000, 1_024)] == reserved(world)
    assert 0 == world.resizes


def test_a_hold_has_its_new_size_at_once_and_keeps_it_when_it_is_held_again(world: World) -> None:
    place(world, hold_us=5 * SECOND)
    assert "resized" == world.resize("p1", "a", cpu_milli=3_000).outcome
    assert [(3_000, 1_024)] == reserved(world)
    world.pass_time(6)
    assert [] == reserved(world)
    place(world, hold_us=5 * SECOND)

    assert [(3_000, 1_024)] == reserved(world)
    world.confirm("p1", "a", 2)
    assert 3_000 == world.boxes[world.running("a")[0]].labels.reservation.cpu_milli


def test_one_that_grew_while_it_waited_waits_for_room_for_all_of_it(world: World) -> None:
    place(world, cpu_milli=4_000)
    place(world, request_id="b", queue=True)
    world.resize("p1", "b", cpu_milli=3_000)
    world.release("p1", "a")
    place(world, request_id="c", cpu_milli=2_000)
    world.pass_time(2)

    assert State.QUEUED == world.record("b").state
    world.release("p1", "c")
    world.pass_time(2)
    assert [(3_000, 1_024)] == reserved(world)


def test_a_hold_that_grew_is_held_again_only_with_room_for_all_of_it(world: World) -> None:
    place(world, hold_us=5 * SECOND)
    world.resize("p1", "a", cpu_milli=3_000)
    world.pass_time(6)
    place(world, request_id="c", cpu_milli=2_000)
    said = world.place("p1", gpu=None, cpu_milli=1_000, memory_mib=1_024, hold_us=5 * SECOND)

    assert ("rejected", "not_now.cpu") == (said.outcome, said.reasons[0].code)


def test_the_request_as_it_was_first_sent_is_still_a_duplicate(world: World) -> None:
    place(world)
    world.resize("p1", "a", cpu_milli=2_000)
    world.settle()
    again = world.place("p1", gpu=None, cpu_milli=1_000, memory_mib=1_024)
    other = world.place("p1", gpu=None, cpu_milli=2_000, memory_mib=1_024)

    assert ("started", True) == (again.outcome, again.duplicate)
    assert "error" == other.outcome
    assert [(2_000, 1_024)] == reserved(world)


def test_an_unknown_id_is_unknown_and_leaves_no_key(world: World) -> None:
    assert "unknown" == world.resize("p1", "x", cpu_milli=1).outcome
    assert not world.has_key("x")


def test_what_has_ended_or_is_ending_cannot_be_resized(world: World) -> None:
    place(world)
    world.silent_nodes = {"n1"}
    world.release("p1", "a")
    stops = world.resize("p1", "a", cpu_milli=1)
    world.silent_nodes = set()
    world.pass_time(2)
    ended = world.resize("p1", "a", cpu_milli=1)

    faults = [said.error.found for said in (stops, ended) if said.error]
    assert ["a, which is stopping", "a, which is released"] == faults


def test_another_generation_than_was_meant_is_an_error(world: World) -> None:
    place(world)
    said = world.resize("p1", "a", cpu_milli=1, generation=2)

    assert said.error is not None
    assert ("generation", "2", "1, the present one") == (said.error.field, said.error.found, said.error.allowed)
    assert "resizing" == world.resize("p1", "a", cpu_milli=1, generation=1).outcome


def test_a_release_while_it_is_resized_waits_for_the_engine_and_frees_all(world: World) -> None:
    place(world)
    world.ask("p1", ResizeRequest(request_id="a", cpu_milli=2_000))
    until_resize(world)
    resize = world.tasks.popleft()
    world.release("p1", "a")
    assert [(2_000, 1_024)] == reserved(world)
    world.tasks.append(resize)
    world.settle()

    assert State.RELEASED == world.record("a").state
    assert [] == reserved(world)
    world.check_settled()


def test_an_end_while_it_is_resized_leaves_nothing_under_way(world: World) -> None:
    place(world)
    world.ask("p1", ResizeRequest(request_id="a", cpu_milli=2_000))
    until_resize(world)
    world.end(world.running("a")[0], 0)
    world.settle()

    assert (State.EXITED, None) == ((record := world.record("a")).state, record.replicas[0].resizing)
    assert [] == reserved(world)


@pytest.mark.parametrize("tasks", ["lost", "done"])
def test_who_takes_over_gives_it_its_size(world: World, tasks: str) -> None:
    place(world)
    world.placer("p2")
    world.ask("p1", ResizeRequest(request_id="a", cpu_milli=2_000))
    until_resize(world)
    world.kill("p1", tasks=tasks)
    world.pass_time(8)

    assert "p2" == world.record("a").owner
    assert [size(2_000, 1_024)] == limits(world)
    assert ["resizing", "resized"] == world.states("a")[-2:]
    world.check_settled()


def test_two_placers_at_once_never_promise_the_same_room_twice(world: World) -> None:
    place(world)
    world.placer("p2")
    world.settle()
    grow = world.ask("p1", ResizeRequest(request_id="a", cpu_milli=3_000))
    beside = world.ask("p2", request(request_id="b", gpu=None, cpu_milli=2_000))
    outcomes = [world.answer(reply).outcome for reply in (grow, beside)]

    assert ["resizing", "rejected"] == outcomes
    assert 1 == world.placers["p2"].counters["commits.conflict"]


def test_two_resizes_at_once_by_two_placers_leave_what_the_ledger_says() -> None:
    world = World(rules=Rules())
    world.add_node("n1", 2, cpu_milli=4_000, memory_mib=4_096)
    world.placer("p1")
    world.placer("p2")
    world.pass_time(2)
    place(world)
    for name, cpu_milli in (("p1", 3_000), ("p2", 2_000)):
        world.ask(name, ResizeRequest(request_id="a", cpu_milli=cpu_milli))
    world.settle()

    assert [(2_000, 1_024)] == reserved(world)
    assert [size(2_000, 1_024)] == limits(world)


def test_growth_on_a_node_that_is_not_heard_is_refused_and_shrinking_is_not(world: World) -> None:
    place(world)
    world.set_facts(world.facts["n1"].model_copy(update={"state": NodeState.UNREACHABLE}))

    assert ["excluded.unreachable"] == [r.code for r in world.resize("p1", "a", cpu_milli=1_001).reasons]
    assert "resizing" == world.resize("p1", "a", cpu_milli=999).outcome


@pytest.mark.parametrize(
    "body, field",
    [
        (b'{"request_id": "a"}', "cpu_milli"),
        (b'{"request_id": "a", "cpu_milli": 0}', "cpu_milli"),
        (b'{"request_id": "a", "memory_mib": 0}', "memory_mib"),
        (b'{"cpu_milli": 1}', "request_id"),
    ],
)
def test_a_request_for_no_size_or_no_limit_is_refused(body: bytes, field: str) -> None:
    with pytest.raises(FieldError) as raised:
        ResizeRequest.from_json(body)
    assert field == raised.value.field


def test_events_carry_the_placements_and_the_state_stays(world: World) -> None:
    place(world)
    world.resize("p1", "a", cpu_milli=2_000)
    world.settle()
    last = [event.body for event in world.events if isinstance(event.body, PlaceEvent)][-1]

    assert ("resized", "n1", "started") == (last.state, last.placements[0].node, last.placements[0].state)

"""The queue: who comes first, for whom room is kept and who leaves it alone, and what wakes whom."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from services.placer.core.intents import Rules
from services.placer.core.records import gained, new_record, order, stepped, waited_us
from shared.messages import NodeState, RequestRecord, ShadowPlace, State
from tests.placer_world import SECOND, WALL, World, facts, request

MINUTE = 60 * SECOND
AGE = Rules().age_us


# --- the order ---


def came(request_id: str, at_us: int = 0, **body: Any) -> RequestRecord:
    return new_record(request(request_id=request_id, queue=True, **body), "p1", WALL + at_us)


def in_order(records: list[RequestRecord], at_us: int) -> list[str]:
    return [each.request_id for each in sorted(records, key=lambda each: order(each, WALL + at_us, AGE))]


def test_the_order_is_priority_then_place_by_then_arrival() -> None:
    records = [
        came("late", 2),
        came("early", 1),
        came("urgent", 3, place_by_us=WALL + MINUTE),
        came("more urgent", 4, place_by_us=WALL + SECOND),
        came("important", 5, priority=1),
    ]

    assert ["important", "more urgent", "urgent", "early", "late"] == in_order(records, 6)


def test_waiting_adds_to_a_priority_and_doubles_with_each_ten_minutes() -> None:
    assert [0, 0, 1, 3, 7] == [gained(waited, AGE) for waited in (0, AGE - 1, AGE, 2 * AGE, 3 * AGE)]
    gains = [gained(times * AGE, AGE) for times in range(100)]
    steps = [after - before for before, after in itertools.pairwise(gains)]

    assert sorted(steps) == steps
    assert 2_000_000 < steps[22] == steps[-1]


@pytest.mark.parametrize(("difference", "minutes"), [(0, 10), (1, 20), (100, 70), (2_000_000, 210)])
def test_who_has_waited_long_enough_comes_before_every_newcomer(difference: int, minutes: int) -> None:
    """The bound of docs/placement.md: 10 minutes times the logarithm of the difference + 2, rounded up."""
    waits = came("waits", priority=-1_000_000)
    now = minutes * MINUTE
    newcomer = came("new", now, priority=difference - 1_000_000, place_by_us=WALL + now + 1)
    early = came("early", now - SECOND, priority=difference - 1_000_000, place_by_us=WALL + now + 1)

    assert ["waits", "new"] == in_order([newcomer, waits], now)
    assert ["early", "waits"] == in_order([early, waits], now - SECOND)


def test_a_restart_waits_since_it_lost_its_place() -> None:
    record = stepped(came("a"), State.PLACED, WALL + SECOND)
    record = stepped(record, State.WAITING, WALL + 50 * MINUTE)

    assert MINUTE == waited_us(record, WALL + 51 * MINUTE)
    assert 0 == waited_us(record, WALL + 49 * MINUTE)


# --- for whom room is kept ---


def cluster(*nodes: int, rules: Rules | None = None) -> World:
    """Nodes n0, n1 … with so many devices each; p1 leads, p2 does not."""
    world = World(rules=rules or Rules())
    for number, devices in enumerate(nodes):
        world.add_node(f"n{number}", devices)
    for name in ("p1", "p2"):
        world.placer(name)
        world.pass_time(2)
    assert "p1" == world.leader()
    return world


def small(world: World, request_id: str, placer: str = "p2", **body: Any) -> str:
    """A request for one whole device; its outcome."""
    said = world.place(placer, **{"request_id": request_id, "gpu": {"share": 1}} | body)
    world.settle()
    return said.outcome


def big(world: World, count: int, request_id: str = "big", **body: Any) -> None:
    said = world.place("p2", request_id=request_id, gpu={"count": count}, queue=True, **body)
    assert "queued" == said.outcome
    world.pass_time(0.4)


def shadow(world: World, request_id: str = "big") -> dict[str, int]:
    """How many devices of which node are kept for it."""
    found: dict[str, int] = {}
    for place in world.record(request_id).shadow:
        found[place.node] = found.get(place.node, 0) + len(place.devices)
    return found


def placed_on(world: World, request_id: str) -> set[str | None]:
    return {each.node for each in world.record(request_id).replicas}


def test_room_is_kept_where_least_of_it_is_lacking() -> None:
    world = cluster(4, 4, 4)
    for number, node in enumerate(("n0", "n0", "n1", "n2", "n2")):
        small(world, f"s{number}", candidates=[node])
    big(world, 4)

    assert {"n1": 4} == shadow(world)


@pytest.mark.parametrize(("there", "comes"), [(50_000, 12_500), (12_500, 50_000)], ids=["its own", "a neighbour's"])
def test_room_is_kept_where_a_deadline_stands_in_the_way_whoever_would_miss_it(there: int, comes: int) -> None:
    world = cluster(1)
    for request_id, deadline_us in (("there", there), ("comes", comes)):
        timing = {"kind": "firm", "deadline_us": deadline_us, "period_us": 1_000_000, "runtime_us": 8_000}
        world.place("p2", request_id=request_id, gpu={"share": 0.1}, realtime=timing, queue=True)
        world.settle()
    world.pass_time(1)

    assert (State.STARTED, State.QUEUED) == (world.record("there").state, world.record("comes").state)
    assert {"n0": 1} == shadow(world, "comes")


def test_a_newcomer_at_any_placer_leaves_it_alone_and_is_told_so() -> None:
    world = cluster(4)
    small(world, "s0")
    big(world, 4)
    said = world.place("p2", request_id="s1", gpu={"share": 1})

    assert "rejected" == said.outcome
    assert ("not_now.kept", 1) == (said.reasons[0].code, said.reasons[0].count)
    assert "n0 has room that is kept for big" in said.reasons[0].message
    assert "rejected" == small(world, "s2", "p1", dry_run=True)
    world.release("p2", "s0")
    world.pass_time(0.6)
    assert State.STARTED == world.record("big").state
    assert () == world.record("big").shadow


def test_a_small_one_takes_at_once_what_does_not_delay_the_first() -> None:
    world = cluster(4, 2)
    small(world, "s0", candidates=["n0"])
    big(world, 4)

    assert "placed" == small(world, "elsewhere")
    assert {"n1"} == placed_on(world, "elsewhere")


def test_what_is_kept_of_a_device_leaves_the_rest_of_it() -> None:
    world = cluster(1)
    small(world, "s0", gpu={"share": 0.6})
    world.place("p1", request_id="half", gpu={"share": 0.5, "memory_mib": 0}, queue=True)
    world.pass_time(0.4)
    assert {"n0": 1} == shadow(world, "half")

    assert "rejected" == small(world, "more", gpu={"share": 0.2})
    world.release("p1", "s0")
    world.pass_time(0.4)
    assert "placed" == small(world, "rest", gpu={"share": 0.5})


def test_cpu_is_kept_as_devices_are() -> None:
    world = cluster(1)
    small(world, "s0", gpu=None, cpu_milli=40_000)
    world.place("p1", request_id="wide", gpu=None, cpu_milli=50_000, queue=True)
    world.pass_time(0.4)

    assert [ShadowPlace(replica=0, node="n0")] == list(world.record("wide").shadow)
    assert "rejected" == small(world, "s1", gpu=None, cpu_milli=20_000)
    assert "placed" == small(world, "s2", gpu={"share": 1})


def test_who_comes_before_it_takes_what_is_kept_for_it() -> None:
    world = cluster(4)
    small(world, "s0")
    big(world, 4)

    assert "placed" == small(world, "first", priority=1)
    assert "rejected" == small(world, "s1")


def test_a_stream_of_small_ones_does_not_starve_a_large_one() -> None:
    world = cluster(8, 8)
    running = [f"s{number}" for number in range(16)]
    for name in running:
        small(world, name)
    big(world, 8)
    for released, name in enumerate(running, 1):
        world.release("p1", name)
        world.pass_time(0.4)
        if State.STARTED == world.record("big").state:
            break
        running += [f"n{released}{p}" for p in ("p1", "p2") if "placed" == small(world, f"n{released}{p}", p)]

    assert State.STARTED == world.record("big").state
    assert released <= 16


def test_a_gang_keeps_room_for_all_of_it() -> None:
    world = cluster(2, 2)
    for number in range(3):
        small(world, f"s{number}")
    world.place("p1", request_id="gang", replicas=3, gpu={"share": 1}, queue=True)
    world.pass_time(0.4)

    assert 3 == sum(shadow(world, "gang").values())
    assert 3 == len({device for place in world.record("gang").shadow for device in place.devices})
    world.release("p1", "s0")
    assert "rejected" == small(world, "s3")
    world.release("p1", "s1")
    world.pass_time(0.4)
    assert State.STARTED == world.record("gang").state


def test_the_first_few_have_shadows_that_are_disjoint_and_no_more_than_they() -> None:
    world = cluster(*[2] * 6, rules=Rules(heads=4))
    for number in range(6):
        small(world, f"s{number}", candidates=[f"n{number}"])
    for number in range(5):
        big(world, 2, f"big{number}")
    world.pass_time(2)

    assert [1, 1, 1, 1, 0] == [len(shadow(world, f"big{number}")) for number in range(5)]
    assert 4 == len({node for number in range(5) for node in shadow(world, f"big{number}")})


# --- until when ---


def waits_and_keeps() -> World:
    """One node of 4, `s0` on it, `big` waits for all of it and `next` for what is kept for that."""
    world = cluster(4)
    small(world, "s0")
    big(world, 4, place_by_us=WALL + world.now + 20 * SECOND)
    assert "queued" == small(world, "next", queue=True)
    world.pass_time(1)
    assert State.QUEUED == world.record("next").state
    return world


def test_one_that_expires_keeps_nothing_any_more_and_who_waits_behind_it_is_placed() -> None:
    world = waits_and_keeps()
    world.pass_time(20)

    assert State.EXPIRED == world.record("big").state
    assert State.STARTED == world.record("next").state


def test_one_that_is_released_keeps_nothing_any_more() -> None:
    world = waits_and_keeps()
    world.release("p2", "big")
    assert "placed" == small(world, "s1")
    world.pass_time(0.6)

    assert State.STARTED == world.record("next").state


def lost(world: World, node: str, devices: int) -> None:
    world.set_facts(facts(node, devices).model_copy(update={"state": NodeState.LOST}))


def test_where_its_node_is_lost_it_keeps_another_or_none() -> None:
    world = cluster(4, 4)
    small(world, "s0", candidates=["n0"])
    small(world, "s1", candidates=["n1"])
    small(world, "s2", candidates=["n1"])
    big(world, 4)
    assert {"n0": 4} == shadow(world)
    lost(world, "n0", 4)
    world.pass_time(1.2)
    assert {"n1": 4} == shadow(world)
    lost(world, "n1", 4)
    world.pass_time(1.2)

    assert {} == shadow(world)


def test_one_that_no_node_can_take_now_is_in_nobodys_way() -> None:
    world = cluster(4, 4)
    lost(world, "n1", 4)
    small(world, "s0", candidates=["n0"])
    big(world, 4, "hopeless", candidates=["n1"])
    big(world, 4, "big", candidates=["n0"])

    assert ({}, {"n0": 4}) == (shadow(world, "hopeless"), shadow(world))


def test_it_moves_to_where_less_is_lacking() -> None:
    world = cluster(4, 4)
    for number, node in enumerate(("n0", "n1", "n1")):
        small(world, f"s{number}", candidates=[node])
    small(world, "s3", candidates=["n0"])
    big(world, 4)
    assert {"n0": 4} == shadow(world)
    world.release("p1", "s1")
    world.pass_time(1.2)

    assert {"n1": 4} == shadow(world)


def test_room_that_comes_no_nearer_is_left_to_others_for_as_long_as_it_was_kept() -> None:
    world = cluster(4, rules=Rules(patience_us=10 * SECOND))
    small(world, "s0")
    big(world, 4)
    world.pass_time(8)
    assert "rejected" == small(world, "s1")
    world.pass_time(5)
    assert {} == shadow(world)
    assert "placed" == small(world, "s2")
    world.pass_time(15)
    assert {"n0": 4} == shadow(world)
    assert "rejected" == small(world, "s3")


def test_room_that_comes_nearer_is_kept_on() -> None:
    world = cluster(4, rules=Rules(patience_us=10 * SECOND))
    for number in range(3):
        small(world, f"s{number}")
    big(world, 4)
    for number in range(2):
        world.pass_time(8)
        world.release("p1", f"s{number}")
    world.pass_time(8)

    assert {"n0": 4} == shadow(world)


def test_when_the_leader_dies_the_room_is_still_kept_and_another_places_it() -> None:
    world = waits_and_keeps()
    world.kill("p1")
    assert "rejected" == small(world, "s1")
    world.pass_time(6)
    world.release("p2", "s0")
    world.pass_time(1)

    assert State.STARTED == world.record("big").state
    assert State.QUEUED == world.record("next").state
    world.check_settled()


# --- who is woken ---


def of_model(node: str, model: str, **more: Any) -> Any:
    made = facts(node, 1, **more)
    return made.model_copy(update={"devices": tuple(d.model_copy(update={"model": model}) for d in made.devices)})


@pytest.fixture
def two_models() -> World:
    """A full node of each model; `waits` for an A100."""
    world = cluster()
    world.set_facts(of_model("a", "A100"))
    world.set_facts(of_model("h", "H100"))
    for node in "ah":
        small(world, f"on-{node}", candidates=[node], cpu_milli=8_000)
    assert "queued" == small(world, "waits", queue=True, gpu={"share": 1, "models": ["A100"]})
    world.pass_time(2)
    return world


def woken(world: World) -> int:
    return world.placers["p1"].counters["queue.woken"]


def test_what_happens_on_a_node_of_another_model_wakes_nobody(two_models: World) -> None:
    world, before = two_models, woken(two_models)
    tried = world.placers["p1"].counters["queue.tried"]
    world.release("p1", "on-h")
    lost(world, "h", 1)
    world.set_facts(of_model("h", "H100", cpu_milli=1_000))
    world.pass_time(30)

    assert (before, tried) == (woken(world), world.placers["p1"].counters["queue.tried"])


def test_a_release_wakes_who_could_use_the_node(two_models: World) -> None:
    world, before = two_models, woken(two_models)
    world.release("p1", "on-a")
    world.pass_time(1)

    assert before + 1 == woken(world)
    assert State.STARTED == world.record("waits").state


def test_less_wakes_and_more_does_not(two_models: World) -> None:
    world, before = two_models, woken(two_models)
    world.resize("p1", "on-a", cpu_milli=9_000)
    world.pass_time(1)
    grown = woken(world) - before
    world.resize("p1", "on-a", cpu_milli=1_000)
    world.pass_time(1)

    assert grown <= 1  # once it is done, what was reserved for both sizes shrinks to the larger: nothing
    assert woken(world) > before + grown


def test_what_the_node_list_says_anew_of_its_node_wakes_it(two_models: World) -> None:
    world, before = two_models, woken(two_models)
    world.set_facts(of_model("a", "A100", cpu_milli=32_000))
    world.pass_time(1)

    assert before + 1 == woken(world)


def test_a_node_that_comes_wakes_who_could_use_it(two_models: World) -> None:
    world = two_models
    world.set_facts(of_model("new", "A100"))
    world.pass_time(1)

    assert State.STARTED == world.record("waits").state

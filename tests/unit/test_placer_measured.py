"""What was measured of response times admits firm requests, and refuses them; beside what declarations say."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import pytest

from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.feasible import admit
from services.placer.core.intents import Rules
from shared.admission import Beside, DeviceType, Profile, explores
from shared.effects import KeyChanged, WatchReplayed
from shared.messages import PlaceReply, Regime, State
from shared.subjects import LEARNED, profile_key
from tests.decide_world import device, firm, node, share
from tests.placer_world import World

MPS = DeviceType("H200", Regime.MPS)
EXPLORES = next(f"r{number}" for number in range(10_000) if explores(f"r{number}"))


def learned(
    profile: str, takes: Mapping[Beside, int], count: int = 2_000, of: DeviceType = MPS, revision: int = 1
) -> KeyChanged:
    """A key of rt_learned: of so many tasks beside each of these sets, each took about so long."""
    chance, found = Random(profile), Profile()
    for beside, time_us in takes.items():
        found.add(beside, [round(time_us * chance.uniform(0.9, 1)) for _ in range(count)])
    key = profile_key(profile, of.model, of.regime)
    return KeyChanged(LEARNED, key, found.message(of, profile, 1).to_json(), revision)


def mps_world(regime: Regime = Regime.MPS, **rules: Any) -> World:
    """One device of this regime."""
    world = World(rules=Rules(**rules))
    world.facts["n1"] = node("n1", (device("g0", model="H200", regime=regime),))
    world.placer("p1")
    world.pass_time(2)
    return world


def ask(world: World, name: str, profile: str | None = None, **body: Any) -> PlaceReply:
    timing = {"deadline_us": 50_000, "period_us": 100_000, "runtime_us": 10_000, "kind": body.pop("kind", "firm")}
    body = {"request_id": name, "gpu": {"share": 0.25}, "realtime": timing | {"profile": profile or name}} | body
    reply = world.place("p1", **body)
    world.pass_time(1)
    return reply


def hear(world: World, *changes: KeyChanged) -> None:
    for change in changes:
        world.tell("p1", change)


BOTH_FIT = (learned("a", {("b",): 40_000}), learned("b", {("a",): 30_000}))


def test_a_second_firm_container_is_admitted_on_mps_once_it_was_measured_that_both_keep_their_deadlines() -> None:
    world = mps_world()
    assert State.PLACED == ask(world, "a").outcome
    assert State.REJECTED == ask(world, "b").outcome
    hear(world, *BOTH_FIT)
    reply = ask(world, "b2", "b")
    assert (State.PLACED, False) == (reply.outcome, reply.unproven)
    assert reply.measured is not None
    assert "99 % of the tasks of a take at most" in reply.measured


def test_the_answer_to_a_repeat_says_the_same() -> None:
    world = mps_world()
    ask(world, "a")
    hear(world, *BOTH_FIT)
    first = ask(world, "b")
    assert first.measured == ask(world, "b").measured
    assert first.measured is not None


def test_who_was_not_measured_is_admitted_by_its_declaration_and_unproven() -> None:
    reply = ask(mps_world(), "a")
    assert (State.PLACED, True, None) == (reply.outcome, reply.unproven, reply.measured)


def test_what_was_measured_alone_is_no_longer_unproven() -> None:
    world = mps_world(regime=Regime.EXCLUSIVE)
    hear(world, learned("a", {(): 20_000}, of=DeviceType("H200", Regime.EXCLUSIVE)))
    reply = ask(world, "a", gpu={"share": 1.0})
    assert (State.PLACED, False) == (reply.outcome, reply.unproven)


def test_where_a_neighbour_is_known_to_become_late_it_is_refused_and_the_neighbour_is_named() -> None:
    world = mps_world()
    ask(world, "a")
    hear(world, learned("a", {("b",): 60_000}), learned("b", {("a",): 30_000}))
    reply = ask(world, "b", queue=True)
    assert (State.QUEUED, ["would_break.deadline"]) == (reply.outcome, [each.code for each in reply.reasons])
    assert "tasks of a take at most" in reply.reasons[0].message


def test_who_is_known_to_be_late_itself_is_refused_also_where_declarations_would_do() -> None:
    world = mps_world()
    hear(world, learned("a", {(): 60_000}))
    reply = ask(world, "a", queue=True)
    assert (State.QUEUED, ["not_now.deadline"]) == (reply.outcome, [each.code for each in reply.reasons])


def test_a_soft_one_is_refused_where_it_is_known_to_make_a_firm_one_late() -> None:
    world = mps_world()
    ask(world, "a")
    hear(world, learned("a", {("b",): 60_000}))
    assert State.REJECTED == ask(world, "b", kind="soft").outcome
    assert State.PLACED == ask(world, "c", kind="soft").outcome


def test_measured_times_open_nothing_beside_a_hard_container() -> None:
    world = mps_world(regime=Regime.GATED)
    timing = {"deadline_us": 50_000, "period_us": 50_000, "runtime_us": 45_000, "kind": "hard", "gate": True}
    world.place("p1", request_id="a", gpu={"share": 0.25}, realtime=timing | {"profile": "a"})
    world.pass_time(1)
    gated = DeviceType("H200", Regime.GATED)
    hear(world, learned("a", {("b",): 10_000}, of=gated), learned("b", {("a",): 10_000}, of=gated))
    firm_one = timing | {"kind": "firm", "runtime_us": 10_000, "profile": "b"}
    assert State.REJECTED == world.place("p1", request_id="b", gpu={"share": 0.25}, realtime=firm_one).outcome


def test_what_was_forgotten_admits_nothing() -> None:
    for forget in (
        [KeyChanged(LEARNED, BOTH_FIT[0].key, None, 2), KeyChanged(LEARNED, BOTH_FIT[1].key, None, 3)],
        [WatchReplayed(LEARNED, frozenset())],
    ):
        world = mps_world()
        ask(world, "a")
        hear(world, *BOTH_FIT)
        for event in forget:
            world.tell("p1", event)
        assert State.REJECTED == ask(world, "b").outcome


def test_who_waits_is_tried_again_when_something_was_learned() -> None:
    world = mps_world()
    ask(world, "a")
    assert State.QUEUED == ask(world, "b", queue=True).outcome
    world.pass_time(5)
    hear(world, *BOTH_FIT)
    world.pass_time(2)
    assert State.STARTED == world.record("b").state


@pytest.mark.parametrize(("explored_ratio", "outcome"), [(0.01, State.PLACED), (0.0, State.REJECTED)])
def test_one_in_a_hundred_goes_where_keeping_the_deadline_is_likely_and_not_proven(
    explored_ratio: float, outcome: State
) -> None:
    world = mps_world(explored_ratio=explored_ratio)
    ask(world, "a")
    hear(world, learned("a", {("b",): 40_000}, count=200), learned("b", {("a",): 30_000}, count=200))
    assert State.REJECTED == ask(world, "b").outcome
    reply = ask(world, EXPLORES, "b")
    assert outcome == reply.outcome
    if outcome == State.PLACED:
        assert reply.unproven
        assert str(reply.measured).startswith("explores, not proven: ")


def test_a_profile_that_cannot_be_read_is_counted_and_changes_nothing() -> None:
    world = mps_world()
    ask(world, "a")
    hear(world, KeyChanged(LEARNED, BOTH_FIT[0].key, b"{}", 1), KeyChanged(LEARNED, "profile.a", b"{}", 1))
    assert 2 == world.placers["p1"].counters["malformed.learned"]
    assert State.REJECTED == ask(world, "b").outcome


def test_how_many_more_fit_is_counted_by_what_was_measured() -> None:
    world = mps_world()
    assert 1 == ask(world, "a", dry_run=True).fits_more
    hear(world, learned("a", {(): 10_000, ("a",): 20_000, ("a", "a"): 40_000, ("a", "a", "a"): 60_000}))
    assert 3 == ask(world, "a", dry_run=True).fits_more


def test_many_loads_are_judged_as_each_by_itself() -> None:
    """Arrays decide by declarations; those of which something was measured are asked again."""
    chance, kinds = Random(5), [(f"p{number}", 2_000 * (number + 1)) for number in range(6)]
    made = Cluster()
    for number in range(60):
        facts = node(f"n{number}", (device(f"g{number}", regime=chance.choice((Regime.MPS, Regime.TIME_SLICED))),))
        made.set_facts(facts.node, facts, 0)
        held = []
        for place in range(chance.randint(0, 3)):
            profile, runtime_us = chance.choice(kinds)
            timing = firm(runtime_us=runtime_us, profile=chance.choice((profile, profile, None)))
            demand = Demand.of(share(0.25, realtime=timing))
            held.append(demand.reservation(f"r{number}.{place}", 0, 1, (f"g{number}",)))
        made.set_reservations(facts.node, tuple(held))
    for profile, runtime_us in kinds:
        sets = {(): 1, ("p0",): 2, ("p1",): 3, ("p0", "p1"): 5}
        for regime in (Regime.MPS, Regime.TIME_SLICED):
            takes = {beside: runtime_us * times for beside, times in sets.items()}
            made.measured.heard(learned(profile, takes, of=DeviceType("H100", regime)))
    seen = set()
    for profile, runtime_us in kinds:
        demand = Demand.of(share(0.25, realtime=firm(runtime_us=runtime_us, profile=profile)))
        numbers = np.unique(made.devices["load"][made.all_rows()])
        found = made.verdicts(demand, numbers)
        for number in numbers.tolist():
            verdict = admit(demand, made.kinds[number], made.measured)
            told = [bool(found.column(name, np.array([number]))[0]) for name in ("admitted", "unproven", "breaks")]
            late = verdict.late not in (None, "this request")
            assert [verdict.admitted, verdict.unproven, late] == told
            seen.add((verdict.test, verdict.admitted))
    assert {("measured", True), ("measured", False)} < seen

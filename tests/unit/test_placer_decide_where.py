"""Decisions of the placer: strategies, gangs, and where replicas go."""

import pytest
from decide_world import (
    cluster,
    codes,
    device,
    firm,
    fits,
    message,
    node,
    place,
    request,
    share,
    take,
    total,
    would_fit_if,
)

from services.placer.core.outcome import Assignment, Fits, Never, NotNow
from services.placer.core.pipeline import decide, fits_more
from shared.messages import (
    ClassStanding,
    DeviceStanding,
    Gpu,
)

# --------------------------------------------------------------------------------------------- strategies


def test_deadline_keeps_devices_with_much_slack_for_short_deadlines() -> None:
    """The first node's device has room for one more wide request; the empty one is needed by the short deadline."""
    made = cluster(node("a"), node("b"))
    place(made, share(0.1, realtime=firm(30_000, 8_000)), "first")
    assert ["a"] == place(made, share(0.1, realtime=firm(60_000, 8_000)), "wide")
    assert ["b"] == place(made, share(0.1, realtime=firm(8_400, 8_000)), "short")


def test_deadline_prefers_guaranteed_over_tight_and_takes_at_risk_last() -> None:
    def standing(word: DeviceStanding) -> dict[str, ClassStanding]:
        return {"any": ClassStanding(standing=word, slack_us=0)}

    words = {"a": DeviceStanding.AT_RISK, "b": DeviceStanding.TIGHT, "c": DeviceStanding.GUARANTEED}
    made = cluster(*(node(name, (device(f"{name}.0", classes=standing(w)),)) for name, w in words.items()))
    assert ["c", "b", "a"] == [place(made, share(0.6, realtime=firm()), f"r{i}")[0] for i in range(3)]


def test_best_effort_keeps_away_from_devices_that_promise_something() -> None:
    made = cluster(node("a"), node("b"))
    place(made, share(0.1, realtime=firm(80_000)), "promised")
    assert ["b"] == place(made, share(0.1))


@pytest.mark.parametrize("strategy", ["deadline", "binpack"])
def test_P4_two_devices_go_where_two_are(strategy: str) -> None:
    made = cluster(node("a", 4), node("b", 4), node("c", 2))
    asked = [request(Gpu(count=count), strategy=strategy) for count in (2, 4, 4)]
    assert [["c"], ["a"], ["b"]] == [place(made, one, f"r{i}") for i, one in enumerate(asked)]


@pytest.mark.parametrize("strategy", ["deadline", "binpack"])
def test_P5_two_single_replicas_leave_the_pair_whole(strategy: str) -> None:
    made = cluster(node("x1", 2), node("x2", 1), node("x3", 1))
    assert ["x2", "x3"] == place(made, request(Gpu(), replicas=2, strategy=strategy), "gang")
    assert ["x1"] == place(made, request(Gpu(count=2), strategy=strategy), "pair")


def test_binpack_has_the_arithmetic_of_kube_scheduler() -> None:
    """CPU 3000 of 8000 is 37, memory 8192 of 32768 is 25, gpu 1.5 of 2 devices is 75: (37 + 25 + 7500) // 102 = 74."""
    made = cluster(node("a", 2))
    place(made, share(1.0, cpu_milli=1_000))
    asked = share(0.5, cpu_milli=2_000, memory_mib=8_192, strategy="binpack")
    assert 0.74 == total(made, asked)


def test_binpack_skips_a_resource_of_which_there_is_none() -> None:
    made = cluster(node("a", 1, memory_mib=0))
    asked = share(0.5, cpu_milli=4_000, strategy="binpack")
    assert 0.5 == total(made, asked)


def test_binpack_fills_and_spread_spreads() -> None:
    for strategy, expected in (("binpack", ["a", "a", "a"]), ("spread", ["a", "b", "c"])):
        made = cluster(node("a"), node("b"), node("c"))
        asked = share(0.25, strategy=strategy)
        assert expected == [place(made, asked, f"r{i}")[0] for i in range(3)]


def test_several_devices_come_from_one_group_and_from_the_smallest_that_has_enough() -> None:
    groups = ("x", "y", "x", "y", "x", "z")
    made = cluster(node("a", tuple(device(f"a.{i}", i, group=g) for i, g in enumerate(groups))))
    assert ("a.1", "a.3") == fits(made, request(Gpu(count=2))).assignments[0].devices
    assert ("a.0", "a.2", "a.4") == fits(made, request(Gpu(count=3))).assignments[0].devices
    assert 4 == len(fits(made, request(Gpu(count=4))).assignments[0].devices)


def test_the_runner_up_is_on_another_node() -> None:
    decision = decide(cluster(node("a", 2), node("b")), share(0.5), 0)
    assert isinstance(decision, Fits)
    assert decision.runner_up is not None
    assert {"a", "b"} == {decision.assignments[0].node, decision.runner_up.node}
    assert fits(cluster(node("a", 2)), share(0.5)).runner_up is None


def test_ties_are_broken_by_name_or_by_the_tie_given() -> None:
    made = cluster(*(node(f"n{i}") for i in range(20)))
    assert {"n0"} == {fits(made, share(0.5)).assignments[0].node for _ in range(3)}
    chosen = [fits(made, share(0.5), tie=f"placer-{i}").assignments[0].node for i in range(40)]
    assert chosen == [fits(made, share(0.5), tie=f"placer-{i}").assignments[0].node for i in range(40)]
    assert len(set(chosen)) > 10


# -------------------------------------------------------------------------------------------------- gangs


def test_a_gang_is_planned_whole_or_not_at_all() -> None:
    made = cluster(node("a", 2), node("b", 1))
    assert isinstance(decide(made, request(Gpu(), replicas=3), 0), Fits)
    place(made, request(Gpu()))
    decision = decide(made, request(Gpu(), replicas=3), 0)
    assert isinstance(decision, NotNow)
    assert "needs 3 replicas at once, 2 fit" == message(decision)
    assert "replicas is at most 2 (asked 3)" in would_fit_if(decision)
    assert Never is type(decide(made, request(Gpu(), replicas=4), 0))


def test_a_decision_leaves_the_cluster_as_it_was() -> None:
    made = cluster(node("a", 2), node("b", 2))
    place(made, request(Gpu()))
    before = {name: made.reservations(name) for name in "ab"}
    decide(made, request(Gpu(), replicas=3), 0)
    decide(made, request(Gpu(), replicas=4), 0)
    assert before == {name: made.reservations(name) for name in "ab"}
    assert 3 == fits_more(made, request(Gpu()), 0)


def test_P13_P14_interleaved_gangs_cannot_hold_parts_and_wait_for_each_other() -> None:
    """Groups A, C, B, D of which two fit: each is placed whole or holds nothing."""
    made = cluster(node("a", 2), node("b", 2))
    gangs = {name: request(Gpu(), replicas=2) for name in "ACBD"}
    decided = {}
    for name, asked in gangs.items():
        decided[name] = decide(made, asked, 0)
        if isinstance(decided[name], Fits):
            take(made, asked, decided[name], name)
    assert {"A": Fits, "C": Fits, "B": NotNow, "D": NotNow} == {name: type(d) for name, d in decided.items()}
    held = [r.request_id for n in "ab" for r in made.reservations(n)]
    assert {"A": 2, "C": 2} == {name: held.count(name) for name in held}


def test_replicas_spread_over_nodes_as_far_as_there_are_nodes() -> None:
    made = cluster(node("a", 4), node("b", 1), node("c", 1))
    nodes = place(made, share(0.25, replicas=4, spread_over="node"))
    assert [1, 1, 2] == sorted(nodes.count(n) for n in "abc")


def test_replicas_pack_onto_as_few_nodes_as_take_them() -> None:
    made = cluster(node("a", 1), node("b", 3), node("c", 2), node("d", 1))
    assert {"b", "c"} == set(place(made, request(Gpu(), replicas=5, spread_over="pack"), "big"))
    made = cluster(node("a", 1), node("b", 3), node("c", 2), node("d", 1))
    assert ["c", "c"] == place(made, request(Gpu(), replicas=2, spread_over="pack"), "small")


def test_one_replica_of_a_request_is_placed_away_from_the_others() -> None:
    made = cluster(node("a", 2), node("b", 2))
    others = (Assignment(0, "a", ("a.0",)),)
    asked = share(0.25, replicas=2, spread_over="node")
    decision = decide(made, asked, 0, only_replicas=(1,), others_of_request=others)
    assert isinstance(decision, Fits)
    assert [(1, "b")] == [(a.replica, a.node) for a in decision.assignments]


def test_a_gang_over_more_nodes_than_a_batch_has_keys_is_refused_with_that_number() -> None:
    made = cluster(*(node(f"n{i}", 0, cpu_milli=1_000) for i in range(1_001)))
    assert isinstance(decide(made, request(cpu_milli=1_000, replicas=999), 0), Fits)
    decision = decide(made, request(cpu_milli=1_000, replicas=1_000), 0, advise=False)
    assert Never is type(decision)
    assert "needs 1000 nodes, one placement touches at most 999" == message(decision)


def test_fits_more_counts_whole_gangs_and_stops_at_its_limit() -> None:
    made = cluster(node("a", 3), node("b", 2))
    assert 2 == fits_more(made, request(Gpu(), replicas=2), 0)
    assert 7 == fits_more(made, request(), 0, limit=7)


def test_devices_of_one_replica_are_on_one_node() -> None:
    made = cluster(node("a", 2), node("b", 2))
    assert {"never.devices": 4} == codes(decide(made, request(Gpu(count=3)), 0))

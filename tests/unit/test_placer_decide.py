"""Decisions of the placer: what is free, who is passed over and why, where replicas go."""

from typing import Any

import pytest

from services.placer.core.capabilities import OTHERS, Capabilities
from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import Assignment, Decision, Fits, Never, NotNow
from services.placer.core.pipeline import decide, fits_more
from services.placer.core.strategies import registry
from services.placer.core.strategies.binpack import Binpack
from shared.errors import FieldError
from shared.messages import (
    AllExcept,
    ClassStanding,
    DeviceFacts,
    DeviceStanding,
    Gpu,
    Kind,
    NodeFacts,
    NodeState,
    PlaceRequest,
    Realtime,
    Regime,
    Secret,
)


def device(uuid: str, index: int = 0, **fields: Any) -> DeviceFacts:
    """A healthy time-sliced device of 16 GiB with slices of 2 ms."""
    known: dict[str, Any] = {"model": "H100", "regime": Regime.TIME_SLICED, "slice_us": 2_000, "switch_us": 100}
    known |= {"uuid": uuid, "index": index, "healthy": True, "memory_mib": 16_384}
    return DeviceFacts(**known | fields)


def node(name: str, devices: int | tuple[DeviceFacts, ...] = 1, **fields: Any) -> NodeFacts:
    """A ready node of 8 cores and 32 GiB, its devices being `<name>.0`, `<name>.1`, ..."""
    if isinstance(devices, int):
        devices = tuple(device(f"{name}.{i}", i) for i in range(devices))
    known: dict[str, Any] = {"state": NodeState.READY, "at_us": 0, "cpu_milli": 8_000, "memory_mib": 32_768}
    return NodeFacts(**{"node": name, "devices": devices} | known | fields)


def cluster(*nodes: NodeFacts) -> Cluster:
    made = Cluster()
    for facts in nodes:
        made.set_facts(facts.node, facts, 0)
    return made


def request(gpu: Gpu | None = None, **fields: Any) -> PlaceRequest:
    return PlaceRequest(**{"command": ("serve",), "gpu": gpu} | fields)


def share(share: float, device_mib: int = 0, **fields: Any) -> PlaceRequest:
    return request(Gpu(share=share, memory_mib=device_mib), **fields)


def firm(deadline_us: int = 50_000, runtime_us: int = 8_000, **fields: Any) -> Realtime:
    return Realtime(deadline_us=deadline_us, runtime_us=runtime_us, **fields)


def take(made: Cluster, asked: PlaceRequest, decision: Decision, request_id: str = "other") -> None:
    """Reserves what was decided."""
    assert isinstance(decision, Fits)
    for a in decision.assignments:
        taken = Demand.of(asked).reservation(request_id, a.replica, 1, a.devices)
        made.set_reservations(a.node, (*made.reservations(a.node), taken))


def place(made: Cluster, asked: PlaceRequest, request_id: str = "other", **fields: Any) -> list[str]:
    """Decides and reserves; the nodes by replica."""
    decision = decide(made, asked, 0, **fields)
    take(made, asked, decision, request_id)
    assert isinstance(decision, Fits)
    return [a.node for a in decision.assignments]


def fits(made: Cluster, asked: PlaceRequest, **fields: Any) -> Fits:
    decision = decide(made, asked, 0, **fields)
    assert isinstance(decision, Fits)
    return decision


def total(made: Cluster, asked: PlaceRequest) -> float:
    score = fits(made, asked).score
    assert score
    return score.total


def would_fit_if(decision: Decision) -> tuple[str, ...]:
    assert not isinstance(decision, Fits)
    return decision.would_fit_if


def codes(decision: Decision) -> dict[str, int]:
    assert not isinstance(decision, Fits)
    return {reason.code: reason.count for reason in decision.reasons}


def message(decision: Decision) -> str:
    assert not isinstance(decision, Fits)
    return decision.reasons[0].message


# ------------------------------------------------------------------------------------------- what is free


def test_P1_sixteen_halves_fill_eight_devices_with_two_each() -> None:
    made = cluster(node("a", 8))
    for i in range(16):
        place(made, share(0.5), f"r{i}")
    held = [uuid for r in made.reservations("a") for uuid in r.devices]
    assert dict.fromkeys(held, 2) == {uuid: held.count(uuid) for uuid in held}
    assert {"not_now.share": 8} == codes(decide(made, share(0.5), 0))


def test_P3_the_least_free_device_is_found_among_real_ones_only() -> None:
    made = cluster(node("a", (device("a.0", foreign_share_micro=300_000),)))
    assert "needs a share of 0.8 of one device, largest free is 0.7 (a/gpu-0)" == message(decide(made, share(0.8), 0))


def test_P8_shares_are_of_one_device_and_never_summed_across_devices() -> None:
    made = cluster(node("a", 8))
    assert 48 == fits_more(made, share(0.15), 0)
    for i in range(48):
        place(made, share(0.15), f"r{i}")
    assert {"not_now.share": 8} == codes(decide(made, share(0.15), 0))


def test_three_thirds_fit_on_a_device() -> None:
    assert 3 == fits_more(cluster(node("a")), share(1 / 3), 0)


def test_P10_memory_free_on_two_devices_is_not_memory_on_one() -> None:
    made = cluster(node("a", (device("a.0", memory_mib=10_240), device("a.1", 1, memory_mib=30_720))))
    decision = decide(made, share(0.5, 40_960), 0)
    assert Never is type(decision)
    assert "needs 40960 MiB on one device, the largest is 30720 MiB (a/gpu-1)" == message(decision)


def test_P11_what_is_left_of_a_node_that_shrank_under_use_is_nothing() -> None:
    made = cluster(node("a", 8, cpu_milli=8_000))
    for i in range(8):
        place(made, share(1.0, cpu_milli=1_000), f"r{i}")
    made.set_facts("a", node("a", 6, cpu_milli=6_000), 0)
    assert 0 == fits_more(made, share(0.1), 0)
    assert {"not_now.cpu": 1} == codes(decide(made, request(cpu_milli=1), 0))
    assert 0 == made.nodes["cpu_free"][made.slot("a")]


def test_P12_an_unhealthy_device_is_not_idle() -> None:
    broken = device("a.1", 1, healthy=False, reason="XID 79")
    made = cluster(node("a", (device("a.0"), broken), state=NodeState.DEGRADED))
    assert 1 == fits_more(made, share(1.0), 0)
    place(made, share(1.0))
    decision = decide(made, share(1.0), 0)
    assert {"not_now.share": 1, "excluded.unhealthy": 1} == codes(decision)
    assert isinstance(decision, NotNow)
    assert "not healthy: a/gpu-1 (XID 79)" == decision.reasons[1].message


def test_foreign_use_is_taken_off() -> None:
    made = cluster(node("a", (device("a.0", foreign_share_micro=250_000, foreign_memory_mib=6_384),)))
    assert isinstance(decide(made, share(0.75, 10_000), 0), Fits)
    assert {"not_now.share": 1} == codes(decide(made, share(0.750001, 10_000), 0))
    assert {"not_now.memory": 1} == codes(decide(made, share(0.75, 10_001), 0))


def test_unknown_memory_takes_only_what_asks_for_none() -> None:
    made = cluster(node("a", (device("a.0", memory_mib=None),)))
    assert isinstance(decide(made, share(0.5), 0), Fits)
    decision = decide(made, share(0.5, 1), 0)
    assert {"never.memory_unknown": 1} == codes(decision)
    assert ("gpu.memory_mib is at most 0 (asked 1)",) == would_fit_if(decision)


def test_unknown_foreign_memory_is_not_taken_for_none() -> None:
    made = cluster(node("a", (device("a.0", foreign_memory_mib=None),)))
    assert {"excluded.unknown_use": 1} == codes(decide(made, share(0.5, 1), 0))


def test_a_request_without_gpu_sees_no_device() -> None:
    made = cluster(node("a", 0), node("b", 1, cpu_milli=1_000))
    assert Fits((Assignment(0, "a"),)).assignments == fits(made, request(cpu_milli=4_000)).assignments
    assert {"never.no_device": 1, "never.cpu": 1} == codes(decide(made, share(0.5, cpu_milli=2_000), 0))


def test_a_release_leaves_nothing_behind() -> None:
    made = cluster(node("a"))
    before = {name: made.nodes[name].copy() for name in ("cpu_free", "share_free", "whole_free")}
    place(made, share(1.0, cpu_milli=500))
    made.set_reservations("a", ())
    assert all((before[name] == made.nodes[name]).all() for name in before)


# --------------------------------------------------------------------------------- now, never, excluded


def test_no_node_at_all_is_not_now() -> None:
    decision = decide(cluster(), share(0.5), 0)
    assert isinstance(decision, NotNow)
    assert "no node is known" == message(decision)


@pytest.mark.parametrize("state", [NodeState.JOINED, NodeState.UNREACHABLE, NodeState.LOST])
def test_nodes_that_are_not_there_now_may_be_later(state: NodeState) -> None:
    decision = decide(cluster(node("a", 2, state=state)), share(0.5), 0)
    assert isinstance(decision, NotNow)
    assert {f"excluded.{state}": 2} == codes(decision)


def test_a_joined_node_without_devices_may_still_have_some() -> None:
    assert isinstance(decide(cluster(node("a", 0, state=NodeState.JOINED)), share(0.5), 0), NotNow)


def test_what_fits_no_empty_device_is_never() -> None:
    made = cluster(node("a"), node("b", 1, state=NodeState.UNREACHABLE))
    assert {"never.memory": 2} == codes(decide(made, share(0.5, 99_999), 0))
    assert {"never.model": 2} == codes(decide(made, request(Gpu(models=("H200",))), 0))
    assert {"never.devices": 2} == codes(decide(made, request(Gpu(count=2)), 0))
    assert {"never.selector": 2} == codes(decide(made, share(0.5, node_selector={"rack": "7"}), 0))
    assert {"never.deadline": 2} == codes(decide(made, share(0.5, realtime=firm(5_000, 8_000)), 0))
    assert {"never.guarantee": 2} == codes(decide(made, share(0.5, realtime=firm(kind=Kind.HARD)), 0))
    assert isinstance(decide(made, share(0.5, 99_999), 0), Never)


def test_counts_add_up_to_the_devices() -> None:
    made = cluster(
        node("a", 3), node("b", 2, state=NodeState.LOST), node("c", 0), node("d", (device("d.0", model="L4"),))
    )
    for i in range(3):
        place(made, request(Gpu(models=("H100",))), f"r{i}")
    decision = decide(made, request(Gpu(models=("H100",))), 0)
    assert {"not_now.share": 3, "excluded.lost": 2, "never.model": 1, "never.no_device": 1} == codes(decision)


def test_candidates_and_exceptions() -> None:
    made = cluster(node("a"), node("b"), node("c"))
    assert ["b"] == place(made, share(0.1, candidates=("b", "z")))
    assert ["c"] == place(made, share(0.1, candidates=AllExcept(all_except=("a", "b"))))
    decision = decide(made, share(1.0, candidates=("b",)), 0)
    assert {"not_now.share": 1, "excluded.not_candidate": 2} == codes(decision)
    assert "candidates has a" in would_fit_if(decision)
    stranger = decide(made, share(0.1, candidates=("z",)), 0)
    assert isinstance(stranger, NotNow)
    assert {"excluded.not_candidate": 3, "excluded.unknown_node": 1} == codes(stranger)


def test_a_node_set_aside_is_passed_over() -> None:
    made = cluster(node("a"), node("b"))
    assert ["b"] == place(made, share(0.5), set_aside=frozenset({"a"}))
    decision = decide(made, share(0.4), 0, set_aside=frozenset({"a", "b"}))
    assert isinstance(decision, NotNow)
    assert {"excluded.set_aside": 2} == codes(decision)


def test_P2_a_full_node_is_not_picked_again() -> None:
    made = cluster(node("a"), node("b"))
    assert [["a"], ["b"]] == [place(made, share(0.6), f"r{i}") for i in range(2)]
    assert {"not_now.share": 2} == codes(decide(made, share(0.6), 0))


def test_a_device_that_the_node_list_excludes_is_passed_over() -> None:
    stale = {"any": ClassStanding(standing=DeviceStanding.EXCLUDED, slack_us=None)}
    decision = decide(cluster(node("a", (device("a.0", classes=stale),))), share(0.5), 0)
    assert isinstance(decision, NotNow)
    assert {"excluded.stale": 1} == codes(decision)


@pytest.mark.parametrize(
    "can, asked, field",
    [
        (Capabilities(needs_command=True, images=True), {"command": None, "image": "x"}, "command"),
        (Capabilities(), {"image": "x"}, "image"),
        (Capabilities(), {"ports": (80,)}, "ports"),
        (Capabilities(), {"user": "1000"}, "user"),
        (Capabilities(), {"shm_mib": 64}, "shm_mib"),
        (Capabilities(), {"env": {"KEY": Secret(secret="key")}}, "env"),
    ],
)
def test_what_the_backend_cannot_honour_is_refused_by_name(
    can: Capabilities, asked: dict[str, Any], field: str
) -> None:
    decision = decide(cluster(node("a")), share(0.5, **asked), 0, capabilities={"a": can})
    assert Never is type(decision)
    assert f"{field} cannot be honoured by the backend of a" == message(decision)
    assert isinstance(decide(cluster(node("a")), share(0.5), 0, capabilities={OTHERS: can}), Fits)


def test_a_node_without_a_backend_takes_nothing() -> None:
    assert {"never.backend": 1} == codes(decide(cluster(node("a")), share(0.5), 0, capabilities={}))


def test_an_unknown_strategy_is_an_error_on_its_field() -> None:
    with pytest.raises(FieldError, match="strategy: found magic, allowed: one of binpack, deadline, spread"):
        decide(cluster(), share(0.5, strategy="magic"), 0)


def test_two_strategies_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two strategies are named binpack"):
        registry((Binpack(), Binpack(gpu=1)))


def test_P28_P29_the_reason_is_in_true_numbers() -> None:
    made = cluster(node("a", 3), node("b", 1))
    place(made, request(Gpu(count=2)))
    decision = decide(made, request(Gpu(count=3)), 0)
    assert {"not_now.share": 2, "not_now.devices": 1, "never.devices": 1} == codes(decision)
    assert "needs 3 devices on one node, most free is 1 (a)" == message(decision)
    assert ("gpu.count is at most 1 (asked 3)", "other on a is released") == would_fit_if(decision)


# ---------------------------------------------------------------------------------------------- deadlines


def test_a_newcomer_that_would_break_a_neighbour_is_told_whose_deadline() -> None:
    made = cluster(node("a"))
    place(made, share(0.1, realtime=firm(12_500, 8_000)), "tight-one")
    decision = decide(made, share(0.1, realtime=firm(90_000, 8_000)), 0)
    assert {"not_now.deadline": 1} == codes(decision)
    assert "tight-one needs 16.8 ms of 12.5 ms beside 1 other contexts" in message(decision)
    assert "tight-one on a is released" in would_fit_if(decision)


def test_foreign_use_counts_as_a_context_and_is_named() -> None:
    made = cluster(node("a", (device("a.0", foreign_share_micro=100_000),)))
    decision = decide(made, share(0.1, realtime=firm(12_500, 8_000)), 0)
    assert isinstance(decision, NotNow)
    assert "foreign use on the device counts as one of them" in message(decision)


def test_a_gated_device_takes_only_gated_requests() -> None:
    made = cluster(node("a", (device("a.0", regime=Regime.GATED),)))
    assert {"never.gate": 1} == codes(decide(made, share(0.5), 0))
    assert {"never.gate": 1} == codes(decision := decide(made, share(0.5, realtime=firm()), 0))
    assert ("realtime.gate is true",) == would_fit_if(decision)
    assert ["a"] == place(made, share(0.5, realtime=firm(gate=True, kind=Kind.HARD)))


def test_firm_is_marked_unproven_and_hard_is_not() -> None:
    made = cluster(node("a", (device("a.0", regime=Regime.EXCLUSIVE),)))
    assert fits(made, share(1.0, realtime=firm())).unproven is True
    assert fits(made, share(1.0, realtime=firm(kind=Kind.HARD))).unproven is False


def test_an_exclusive_device_has_one_tenant_even_of_a_small_share() -> None:
    made = cluster(node("a", (device("a.0", regime=Regime.EXCLUSIVE),)))
    place(made, share(0.1))
    assert {"not_now.deadline": 1} == codes(decide(made, share(0.1), 0))
    assert 0 == fits_more(made, share(0.1), 0)


def test_a_soft_container_reserves_its_share() -> None:
    made = cluster(node("a"))
    place(made, share(0.6, realtime=Realtime(deadline_us=1_000, kind=Kind.SOFT)))
    assert {"not_now.share": 1} == codes(decide(made, share(0.6), 0))


def test_the_changes_of_timing_are_exact() -> None:
    made = cluster(node("a"))
    decision = decide(made, share(0.5, realtime=firm(5_000, 8_000)), 0)
    assert "realtime.runtime_us is at most 4700 (asked 8000): 4.7 ms, not 8 ms" == would_fit_if(decision)[0]
    assert "realtime.deadline_us is at least 8400 (asked 5000): 8.4 ms" == would_fit_if(decision)[1]


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


# -------------------------------------------------------------------------------------- facts come and go


def test_a_node_may_change_its_devices_and_leave() -> None:
    made = cluster(node("a", 2), node("b", 1))
    made.set_facts("a", node("a", 5), 0)
    assert 6 == fits_more(made, request(Gpu()), 0)
    made.set_facts("a", None, 0)
    assert 1 == fits_more(made, request(Gpu()), 0)
    made.set_facts("c", node("c", 5), 0)
    assert 6 == fits_more(made, request(Gpu()), 0)


def test_reservations_of_an_unknown_node_count_when_it_comes() -> None:
    made = cluster(node("a"))
    place(made, request(Gpu()))
    made.set_facts("a", None, 0)
    made.set_facts("a", node("a"), 0)
    assert {"not_now.share": 1} == codes(decide(made, request(Gpu()), 0))

"""Decisions of the placer: what is free, and who is passed over and why."""

from typing import Any

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
    would_fit_if,
)

from services.placer.core.capabilities import OTHERS, Capabilities
from services.placer.core.outcome import Assignment, Fits, Never, NotNow
from services.placer.core.pipeline import decide, fits_more
from services.placer.core.strategies import registry
from services.placer.core.strategies.binpack import Binpack
from shared.errors import FieldError
from shared.messages import (
    AllExcept,
    ClassStanding,
    DeviceStanding,
    Gpu,
    Kind,
    NodeState,
    Realtime,
    Regime,
    Secret,
)

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


@pytest.mark.parametrize("by", ["plugin_holder", "claim_holder"])
def test_KU39_a_device_that_others_gave_away_is_never_given_twice(by: str) -> None:
    taken = device("a.1", 1, **{by: "claim shop/gpu"})
    made = cluster(node("a", (device("a.0"), taken)))
    assert 1 == fits_more(made, share(1.0), 0)
    assert 4 == fits_more(made, share(0.25), 0)
    assert 1 == made.nodes["whole_free"][made.slot("a")]
    assert {"excluded.taken": 1, "not_now.devices": 1} == codes(decide(made, request(gpu=Gpu(count=2)), 0))
    place(made, share(1.0))
    decision = decide(made, share(0.25), 0)
    assert {"not_now.share": 1, "excluded.taken": 1} == codes(decision)
    assert isinstance(decision, NotNow)
    assert "given by others: a/gpu-1 (claim shop/gpu)" == decision.reasons[1].message
    made.set_facts("a", node("a", (device("a.0"), device("a.1", 1))), 1)
    assert isinstance(decide(made, share(0.25), 1), Fits)


def test_KU39_what_is_reserved_on_a_device_that_others_give_away_too_stays_counted() -> None:
    made = cluster(node("a", (device("a.0"),)))
    place(made, share(0.5))
    made.set_facts("a", node("a", (device("a.0", claim_holder="claim shop/gpu"),)), 1)
    assert {"excluded.taken": 1} == codes(decide(made, share(0.25), 1))
    made.set_facts("a", node("a", (device("a.0"),)), 2)
    assert {"not_now.share": 1} == codes(decide(made, share(0.75), 2))


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
    with pytest.raises(FieldError, match="strategy: found magic, allowed: one of bestfit, binpack, deadline, "):
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
    assert {"would_break.deadline": 1} == codes(decision)
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

"""The smallest cases in which placers of shared GPUs go wrong."""

import pytest
from decide_world import cluster, codes, device, message, node, place, request, share, take

from services.placer.core.cluster import Cluster
from services.placer.core.outcome import Fits, NotNow
from services.placer.core.pipeline import decide, fits_more
from shared.messages import Gpu, NodeState, Reservation

KEEPING_ROOM = ("deadline", "binpack")
"""Strategies that are there to keep devices together."""
EVERY = ("deadline", "binpack", "spread")


@pytest.mark.parametrize("strategy", KEEPING_ROOM)
def test_P4_jobs_of_2_4_and_4_devices_all_fit_on_nodes_of_4_4_and_2(strategy: str) -> None:
    made = cluster(node("a", 4), node("b", 4), node("c", 2))
    asked = [request(Gpu(count=count), strategy=strategy) for count in (2, 4, 4)]
    assert [["c"], ["a"], ["b"]] == [place(made, one, f"r{i}") for i, one in enumerate(asked)]


@pytest.mark.parametrize("strategy", KEEPING_ROOM)
def test_P5_two_single_devices_then_a_pair_all_fit_on_nodes_of_2_1_and_1(strategy: str) -> None:
    made = cluster(node("a", 2), node("b", 1), node("c", 1))
    singles = [place(made, request(Gpu(), strategy=strategy), f"r{i}")[0] for i in range(2)]
    assert {"b", "c"} == set(singles)
    assert ["a"] == place(made, request(Gpu(count=2), strategy=strategy), "pair")


@pytest.mark.parametrize("strategy", EVERY)
def test_P8_shares_of_0_15_fit_48_times_on_8_devices_and_not_53(strategy: str) -> None:
    made, asked = cluster(node("a", 8)), share(0.15, strategy=strategy)
    assert 48 == fits_more(made, asked, 0)
    for i in range(48):
        place(made, asked, f"r{i}")
    assert {"not_now.share": 8} == codes(decide(made, asked, 0))


@pytest.mark.parametrize("strategy", EVERY)
def test_P2_ten_shares_of_0_6_take_ten_of_sixteen_devices_and_the_rest_takes_six_more(strategy: str) -> None:
    made, asked = cluster(node("a", 8), node("b", 8)), share(0.6, strategy=strategy)
    for i in range(10):
        place(made, asked, f"r{i}")
    held = [uuid for name in "ab" for r in made.reservations(name) for uuid in r.devices]
    assert 10 == len(set(held)) == len(held)
    assert 6 == fits_more(made, asked, 0)


def test_P11_a_node_that_shrinks_from_8_to_6_devices_under_use_has_nothing_left_and_never_less() -> None:
    made = cluster(node("a", 8, cpu_milli=8_000))
    for i in range(8):
        place(made, share(1.0, cpu_milli=1_000), f"r{i}")
    made.set_facts("a", node("a", 6, cpu_milli=6_000), 0)
    slot = made.slot("a")
    assert [0, 0, 0] == [int(made.nodes[name][slot]) for name in ("cpu_free", "share_free", "whole_free")]
    assert {0} == set(made.devices["share_free"][made.all_rows()].tolist())
    assert 0 == fits_more(made, share(0.1), 0)
    made.set_reservations("a", made.reservations("a")[:3])
    assert 3 == fits_more(made, share(1.0), 0)


def test_P12_unhealthy_devices_are_not_free() -> None:
    ill = tuple(device(f"a.{i}", i, healthy=i > 2) for i in range(8))
    made = cluster(node("a", ill, state=NodeState.DEGRADED))
    assert 5 == fits_more(made, share(1.0), 0)
    assert 5_000_000 == made.nodes["share_free"][made.slot("a")]
    decision = decide(made, request(Gpu(count=6)), 0)
    assert {"excluded.unhealthy": 3, "not_now.devices": 5} == codes(decision)


@pytest.mark.parametrize("strategy", EVERY)
def test_P13_P14_gangs_that_arrive_interleaved_are_placed_whole_or_hold_nothing(strategy: str) -> None:
    """A, C, B, D of 3 replicas each on 8 devices: A and C hold 6, B and D wait; when A leaves, B fits whole."""
    made = cluster(node("a", 4), node("b", 4))
    decided = {}
    for name in "ACBD":
        asked = request(Gpu(), replicas=3, strategy=strategy)
        decided[name] = decide(made, asked, 0)
        if isinstance(decided[name], Fits):
            take(made, asked, decided[name], name)
    assert {"A": Fits, "C": Fits, "B": NotNow, "D": NotNow} == {name: type(d) for name, d in decided.items()}
    assert {"A": 3, "C": 3} == held_by(made)
    for name in "ab":
        made.set_reservations(name, tuple(r for r in made.reservations(name) if r.request_id != "A"))
    assert isinstance(decide(made, request(Gpu(), replicas=3, strategy=strategy), 0), Fits)
    assert {"C": 3} == held_by(made)


def held_by(made: Cluster) -> dict[str, int]:
    held: list[Reservation] = [r for name in "ab" for r in made.reservations(name)]
    return {r.request_id: sum(each.request_id == r.request_id for each in held) for r in held}


def test_P28_what_is_free_in_pieces_is_called_fragmented_with_its_numbers() -> None:
    """Of 8 devices each, 7, 6 and 7 are in use; 4 are needed, and 4 are free."""
    made = cluster(node("a", 8), node("b", 8), node("c", 8))
    for name, used in (("a", 7), ("b", 6), ("c", 7)):
        place(made, request(Gpu(count=used), candidates=(name,)), name)
    decision = decide(made, request(Gpu(count=4)), 0)
    assert isinstance(decision, NotNow)
    assert {"not_now.devices": 4, "not_now.share": 20} == codes(decision)
    assert "fragmented: needs 4 devices on one node, 3 nodes have 1, 2, 1 free, largest block 2 (b)" == message(
        decision
    )


def test_what_is_too_little_in_all_is_not_called_fragmented() -> None:
    made = cluster(node("a", 8), node("b", 8))
    for name in "ab":
        place(made, request(Gpu(count=7), candidates=(name,)), name)
    assert "needs 4 devices on one node, most free is 1 (a)" == message(decide(made, request(Gpu(count=4)), 0))


def test_fragments_on_many_nodes_are_told_in_short() -> None:
    made = cluster(*(node(f"n{i}", 2) for i in range(10)))
    for i in range(10):
        place(made, request(Gpu(), candidates=(f"n{i}",)), f"r{i}")
    said = message(decide(made, request(Gpu(count=2)), 0))
    assert "10 nodes have 1, 1, 1, 1, 1, 1, 1, 1 and 2 more free, largest block 1 (n0)" in said

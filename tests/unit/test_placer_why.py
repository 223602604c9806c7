"""What a refusal says: fragmentation in numbers, and the class of each reason."""

from pathlib import Path

import pytest
from decide_world import cluster, codes, device, firm, message, node, place, request, share

from services.placer.core.filters import DEVICE_FILTERS, NODE_FILTERS
from services.placer.core.outcome import Fits
from services.placer.core.pipeline import decide
from shared.messages import Gpu, Kind, Regime

PLACEMENT = (Path(__file__).parents[2] / "docs" / "placement.md").read_text(encoding="utf-8")
FRAGMENTED = "fragmented: needs 4 devices on one node, 3 nodes have 1, 2, 1 free, largest block 2 (b)"
CODES = [one.code for one in DEVICE_FILTERS]


def test_7_6_and_7_of_8_used_and_4_wanted_is_fragmented() -> None:
    made = cluster(*(node(name, 8) for name in "abc"))
    for name, used in (("a", 7), ("b", 6), ("c", 7)):
        place(made, request(Gpu(count=used), candidates=(name,)), name)
    decision = decide(made, request(Gpu(count=4)), 0)
    assert {"not_now.devices": 4, "not_now.share": 20} == codes(decision)
    assert FRAGMENTED == message(decision)


def test_where_too_little_is_free_altogether_nothing_is_fragmented() -> None:
    made = cluster(node("a", 8), node("b", 8))
    place(made, request(Gpu(count=7), candidates=("a",)), "a")
    place(made, request(Gpu(count=7), candidates=("b",)), "b")
    assert "needs 4 devices on one node, most free is 1 (a)" == message(decide(made, request(Gpu(count=4)), 0))


def test_free_parts_of_devices_are_told_with_the_largest_block() -> None:
    made = cluster(node("node-6", 2), node("node-7", 8))
    for number in range(2):
        place(made, share(0.6, candidates=("node-6",)), f"x{number}")
    for number in range(8):
        place(made, share(0.5, candidates=("node-7",), strategy="spread"), f"r{number}")
    said = message(decide(made, request(Gpu()), 0))
    assert said == (
        "needs a share of 1 of one device, largest free is 0.5 (node-7/gpu-0): "
        "fragmented, 4 free on node-7, largest block 0.5"
    )


def test_the_free_devices_of_many_nodes_are_not_told_one_by_one() -> None:
    made = cluster(*(node(f"n{number}", 2) for number in range(9)))
    for number in range(9):
        place(made, request(Gpu(), candidates=(f"n{number}",)), f"r{number}")
    said = message(decide(made, request(Gpu(count=2)), 0))
    assert said.endswith("9 nodes have 1, 1, 1, 1, 1, 1, 1, 1 and 1 more free, largest block 1 (n0)")


def test_who_would_be_late_itself_is_told_apart_from_who_would_make_others_late() -> None:
    made = cluster(node("a"))
    place(made, share(0.1, realtime=firm(50_000, 8_000)), "neighbour")
    itself = decide(made, share(0.1, realtime=firm(12_500, 8_000)), 0)
    assert {"not_now.deadline": 1} == codes(itself)
    made.set_reservations("a", ())
    place(made, share(0.1, realtime=firm(12_500, 8_000)), "neighbour")
    neighbour = decide(made, share(0.1, realtime=firm(50_000, 8_000)), 0)
    assert {"would_break.deadline": 1} == codes(neighbour)
    assert message(neighbour).startswith("neighbour needs 16.8 ms of 12.5 ms")


def test_on_a_gated_device_a_long_task_breaks_the_deadline_of_a_short_one() -> None:
    made = cluster(node("a", (device("a.0", regime=Regime.GATED),)))
    place(made, share(0.1, realtime=firm(10_000, 2_000, gate=True, kind=Kind.HARD)), "short")
    decision = decide(made, share(0.1, realtime=firm(100_000, 9_000, gate=True, kind=Kind.HARD)), 0)
    assert {"would_break.deadline": 1} == codes(decision)


def test_what_a_turn_at_the_gate_may_take_beyond_the_runtime_counts_as_runtime() -> None:
    asked = share(0.1, realtime=firm(10_000, 9_500, gate=True, kind=Kind.HARD))
    for margin_us, fits in ((500, True), (501, False)):
        made = cluster(node("a", (device("a.0", regime=Regime.GATED, handover_us=margin_us),)))
        assert fits is isinstance(decide(made, asked, 0), Fits)


@pytest.mark.parametrize("code", dict.fromkeys((*CODES, *(one.code for one in NODE_FILTERS))))
def test_every_reason_is_documented_and_of_a_documented_class(code: str) -> None:
    assert f"`{code}`" in PLACEMENT
    kind, _, _ = code.partition(".")
    assert f"| `{kind}.*` |" in PLACEMENT

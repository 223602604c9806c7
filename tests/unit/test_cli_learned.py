"""What ``laxity explain`` tells of measured response times behind the standing of a device."""

from __future__ import annotations

from random import Random

from cli.learned import numbers
from shared.messages import DeviceFacts, Regime, Reservation
from tests.unit.test_learned import model
from tests.unit.test_node_list_learning import resident

DEVICE = DeviceFacts(uuid="g0", index=0, model="H200", regime=Regime.MPS, healthy=True, memory_mib=1000)


def told(*residents: Reservation, count: int = 400) -> list[str]:
    sets: dict[tuple[str, ...], int] = {("speech",): 20_000, (): 10_000}
    return list(numbers(model({"detector": sets}, Random(1), count), DEVICE, residents))


def test_the_bounds_of_each_container_beside_the_others_are_told() -> None:
    first, second = told(resident("a", "detector"), resident("b", "speech"))
    assert first.startswith("a/0 (detector) beside speech: 99 % take at most 22.")
    assert first.endswith("ms (400 tasks seen); deadline 50 ms")
    assert "b/0 (speech) beside detector: unknown, too little was seen; deadline 50 ms" == second


def test_a_bound_without_a_proof_is_told_as_such() -> None:
    (line,) = told(resident("a", "detector"), count=200)
    assert "proven unknown (200 tasks seen)" in line


def test_a_container_of_no_profile_leaves_the_others_unknown() -> None:
    assert ["a/0 (detector): nothing is learned of some of its neighbours"] == told(
        resident("a", "detector"), resident("b", None)
    )

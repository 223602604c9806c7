"""Strategies to the letter of what they name, their parameters, and profiles."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from decide_world import cluster, codes, fits, message, node, place, request, share, total

from services.placer.core.columns import Ints
from services.placer.core.outcome import Fits, Never, NotNow
from services.placer.core.pipeline import decide, fits_by_size
from services.placer.core.strategies import STRATEGIES
from services.placer.core.strategies.binpack import Binpack, broken_line, shaped
from services.placer.core.strategies.profiles import with_profiles
from services.placer.core.strategies.slot import Slot
from services.placer.settings import PlacerSettings
from shared.errors import FieldError
from shared.messages import Gpu

# ------------------------------------------------------------------------------------------------ binpack


@dataclass(frozen=True)
class Foo:
    """The example of Kubernetes' page on bin packing: intel.com/foo weighs 5, memory 1, cpu 3."""

    shape: tuple[tuple[int, int], ...] = ((0, 0), (100, 10))
    cpu: int = 3
    memory: int = 1
    gpu: int = 5


@dataclass(frozen=True)
class Resources:
    capacity: Ints
    resources: tuple[str, ...] = ("cpu", "memory", "gpu")


def scored(used: list[int], capacity: list[int], shape: tuple[tuple[int, int], ...] = Foo.shape) -> float:
    """Used of cpu, memory and gpu; what is over the capacity counts as all of it."""
    held, there = np.array([used]), np.array([capacity])
    utilisation = np.minimum(held, there) * 100 // np.maximum(there, 1)
    strategy: Any = Foo(shape)
    rows: Any = Resources(there)
    return float(shaped(rows, utilisation, strategy)[0][0])


def test_the_worked_example_of_kubernetes_gives_5_and_7() -> None:
    """Used of cpu, memory and foo: node 1 37, 50 and 75 %, node 2 100, 75 and 50 %.

    The page counts scores from 0 to 10, the code from 0 to 100, and so do we.
    """
    line, weights = broken_line(Foo.shape), np.array([3, 1, 5])
    assert [5, 7] == [round(float(line[used] @ weights / 9)) for used in ([37, 50, 75], [100, 75, 50])]
    assert [0.6, 0.69] == [scored([3, 512, 3], [8, 1024, 4]), scored([8, 768, 4], [8, 1024, 8])]


def test_a_shape_is_read_off_in_whole_numbers() -> None:
    assert [0, 3, 5, 7, 10] == broken_line(((0, 0), (100, 10)))[[0, 37, 50, 75, 100]].tolist()
    assert [10, 7, 3, 0] == broken_line(((0, 10), (100, 0)))[[0, 37, 75, 100]].tolist()
    assert [2, 2, 6, 9, 9] == broken_line(((20, 2), (60, 9)))[[0, 20, 44, 60, 100]].tolist()


def test_what_scores_0_does_not_weigh_and_the_mean_is_rounded() -> None:
    assert 0.5 == scored([0, 0, 4], [8, 1024, 8])
    assert 0.61 == scored([5, 512, 5], [8, 1024, 8])  # (3 x 62 + 50 + 5 x 62) / 9 = 60.7
    assert 0.0 == scored([0, 0, 0], [8, 1024, 8])


def test_more_than_there_is_counts_as_all_and_of_nothing_nothing_is_scored() -> None:
    assert 1.0 == scored([9, 2048, 9], [8, 1024, 8])
    assert scored([4, 512, 0], [8, 1024, 8]) == scored([4, 512, 3], [8, 1024, 0])


def test_a_shape_that_falls_spreads() -> None:
    made = cluster(node("a", 2), node("b", 2))
    profiles = with_profiles({"wide": {"strategy": "binpack", "shape": [[0, 10], [100, 0]]}})
    place(made, share(0.5, strategy="binpack"))
    assert ["a"] == place(made, share(0.5, strategy="binpack"))
    assert ["b"] == place(made, share(0.5, strategy="wide"), strategies=profiles)


def test_weights_decide_what_is_packed() -> None:
    """Node b has more of its CPU in use, node a more of its devices."""
    made = cluster(node("a", 4), node("b", 4))
    place(made, share(1.0, candidates=("a",)), "gpu")
    place(made, request(cpu_milli=4_000, candidates=("b",)), "cpu")
    profiles = with_profiles({"cpu-first": {"strategy": "binpack", "cpu": 100, "gpu": 1}})
    assert "a" == fits(made, share(0.5, cpu_milli=100, strategy="binpack")).assignments[0].node
    chosen = fits(made, share(0.5, cpu_milli=100, strategy="cpu-first"), strategies=profiles)
    assert "b" == chosen.assignments[0].node


def test_spread_has_the_arithmetic_of_least_allocated() -> None:
    """CPU 5000 of 8000 are left, 62; memory 24576 of 32768, 75; gpu 0.5 of 2, 25: (62 + 75 + 2500) // 102 = 25."""
    made = cluster(node("a", 2))
    place(made, share(1.0, cpu_milli=1_000))
    assert 0.25 == total(made, share(0.5, cpu_milli=2_000, memory_mib=8_192, strategy="spread"))


# --------------------------------------------------------------------------------------------------- slot


def sized(name: str, size: int, devices: int = 8) -> Any:
    return node(name, devices, labels={"laxity.dev/slot": str(size)})


def slot(count: int, **fields: Any) -> Any:
    return request(Gpu(count=count), strategy="slot", **fields)


def test_a_request_goes_to_the_nodes_of_its_size_alone() -> None:
    made = cluster(sized("one", 1), sized("two", 2), sized("four", 4), sized("eight", 8))
    placed = {size: place(made, slot(size), f"r-{size}") for size in (1, 2, 4, 8)}
    assert {1: ["one"], 2: ["two"], 4: ["four"], 8: ["eight"]} == placed
    assert ["one"] == place(made, share(0.3, strategy="slot"), "share")
    assert ["four"] == place(made, slot(3), "three goes with four")


def test_what_fits_of_a_size_does_not_depend_on_what_others_take() -> None:
    made = cluster(sized("one", 1), sized("two", 2), sized("eight", 8))
    assert {1: 8, 2: 4, 4: 0, 8: 1} == fits_by_size(made, slot(1), 0)
    for number in range(8):
        place(made, slot(1), f"r-{number}")
    assert {1: 0, 2: 4, 4: 0, 8: 1} == fits_by_size(made, slot(1), 0)
    assert None is fits_by_size(made, share(0.3), 0)


def test_another_size_is_a_reason_in_numbers_and_a_full_group_is_not_now() -> None:
    made = cluster(sized("a", 1), sized("b", 1), node("c", 8), sized("d", 8))
    refused = decide(made, slot(4), 0)
    assert isinstance(refused, Never)
    assert {"never.slot": 32} == codes(refused)
    assert "needs a node of SLOT-4 for 4 devices, these are of none (1), SLOT-1 (2), SLOT-8 (1)" == message(refused)
    place(made, slot(8))
    full = decide(made, slot(8), 0)
    assert isinstance(full, NotNow)
    assert {"not_now.share": 8, "never.slot": 24} == codes(full)


def test_a_fall_back_is_taken_in_its_order_when_the_own_group_is_full() -> None:
    made = cluster(sized("one", 1, 1), sized("two", 2, 2), sized("eight", 8))
    profiles = with_profiles({"lent": {"strategy": "slot", "fallback": {"1": [8, 2]}}})
    lent = slot(1).model_copy(update={"strategy": "lent"})
    assert ["one", "eight"] == [place(made, lent, f"r-{i}", strategies=profiles)[0] for i in range(2)]
    assert {"never.slot": 10, "not_now.share": 1} == codes(decide(made, slot(1), 0))


def test_a_request_without_a_gpu_has_no_slot_and_one_too_large_has_none_either() -> None:
    made = cluster(sized("one", 1), node("none", 2, labels={"laxity.dev/slot": "big"}))
    assert isinstance(decide(made, request(cpu_milli=100, strategy="slot"), 0), Fits)
    assert isinstance(decide(made, slot(16), 0), Never)


# ----------------------------------------------------------------------------------------------- profiles


def test_a_profile_is_a_strategy_of_another_name() -> None:
    profiles = with_profiles({"tight": {"strategy": "binpack", "gpu": 10}})
    assert Binpack(gpu=10, name="tight") == profiles["tight"]
    assert {*STRATEGIES, "tight"} == set(profiles)


@pytest.mark.parametrize(
    "profiles, says",
    [
        ({"binpack": {"strategy": "spread"}}, "profiles.binpack: found binpack, allowed: a name that no strategy has"),
        ({"x": {}}, "profiles.x.strategy: found None, allowed: one of bestfit, binpack, deadline, "),
        ({"x": {"strategy": "binpack", "gpus": 1}}, "profiles.x.gpus: found 1, allowed: parameters of binpack: cpu"),
        ({"x": {"strategy": "binpack", "gpu": "much"}}, "profiles.x.gpu: found much, allowed: Input should be a valid"),
        ({"x": {"strategy": "binpack", "gpu": -1}}, "found a weight below 0"),
        ({"x": {"strategy": "binpack", "shape": [[50, 1], [20, 2]]}}, "utilisations 0 to 100 going up"),
        ({"x": {"strategy": "slot", "sizes": [4, 2]}}, "whole numbers above 0, going up"),
        ({"x": {"strategy": "slot", "fallback": {"1": [3]}}}, "sizes among"),
    ],
)
def test_a_wrong_profile_is_told_at_the_start(profiles: dict[str, Any], says: str) -> None:
    with pytest.raises(FieldError) as caught:
        with_profiles(profiles)
    assert says in str(caught.value)
    with pytest.raises(ValueError, match="profiles"):
        PlacerSettings(profiles=profiles)


def test_settings_hand_profiles_to_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAXITY_PLACER_PROFILES", '{"tight": {"strategy": "binpack", "gpu": 10}}')
    assert Binpack(gpu=10, name="tight") == PlacerSettings().rules().strategies["tight"]
    assert isinstance(PlacerSettings().rules().strategies["slot"], Slot)

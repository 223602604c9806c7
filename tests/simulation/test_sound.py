"""What a test admits is never late in a simulated device, on ten thousand random sets; `make bench-sound` runs more."""

from random import Random

import pytest

from bench import sound_sets, tight


@pytest.mark.parametrize("seed", range(5))
def test_no_set_that_a_gate_admits_is_late(seed: int) -> None:
    found = sound_sets.gated_sets(1_000, Random(seed))
    assert {"admitted": 1_000, "missed": 0, "differ": 0} == {
        key: found[key] for key in ("admitted", "missed", "differ")
    }


def test_no_set_that_a_time_sliced_device_admits_is_late() -> None:
    found = sound_sets.time_sliced_sets(5_000, Random(1))
    assert (True, 0, 0) == (found["admitted"] > 2_500, found["missed"], found["differ"])


def test_the_exact_test_admits_what_no_choice_of_phases_makes_late_and_nothing_else() -> None:
    found = sound_sets.small_sets(1_000, Random(1))
    assert (0, 0) == (found["disagree"], found["unsound"])
    assert 500 < found["online"] < found["admitted"] < 1_000


def test_no_promise_is_broken_whatever_containers_do_within_their_declarations() -> None:
    found = sound_sets.single_devices(40, Random(1))
    assert (True, 0) == (found["jobs"] > 4_000, found["missed"])


def test_a_test_that_admitted_one_microsecond_too_much_would_be_noticed() -> None:
    gated = sound_sets.gated_sets(300, Random(1), sooner_us=1)
    sliced = sound_sets.time_sliced_sets(300, Random(1), sooner_us=1)
    assert [True, True] == [found["missed"] > 30 for found in (gated, sliced)]


# -------------------------------------------------------------------------------------- tight


def test_the_online_tests_admit_most_of_what_can_be_admitted() -> None:
    counts = tight.measure(300, seed=3)
    online, exact, density = (
        tight.total(counts, name) for name in ("online_right", "exact", "density_with_blocking_right")
    )
    assert 0 == tight.total(counts, "online_wrong")
    assert online >= tight.TARGET_OF_EXACT * exact
    assert online >= tight.TARGET_OVER_DENSITY * density

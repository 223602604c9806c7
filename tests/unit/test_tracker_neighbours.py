"""A neighbour that slows a container down is found within twenty tasks; one that does not is hardly ever accused."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from services.deadline_tracker.neighbours import ALARM, HISTORY, Neighbours, density


def times(chance: Random, duty: float, slower: float) -> Iterator[tuple[float, dict[str, bool]]]:
    """Tasks of about a millisecond; the neighbour is beside some of them and makes them take longer."""
    while True:
        there = chance.random() < duty
        yield chance.uniform(900, 1_100) * (slower if there else 1), {"j": there}


def found_after(seed: int, alone: int, duty: float, slower: float, most: int) -> int | None:
    """How many tasks after its arrival the neighbour was found."""
    chance, test = Random(seed), Neighbours()
    for _ in range(alone):
        test.add(chance.uniform(900, 1_100), {"j": False})
    for number, task in zip(range(1, most + 1), times(chance, duty, slower), strict=False):
        if test.add(*task):
            return number
    return None


@pytest.mark.parametrize("duty", [0.5, 1.0])
def test_a_neighbour_that_makes_tasks_take_half_as_long_again_is_found_within_twenty(duty: float) -> None:
    found = [found_after(seed, alone=100, duty=duty, slower=1.5, most=20) for seed in range(40)]
    assert 39 <= sum(number is not None for number in found)


def test_one_that_was_always_there_for_half_of_the_tasks_is_found_too() -> None:
    found = [found_after(seed, alone=0, duty=0.5, slower=1.5, most=60) for seed in range(20)]
    assert 19 <= sum(number is not None for number in found)


def test_one_without_an_effect_is_not_accused() -> None:
    assert [None] * 40 == [found_after(seed, alone=0, duty=0.5, slower=1.0, most=HISTORY) for seed in range(40)]


@pytest.mark.parametrize("power", [0.0, 0.3, 1.0, 2.5, 40.0])
def test_a_bet_wins_nothing_on_average_over_all_ranks_that_a_time_can_have(power: float) -> None:
    for count in (1, 2, 7, 40):
        gains = [density(power, (rank + 0.5) / count) for rank in range(count)]
        assert sum(gains) / count <= 1 + 1e-9


def test_times_that_are_all_equal_are_no_evidence() -> None:
    test = Neighbours()
    assert [None] * 200 == [test.add(1_000, {"j": number % 2 == 0}) for number in range(200)]


def test_what_is_found_is_told_once_with_the_medians_with_and_without_it() -> None:
    test = Neighbours()
    told = [test.add(1_000 + 500 * (number % 2), {"j": number % 2 == 1}) for number in range(100)]
    (found,) = filter(None, told)
    assert ("j", 1_500, 1_000, 1.5) == (found.neighbour, found.beside_us, found.without_us, found.ratio)


def test_what_slows_by_a_hair_is_no_alarm() -> None:
    test = Neighbours()
    assert [None] * 200 == [test.add(1_000 + number % 2, {"j": number % 2 == 1}) for number in range(200)]


def test_who_is_only_there_together_with_a_noisy_one_is_not_accused() -> None:
    chance, test, told = Random(1), Neighbours(), []
    for _ in range(HISTORY):
        noisy = chance.random() < 0.5
        beside = {"noisy": noisy, "with_it": noisy if chance.random() < 0.8 else not noisy}
        told.append(test.add(chance.uniform(900, 1_100) * (2 if noisy else 1), beside))
    assert {"noisy"} == {found.neighbour for found in told if found}


def test_the_rate_of_false_alarms_is_the_one_that_is_stated() -> None:
    assert (1e-4, 512) == (ALARM, HISTORY)

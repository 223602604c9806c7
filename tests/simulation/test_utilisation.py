"""The lowest utilisation is the wrong choice, in simulated devices; `make bench-utilisation` runs more of it."""

from pathlib import Path

import pytest

from bench import density, utilisation
from bench.shared_devices import GATED, TIME_SLICED, Kept
from bench.utilisation import CHOOSERS, OURS, PLACES, PROMISED
from shared.units import format_us

PAGE = (Path(__file__).parents[2] / "docs" / "utilisation.md").read_text(encoding="utf-8")
SECONDS_US = 1_000_000


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_detector_misses_where_it_is_not_admitted_and_nobody_does_where_it_is(place: utilisation.Place) -> None:
    found = utilisation.one_more(place, 10 * SECONDS_US, [1])
    assert found.verdict.admitted == (found.newcomer.missed == 0)
    assert 0 == found.residents.missed
    assert found.newcomer.met > 50


def test_the_nodes_on_which_it_is_admitted_are_those_used_most() -> None:
    order = sorted(PLACES, key=lambda place: place.utilisation)
    admitted = [utilisation.one_more(place, SECONDS_US, [1]).verdict.admitted for place in order]
    assert [False, False, True, True] == admitted


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_the_page_says_what_the_admission_tests_say(place: utilisation.Place) -> None:
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| {place.name} |")]
    verdict = utilisation.one_more(place, SECONDS_US, [1]).verdict
    assert verdict.slack_us is not None
    room = f"{format_us(abs(verdict.slack_us))} {'to spare' if verdict.admitted else 'short'} |"
    assert [True, True] == [said in row for said in (f"| {round(100 * place.utilisation)} % |", room)]


def test_placed_by_guarantees_nobody_misses_and_by_anything_else_somebody_does() -> None:
    found = {chooser.name: utilisation.outcome(chooser, 42, 5 * SECONDS_US, 2) for chooser in CHOOSERS}
    ours = found.pop(OURS.name)
    assert (0, 0) == (ours.kept.missed, ours.broken)
    assert ours.admitted > 36
    assert [True] * 3 == [each.broken > 0 and each.kept.ratio < 1 for each in found.values()]


def test_what_a_container_does_does_not_depend_on_who_chose_its_device() -> None:
    utilised, packed = (utilisation.outcome(chooser, 12, 5 * SECONDS_US, 3) for chooser in CHOOSERS[:2])
    assert utilised.admitted == packed.admitted == 12
    assert utilised.kept.met + utilised.kept.missed == packed.kept.met + packed.kept.missed


def test_a_container_is_broken_that_meets_less_than_it_wants() -> None:
    assert (0.0, 0.5, 1.0) == tuple(Kept(*each).ratio for each in ((0, 3), (2, 2), (4, 0)))
    assert PROMISED < 1


# ------------------------------------------------------------------------------------------- density


SIZE = density.Size(containers=40, horizon_us=3 * SECONDS_US)


def test_ours_misses_nothing_on_fewer_gpus_than_those_who_fill_up_to_half() -> None:
    ours = density.fleet(density.OURS, GATED, SIZE, 1)
    half = [density.fleet(density.filled(other, 0.5), TIME_SLICED, SIZE, 1) for other in density.OTHERS]
    assert (0, 0) == (ours.refused, ours.kept.missed)
    assert [True] * 3 == [ours.gpus < other.gpus for other in half]


def test_a_full_device_misses_and_an_almost_empty_one_does_not() -> None:
    full, empty = (density.fleet(density.filled(density.OTHERS[0], fill), TIME_SLICED, SIZE, 1) for fill in (1, 0.1))
    assert full.kept.ratio < 1 - density.MOST_MISSED
    assert 1 == empty.kept.ratio
    assert full.gpus < empty.gpus


def test_the_fill_is_the_largest_percent_that_keeps_to_the_misses() -> None:
    tuned = density.tuned(density.OTHERS[0], TIME_SLICED, SIZE, [1])
    more = density.filled(tuned, tuned.fill_ratio + 0.01)
    ratios = [density.fleet(each, TIME_SLICED, SIZE, 1).kept.ratio for each in (tuned, more)]
    assert [True, False] == [ratio >= 1 - density.MOST_MISSED for ratio in ratios]

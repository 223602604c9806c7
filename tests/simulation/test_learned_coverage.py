"""Of tasks that were held out so many stay within their bound as it says; `make bench-predict` has more of them."""

from statistics import fmean

import pytest

from bench import predict

SIZES = (30, 100, 300, 600)


@pytest.fixture(scope="module")
def found() -> dict[str, predict.Found]:
    return predict.seen(2, seed=1, sizes=SIZES, held_out=500)


@pytest.mark.parametrize("size", SIZES[1:])
def test_of_the_tasks_held_out_99_in_100_stay_within_the_99_per_cent_bound(
    found: dict[str, predict.Found], size: int
) -> None:
    low, high = predict.COVERED
    assert low <= fmean(found[f"{size}"].covered) <= high
    assert 0 == found[f"{size}"].unknown["likely"]


def test_too_few_tasks_give_no_bound(found: dict[str, predict.Found]) -> None:
    assert [] == found["30"].covered
    assert [] == found["300"].proven


def test_what_a_bound_proves_holds_nearly_always(found: dict[str, predict.Found]) -> None:
    assert fmean([covered >= predict.RATIO for covered in found["600"].proven]) >= 0.9


def test_a_bound_for_97_per_cent_would_be_noticed() -> None:
    found = predict.seen(1, seed=1, sizes=(30, 300), held_out=500, ratio=0.97)
    assert fmean(found["300"].covered) < predict.COVERED[0]


def test_beside_neighbours_never_seen_a_bound_is_wider_and_holds() -> None:
    found, _ = predict.composed(6, seed=1, count=110, learned_sets=36, held_out=300, worlds=("together",))
    assert 4 <= len(found["together"].covered)
    assert fmean(found["together"].covered) >= predict.COVERED[0]
    assert fmean(found["together"].width) > 1

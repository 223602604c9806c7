"""Verdicts, laxity, guarantee ratios and windows on numbers that can be checked by hand."""

import json

import pytest

from shared.deadlines import (
    Outcome,
    SlidingWindow,
    Standing,
    WindowError,
    check_window,
    guarantee_ratio,
    laxity_us,
    smallest_window,
    standing,
    tardiness_us,
    verdict,
    wilson,
)


def window_of(outcomes: str, length: int) -> SlidingWindow:
    """A window that has seen these outcomes, oldest first: + is met, - is missed."""
    window = SlidingWindow(length)
    for outcome in outcomes:
        window.push(outcome == "+")
    return window


@pytest.mark.parametrize(
    "end_us,expected", [(149, Outcome.MET), (150, Outcome.MET), (151, Outcome.MISSED), (100, Outcome.MET)]
)
def test_a_task_that_ends_at_its_deadline_has_met_it(end_us: int, expected: Outcome) -> None:
    assert expected == verdict(begin_us=100, end_us=end_us, deadline_us=50)


def test_T9_a_negative_duration_is_invalid_and_neither_met_nor_missed() -> None:
    assert Outcome.INVALID == verdict(begin_us=100, end_us=99, deadline_us=50)


def test_laxity_is_the_time_left_minus_the_work_left() -> None:
    assert 50_000 - 20_000 - 12_000 == laxity_us(50_000, elapsed_us=20_000, remaining_runtime_us=12_000)
    assert -2_000 == laxity_us(50_000, elapsed_us=40_000, remaining_runtime_us=12_000)


def test_tardiness_is_never_negative() -> None:
    assert [0, 0, 7] == [tardiness_us(100, end_us, 50) for end_us in (120, 150, 157)]


def test_wilson_gives_the_published_interval() -> None:
    bounds = wilson(81, 263)  # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    assert bounds is not None
    assert (0.2553, 0.3662) == (round(bounds.lower, 4), round(bounds.upper, 4))


def test_the_ends_of_the_interval_are_exact() -> None:
    none_met, all_met = wilson(0, 20), wilson(20, 20)
    assert none_met is not None
    assert all_met is not None
    assert (0.0, 1.0) == (none_met.lower, all_met.upper)
    assert (0.1611, 0.8389) == (round(none_met.upper, 4), round(all_met.lower, 4))


def test_nothing_seen_is_unknown_and_not_zero() -> None:
    assert (None, None) == (wilson(0, 0), guarantee_ratio(0, 0))
    assert Standing.UNKNOWN == standing(0, 0, 0.99)


@pytest.mark.parametrize("met,total,confidence", [(-1, 1, 0.95), (2, 1, 0.95), (1, 1, 1.0), (1, 1, 0.0)])
def test_wilson_refuses_what_is_no_proportion(met: int, total: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="met <= total"):
        wilson(met, total, confidence)


@pytest.mark.parametrize(
    "met,missed,expected",
    [
        (380, 0, Standing.UNKNOWN),
        (381, 0, Standing.GOOD),
        (29, 1, Standing.UNKNOWN),
        (27, 3, Standing.AT_RISK),  # a few misses in thirty tasks are enough
        (0, 1, Standing.AT_RISK),
        (990, 10, Standing.UNKNOWN),
    ],
)
def test_standing_follows_the_bounds_and_never_the_mean(met: int, missed: int, expected: Standing) -> None:
    assert expected == standing(met, missed, guarantee=0.99)


def test_a_guarantee_of_all_tasks_is_never_good_and_at_risk_from_the_first_miss() -> None:
    assert [Standing.UNKNOWN, Standing.AT_RISK] == [standing(10**6, missed, guarantee=1.0) for missed in (0, 1)]


@pytest.mark.parametrize("guarantee,expected", [(0.9, 35), (0.99, 381), (0.999, 3838), (1.0, None)])
def test_the_smallest_window_is_what_theory_says(guarantee: float, expected: int | None) -> None:
    assert expected == smallest_window(guarantee)


@pytest.mark.parametrize("guarantee", [0.0, -1.0, 1.01])
def test_a_guarantee_is_a_ratio(guarantee: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        smallest_window(guarantee)


def test_a_window_too_short_for_its_guarantee_is_refused_with_the_numbers() -> None:
    check_window(381, 0.99)
    with pytest.raises(WindowError, match=r"window of 380 tasks .* 0\.99: at least 381") as error:
        check_window(380, 0.99)
    assert (380, 0.99, 381) == (error.value.window, error.value.guarantee, error.value.needed)


def test_no_window_can_show_that_nothing_is_ever_missed() -> None:
    with pytest.raises(WindowError, match="no number of tasks") as error:
        check_window(10**9, 1.0)
    assert error.value.needed is None


def test_a_full_window_forgets_its_oldest_outcome() -> None:
    window = window_of("--+++", length=4)
    assert (3, 1) == (window.met, window.missed)
    window.push(met=True)
    assert (4, 0) == (window.met, window.missed)


def test_a_window_goes_through_json_and_back() -> None:
    window = window_of("-++-+", length=4)
    state = json.loads(json.dumps(window.dump()))
    assert {"length": 4, "count": 4, "bits": "d"} == state  # + + - +, newest lowest
    assert window.dump() == SlidingWindow.load(state).dump()


@pytest.mark.parametrize("count,bits", [(5, "0"), (2, "7"), (-1, "0"), (1, "-1")])
def test_a_window_state_that_contradicts_itself_is_refused(count: int, bits: str) -> None:
    with pytest.raises(ValueError, match="contradicts"):
        SlidingWindow.load({"length": 4, "count": count, "bits": bits})


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SlidingWindow(0)


@pytest.mark.parametrize(
    "outcomes,expected",
    [
        ("", 2),  # 9 of 10: the second miss breaks it
        ("++++++++++", 2),
        ("-", 1),
        ("+++++-++++", 1),
        ("-+++++++++", 2),  # the miss is just about to fall out
        ("--++++++++", 0),
        ("----------", 0),
    ],
)
def test_the_distance_to_failure_counts_the_misses_that_are_still_allowed(outcomes: str, expected: int) -> None:
    assert expected == window_of(outcomes, length=10).distance_to_failure(9)


@pytest.mark.parametrize("m", [0, 11])
def test_m_lies_within_the_window(m: int) -> None:
    with pytest.raises(ValueError, match="m must lie"):
        SlidingWindow(10).distance_to_failure(m)

"""Deadline arithmetic against plain definitions: lists instead of rings, trial instead of formula."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.deadlines import (
    Outcome,
    SlidingWindow,
    Standing,
    laxity_us,
    smallest_window,
    standing,
    tardiness_us,
    verdict,
    wilson,
)

times = st.integers(0, 10**12)
outcomes = st.lists(st.booleans(), max_size=60)
lengths = st.integers(1, 20)


def window_of(length: int, seen: list[bool]) -> SlidingWindow:
    window = SlidingWindow(length)
    for met in seen:
        window.push(met)
    return window


@given(times, times, times)
def test_met_is_not_tardy_and_missed_is(begin_us: int, end_us: int, deadline_us: int) -> None:
    outcome = verdict(begin_us, end_us, deadline_us)
    assert (outcome is Outcome.INVALID) == (end_us < begin_us)
    assert (outcome is Outcome.MISSED) == (tardiness_us(begin_us, end_us, deadline_us) > 0)


@given(times, times, times)
def test_a_task_that_runs_on_from_its_laxity_ends_in_time_exactly_when_it_is_not_negative(
    deadline_us: int, elapsed_us: int, remaining_us: int
) -> None:
    in_time = verdict(0, elapsed_us + remaining_us, deadline_us) is Outcome.MET
    assert in_time == (laxity_us(deadline_us, elapsed_us, remaining_us) >= 0)


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_the_interval_holds_the_ratio_and_more_tasks_narrow_it(met: int, missed: int) -> None:
    total = met + missed
    bounds, finer = wilson(met, total), wilson(10 * met, 10 * total)
    if bounds is None or finer is None:
        assert (0, None, None) == (total, bounds, finer)
        return
    assert 0 <= bounds.lower <= met / total <= bounds.upper <= 1
    assert bounds.lower <= finer.lower
    assert finer.upper <= bounds.upper


@given(st.integers(0, 3000), st.integers(0, 300), st.floats(0.5, 0.999))
def test_one_more_miss_never_improves_a_standing(met: int, missed: int, guarantee: float) -> None:
    rank = {Standing.GOOD: 2, Standing.UNKNOWN: 1, Standing.AT_RISK: 0}
    if met + missed:
        assert rank[standing(met, missed + 1, guarantee)] <= rank[standing(met, missed, guarantee)]


@given(st.floats(0.01, 0.9999))
@settings(max_examples=200)
def test_the_smallest_window_is_good_when_clean_and_one_task_fewer_is_not(guarantee: float) -> None:
    needed = smallest_window(guarantee)
    assert needed is not None
    assert Standing.GOOD == standing(needed, 0, guarantee)
    assert needed == 1 or Standing.GOOD != standing(needed - 1, 0, guarantee)


@given(lengths, outcomes)
def test_a_window_counts_the_last_outcomes(length: int, seen: list[bool]) -> None:
    window, last = window_of(length, seen), seen[-length:]
    assert (last.count(True), last.count(False)) == (window.met, window.missed)


@given(lengths, outcomes, st.lists(st.tuples(st.booleans(), st.integers(0, 45)), max_size=6))
def test_many_equal_outcomes_at_once_are_as_good_as_one_by_one(
    length: int, seen: list[bool], runs: list[tuple[bool, int]]
) -> None:
    at_once, one_by_one = window_of(length, seen), window_of(length, seen)
    for met, times in runs:
        before, copy = at_once.dump(), at_once.copy()
        at_once.push(met, times)
        assert before == copy.dump()
        for _ in range(times):
            one_by_one.push(met)
        assert (one_by_one.dump(), one_by_one.met) == (at_once.dump(), at_once.met)


@given(st.integers(0, 400), st.integers(0, 400), st.integers(1, 300))
def test_a_met_task_lowers_neither_bound(met: int, missed: int, more: int) -> None:
    before, after = wilson(met, met + missed), wilson(met + more, met + more + missed)
    assert after is not None
    assert before is None or (before.lower <= after.lower and before.upper <= after.upper)


@given(lengths, outcomes, outcomes)
def test_a_window_goes_on_after_a_restart_as_if_there_had_been_none(
    length: int, before: list[bool], after: list[bool]
) -> None:
    restored = SlidingWindow.load(window_of(length, before).dump())
    for met in after:
        restored.push(met)
    assert window_of(length, before + after).dump() == restored.dump()


@given(lengths, outcomes, st.data())
def test_the_distance_to_failure_is_found_by_missing_until_it_fails(
    length: int, seen: list[bool], data: st.DataObject
) -> None:
    m = data.draw(st.integers(1, length))
    history, misses = [True] * length + seen, 0  # what was not seen counts as met
    while sum(history[-length:]) >= m:
        history.append(False)
        misses += 1
    assert misses == window_of(length, seen).distance_to_failure(m)

"""What is learned of response times: order statistics in bins, composed slowdowns, admission by what was measured."""

from __future__ import annotations

from random import Random

import pytest

from shared.admission import (
    NEVER_US,
    Beside,
    Bound,
    DeviceType,
    Learned,
    Profile,
    ResponseTimes,
    Tenant,
    Way,
    composed_us,
    explores,
)
from shared.admission.learned import MOST_SETS
from shared.admission.response_times import GENERATION
from shared.messages import LearnedProfile, Regime

H200 = DeviceType("H200", Regime.MPS)


def times(*times_us: int) -> ResponseTimes:
    made = ResponseTimes()
    made.add(times_us)
    return made


# ------------------------------------------------------------------------------------- response times


def test_a_time_counts_as_one_that_is_at_most_four_thousandths_longer() -> None:
    chance = Random(1)
    for _ in range(2_000):
        time_us = chance.randrange(1 << chance.randrange(1, 50))
        counted_us = times(time_us).order_us(1)
        assert time_us <= counted_us <= time_us * (1 + 1 / 256)


def test_places_are_counted_from_the_shortest_on() -> None:
    assert [3, 5, 5, 200] == [times(5, 200, 3, 5).order_us(place) for place in (1, 2, 3, 4)]


def test_how_many_lie_within_a_time_is_never_too_many() -> None:
    held = times(10, 20, 20, 1_000)
    assert [0, 1, 3, 3, 4] == [held.within(time_us) for time_us in (9, 10, 20, 999, 1_001)]


@pytest.mark.parametrize(("count", "place"), [(98, None), (99, 99), (199, 198), (999, 990), (4_999, 4_950)])
def test_the_likely_bound_is_the_time_at_the_place_that_conformal_prediction_names(
    count: int, place: int | None
) -> None:
    held = times(*range(1, count + 1))
    assert (place and held.order_us(place)) == held.likely_us(0.99)


@pytest.mark.parametrize(("count", "missed"), [(380, None), (381, 0), (564, 1), (563, 0)])
def test_the_proven_bound_leaves_out_as_many_as_the_wilson_bound_allows(count: int, missed: int | None) -> None:
    held = times(*range(1, count + 1))
    assert (None if missed is None else held.order_us(count - missed)) == held.proven_us(0.99)


def test_a_task_that_never_ended_is_longer_than_any_other() -> None:
    held = times(*[10] * 990, *[NEVER_US] * 30)
    assert (10, NEVER_US) == (held.order_us(990), held.proven_us(0.99))


def test_what_has_changed_is_forgotten() -> None:
    held = times(*[100] * 2 * GENERATION, *[50] * GENERATION)
    assert 2 * GENERATION == len(held)
    assert 100 == held.proven_us(0.99)
    held.add([50] * (GENERATION + 1))
    assert GENERATION + 1 == len(held)
    assert 50 == held.proven_us(0.99)


# ------------------------------------------------------------------------------------------- slowdown


def test_slowdowns_that_add_up_are_found_without_the_time_alone() -> None:
    seen: dict[Beside, float] = {("a",): 120, ("b",): 150, ("a", "a"): 140}
    assert 170 == pytest.approx(composed_us(seen, ("a", "b"), Way.ADDED))


def test_slowdowns_that_multiply_are_found() -> None:
    seen: dict[Beside, float] = {(): 100, ("a",): 120, ("b",): 150}
    assert 180 == pytest.approx(composed_us(seen, ("a", "b"), Way.MULTIPLIED))


def test_a_neighbour_never_seen_and_two_that_were_always_together_tell_nothing() -> None:
    together: dict[Beside, float] = {(): 100, ("a", "b"): 150}
    assert [None, None] == [composed_us(together, beside, Way.ADDED) for beside in (("c",), ("a",))]
    assert 150 == pytest.approx(composed_us(together, ("a", "b"), Way.ADDED))


def test_nothing_is_said_of_two_neighbours_more_than_ever() -> None:
    assert composed_us({(): 100, ("a",): 110}, ("a", "a", "a"), Way.ADDED) is None


def test_nobody_speeds_another_one_up() -> None:
    seen: dict[Beside, float] = {(): 100, ("a",): 90, ("b",): 100}
    assert 100 == composed_us(seen, ("a", "b"), Way.ADDED)


# -------------------------------------------------------------------------------------------- bounds


def model(profiles: dict[str, dict[Beside, int]], chance: Random, count: int = 1_000, spread: float = 0.05) -> Learned:
    """Of each profile beside each set of neighbours so many times around one."""
    learned = Learned()
    for name, sets in profiles.items():
        profile = Profile()
        for beside, usual_us in sets.items():
            profile.add(beside, [round(usual_us * chance.gauss(1, spread)) for _ in range(count)])
        learned.put(H200, name, profile)
    return learned


def test_nothing_is_known_of_what_was_not_seen() -> None:
    learned = model({"detector": {(): 10_000}}, Random(1))
    assert learned.bound(H200, "other", (), 0.99) is None
    assert learned.bound(DeviceType("L4", Regime.MPS), "detector", (), 0.99) is None
    assert learned.bound(H200, "detector", ("other",), 0.99) is None


def test_few_tasks_give_a_bound_that_is_likely_and_not_proven_and_fewer_give_none() -> None:
    few = model({"detector": {(): 10_000}}, Random(1), count=200).bound(H200, "detector", (), 0.99)
    assert few
    assert (True, None, 200) == (few.likely_us is not None, few.proven_us, few.samples)
    assert model({"detector": {(): 10_000}}, Random(1), count=98).bound(H200, "detector", (), 0.99) is None


SETS: dict[Beside, int] = {
    tuple(sorted(a * "a" + b * "b" + c * "c")): 10_000 + 1_000 * a + 2_000 * b + 500 * c
    for a in range(3)
    for b in range(3)
    for c in range(3)
}


def test_a_set_of_neighbours_never_seen_is_composed_where_there_are_enough_to_compare_with() -> None:
    left = {beside: us for beside, us in SETS.items() if beside != ("a", "b", "c")}
    found = model({"detector": left}, Random(1)).bound(H200, "detector", ("a", "b", "c"), 0.99)
    assert found
    assert found.composed
    assert 13_500 * 1.11 < (found.likely_us or 0) <= (found.proven_us or 0) < 13_500 * 1.2
    few = dict(list(left.items())[:15])
    assert model({"detector": few}, Random(1)).bound(H200, "detector", ("a", "b", "c"), 0.99) is None


def test_what_was_learned_is_the_same_after_it_was_written_and_read() -> None:
    learned = model({"detector": SETS}, Random(2), count=400)
    profile = learned.get(H200, "detector")
    assert profile
    written = profile.message(H200, "detector", 7).to_json()
    again = Learned()
    again.put(H200, "detector", Profile.of(LearnedProfile.trusted(written)))
    for beside in [*SETS, ("a", "b", "b", "c", "c")]:
        assert learned.bound(H200, "detector", beside, 0.99) == again.bound(H200, "detector", beside, 0.99)


def test_a_profile_has_room_for_so_many_sets_of_neighbours_and_a_full_one_for_a_message() -> None:
    profile, chance = Profile(), Random(1)
    for number in range(MOST_SETS + 1):
        profile.add((f"{number}",), [round(chance.lognormvariate(9, 0.5)) for _ in range(3_000)])
    assert (MOST_SETS, False) == (len(profile.times), ("0",) in profile.times)
    assert 600_000 > len(profile.message(H200, "detector", 0).to_json())


# ----------------------------------------------------------------------------------------- admission


def tenant(name: str, deadline_us: int | None, profile: str = "") -> Tenant:
    return Tenant(name, profile or name, deadline_us, 0.99)


def test_it_is_admitted_where_all_keep_their_deadlines_beside_each_other() -> None:
    learned = model({"a": {("b",): 10_000}, "b": {("a",): 20_000}}, Random(1))
    verdict = learned.admit(H200, [tenant("b", 30_000)], tenant("a", 15_000))
    assert verdict
    assert (True, False, "measured", None) == (
        verdict.admitted,
        verdict.unproven,
        verdict.test,
        verdict.late,
    )
    assert "99 % of the tasks of a take at most" in verdict.reason


def test_a_newcomer_that_would_break_a_resident_is_refused_and_the_resident_is_named() -> None:
    learned = model({"a": {("b",): 10_000}, "b": {(): 10_000, ("a",): 20_000}}, Random(1))
    verdict = learned.admit(H200, [tenant("b", 21_000)], tenant("a", 15_000))
    assert verdict
    assert (False, "b") == (verdict.admitted, verdict.late)
    assert verdict.slack_us is not None
    assert verdict.slack_us < 0


def test_nothing_is_said_while_one_of_them_is_unknown_unless_another_one_is_known_to_be_late() -> None:
    learned = model({"a": {("b",): 10_000}}, Random(1))
    assert learned.admit(H200, [tenant("b", 30_000)], tenant("a", 15_000)) is None
    late = learned.admit(H200, [tenant("b", 30_000)], tenant("a", 9_000))
    assert late
    assert not late.admitted


def test_nothing_was_promised_to_a_soft_neighbour_that_still_slows_others_down() -> None:
    learned = model({"a": {("b",): 10_000}}, Random(1))
    verdict = learned.admit(H200, [tenant("b", None)], tenant("a", 15_000))
    assert verdict
    assert verdict.admitted


def test_who_explores_is_content_with_the_likely_bound() -> None:
    learned = model({"a": {(): 10_000}}, Random(1), count=200)
    assert learned.admit(H200, [], tenant("a", 15_000)) is None
    verdict = learned.admit(H200, [], tenant("a", 15_000), explore=True)
    assert verdict
    assert verdict.admitted


def test_one_request_in_a_hundred_explores_and_always_the_same_ones() -> None:
    exploring = [number for number in range(100_000) if explores(f"r{number}")]
    assert 900 < len(exploring) < 1_100
    assert exploring == [number for number in range(100_000) if explores(f"r{number}")]


def test_a_task_that_does_not_end_counts_against_a_device() -> None:
    profile = Profile()
    profile.add((), [10_000] * 980 + [NEVER_US] * 40)
    learned = Learned()
    learned.put(H200, "a", profile)
    assert learned.bound(H200, "a", (), 0.99) == Bound(NEVER_US, NEVER_US, 1_020)
    verdict = learned.admit(H200, [], tenant("a", 15_000))
    assert verdict
    assert (False, "more tasks of a than it may have do not end") == (
        verdict.admitted,
        verdict.reason.partition(" beside")[0],
    )

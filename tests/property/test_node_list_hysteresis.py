"""A device near an edge does not flap: random walks of its slack, and how often its standing may change in the list."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.deadline_tracker.record import Record
from services.node_list.hysteresis import Hysteresis
from services.node_list.standing import ClassTask
from shared.deadlines import Outcome, SlidingWindow, Standing, standing
from shared.lists import PLACE_OF
from shared.messages import ClassStanding, DeviceStanding

GUARANTEED, TIGHT, FULL, AT_RISK, EXCLUDED = DeviceStanding
WANTED = ClassTask("interactive", 50_000, 12_000, 50_000)
DEVICE = ("n1", "g0")
TIGHT_RATIO, RATIO, AFTER_US = 0.1, 0.05, 5_000_000
EDGE_US, MARGIN_US = 5_000, 2_500
STEP_US = 100_000


def found(slack_us: int | None, standing: DeviceStanding | None = None) -> ClassStanding:
    if standing is None:
        assert slack_us is not None
        standing = FULL if slack_us < 0 else TIGHT if slack_us < EDGE_US else GUARANTEED
    return ClassStanding(standing=standing, slack_us=slack_us)


class Walk:
    """The list's word on one device, which is what was settled last."""

    def __init__(self) -> None:
        self.rule = Hysteresis(TIGHT_RATIO, RATIO, AFTER_US)
        self.listed: ClassStanding | None = None
        self.now_us = 0

    def step(self, what: ClassStanding, after_us: int = STEP_US) -> DeviceStanding:
        self.now_us += after_us
        self.listed = self.rule.settle(DEVICE, WANTED, self.listed, what, self.now_us)
        return self.listed.standing


def test_a_better_standing_is_left_at_once() -> None:
    walk = Walk()
    assert [walk.step(found(slack)) for slack in (5_000, 4_999, -1)] == [GUARANTEED, TIGHT, FULL]


def test_it_is_taken_again_where_the_slack_exceeds_its_edge_by_enough() -> None:
    walk = Walk()
    walk.step(found(-1))
    slacks = (0, 2_499, 2_500, 5_000, 7_499, 7_500)
    assert [walk.step(found(slack)) for slack in slacks] == [FULL, FULL, TIGHT, TIGHT, TIGHT, GUARANTEED]


def test_nearer_to_the_edge_it_is_taken_again_once_nothing_worse_was_seen_for_long_enough() -> None:
    walk = Walk()
    walk.step(found(4_999))
    assert [walk.step(found(5_100), 1_000_000) for _ in range(5)] == [TIGHT] * 5
    assert walk.step(found(5_100), 1_000_000) == GUARANTEED
    assert walk.step(found(5_100), 1_000_000) == GUARANTEED


def test_something_worse_in_between_makes_the_wait_begin_again() -> None:
    walk = Walk()
    walk.step(found(4_999))
    walk.step(found(5_100), 4_000_000)
    walk.step(found(4_999), 4_000_000)
    assert walk.step(found(5_100), 4_000_000) == TIGHT


def test_the_slack_is_told_as_it_is_and_the_reason_says_why_the_standing_is_not() -> None:
    walk = Walk()
    walk.step(found(4_999))
    walk.step(found(5_100))
    assert walk.listed is not None
    assert (walk.listed.slack_us, "held back" in (walk.listed.reason or "")) == (5_100, True)


def test_what_was_at_risk_or_excluded_comes_back_when_its_cause_is_gone() -> None:
    for was in (AT_RISK, EXCLUDED):
        walk = Walk()
        walk.step(found(None, was))
        assert walk.step(found(5_001)) == GUARANTEED


def test_a_device_that_waits_is_due_when_its_time_has_come() -> None:
    walk = Walk()
    walk.step(found(4_999))
    walk.step(found(5_100))
    waiting = walk.rule.due(walk.now_us + AFTER_US - 1)
    walk.rule.forget(("n1", "g1"))
    assert (waiting, walk.rule.due(walk.now_us + AFTER_US)) == (set(), {"n1"})
    walk.rule.forget(DEVICE)
    assert walk.rule.due(walk.now_us + AFTER_US) == set()


@given(st.integers(0, 1 << 32), st.sampled_from([0, EDGE_US]), st.sampled_from([50, 500, 2_000]))
@settings(max_examples=15, deadline=None)
def test_a_random_walk_at_an_edge_changes_the_standing_seldom(seed: int, edge_us: int, stride_us: int) -> None:
    """Each return needs a climb of a margin, or ``after_us`` of its own; each fall a return before it."""
    chance, walk, steps = Random(seed), Walk(), 300
    slacks = [edge_us]
    for _ in range(steps):
        slacks.append(min(edge_us + 3_000, max(edge_us - 3_000, slacks[-1] + chance.randint(-stride_us, stride_us))))
    said = [walk.step(found(slack)) for slack in slacks]
    climbs = sum(max(0, after - before) for before, after in pairwise(slacks))
    returns = climbs // MARGIN_US + steps * STEP_US // AFTER_US
    assert sum(before != after for before, after in pairwise(said)) <= 2 * returns + 2


@given(st.integers(0, 1 << 32))
@settings(max_examples=15, deadline=None)
def test_noise_at_an_edge_changes_the_standing_once(seed: int) -> None:
    chance, walk = Random(seed), Walk()
    noise = [EDGE_US + chance.choice([-100, 100, 0, -1]) for _ in range(200)]
    noise[::20] = [EDGE_US - 1] * len(noise[::20])  # never still for as long as it must be
    said = [walk.step(found(slack)) for slack in noise]
    raw = [found(slack).standing for slack in noise]
    assert sum(before != after for before, after in pairwise(said)) <= 1
    assert sum(before != after for before, after in pairwise(raw)) > 40


@given(st.integers(0, 1 << 32))
@settings(max_examples=15, deadline=None)
def test_a_record_at_its_guarantee_warns_and_recovers_seldom(seed: int) -> None:
    """Why ``at_risk`` needs no rule of the list's: from one bound of a record to the other it takes many verdicts."""
    window, guarantee, steps = 200, 0.9, 2_000
    by_misses = [standing(window - misses, misses, guarantee) for misses in range(window + 1)]
    gap = by_misses.index(Standing.AT_RISK) - max(n for n, each in enumerate(by_misses) if each == Standing.GOOD)
    chance, record = Random(seed), Record("c", guarantee, SlidingWindow(window))
    for _ in range(window):
        record.judge(Outcome.MET)
    crossed = [record.judge(Outcome.MISSED if chance.random() > guarantee else Outcome.MET) for _ in range(steps)]
    assert gap > 15
    assert sum(word is not None for word in crossed) <= steps // gap


@given(st.integers(0, 1 << 32))
@settings(max_examples=15, deadline=None)
def test_a_list_never_says_better_than_was_found(seed: int) -> None:
    chance, walk = Random(seed), Walk()
    for _ in range(200):
        what = found(chance.randint(-6_000, 12_000))
        assert PLACE_OF[walk.step(what, chance.randint(0, 3_000_000))] >= PLACE_OF[what.standing]

"""In simulated devices the tracker names who caused a miss, and who is noisy; `make bench-culprit` asks more often."""

from random import Random

import pytest

from bench import culprit
from shared.messages import Cause, CauseKind, DeadlineEvent, Regime


@pytest.mark.parametrize("regime", culprit.REGIMES)
def test_the_culprit_of_nearly_every_overrun_is_named_rightly(regime: Regime) -> None:
    found = culprit.overruns(regime, 100, Random(11))
    assert found["hurt"] >= 100
    assert found["hurt"] == found["right"] + found["wrong"] + found["unknown"]
    assert found["right"] >= culprit.TARGET * found["hurt"]
    assert 0 == found["without_a_fault"]
    assert 0 == found["alarms"] or regime is Regime.MPS  # where neighbours do slow each other down, by contention


@pytest.mark.parametrize("regime", culprit.REGIMES)
def test_a_clock_that_is_told_to_be_held_back_is_named_and_nobody_on_the_device(regime: Regime) -> None:
    told, inferred = (culprit.slowed(regime, 20, Random(11), told=told) for told in (True, False))
    assert told["device"] == told["misses"] >= 20
    assert inferred["device"] < inferred["misses"]


def test_a_power_cap_that_is_usual_hides_no_culprit() -> None:
    found = culprit.overruns(Regime.GATED, 30, Random(11), culprit.CAPPED)
    assert found["hurt"] >= 30
    assert found["right"] >= culprit.TARGET * found["hurt"]


def test_an_answer_that_names_another_container_is_counted_as_wrong() -> None:
    because = (Cause(cause=CauseKind.OVERRAN, container="a", amount_us=1),)
    said = {"kind": "missed", "task": 1, "deadline_us": 1, "met": 0, "missed": 1, "guarantee": 0.9}
    bounds = {"ratio": None, "lower": None, "upper": None}
    event = DeadlineEvent.model_validate(
        {"at_us": 0, "node": "n", "container": "v", "because": because} | said | bounds
    )
    assert ["right", "wrong", "wrong"] == [culprit.answer(event, name) for name in ("a", "b", "v")]


def test_a_noisy_neighbour_is_found_within_twenty_tasks_or_a_second() -> None:
    found = culprit.noisy(12, Random(11), culprit.loud)
    assert found["pairs"] >= 12
    assert found["in_time"] >= culprit.TARGET * found["pairs"] - 1
    assert found["others"] <= 1


@pytest.mark.parametrize("regime", culprit.REGIMES)
def test_nobody_is_found_noisy_where_nobody_has_an_effect_but_by_sharing(regime: Regime) -> None:
    found = culprit.quiet(regime, 4, Random(11))
    assert found["tasks"] > 1_000
    assert 0 == found["alarms"]

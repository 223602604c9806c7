"""Of pods that were refused those of a higher priority are tried first once something is free (case KU08)."""

from __future__ import annotations

from typing import Any

import pytest

from services.kube_bridge import sentences
from services.kube_bridge.calls import AskPlace, PlaceAnswered
from services.kube_bridge.core import SOON
from services.kube_bridge.nudging import HEAD_START_US
from shared.effects import Effect
from shared.messages import State
from tests.kube_bridge_world import Bridge, answer, rejected, wanting, written


@pytest.fixture
def bridge() -> Bridge:
    """With one device that is taken."""
    bridge = Bridge()
    bridge.reserve("n1", "other")
    return bridge


def pod(uid: str, priority: int = 0) -> dict[str, Any]:
    return wanting(uid=uid, priority=priority)


def refuse(bridge: Bridge, found: dict[str, Any], *nodes: str) -> None:
    token, _ = bridge.filter(found, nodes)
    bridge.tell(PlaceAnswered(token, rejected(found["metadata"]["uid"])))


def asks(effects: list[Effect]) -> bool:
    return any(isinstance(each, AskPlace) for each in effects)


def put_off(effects: list[Effect]) -> bool:
    return {sentences.LATER} == {*answer(effects)["FailedAndUnresolvableNodes"].values()}


def nudged(bridge: Bridge, seconds: float = 1) -> list[str]:
    return [each.uid for each in written(bridge.tick(SOON, seconds)) if each.probed]


def test_one_that_comes_in_between_waits_for_the_one_above_it_and_then_has_its_turn(bridge: Bridge) -> None:
    refuse(bridge, pod("high", 1000))
    bridge.reserve("n1")
    assert put_off(bridge.filter(pod("low", 10))[1])
    assert ["high", "low"] == nudged(bridge)
    bridge.hold(pod("high", 1000), "n1")
    assert asks(bridge.filter(pod("low", 10))[1])


def test_one_above_it_that_was_refused_again_holds_nobody_back(bridge: Bridge) -> None:
    refuse(bridge, pod("high", 1000))
    bridge.reserve("n1")
    refuse(bridge, pod("high", 1000))
    assert asks(bridge.filter(pod("low", 10))[1])


def test_the_order_among_equals_and_of_those_above_is_as_it_was(bridge: Bridge) -> None:
    refuse(bridge, pod("low", 10))
    bridge.reserve("n1")
    assert asks(bridge.filter(pod("equal", 10))[1])
    assert asks(bridge.filter(pod("high", 1000))[1])


def test_nobody_waits_for_one_that_is_offered_other_nodes(bridge: Bridge) -> None:
    refuse(bridge, pod("high", 1000), "n2", "n3")
    bridge.reserve("n1")
    assert asks(bridge.filter(pod("low", 10), ["n1"])[1])


def test_one_that_holds_a_place_is_not_put_off(bridge: Bridge) -> None:
    refuse(bridge, pod("high", 1000))
    bridge.reserve("n1")
    bridge.record(pod("low", 10), State.HELD)
    assert asks(bridge.filter(pod("low", 10))[1])


def test_nobody_is_put_off_for_ever_by_one_that_does_not_come(bridge: Bridge) -> None:
    refuse(bridge, pod("high", 1000))
    bridge.reserve("n1")
    assert put_off(bridge.filter(pod("low", 10))[1])
    bridge.now += HEAD_START_US - 1
    assert put_off(bridge.filter(pod("low", 10))[1])
    bridge.now += 1
    assert asks(bridge.filter(pod("low", 10))[1])


def test_one_that_was_put_off_is_nudged_until_it_has_had_its_turn(bridge: Bridge) -> None:
    refuse(bridge, pod("high", 1000))
    bridge.reserve("n1")
    bridge.filter(pod("low", 10))
    refuse(bridge, pod("high", 1000))
    assert ["low"] == nudged(bridge)
    refuse(bridge, pod("low", 10))
    assert [] == nudged(bridge)

"""Our condition of pods that are bound: true of those that were refused before, and not written of any other."""

from __future__ import annotations

from typing import Any

import pytest

from services.kube_bridge.calls import ConfirmAnswered, PlaceAnswered
from services.kube_bridge.core import COMPARE
from shared.effects import Effect
from shared.messages import State
from tests.kube_bridge_world import Bridge, held, rejected, wanting, written


@pytest.fixture
def bridge() -> Bridge:
    return Bridge()


def refused(found: dict[str, Any]) -> dict[str, Any]:
    """As the API server shows it."""
    one = {"type": "laxity.dev/Placed", "status": "False", "reason": "NotNowShare", "message": "of 3 nodes: no share"}
    return found | {"status": found["status"] | {"conditions": [one]}}


def on_n1(**more: Any) -> dict[str, Any]:
    return wanting(node="n1", annotations={"devices": "n1-gpu-0,n1-gpu-1"}, **more)


def bind(bridge: Bridge) -> list[Effect]:
    bridge.hold(wanting(), "n1")
    token, _ = bridge.bind(wanting(), "n1")
    return bridge.tell(ConfirmAnswered(token, held("u-1", "n1", outcome="started")))


def said(effects: list[Effect]) -> list[tuple[str, str, str]]:
    found = [each.condition for each in written(effects)]
    return [(each.status, each.reason, each.message) for each in found]


def test_one_that_was_never_refused_is_bound_without_a_word(bridge: Bridge) -> None:
    bridge.show(wanting())
    assert [] == said(bind(bridge))
    bridge.show(on_n1())
    assert [] == said(bridge.tick(COMPARE, 10))


def test_one_that_was_refused_by_this_bridge_says_where_it_is(bridge: Bridge) -> None:
    token, _ = bridge.filter(wanting())
    bridge.tell(PlaceAnswered(token, rejected("u-1")))
    bridge.core.view.world += 1
    assert [("True", "Bound", "on n1-gpu-0 of n1, share 0.25 of each")] == said(bind(bridge))


def test_one_that_was_refused_by_another_bridge_says_so_too(bridge: Bridge) -> None:
    bridge.show(refused(wanting()))
    assert [("True", "Bound", "on n1-gpu-0 of n1, share 0.25 of each")] == said(bind(bridge))


def test_what_is_shown_too_late_or_was_overtaken_is_mended(bridge: Bridge) -> None:
    """An older write may come after that one; what was written just now has its time to be shown."""
    assert [] == said(bind(bridge))
    bridge.record(wanting(), State.STARTED)
    bridge.show(refused(on_n1()))
    assert [("True", "Bound", "on n1-gpu-0, n1-gpu-1 of n1")] == said(bridge.tick(COMPARE, 10))
    assert [] == said(bridge.tick(COMPARE, 10))
    assert 1 == len(said(bridge.tick(COMPARE, 31))), "nothing came of it"
    bridge.show(on_n1())
    assert [] == said(bridge.tick(COMPARE, 31))


@pytest.mark.parametrize("found", [refused(wanting(node="n1")), refused(wanting()), refused(on_n1(phase="Failed"))])
def test_one_that_others_have_bound_that_waits_or_has_ended_is_left_as_it_is(
    bridge: Bridge, found: dict[str, Any]
) -> None:
    bridge.show(found)
    assert [] == [each for each in said(bridge.tick(COMPARE, 10)) if each[0] == "True"]

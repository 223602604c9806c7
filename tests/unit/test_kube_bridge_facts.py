"""What the bridge tells of nodes: when something in it is new, and again and again as it was told last."""

from __future__ import annotations

from typing import Any

import pytest

from services.kube_bridge.calls import NodeChanged, NodeGone
from services.kube_bridge.core import SOON
from services.kube_bridge.facts import AGAIN_TICKS, GRACE_TICKS
from services.kube_bridge.seen import NodeSeen
from shared.effects import Emit
from shared.messages import KubeNodeFacts, State
from tests.kube_bridge_world import Bridge, wanting
from tests.kube_pods import node, pod


@pytest.fixture
def bridge() -> Bridge:
    """One node, which has just been told of again: ticks say what is new for a while."""
    bridge = Bridge("n1")
    while not told(bridge):
        pass
    while not told(bridge):
        pass
    return bridge


def told(bridge: Bridge) -> list[int | None]:
    """CPU that others reserve on the node, each time it is told of."""
    bodies = [each.body for each in bridge.tick(SOON, 1) if isinstance(each, Emit)]
    return [each.foreign_cpu_milli for each in bodies if isinstance(each, KubeNodeFacts)]


def ours(**more: Any) -> dict[str, Any]:
    """A pod as our Binding makes it."""
    return wanting(cpu="1", node="n1", annotations={"devices": "n1-gpu-0"}, **more)


def test_a_pod_of_ours_that_comes_is_used_and_goes_says_nothing_new(bridge: Bridge) -> None:
    bridge.record(wanting(), State.PLACED)
    bridge.show(ours())
    assert [] == told(bridge)
    bridge.record(wanting(), State.STARTED)
    bridge.show(ours(phase="Running"))
    assert [] == told(bridge)
    bridge.show(ours(phase="Succeeded"))
    bridge.record(wanting(), State.EXITED)
    assert [] == told(bridge)


def test_a_pod_of_ours_that_is_seen_before_its_reservation_is_not_foreign(bridge: Bridge) -> None:
    bridge.show(ours())
    assert [] == told(bridge)
    bridge.record(wanting(), State.STARTED)
    assert [] == [each for _ in range(AGAIN_TICKS - 2) for each in told(bridge) if each]


def test_a_pod_with_devices_that_the_ledger_does_not_know_is_foreign_after_a_while(bridge: Bridge) -> None:
    bridge.show(ours())
    assert [[]] * GRACE_TICKS + [[1000]] == [told(bridge) for _ in range(GRACE_TICKS + 1)]
    bridge.record(wanting(), State.STARTED)
    assert [0] == told(bridge), "until its reservation is rebuilt"


def test_a_pod_whose_reservation_goes_before_it_is_foreign_from_then_on(bridge: Bridge) -> None:
    bridge.record(wanting(), State.STARTED)
    bridge.show(ours())
    for _ in range(AGAIN_TICKS):
        told(bridge)
    bridge.record(wanting(), State.RELEASED)
    assert [1000] == told(bridge)
    bridge.record(wanting(uid="u-1"), State.STARTED, "n2")
    assert [] == told(bridge), "that of another node does not stand for it"


def test_others_are_foreign_at_once_as_long_as_they_are_there(bridge: Bridge) -> None:
    bridge.show(pod("theirs", "u-9", node="n1", cpu="1"))
    bridge.show(wanting("theirs too", "u-8", cpu="2", node="n1"))
    assert [3000] == told(bridge)
    bridge.show(pod("theirs", "u-9", node="n1", cpu="500m"))
    assert [2500] == told(bridge), "it was resized"
    bridge.delete(pod("theirs", "u-9"))
    assert [2000] == told(bridge)


def test_what_is_told_again_is_of_now(bridge: Bridge) -> None:
    bridge.show(pod("theirs", "u-9", node="n1", cpu="1"))
    assert [1000] == told(bridge)
    again = [each for _ in range(AGAIN_TICKS) for each in bridge.tick(SOON, 1) if isinstance(each, Emit)]
    (body,) = [each.body for each in again if isinstance(each.body, KubeNodeFacts)]
    assert (1000, True) == (body.foreign_cpu_milli, bridge.now - body.at_us < AGAIN_TICKS * 1_000_000)


def test_a_node_that_is_shown_as_it_was_says_nothing_and_one_that_comes_back_does(bridge: Bridge) -> None:
    bridge.tell(NodeChanged(NodeSeen.of(node("n1"))))
    assert [] == told(bridge)
    bridge.tell(NodeGone("n1"))
    assert [None] == told(bridge)
    bridge.tell(NodeChanged(NodeSeen.of(node("n1"))))
    assert [0] == told(bridge)

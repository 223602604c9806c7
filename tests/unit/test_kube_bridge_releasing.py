"""What pods held that are over, as a bridge's core gives it back; where pods and ledger differ; node facts."""

from __future__ import annotations

from typing import Any

import pytest

from services.kube_bridge.calls import (
    AskRelease,
    Listed,
    LookAtPod,
    NodeChanged,
    NodeGone,
    PlaceAnswered,
    PodLooked,
    ReleaseAnswered,
)
from services.kube_bridge.core import COMPARE, SOON
from services.kube_bridge.seen import NodeSeen, PodSeen
from shared.effects import Effect, Emit, Publish
from shared.messages import BusEvent, KubeNodeFacts, PlaceReply, State
from tests.kube_bridge_world import Bridge, rejected, wanting, written
from tests.kube_pods import node, pod


@pytest.fixture
def bridge() -> Bridge:
    return Bridge()


def running(name: str = "web", uid: str = "u-1", where: str = "n1", **more: Any) -> dict[str, Any]:
    return wanting(name, uid, node=where, phase="Running", annotations={"devices": f"{where}-gpu-0"}, **more)


def ended(found: dict[str, Any], phase: str = "Failed") -> dict[str, Any]:
    return found | {"status": {"phase": phase, "reason": "UnexpectedAdmissionError"}}


def releases(effects: list[Effect]) -> list[str]:
    return [each.request_id for each in effects if isinstance(each, AskRelease)]


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_KU12_a_pod_that_ended_is_given_back_though_its_object_stays(bridge: Bridge, phase: str) -> None:
    """The placers may say first how it ended; then nothing is left to give back."""
    bridge.show(running())
    bridge.record(running(), State.STARTED)
    assert [] == releases(bridge.show(ended(running(), phase)))
    assert [] == releases(bridge.tick(SOON, 1))
    assert ["u-1"] == releases(bridge.tick(SOON, 3))
    assert [] == releases(bridge.tick(SOON, 1)), "asked once"
    bridge.tell(ReleaseAnswered("u-1", None))
    assert ["u-1"] == releases(bridge.tick(SOON, 1)), "nobody answered"
    bridge.tell(ReleaseAnswered("u-1", PlaceReply(outcome="released", request_id="u-1")))
    bridge.record(running(), State.RELEASED)
    assert [] == releases(bridge.tick(SOON, 1))


def test_KU12_where_the_placers_saw_the_end_nothing_is_given_back_twice(bridge: Bridge) -> None:
    bridge.show(running())
    bridge.record(running(), State.STARTED)
    bridge.show(ended(running()))
    bridge.record(running(), State.EXITED)

    assert [] == releases(bridge.tick(SOON, 10))


def test_KU12_another_pod_of_the_same_name_is_another_pod(bridge: Bridge) -> None:
    bridge.show(running())
    bridge.record(running(), State.STARTED)
    bridge.delete(running())
    bridge.show(running(uid="u-2"))
    bridge.record(running(uid="u-2"), State.STARTED)

    assert ["u-1"] == releases(bridge.tick(SOON, 4))


def test_a_pod_that_is_only_being_deleted_keeps_what_it_has(bridge: Bridge) -> None:
    """Its containers may still run: deletionTimestamp says nothing of them (case KU06)."""
    leaving = running()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    bridge.record(running(), State.STARTED)
    bridge.show(leaving)

    assert [] == [
        *releases(bridge.tick(SOON, 10)),
        *releases(bridge.tick(COMPARE, 60)),
        *releases(bridge.tick(SOON, 10)),
    ]


def test_KU12_what_ended_while_no_bridge_was_there_is_found_and_looked_at_first(bridge: Bridge) -> None:
    bridge.record(running(), State.STARTED)
    bridge.record(running("gone", "u-2"), State.EXPIRED)
    effects = bridge.tick(COMPARE, 10)
    assert {("web", "u-1"), ("gone", "u-2")} == {(e.name, e.uid) for e in effects if isinstance(e, LookAtPod)}
    assert [] == releases(bridge.tell(PodLooked("u-1", there=True, node="n1")))
    assert [] == releases(bridge.tell(PodLooked("u-1", there=None))), "nobody knows"
    assert ["u-2"] == releases(bridge.tell(PodLooked("u-2", there=False)))
    assert [] == releases(bridge.tell(PodLooked("u-1", there=False)))
    assert ["u-1"] == releases(bridge.tick(SOON, 4))


def test_what_the_ledger_has_on_nodes_of_another_cluster_is_left_alone(bridge: Bridge) -> None:
    bridge.record(running(where="elsewhere"), State.STARTED, "elsewhere")

    assert [] == [each for each in bridge.tick(COMPARE, 10) if isinstance(each, LookAtPod)]


def test_what_a_new_list_does_not_name_is_over(bridge: Bridge) -> None:
    bridge.show(running())
    bridge.show(running("other", "u-2"))
    for found in (running(), running("other", "u-2")):
        bridge.record(found, State.STARTED)
    bridge.tell(Listed(pods=(PodSeen.of(running("other", "u-2"), "laxity"),)))

    assert ["u-1"] == releases(bridge.tick(SOON, 4))


# --- differences ---


def drifts(bridge: Bridge, seconds: float = 10) -> list[str]:
    effects = bridge.tick(COMPARE, seconds)
    bodies = [each.body for each in effects if isinstance(each, Publish)]
    return [body.kind for body in bodies if isinstance(body, BusEvent)]


@pytest.mark.parametrize(
    "found, state, where, kind",
    [
        (running(), None, "", "drift_no_request"),
        (running(), State.STARTED, "n2", "drift_other_node"),
        (running() | {"metadata": wanting()["metadata"]}, State.STARTED, "n1", "drift_other_devices"),
        (wanting(), State.STARTED, "n1", "drift_not_bound"),
        (running(), State.HELD, "n1", "drift_not_ours"),
    ],
)
def test_a_difference_that_lasts_is_told_once_and_counted(
    bridge: Bridge, found: dict[str, Any], state: State | None, where: str, kind: str
) -> None:
    bridge.show(found)
    if state is not None:
        bridge.record(found, state, where)

    assert [] == drifts(bridge)
    assert [kind] == drifts(bridge)
    assert [] == drifts(bridge)
    assert [kind.removeprefix("drift_")] == [each.kind for each in bridge.core.releasing.drifts.values()]


def test_pods_that_are_as_the_ledger_says_differ_in_nothing(bridge: Bridge) -> None:
    bridge.show(running())
    bridge.record(running(), State.STARTED)
    bridge.show(wanting("pending", "u-2"))
    bridge.show(wanting("held", "u-3"))
    bridge.record(wanting("held", "u-3"), State.HELD)
    bridge.show(pod("plain", "u-4", node="n1"))

    assert [] == [*drifts(bridge), *drifts(bridge)]


# --- bound by others, and on nodes that nobody hears ---


@pytest.mark.parametrize("state", [State.HELD, State.EXPIRED])
def test_what_is_held_for_a_pod_that_somebody_else_has_bound_is_given_back_and_the_pod_says_so(
    bridge: Bridge, state: State
) -> None:
    bridge.record(wanting(), state)
    taken = wanting(node="n2", annotations={"devices": "void"})

    assert ["u-1"] == releases(bridge.show(taken))
    bridge.record(wanting(), State.RELEASED)
    effects = [*bridge.tick(COMPARE, 10), *bridge.tick(COMPARE, 10)]
    assert [] == releases(effects)
    (said,) = written(effects)
    assert ("False", "BoundByOthers") == (said.condition.status, said.condition.reason)


def test_a_hold_that_comes_after_somebody_else_has_bound_the_pod_is_found(bridge: Bridge) -> None:
    bridge.show(wanting(node="n2"))
    bridge.record(wanting(), State.HELD)

    assert ["u-1"] == releases(bridge.tick(COMPARE, 10))


@pytest.mark.parametrize("state", [State.PLACED, State.STARTED])
def test_what_is_being_bound_or_is_is_the_placers_own_to_settle(bridge: Bridge, state: State) -> None:
    bridge.record(wanting(), state)
    bridge.show(wanting(node="n2"))

    assert [] == [*releases(bridge.tick(SOON, 10)), *releases(bridge.tick(COMPARE, 10))]


def unheard(name: str) -> NodeSeen:
    found = node(name)
    found["status"]["conditions"] = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
    return NodeSeen.of(found)


@pytest.mark.parametrize("object_stays", [True, False])
def test_KU06_what_goes_from_a_node_that_nobody_hears_is_told_and_why_others_wait(
    bridge: Bridge, object_stays: bool
) -> None:
    bridge.show(running())
    bridge.record(running(), State.STARTED)
    bridge.tell(NodeChanged(unheard("n1")))
    assert [] == [*drifts(bridge), *drifts(bridge)], "while it is to run there it is as it should be"
    if object_stays:
        leaving = running()
        leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        bridge.show(leaving)
    else:
        bridge.delete(running())
        bridge.record(running(), State.STOPPING)
    drifts(bridge)
    effects = bridge.tick(COMPARE, 10)
    assert [("u-1", "n1")] == [(each.uid, each.node) for each in bridge.core.releasing.drifts.values()]
    assert ["NodeSilent"] * object_stays == [each.condition.reason for each in written(effects)]

    token, _ = bridge.filter(wanting("other", "u-2"))
    (said,) = written(bridge.tell(PlaceAnswered(token, rejected("u-2"))))
    assert said.condition.message.endswith("; held by nodes that are not heard: n1")
    bridge.tell(NodeChanged(NodeSeen.of(node("n1"))))
    assert [] == drifts(bridge)
    assert {} == bridge.core.releasing.drifts


# --- node facts ---


def told(effects: list[Effect]) -> dict[str, KubeNodeFacts]:
    bodies = [(each.subject, each.body) for each in effects if isinstance(each, Emit)]
    return {subject: body for subject, body in bodies if isinstance(body, KubeNodeFacts)}


def test_a_node_is_told_with_what_it_can_give_and_what_others_reserve_there(bridge: Bridge) -> None:
    cordoned = node("n1", cpu="7910m", memory="31Gi", unschedulable=True)
    cordoned["spec"]["taints"] = [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]
    bridge.tell(Listed(nodes=(NodeSeen.of(cordoned),)))
    bridge.show(running(cpu="1", memory="1Gi"))
    bridge.record(running(), State.STARTED)
    bridge.show(pod("foreign", "u-2", node="n1", cpu="250m", memory="512Mi", extra={"nvidia.com/gpu": "2"}))
    bridge.show(ended(pod("over", "u-3", node="n1", cpu="3")))
    bridge.show(pod("elsewhere", "u-4", node="n7", cpu="3"))
    facts = told(bridge.tick(SOON, 1))["rt.metrics.n1.kube"]

    assert (7910, 31 * 1024) == (facts.cpu_milli, facts.memory_mib)
    assert (250, 512, 2) == (facts.foreign_cpu_milli, facts.foreign_memory_mib, facts.foreign_gpus)
    assert (True, True) == (facts.unschedulable, facts.ready)
    assert [("gpu", "yes", "NoSchedule")] == [(each.key, each.value, each.effect) for each in facts.taints]


def test_what_cannot_be_read_is_unknown_and_not_zero(bridge: Bridge) -> None:
    odd = node("n1", cpu="many")
    odd["status"]["conditions"] = []
    bridge.tell(Listed(nodes=(NodeSeen.of(odd),)))
    bridge.show(pod("foreign", "u-2", node="n1", cpu="1x"))
    facts = told(bridge.tick(SOON, 1))["rt.metrics.n1.kube"]

    assert (None, 16 * 1024, None, 0) == (
        facts.cpu_milli,
        facts.memory_mib,
        facts.foreign_cpu_milli,
        facts.foreign_memory_mib,
    )
    assert facts.ready is None


def test_a_node_is_told_when_it_changes_and_every_tenth_tick_and_when_it_goes(bridge: Bridge) -> None:
    bridge.tell(Listed(nodes=(NodeSeen.of(node("n1")),)))
    bridge.tick(SOON, 1)
    assert 1 == len([1 for _ in range(10) if told(bridge.tick(SOON, 1))])
    bridge.show(pod("foreign", "u-2", node="n1", cpu="1"))
    assert [1000] == [facts.foreign_cpu_milli for facts in told(bridge.tick(SOON, 1)).values()]
    bridge.tell(NodeGone("n1"))
    assert [True] == [facts.gone for facts in told(bridge.tick(SOON, 1)).values()]
    assert {} == told(bridge.tick(SOON, 20))

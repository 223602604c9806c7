"""What Kubernetes says of nodes, in rt_nodes; and what placers make of a node that it has closed."""

from __future__ import annotations

from typing import Any

import pytest

from services.node_list.kubernetes import closed, merged
from services.node_list.liveness import Liveness
from services.node_list.nodes import NodeView
from shared.messages import KubeNodeFacts, NodeMetrics, Taint
from tests.placer_world import World
from tests.unit.test_placer_pods import POD

TOLERATED = ("nvidia.com/gpu",)


def kube(**more: Any) -> KubeNodeFacts:
    said: dict[str, Any] = {
        "cpu_milli": 7_000,
        "memory_mib": 30_000,
        "foreign_cpu_milli": 500,
        "foreign_memory_mib": 64,
    }
    return KubeNodeFacts(**{"node": "n1", "at_us": 1, "ready": True, **said, **more})


def metrics(**more: Any) -> NodeMetrics:
    said: dict[str, Any] = {
        "node": "n1",
        "start_id": "s",
        "counter": 1,
        "at_us": 1,
        "mono_us": 1,
        "period_us": 1_000_000,
    }
    return NodeMetrics(**{**said, "devices": (), "cpu_milli": 8_000, "memory_mib": 32_000, **more})


def test_a_node_has_what_both_say_and_foreign_use_is_the_larger_of_both() -> None:
    said = merged(metrics(foreign_cpu_milli=700, labels={"group": "a"}), kube(labels={"zone": "z"}), TOLERATED)

    assert (7_000, 30_000) == (said["cpu_milli"], said["memory_mib"])
    assert (700, 64) == (said["foreign_cpu_milli"], said["foreign_memory_mib"])
    assert {"group": "a", "zone": "z"} == said["labels"]
    assert said["closed"] is None


def test_what_one_of_both_does_not_know_is_unknown_and_not_zero() -> None:
    said = merged(metrics(), kube(cpu_milli=None, foreign_cpu_milli=None), TOLERATED)

    assert (8_000, None, 64) == (said["cpu_milli"], said["foreign_cpu_milli"], said["foreign_memory_mib"])


@pytest.mark.parametrize(
    "said, why",
    [
        (kube(unschedulable=True), "cordoned"),
        (kube(ready=None), "not ready: its kubelet is not heard"),
        (kube(ready=False, reason="KubeletNotReady"), "not ready: KubeletNotReady"),
        (kube(taints=(Taint(key="team", value="b", effect="NoSchedule"),)), "taint team=b:NoSchedule"),
        (kube(taints=(Taint(key="team", effect="PreferNoSchedule"),)), None),
        (kube(taints=(Taint(key="nvidia.com/gpu", effect="NoSchedule"),)), None),
        (kube(publishes_ours=True), "its kubelet gives out laxity.dev resources itself"),
        (kube(gone=True, ready=None), "the cluster has no such node any more"),
        (kube(), None),
    ],
)
def test_why_nothing_new_may_go_there(said: KubeNodeFacts, why: str | None) -> None:
    assert why == closed(said, TOLERATED)


def test_facts_are_written_anew_where_kubernetes_says_something_new_and_not_for_its_time() -> None:
    view = NodeView("n1", Liveness(0))
    view.heartbeat(metrics(), 1)
    view.kube_says(kube())
    assert view.dirty
    view.dirty = False
    view.kube_says(kube(at_us=2))
    assert not view.dirty
    view.kube_says(kube(unschedulable=True))
    facts = view.new_facts(1, TOLERATED)

    assert view.dirty
    assert facts is not None
    assert ("cordoned", 7_000) == (facts.closed, facts.cpu_milli)


def test_a_node_list_that_has_just_started_leaves_a_closed_node_closed_until_kubernetes_speaks() -> None:
    first, second = (NodeView("n1", Liveness(0)) for _ in range(2))
    first.heartbeat(metrics(), 1)
    first.kube_says(kube(unschedulable=True))
    second.found(first.new_facts(1, TOLERATED), 1)
    second.heartbeat(metrics(), 1)

    def closed_by_second() -> str | None:
        facts = second.new_facts(2, TOLERATED)
        assert facts is not None
        return facts.closed

    assert "cordoned" == closed_by_second()
    second.kube_says(kube())
    assert closed_by_second() is None


def test_a_closed_node_takes_nothing_new_but_the_pods_that_kubernetes_sends() -> None:
    world = World()
    world.add_node("n1", closed="cordoned")
    world.placer("p1")
    world.pass_time(2)
    said = world.place("p1")

    assert ("rejected", ["excluded.closed"]) == (said.outcome, [each.code for each in said.reasons])
    assert "Kubernetes lets nothing new onto n1: cordoned" == said.reasons[0].message
    assert "held" == world.place("p1", request_id="u-1", command=None, pods=[POD], hold_us=1_000_000).outcome
    world.add_node("n1")
    assert "placed" == world.place("p1", request_id="b").outcome

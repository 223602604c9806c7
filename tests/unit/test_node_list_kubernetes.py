"""What Kubernetes says of nodes, in rt_nodes; and what placers make of a node that it has closed."""

from __future__ import annotations

from typing import Any

import pytest

from cli.nodes import row
from services.node_list.kubernetes import closed, merged
from services.node_list.liveness import Liveness
from services.node_list.nodes import NodeView, Policy
from services.node_list.standing import ClassTask
from shared.admission import Learned
from shared.effects import Received
from shared.messages import DeviceMetrics, KubeNodeFacts, Measured, NodeMetrics, Regime, Taint
from tests.placer_world import World
from tests.unit.test_node_list_core import Harness, device
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


def test_the_list_and_its_reader_say_which_nodes_are_closed_and_why() -> None:
    it = Harness()
    for node in ("n1", "n2"):
        it.beat(node, device("g0"), times=2)
    it.tell(Received("rt.metrics.n2.kube", kube(node="n2", unschedulable=True)))
    it.wait(1_000_000, beating=("n1", "n2"))
    it.listed()

    shown = {each.node: row(1, each) for each in it.replies[-1].body.devices}
    assert {"n1": "guaranteed", "n2": "guaranteed (closed)"} == {node: str(cells[3]) for node, cells in shown.items()}
    assert {"n1": "", "n2": "cordoned"} == {node: cells[-1] for node, cells in shown.items()}


# --------------------------------------------------------------------------- devices that others gave away


def gpu(uuid: str, **more: Any) -> DeviceMetrics:
    unknown = Measured(value=None, reason="not_supported")
    said: dict[str, Any] = {"utilisation_ratio": unknown, "memory_used_mib": unknown, "memory_mib": None}
    return DeviceMetrics(uuid=uuid, index=0, model="H200", regime=Regime.EXCLUSIVE, healthy=True, **said, **more)


def holders(view: NodeView) -> list[str | None]:
    facts = view.new_facts(1)
    assert facts is not None
    return [each.holder for each in facts.devices]


def hearing(*devices: DeviceMetrics, start_id: str = "s") -> NodeView:
    view = NodeView("n1", Liveness(0))
    for counter in (1, 2):
        view.heartbeat(metrics(devices=devices, counter=counter, start_id=start_id), counter)
    return view


def test_KU39_a_device_of_a_claim_says_whose_it_is_and_a_gpu_means_all_its_parts() -> None:
    view = hearing(gpu("GPU-1"), gpu("GPU-2"), gpu("MIG-a", parent="GPU-3"), gpu("MIG-b", parent="GPU-3"))
    view.kube_says(kube(claimed={"GPU-1": "claim shop/a", "GPU-3": "claim shop/b"}))
    assert ["claim shop/a", None, "claim shop/b", "claim shop/b"] == holders(view)
    view.kube_says(kube(claimed={"MIG-b": "claim shop/c"}))
    assert [None, None, None, "claim shop/c"] == holders(view)
    view.kube_says(kube(claimed_unknown="claim shop/d"))
    assert ["claim shop/d"] * 4 == holders(view)
    view.kube_says(kube())
    assert [None] * 4 == holders(view)


def test_a_device_that_a_plugin_gave_away_is_in_no_list_and_is_well() -> None:
    view = hearing(gpu("GPU-1", plugin_holder="pod shop/train"), gpu("GPU-2"))
    policy = Policy((ClassTask("c", 50_000, 10_000, 100_000),), 1, 1, 0.1, 1)
    view.age(2, policy)
    judged = view.judge_devices(policy, Learned())

    assert ["pod shop/train", None] == holders(view)
    assert ("excluded", "given to pod shop/train") == (judged["GPU-1"]["c"].standing, judged["GPU-1"]["c"].reason)
    assert "guaranteed" == judged["GPU-2"]["c"].standing


def test_a_node_list_that_has_just_started_leaves_claims_until_kubernetes_speaks() -> None:
    first = hearing(gpu("GPU-1"), gpu("GPU-2"))
    first.kube_says(kube(claimed={"GPU-1": "claim shop/a"}))
    second = hearing(gpu("GPU-1"), gpu("GPU-2"), start_id="t")
    second.found(first.new_facts(1, TOLERATED), 1)

    assert ["claim shop/a", None] == holders(second)
    second.kube_says(kube())
    assert [None, None] == holders(second)

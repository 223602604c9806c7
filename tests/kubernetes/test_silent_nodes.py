"""Nodes that nobody hears, by their kubelet or by their monitor, and that come back."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from shared.testing.wait import eventually, until
from tests.kubernetes.api import Json
from tests.kubernetes.bridged import condition, pod
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.scheduled import Scheduled, scheduled

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240)]

UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}
LOOKS_S = 5
"""Longer than the placers need to look at what runs."""


def silent(kube: KubeCluster, node: str) -> None:
    """As the controller says it of a node whose kubelet is not heard."""
    kube.node_is(node, "Unknown", "NodeStatusUnknown")
    kube.admin.patch(f"/api/v1/nodes/{node}", {"spec": {"taints": [UNREACHABLE]}})


def heard(kube: KubeCluster, node: str) -> None:
    kube.node_is(node, "True")
    kube.admin.patch(f"/api/v1/nodes/{node}", {"spec": {"taints": None}})


async def drifts(cluster: Scheduled) -> list[str]:
    return [json.loads(each.body)["kind"] for each in await cluster.bus.history("RT_EVENTS", "rt.events.bus.>")]


async def test_KU06_what_is_on_a_silent_node_keeps_its_device_until_the_node_is_back(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    await cluster.start("k1", "k2")
    first = pod("first", gpu_milli="1000")
    first["metadata"]["finalizers"] = ["laxity.test/kept"]
    uid = kube.admin.create(pods, first)["metadata"]["uid"]
    where = (await cluster.until_bound(f"{pods}/first"))["spec"]["nodeName"]
    (other,) = {"k1", "k2"} - {where}
    await cluster.reach(uid, "started")
    silent(kube, where)
    kube.admin.delete(f"{pods}/first", grace_s=0)
    kube.admin.create(pods, pod("second", gpu_milli="1000"))
    assert other == (await cluster.until_bound(f"{pods}/second"))["spec"]["nodeName"], "the replacement goes elsewhere"
    assert "deletionTimestamp" in kube.admin.get(f"{pods}/first")["metadata"]
    await until(lambda: condition(kube.admin.get(f"{pods}/first")).get("reason") == "NodeSilent", 40)

    kube.admin.patch(f"{pods}/first", {"metadata": {"finalizers": None}})
    kube.admin.until_gone(f"{pods}/first")
    await cluster.reach(uid, "stopping")
    kube.admin.create(pods, pod("third", gpu_milli="1000"))
    why = f"held by nodes that are not heard: {where}"
    await until(lambda: why in condition(kube.admin.get(f"{pods}/third")).get("message", ""), 40)
    await asyncio.sleep(LOOKS_S)
    assert [uid] == await cluster.reserved(where), "its object is gone, and it may still run"
    assert "drift_held_by_silent_node" in await drifts(cluster)

    heard(kube, where)
    await cluster.reach(uid, "released")
    assert where == (await cluster.until_bound(f"{pods}/third"))["spec"]["nodeName"]


async def test_KU35_a_node_whose_monitor_was_paused_is_back_by_itself(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    monitor = {
        "LAXITY_MONITOR_NODE": "k1",
        "LAXITY_MONITOR_PROBE": "fake",
        "LAXITY_MONITOR_FAKE_DEVICES": json.dumps([{"count": 2}]),
        "LAXITY_MONITOR_RING_ROOT": str(cluster.folder / "rings"),
    }
    times = {"LAXITY_NODE_LIST_GRACE_US": "3000000", "LAXITY_NODE_LIST_LOST_US": "5000000"}
    paused, _ = await asyncio.gather(
        asyncio.to_thread(cluster.service, "monitor", **monitor),
        asyncio.to_thread(cluster.service, "node_list", **times),
    )
    await cluster.start("k1", devices=0)
    first = kube.admin.create(pods, pod("first", gpu_milli="1000"))
    await cluster.until_bound(f"{pods}/first")
    paused.send_signal(signal.SIGSTOP)
    try:
        await eventually(lambda: said(cluster, "lost"), 30)
        kube.admin.create(pods, pod("second", gpu_milli="1000"))
        await until(lambda: "not heard" in scheduled(kube.admin.get(f"{pods}/second")).get("message", ""), 40)
        assert "k1" == kube.admin.get(f"{pods}/first")["spec"]["nodeName"], "nobody has touched what runs"
    finally:
        paused.send_signal(signal.SIGCONT)
    await cluster.until_bound(f"{pods}/second")
    assert {first["metadata"]["uid"], uid_of(kube, f"{pods}/second")} == set(await cluster.reserved("k1"))


async def said(cluster: Scheduled, state: str) -> bool | None:
    """The node list has said that of a node."""
    events = await cluster.bus.history("RT_EVENTS", "rt.events.node.>")
    return state in [json.loads(each.body)["state"] for each in events] or None


def uid_of(kube: KubeCluster, path: str) -> str:
    found: Json = kube.admin.get(path)
    return str(found["metadata"]["uid"])

"""Pods that go, come again or are taken otherwise than Laxity would: what they had is free, and the ledger is right."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from services.kube_bridge import sentences
from shared.testing.wait import eventually, until
from tests.kubernetes.api import Json
from tests.kubernetes.bridged import condition, pod
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.scheduled import Scheduled

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240)]


async def only(cluster: Scheduled, node: str, *uids: str) -> None:
    """Nothing else is reserved there any more."""

    async def right() -> bool | None:
        return sorted(await cluster.reserved(node)) == sorted(uids) or None

    await eventually(right, 40)


async def test_whichever_way_a_pod_goes_what_it_had_is_the_next_ones_also_under_the_same_name(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    """Deleted by force and made again as a StatefulSet does it; evicted, which deletes it too; ended by its kubelet,
    which leaves its object. Each waits for the only device.
    """
    await cluster.start("k1")
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "db-0"}}
    ways: list[Callable[[], object]] = [
        lambda: kube.admin.delete(f"{pods}/db-0", grace_s=0),
        lambda: kube.admin.create(f"{pods}/db-0/eviction", eviction),
        lambda: kube.say(pods.split("/")[4], "db-0", phase="Failed", reason="Evicted", message="low on memory"),
    ]
    went = kube.admin.create(pods, pod("db-0", gpu_milli="1000"))
    for name, goes in zip(("db-0", "db-0", "db-1"), ways, strict=True):
        await cluster.until_bound(f"{pods}/db-0")
        goes()
        came = kube.admin.create(pods, pod(name, gpu_milli="1000"))
        found = await cluster.until_bound(f"{pods}/{name}")
        assert came["metadata"]["uid"] == found["metadata"]["uid"]
        assert "k1-gpu-0" == found["metadata"]["annotations"]["laxity.dev/devices"]
        await cluster.reach(went["metadata"]["uid"], "released", "exited")
        await only(cluster, "k1", came["metadata"]["uid"])
        went = came


async def test_a_pod_that_somebody_else_binds_after_its_place_was_held_holds_nothing_and_says_so(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    """No kube-scheduler here: the call to bind comes when the test makes it, or never."""
    for name in ("k1", "k2"):
        await cluster.add_node(name, 1)
        kube.add_node(name)
    cluster.placer(backend="kubernetes")
    extender = cluster.bridge()
    await until(lambda: "the extender listens" in extender.process.log, 20)
    asked, left = (kube.admin.create(pods, pod(name, gpu_milli="1000")) for name in ("asked", "left"))

    async def held(found: Json, node: str) -> bool | None:
        return extender.filter(found, [node])["NodeNames"] == [node] or None

    await eventually(lambda: held(asked, "k1"), 20)
    await eventually(lambda: held(left, "k2"), 20)
    kube.bind(pods.split("/")[4], "asked", "k2")
    kube.bind(pods.split("/")[4], "left", "k1")
    assert extender.bind(asked, "k1")["Error"] in {sentences.NOT_BOUND, sentences.NO_HOLD}
    for found in (asked, left):
        await cluster.reach(found["metadata"]["uid"], "released")
    assert [] == [*await cluster.reserved("k1"), *await cluster.reserved("k2")]

    for name in ("asked", "left"):
        await until(lambda name=name: condition(kube.admin.get(f"{pods}/{name}")).get("reason") == "BoundByOthers", 40)
        assert ("False", True) == (condition(kube.admin.get(f"{pods}/{name}"))["status"], name in await told(cluster))
    for name in ("k1", "k2"):
        kube.admin.delete(f"/api/v1/nodes/{name}")


async def told(cluster: Scheduled) -> str:
    """All that the bridge said on the bus of pods that are not as the ledger says."""
    events = await cluster.bus.history("RT_EVENTS", "rt.events.bus.kube-bridge")
    return " ".join(json.loads(each.body)["detail"] for each in events)

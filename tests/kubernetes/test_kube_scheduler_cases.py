"""Known cases of others with a stock kube-scheduler: priorities over devices, and a Binding that outlasts a call."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from services.kube_bridge import sentences
from shared.testing.wait import until
from tests.kubernetes.api import ApiRefusedError, Json
from tests.kubernetes.bridged import condition, pod
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.front import Asked, Front
from tests.kubernetes.scheduled import Scheduled, bound, scheduled

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]


def of_class(name: str, priority_class: str) -> Json:
    found = pod(name, gpu_milli="1000")
    found["spec"]["priorityClassName"] = priority_class
    return found


def classes(kube: KubeCluster, **values: int) -> None:
    for name, value in values.items():
        with suppress(ApiRefusedError):  # it is there
            kube.admin.create(
                "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": name}, "value": value}
            )


async def test_KU08_a_pod_of_high_priority_evicts_nobody_and_is_the_first_to_get_what_becomes_free(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    await asyncio.to_thread(classes, kube, low=10, high=1000)
    await cluster.start("k1", devices=2)
    low = [kube.admin.create(pods, of_class(f"low-{number}", "low")) for number in range(2)]
    for each in low:
        await cluster.until_bound(f"{pods}/{each['metadata']['name']}")
    for number in range(3):
        kube.admin.create(pods, of_class(f"later-{number}", "low"))
    await until(lambda: condition(kube.admin.get(f"{pods}/later-2")) != {}, 30)
    kube.admin.create(pods, of_class("high", "high"))
    await until(lambda: scheduled(kube.admin.get(f"{pods}/high")).get("reason") == "Unschedulable", 30)

    found = kube.admin.get(f"{pods}/high")
    message = scheduled(found)["message"]
    print(message)
    assert f"1 {sentences.OF_CODES['not_now.share']}" in message
    assert "Preemption is not helpful for scheduling" in message
    assert "victim" not in message
    assert "nominatedNodeName" not in found["status"]
    there = [kube.admin.get(f"{pods}/{each['metadata']['name']}") for each in low]
    assert [each["metadata"]["uid"] for each in low] == [each["metadata"]["uid"] for each in there]
    assert [] == [each for each in there if "deletionTimestamp" in each["metadata"]]

    kube.admin.delete(f"{pods}/low-0", grace_s=0)
    begun = time.monotonic()
    assert "k1" == (await cluster.until_bound(f"{pods}/high", 30))["spec"]["nodeName"]
    print(f"bound {time.monotonic() - begun:.2f} s after a device became free")
    assert {} == bound(kube, pods, "later-")
    kube.admin.delete(f"{pods}/low-1", grace_s=0)
    await until(lambda: len(bound(kube, pods, "later-")) == 1, 30)


async def test_KU01_a_binding_that_takes_longer_than_the_scheduler_waits_is_made_once_and_kept(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    """kube-scheduler takes it for failed and tries the pod again, which is bound meanwhile."""
    with Front(kube) as front:
        cluster.patience = "1s"
        await cluster.start("k1", devices=2, placer={"LAXITY_PLACER_KUBERNETES__SERVER": front.url})

        def late(asked: Asked) -> None:
            time.sleep(2.5)
            asked.forward()

        front.once("POST /binding", late)
        made = kube.admin.create(pods, pod("one", gpu_milli="1000"))
        uid = made["metadata"]["uid"]
        await until(lambda: scheduled(kube.admin.get(f"{pods}/one")).get("reason") == "SchedulerError", 30)
        assert [uid] == await cluster.reserved("k1"), "what is unclear is not given back"

        found = await cluster.until_bound(f"{pods}/one")
        record = await cluster.reach(uid, "started")
        devices = found["metadata"]["annotations"]["laxity.dev/devices"]
        assert ("k1", 1, devices) == (
            record.replicas[0].node,
            record.replicas[0].generation,
            ",".join(record.replicas[0].devices),
        )
        await asyncio.sleep(3)  # longer than the scheduler waits to try it again
        assert [uid] == await cluster.reserved("k1")
        assert "started" == (await cluster.reach(uid, "started", "released")).state
        assert 1 == front.count("POST /binding")
        assert devices == kube.admin.get(f"{pods}/one")["metadata"]["annotations"]["laxity.dev/devices"]

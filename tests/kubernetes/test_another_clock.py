"""An API server whose clock is an hour before or behind ours: placers and bridge never compare the two."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus import Msg
from shared.messages import KubeNodeFacts
from tests.kubernetes.bridged import pod
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.front import Front
from tests.kubernetes.scheduled import Scheduled

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240)]


async def test_a_pod_is_placed_kept_while_it_is_being_deleted_and_given_back_whatever_the_clock_says(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    ready: list[bool | None] = []

    async def hear(msg: Msg) -> None:
        ready.append(KubeNodeFacts.from_json(msg.body).ready)

    await cluster.bus.subscribe("rt.metrics.k1.kube", hear)
    with Front(kube) as front:
        cluster.api_url = front.url
        front.ahead_s = 3600
        await cluster.start("k1")
        for name, ahead_s in (("ahead", 3600), ("behind", -3600)):
            front.ahead_s = ahead_s
            slow = pod(name, gpu_milli="1000")
            slow["spec"]["terminationGracePeriodSeconds"] = 30
            uid = kube.admin.create(pods, slow)["metadata"]["uid"]
            await cluster.until_bound(f"{pods}/{name}")
            await cluster.reach(uid, "started")
            kube.admin.delete(f"{pods}/{name}")  # by that clock it is over long ago, or not for an hour
            await asyncio.sleep(5)
            record = await cluster.record(uid)
            assert ("started", [uid]) == (record and record.state, await cluster.reserved("k1"))
            kube.admin.delete(f"{pods}/{name}", grace_s=0)
            await cluster.reach(uid, "released", "exited")
            assert [] == await cluster.reserved("k1")
    assert {True} == set(ready), "its heartbeats are not of now"

"""`laxity explain pod/NAME` on a real API server: where a pod is, why it waits in numbers, and what it ended of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.testing.wait import eventually, until
from tests.e2e.embedded import call
from tests.kubernetes.api import Json
from tests.kubernetes.bridged import Bridged, Extender, laxity_on, pod
from tests.kubernetes.cluster import KubeCluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]
SOFT = {"deadline": "50ms", "kind": "soft"}


@pytest.fixture
async def bridged(kube: KubeCluster, tmp_path: Path) -> AsyncIterator[Bridged]:
    async with laxity_on(kube, tmp_path, Bridged) as bridged:
        kube.add_node("k1")
        yield bridged
        kube.admin.delete("/api/v1/nodes/k1")


async def started(bridged: Bridged) -> Extender:
    """A placer that binds and a bridge that knows everything; one device."""
    await bridged.add_node("k1", 1)
    _, extender = await asyncio.gather(
        asyncio.to_thread(bridged.placer, "p1", "kubernetes"), asyncio.to_thread(bridged.bridge)
    )
    await until(lambda: "the extender listens" in extender.process.log, 20)
    probe = {"metadata": {"name": "x", "namespace": "x", "uid": "x"}, "spec": {}}
    await until(lambda: not extender.filter(probe, [])["Error"], 20)
    return extender


async def explain(bridged: Bridged, *words: str) -> str:
    done = await asyncio.to_thread(call, "-o", "json", "explain", *words, url=bridged.server.url)
    assert 0 == done.returncode, done.stderr
    return "\n".join(json.loads(done.stdout)["story"])


async def tells(bridged: Bridged, *words: str, of: str) -> str:
    """The story once it has this in it."""

    async def look() -> str | None:
        told = await explain(bridged, *words)
        return told if of in told else None

    return await eventually(look, 20)


async def test_a_pod_says_by_its_name_where_it_is_or_why_it_waits_and_then_what_it_ended_of(
    bridged: Bridged, kube: KubeCluster, pods: str
) -> None:
    extender, namespace = await started(bridged), pods.split("/")[4]
    runs, waits = (kube.admin.create(pods, pod(name, SOFT, gpu_milli="1000")) for name in ("runs", "waits"))
    kube.admin.create(pods, pod("plain"))
    await asyncio.to_thread(extender.filter, runs, ["k1"])
    assert {"Error": ""} == await asyncio.to_thread(extender.bind, runs, "k1")
    await asyncio.to_thread(extender.filter, waits, ["k1"])

    told = await tells(bridged, "pod/runs", of=": bound to k1 (k1-gpu-0)")
    assert f"pod {namespace}/runs, uid {_uid(runs)}: bound to k1 (k1-gpu-0)" in told
    assert f"{_uid(runs)} is started on k1" in told
    told = await tells(bridged, f"pod/{namespace}/waits", of="laxity.dev/Placed is False")
    assert ": not bound" in told
    assert "NotNowShare: of 1 nodes offered: needs a share of 1 of one device, largest free is 0" in told
    assert "nothing is held for it" in told
    assert "asks for nothing of Laxity's" in await tells(bridged, "pod/plain", "-n", namespace, of=": not bound")
    assert 1 == (await asyncio.to_thread(call, "explain", "pod/nobody", url=bridged.server.url)).returncode

    kube.say(namespace, "runs", phase="Failed", reason="Evicted", message="The node was low on resource: memory.")
    record = await bridged.reach(_uid(runs), "exited")
    assert ("Evicted", None) == (record.end_reason, record.exit_code)
    told = await tells(bridged, "pod/runs", of="has ended")
    assert "exited, generation 1, Evicted" in told
    assert "(Evicted: The node was low on resource: memory.)" in told


def _uid(found: Json) -> str:
    return str(found["metadata"]["uid"])


async def test_without_a_bridge_and_after_its_pod_the_ledger_alone_tells(
    bridged: Bridged, kube: KubeCluster, pods: str
) -> None:
    extender = await started(bridged)
    found = kube.admin.create(pods, pod("one", SOFT, gpu_milli="1000"))
    await asyncio.to_thread(extender.filter, found, ["k1"])
    assert {"Error": ""} == await asyncio.to_thread(extender.bind, found, "k1")
    await bridged.reach(_uid(found), "started")
    kube.admin.delete(f"{pods}/one", grace_s=0)
    told = await tells(bridged, "pod/one", of="Kubernetes has no such pod any more; from the ledger alone")
    assert f"{_uid(found)} is" in told

    extender.process.kill()
    told = await tells(bridged, "pod/one", of="no kube-bridge answers; from the ledger alone")
    assert "started, generation 1 on k1" in told

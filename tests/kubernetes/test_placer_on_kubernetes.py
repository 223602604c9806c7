"""Placer processes, a real nats-server and a real kubelet: what an outside client asks for is what the kubelet runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.testing.wait import until
from shared.units import parse_quantity
from tests.integration import test_placer as placers
from tests.kubernetes.api import Json
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.image import IMAGE
from tests.kubernetes.node import Machine
from tests.kubernetes.pods import kubernetes_options, pods_in

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240)]
stack = placers.stack
cluster = placers.cluster


@pytest.fixture
async def settings(kube: KubeCluster, machine: Machine, cluster: placers.Cluster, tmp_path: Path) -> dict[str, str]:
    """What a placer must be told to run its containers as pods; the devices of its node are made up."""
    await cluster.add_node(machine.name, 8)
    options = kubernetes_options(kube, tmp_path)
    return {"LAXITY_PLACER_BACKENDS": '{"*": "kubernetes"}', "LAXITY_PLACER_KUBERNETES": options.model_dump_json()}


@pytest.fixture
def namespace(kube: KubeCluster, tmp_path: Path) -> str:
    return kubernetes_options(kube, tmp_path).namespace


async def place(cluster: placers.Cluster, **body: Any) -> None:
    assert "placed" == (await cluster.place(candidates=["real-1"], **body))["outcome"]


async def the_pod(kube: KubeCluster, namespace: str) -> Json:
    (pod,) = await asyncio.to_thread(pods_in, kube, namespace)
    return pod


async def test_what_is_placed_runs_with_its_own_devices_until_it_is_released(
    kube: KubeCluster, machine: Machine, cluster: placers.Cluster, settings: dict[str, str], namespace: str
) -> None:
    await asyncio.to_thread(cluster.placer, "p0", **settings)
    await place(cluster, command=["sleep", "60"], cpu_milli=250, memory_mib=64)
    record = await cluster.reach("a", "started")
    pod = await the_pod(kube, namespace)
    assert ("Running", machine.name) == (pod["status"]["phase"], pod["spec"]["nodeName"])
    uid = pod["metadata"]["uid"]
    assert (250, 64) == machine.limits(uid)
    devices = ",".join(record.replicas[0].devices)
    assert devices == machine.environment(uid)["NVIDIA_VISIBLE_DEVICES"]
    assert devices == pod["metadata"]["annotations"]["laxity.dev/devices"]
    said = await cluster.ask("resize", request_id="a", cpu_milli=500)
    assert "resizing" == said["outcome"]
    await until(lambda: machine.limits(uid) == (500, 64), 60)
    assert "released" != (await cluster.ask("release", request_id="a"))["outcome"]
    await cluster.reach("a", "released")
    await until(lambda: pods_in(kube, namespace) == [])  # the record says so when nothing runs any more


async def test_an_exit_ends_the_request_with_its_code_and_leaves_nothing(
    kube: KubeCluster, cluster: placers.Cluster, settings: dict[str, str], namespace: str
) -> None:
    await asyncio.to_thread(cluster.placer, "p0", **settings)
    await place(cluster, command=["sh", "-c", "exit 7"])
    record = await cluster.reach("a", "exited")
    assert 7 == record.exit_code
    await until(lambda: pods_in(kube, namespace) == [])


async def test_a_start_that_fails_says_why_in_the_kubelets_words(
    kube: KubeCluster, cluster: placers.Cluster, settings: dict[str, str], namespace: str
) -> None:
    few = {"LAXITY_PLACER_MOST_TRIES": "2", "LAXITY_PLACER_BACKOFF_FIRST_US": "1000"}
    await asyncio.to_thread(cluster.placer, "p0", **settings, **few)
    await place(cluster, command=["sleep", "60"], image="laxity.test/none:here")
    record = await cluster.reach("a", "failed")
    assert "ErrImageNeverPull" in record.model_dump_json()
    await until(lambda: pods_in(kube, namespace) == [])


async def test_KU38_what_another_scheduler_took_is_given_back_at_once_and_tried_again_later_and_later(
    kube: KubeCluster, machine: Machine, cluster: placers.Cluster, settings: dict[str, str], namespace: str
) -> None:
    allocatable = kube.admin.get(f"/api/v1/nodes/{machine.name}")["status"]["allocatable"]
    cpu_milli = int(parse_quantity(allocatable["cpu"]) * 1000)
    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "600"]}
    container |= {"resources": {"requests": {"cpu": f"{cpu_milli - 50}m"}}}
    spec = {"schedulerName": "another", "containers": [container], "terminationGracePeriodSeconds": 0}
    spec |= {"automountServiceAccountToken": False}
    pods = f"/api/v1/namespaces/{kube.namespace(f'{namespace}-other')}/pods"
    kube.admin.create(pods, {"metadata": {"name": "faster"}, "spec": spec})
    kube.bind(pods.split("/")[4], "faster", machine.name)
    await asyncio.to_thread(kube.admin.until, f"{pods}/faster", lambda found: found["status"]["phase"] == "Running")
    quick = {"LAXITY_PLACER_MOST_TRIES": "100", "LAXITY_PLACER_BACKOFF_FIRST_US": "250000"}
    await asyncio.to_thread(cluster.placer, "p0", **settings, **quick)

    await place(cluster, command=["sleep", "60"], cpu_milli=500)  # the node list has not heard of the other one yet
    seen: dict[int, int] = {}
    while len(seen) < 3:
        record = await cluster.reach("a", "waiting")
        assert (("real-1",), None, ()) == (record.set_aside, record.replicas[0].node, record.replicas[0].devices)
        assert "OutOfcpu" in record.model_dump_json()
        seen[record.tries] = record.backoff_us
    assert sorted(seen.values()) == [seen[tries] for tries in sorted(seen)] != [min(seen.values())] * 3
    kube.admin.delete(f"{pods}/faster", grace_s=0)
    await cluster.reach("a", "started")
    assert 1 == len(pods_in(kube, namespace)), "those that were refused are gone"


async def test_pods_outlive_a_killed_placer_and_are_not_made_again(
    kube: KubeCluster, cluster: placers.Cluster, settings: dict[str, str], namespace: str
) -> None:
    first = await asyncio.to_thread(cluster.placer, "p0", **settings)
    names = [f"r{number}" for number in range(6)]
    for name in names:
        await place(cluster, request_id=name, command=["sleep", "60"])
        if name == "r3":
            first.kill()
            await asyncio.to_thread(cluster.placer, "p1", **settings)
    for name in names:
        await cluster.reach(name, "started")
    pods = pods_in(kube, namespace)
    assert 6 == len(pods)
    assert {"Running"} == {pod["status"]["phase"] for pod in pods}
    await asyncio.gather(*(cluster.ask("release", request_id=name) for name in names))
    for name in names:
        await cluster.reach(name, "released")
    await until(lambda: pods_in(kube, namespace) == [])

"""A real kubelet, a real device plugin, and a monitor: what the kubelet gives to a pod is never given by placers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from services.monitor.given import RELEASE_AFTER
from services.monitor.probes.fake import fake_uuid
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess
from tests.kubernetes.api import Json
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.device_plugin import DevicePlugin
from tests.kubernetes.image import IMAGE
from tests.kubernetes.node import Machine
from tests.outside import ask, connect, heartbeat, until, value

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

RESOURCE = "example.com/gpu"


@pytest.fixture
def plugin(machine: Machine) -> Iterator[DevicePlugin]:
    """Offers the first of the node's two GPUs."""
    folder = machine.folder / "kubelet" / "plugins_registry"
    with DevicePlugin(folder, RESOURCE, fake_uuid(machine.name, 0)) as plugin:
        yield plugin


@pytest.fixture
async def client(machine: Machine, tmp_path: Path) -> AsyncIterator[Client]:
    """An outsider's, where a monitor of that node, a node list and a placer run."""
    monitor = {
        "LAXITY_MONITOR_NODE": machine.name,
        "LAXITY_MONITOR_PROBE": "fake",
        "LAXITY_MONITOR_FAKE_DEVICES": '[{"count": 2}]',
        "LAXITY_MONITOR_RING_ROOT": str(tmp_path / "rings"),
        "LAXITY_MONITOR_PERIOD_US": "1000000",
        "LAXITY_MONITOR_KUBELET_SOCKET": str(machine.folder / "kubelet" / "pod-resources" / "kubelet.sock"),
        "LAXITY_MONITOR_KUBELET_US": "1000000",  # a kubelet that has just begun leaves out its pods for a second or two
    }
    placer = {"LAXITY_PLACER_BACKENDS": '{"*": "fake"}', "LAXITY_PLACER_STATE_ROOT": str(tmp_path / "state")}
    placer |= {"LAXITY_PLACER_RING_ROOT": str(tmp_path / "rings")}
    with ExitStack() as stack:
        server = stack.enter_context(NatsServer(tmp_path / "nats"))
        services = [
            ServiceProcess(f"services.{name}", tmp_path, server.url, LAXITY_STORAGE="memory", **env)
            for name, env in (("monitor", monitor), ("node_list", {}), ("placer", placer))
        ]
        await asyncio.gather(*(asyncio.to_thread(stack.enter_context, each) for each in services))
        client = await connect(server.url)
        yield client
        await client.close()


def wanting(name: str) -> Json:
    """A pod of somebody else's, bound as by another scheduler."""
    limits = {RESOURCE: "1"}
    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "600"]}
    spec = {
        "nodeName": "real-1",
        "containers": [{**container, "resources": {"limits": limits}}],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "tolerations": [{"operator": "Exists"}],
    }
    return {"metadata": {"name": name}, "spec": spec}


async def facts_with(client: Client, machine: Machine, *holders: str | None) -> Json:
    """rt_nodes once its devices have these holders."""

    async def look() -> Json | None:
        found = await value(client, "rt_nodes", f"node.{machine.name}")
        told = [each.get("plugin_holder") for each in (found or {}).get("devices", ())]
        return found if told == list(holders) else None

    found: Json = await until(look, f"held by {holders}", 60)
    return found


async def try_both(client: Client) -> dict[str, Any]:
    body = {"request_id": "both", "command": ["x"], "gpu": {"count": 2}, "dry_run": True}
    said = await ask(client, "rt.place", body)
    return {each["code"]: each["message"] for each in said.get("reasons", ())} | {"outcome": said["outcome"]}


async def test_KU22_what_the_kubelet_gave_by_a_device_plugin_is_never_given_again(
    kube: KubeCluster, machine: Machine, plugin: DevicePlugin, client: Client, pods: str
) -> None:
    allocatable = "/api/v1/nodes/real-1"
    await asyncio.to_thread(
        kube.admin.until, allocatable, lambda found: found["status"]["allocatable"].get(RESOURCE) == "1"
    )
    await facts_with(client, machine, None, None)
    kube.admin.create(pods, wanting("train"))
    await asyncio.to_thread(kube.admin.until, f"{pods}/train", lambda found: found["status"]["phase"] == "Running")
    holder = f"pod {pods.split('/')[4]}/train by {RESOURCE}"
    await facts_with(client, machine, holder, None)

    said = await until(lambda: refused(client), "refused")
    assert f"given by others: {machine.name}/gpu-0 ({holder})" == said["excluded.taken"]
    placed = await ask(client, "rt.place", {"request_id": "a", "command": ["x"], "gpu": {"count": 1}})
    assert [fake_uuid(machine.name, 1)] == placed["placements"][0]["devices"]

    # a kubelet that is away, and one that has just come back, free nothing
    machine.kubelet.kill()
    await heartbeat(client, lambda told: told["kubelet_stale"], "stale", machine.name)
    await facts_with(client, machine, holder, None)
    await asyncio.to_thread(machine.kubelet.start)
    for _ in range(2 * RELEASE_AFTER):
        told = await heartbeat(client, lambda told: not told.get("kubelet_stale"), "heard", machine.name)
        assert holder == told["devices"][0]["plugin_holder"]

    await asyncio.to_thread(kube.admin.delete, f"{pods}/train", grace_s=0)
    await facts_with(client, machine, None, None)


async def refused(client: Client) -> dict[str, Any] | None:
    said = await try_both(client)
    return said if "excluded.taken" in said else None

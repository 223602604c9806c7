"""All services and a real kubelet: the tasks of a pod that an outside client asked for are told, and judged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.node import Machine
from tests.kubernetes.pods import kubernetes_options, pods_in
from tests.kubernetes.running import running
from tests.outside import Json, ask, connect, events, until, value

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240)]


@pytest.fixture
def nats_url(kube: KubeCluster, machine: Machine, tmp_path: Path) -> Iterator[str]:
    """Of a server with all services, whose monitor looks after the real node with made-up devices."""
    if not machine.has_programs:
        pytest.skip("no C compiler with a static C library")
    told = {
        "placer": {
            "LAXITY_PLACER_BACKENDS": '{"*": "kubernetes"}',
            "LAXITY_PLACER_KUBERNETES": kubernetes_options(kube, tmp_path).model_dump_json(),
        },
        "node_list": {},
        "deadline_tracker": {},
        "monitor": {
            "LAXITY_MONITOR_NODE": machine.name,
            "LAXITY_MONITOR_PROBE": "fake",
            "LAXITY_MONITOR_RING_ROOT": str(tmp_path / "rings"),
            "LAXITY_MONITOR_POD_ROOT": str(machine.folder / "kubelet" / "pods"),
        },
    }
    with running(tmp_path, told) as url:
        yield url


async def test_tasks_of_a_placed_pod_are_told_and_judged_until_it_is_released(
    kube: KubeCluster, machine: Machine, nats_url: str, tmp_path: Path
) -> None:
    client = await connect(nats_url)
    request = {
        "request_id": "seen",
        "command": ["sh", "-c", "marks golden; marks late; sleep 600"],
        "gpu": {"count": 1},
        "queue": True,
        "realtime": {"deadline_us": 50_000, "period_us": 100_000, "runtime_us": 12_000},
    }

    async def known() -> bool:
        return bool((await ask(client, "rt.nodes", {}))["devices"])

    await until(known, "the node's devices are known", 60)
    found = await ask(client, "rt.place", request)
    assert found["outcome"] in {"placed", "queued"}, found

    async def judged() -> Json | None:
        found = await value(client, "rt_deadlines", f"node.{machine.name}")
        records = [each for each in (found or {}).get("containers", []) if each["request_id"] == "seen"]
        return records[0] if records and records[0]["missed"] and records[0]["met"] >= 12 else None

    record = await until(judged, "its tasks are judged", 60)
    missed = [body for _, body in await events(client, "rt.events.deadline.>") if body["kind"] == "missed"]
    assert (machine.name, record["container"]) in {(body["node"], body["container"]) for body in missed}

    namespace = kubernetes_options(kube, tmp_path).namespace
    assert 1 == len(pods_in(kube, namespace))
    await ask(client, "rt.release", {"request_id": "seen"})

    async def gone() -> bool:
        return pods_in(kube, namespace) == []

    await until(gone, "released, and its pod is gone", 60)
    await client.close()

"""DRA on a real API server: what claims were given is never given again; a class that would take ours is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.kube_bridge import sentences
from services.monitor.probes.fake import fake_uuid
from shared.messages import NodeFacts
from shared.subjects import NODES, node_key
from shared.testing.service_process import ServiceProcess
from shared.testing.wait import eventually, until
from tests.kube_claims import DRIVER, GROUP, allocation, claim, device_class, slice_of
from tests.kubernetes.api import MERGE, Json
from tests.kubernetes.bridged import Bridged, Extender, laxity_on, pod
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.profile import profile
from tests.outside import ask, connect

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

NODE = "claimed-1"
GPUS = {f"gpu-{index}": fake_uuid(NODE, index) for index in range(2)}


class Claiming(Bridged):
    """One node with two made-up GPUs, which a driver of DRA offers too; with the node list, as in a whole Laxity."""

    extender: Extender

    async def start(self) -> None:
        admin = self.kube.admin
        self.kube.add_node(NODE)
        admin.create(f"{GROUP}/deviceclasses", device_class())
        admin.create(f"{GROUP}/resourceslices", slice_of(NODE, dict(GPUS)))
        monitor = {"LAXITY_MONITOR_NODE": NODE, "LAXITY_MONITOR_PROBE": "fake", "LAXITY_MONITOR_PERIOD_US": "200000"}
        monitor |= {"LAXITY_MONITOR_FAKE_DEVICES": '[{"count": 2}]', "LAXITY_MONITOR_RING_ROOT": str(self.folder / "r")}
        self.extender, *_ = await asyncio.gather(
            asyncio.to_thread(self.bridge),
            asyncio.to_thread(self.placer),
            asyncio.to_thread(self.service, "node_list"),
            asyncio.to_thread(self.service, "monitor", **monitor, LAXITY_MONITOR_STALE_AFTER_US="1000000"),
        )
        await until(lambda: "the extender listens" in self.extender.process.log, 20)
        assert [None, None] == await self.holders(None, None)

    def service(self, name: str, **env: str) -> ServiceProcess:
        process = ServiceProcess(
            f"services.{name}", self._folder(name), self.server.url, LAXITY_STORAGE="memory", **env
        )
        return self._stack.enter_context(process)

    async def holders(self, *wanted: str | None) -> list[str | None]:
        """Of both GPUs, once they are as wanted."""

        async def look() -> list[str | None] | None:
            found = await self.bus.get(NODES, node_key(NODE))
            facts = NodeFacts.trusted(found[0]) if found else None
            if facts is None or facts.closed or facts.state != "ready":
                return None
            holders = [each.holder for each in facts.devices]
            return holders if holders == list(wanted) else None

        return await eventually(look, 20)

    def end(self) -> None:
        admin = self.kube.admin
        for kind in ("deviceclasses", "resourceslices"):
            for each in admin.items(f"{GROUP}/{kind}"):
                admin.delete(f"{GROUP}/{kind}/{each['metadata']['name']}")
        admin.delete(f"/api/v1/nodes/{NODE}")


@pytest.fixture
async def world(kube: KubeCluster, tmp_path: Path) -> AsyncIterator[Claiming]:
    async with laxity_on(kube, tmp_path, Claiming) as made:
        yield made
        made.end()


@pytest.fixture
def claims(kube: KubeCluster, pods: str) -> Iterator[str]:
    """The path of the claims of this test alone."""
    path = pods.replace("/api/v1", GROUP).replace("/pods", "/resourceclaims")
    yield path
    for each in kube.admin.items(path):
        kube.admin.patch(f"{path}/{each['metadata']['name']}", {"metadata": {"finalizers": None}}, MERGE)
        kube.admin.delete(f"{path}/{each['metadata']['name']}")


def claim_named(name: str) -> Json:
    made = claim(name)
    del made["metadata"]["namespace"]
    return made


def holder(claims: str, name: str) -> str:
    return f"claim {claims.split('/')[5]}/{name} by {DRIVER}"


async def place(world: Claiming, request_id: str, *, dry_run: bool = False, **gpu: Any) -> Json:
    client = await connect(world.server.url)
    body = {"request_id": request_id, "command": ["serve"], "gpu": {"count": 1, **gpu}, "dry_run": dry_run}
    said = await ask(client, "rt.place", body)
    await client.close()
    return said


async def placer_sees(world: Claiming, taken: bool) -> None:
    """The node list has said it; so has its bucket to the placer."""

    async def look() -> bool | None:
        said = await place(world, "both", dry_run=True, count=2)
        return ("excluded.taken" in {each["code"] for each in said.get("reasons", ())}) is taken or None

    await eventually(look, 20)


async def test_KU39_a_device_of_a_foreign_claim_is_given_to_nobody_until_its_allocation_goes(
    world: Claiming, kube: KubeCluster, claims: str
) -> None:
    await world.start()
    kube.admin.create(claims, claim_named("train"))
    status = f"{claims}/train/status"
    given = {"status": {"allocation": allocation("gpu-0", pool=NODE)}}
    assert 403 == kube.api_of("laxity", "placer").ask("PATCH", status, given, MERGE)[0]
    kube.admin.patch(status, given, MERGE)
    await world.holders(holder(claims, "train"), None)
    await placer_sees(world, taken=True)

    first, second = await place(world, "a"), await place(world, "b", share=0.25)
    assert [GPUS["gpu-1"]] == first["placements"][0]["devices"]
    assert "rejected" == second["outcome"]
    (taken,) = [each["message"] for each in second["reasons"] if each["code"] == "excluded.taken"]
    assert f"given by others: {NODE}/gpu-0 ({holder(claims, 'train')})" == taken
    kube.admin.patch(status, {"status": {"allocation": None}}, MERGE)
    await world.holders(None, None)
    await placer_sees(world, taken=False)
    third = await place(world, "c", share=0.25)
    assert [GPUS["gpu-0"]] == third["placements"][0]["devices"]


async def test_KU39_pods_with_claims_and_pods_of_ours_share_a_scheduler_and_never_a_device(
    world: Claiming, kube: KubeCluster, pods: str, claims: str
) -> None:
    await world.start()
    part = kube.scheduler(profile(world.extender.url), name="scheduler-claims")
    world._stack.callback(part.kill)
    reserved = await place(world, "a")
    free = ({*GPUS.values()} - {*reserved["placements"][0]["devices"]}).pop()
    for name in ("one", "two"):
        kube.admin.create(claims, claim_named(name))
        body = pod(name)
        body["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": name}]
        body["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
        kube.admin.create(pods, body)
    # kube-scheduler knows of claims alone: it gives the one that is reserved to one of both pods, which is not bound
    bound, waits = [each["metadata"]["name"] for each in await eventually(lambda: bound_and_refused(kube, pods), 60)]
    await world.holders(*(holder(claims, bound if uuid == free else waits) for uuid in GPUS.values()))
    both_ask = pod("both", gpu_milli="250")
    both_ask["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": bound}]
    kube.admin.create(pods, both_ask)
    text = "two systems would give the pod devices"
    await until(lambda: text in str(kube.admin.get(f"{pods}/both")["status"].get("conditions")), 30)
    await release(world, "a")
    await asyncio.to_thread(kube.admin.until, f"{pods}/{waits}", lambda found: found["spec"].get("nodeName"))


async def release(world: Claiming, request_id: str) -> None:
    client = await connect(world.server.url)
    await ask(client, "rt.release", {"request_id": request_id})
    await client.close()


async def bound_and_refused(kube: KubeCluster, pods: str) -> tuple[Json, Json] | None:
    """The pod that is bound, and the one that was refused in our words."""
    found = kube.admin.items(pods)
    bound = [each for each in found if each["spec"].get("nodeName")]
    refused = [each for each in found if sentences.CLAIMED in scheduled(each).get("message", "")]
    return (bound[0], refused[0]) if bound and refused else None


def scheduled(found: Json) -> Json:
    conditions = found["status"].get("conditions", [])
    return next((each for each in conditions if each["type"] == "PodScheduled"), {})


async def test_a_class_that_stands_for_our_resource_keeps_a_bridge_from_starting(
    world: Claiming, kube: KubeCluster
) -> None:
    kube.add_node(NODE)
    kube.admin.create(f"{GROUP}/deviceclasses", device_class("theirs", "laxity.dev/gpu-milli"))
    process = world.bridge_process()
    process.begin()
    await until(lambda: not process.running, 30)

    assert "deviceclasses: found theirs with laxity.dev/gpu-milli, allowed: no class whose" in process.log

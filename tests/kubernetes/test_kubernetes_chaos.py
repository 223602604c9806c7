"""Everything that Laxity on Kubernetes is made of is killed in turn while pods come and go; then pods and ledger agree.

40 pods of which 20 leave, in ``make chaos-kubernetes`` 100 and 50; LAXITY_CHAOS_PODS and LAXITY_CHAOS_SEED say
otherwise.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest

from services.placer.core.invariants import ledger_faults
from shared.messages import RequestRecord
from tests.kubernetes.api import Json
from tests.kubernetes.bridged import condition, laxity_on, pod
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.scheduled import Scheduled, persist, scheduled

PODS = int(os.environ.get("LAXITY_CHAOS_PODS", "40"))
SEED = int(os.environ.get("LAXITY_CHAOS_SEED", "2026"))
NODES = ("k1", "k2", "k3", "k4")
PER_DEVICE = 2
DEVICES = max(1, PODS * 2 // 5 // (len(NODES) * PER_DEVICE))
"""Of each node: somewhat fewer than what stays needs, so that some must wait and say why."""
QUIET_S = 120
STEADY_S = 6
"""Three looks of the placers at what runs: what they would take back they have taken back by then."""

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240 + 2 * PODS)]


@pytest.fixture
async def cluster(kube: KubeCluster, tmp_path: Path) -> AsyncIterator[Scheduled]:
    """What is killed here must find on its disk what it knew."""
    async with laxity_on(kube, tmp_path, Scheduled, storage="file") as cluster:
        yield cluster
        cluster.end()


async def test_whatever_dies_while_pods_come_and_go_each_is_bound_once_or_says_why_not_and_the_ledger_has_them(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    await cluster.start(*NODES, devices=DEVICES, replicas=2)
    mortals, load = mortals_of(cluster, kube), Load(kube, pods, Random(SEED))
    async with supervision(mortals):
        async with asyncio.TaskGroup() as group:
            coming = group.create_task(load.run())
            while not coming.done():
                for mortal in mortals:
                    await mortal.die()
                    await asyncio.sleep(1)
        begun = time.monotonic()
        await quiet(cluster, kube, load)
        deaths = {mortal.name: mortal.deaths for mortal in mortals}
        print(f"\nseed {SEED}: {PODS} pods, {len(load.left)} left; deaths {deaths}; ", end="")
        print(f"agreed {time.monotonic() - begun:.1f} s after the last pod came")
        await asyncio.sleep(STEADY_S)
        assert [] == await faults(cluster, kube, load), "what was right stays right"
    assert [] == [mortal.name for mortal in mortals if mortal.ours and mortal.fell], "by itself"


# --- what dies ---


@dataclass
class Mortal:
    """Something that a supervisor starts again whenever it has ended. `ours` never ends by itself."""

    name: str
    kill: Callable[[], None]
    begin: Callable[[], None]
    running: Callable[[], bool]
    ours: bool = False
    deaths: int = 0
    fell: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def die(self) -> None:
        """It is away for a moment."""
        async with self._lock:
            if self.running():
                await asyncio.to_thread(self.kill)
                self.deaths += 1
            await asyncio.sleep(0.5)
            await asyncio.to_thread(self.begin)

    async def rise(self) -> None:
        async with self._lock:
            if not self.running():
                self.fell += 1
                await asyncio.to_thread(self.begin)


def mortals_of(cluster: Scheduled, kube: KubeCluster) -> list[Mortal]:
    """In the order in which they die."""
    found = []
    for number, brain in enumerate(cluster.brains):
        placer, bridge, scheduler = cluster.placers[number], brain.extender.process, brain.scheduler
        for name, each in ((f"placer {number}", placer), (f"bridge {number}", bridge)):
            found.append(Mortal(name, each.kill, each.begin, lambda each=each: each.running, ours=True))
        found.append(Mortal(scheduler.name, scheduler.kill, scheduler.begin, lambda each=scheduler: each.running))
        part = (kube.apiserver, kube.etcd)[number]
        found.append(Mortal(part.name, part.kill, part.begin, lambda part=part: part.running))
    server = cluster.server
    return [*found, Mortal("nats", server.kill, server.start, lambda: server.running)]


@asynccontextmanager
async def supervision(mortals: list[Mortal]) -> AsyncIterator[None]:
    task = asyncio.create_task(supervise(mortals))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def supervise(mortals: list[Mortal]) -> NoReturn:
    """As a kubelet does: a kube-scheduler ends by itself when it cannot renew its lease."""
    while True:
        for mortal in mortals:
            await mortal.rise()
        await asyncio.sleep(0.5)


# --- what comes and goes ---


class Load:
    """Pods of which every second one leaves again: deleted or ended, bound or not."""

    def __init__(self, kube: KubeCluster, pods: str, random: Random) -> None:
        self._kube, self.pods, self._random = kube, pods, random
        self.made: dict[str, Json] = {}
        """By name."""
        self.left: set[str] = set()

    async def run(self) -> None:
        for number in range(PODS):
            name = f"p{number}"
            self.made[name] = await persist(lambda name=name: self._made(name))
            if number % 2:
                await self._leave(self._random.choice(sorted(self.made.keys() - self.left)))
            await asyncio.sleep(0.2)

    def _made(self, name: str) -> Json:
        """One that was made by a try whose answer was lost is there."""
        found = self._kube.admin.find(f"{self.pods}/{name}")
        return found or self._kube.admin.create(self.pods, pod(name, gpu_milli=str(1000 // PER_DEVICE)))

    async def _leave(self, name: str) -> None:
        self.left.add(name)
        if self._random.random() < 0.5:
            await persist(lambda: self._kube.admin.delete(f"{self.pods}/{name}", grace_s=0))
        else:
            await persist(lambda: self._kube.say(self.pods.split("/")[4], name, phase="Succeeded"))


# --- what must hold ---


async def quiet(cluster: Scheduled, kube: KubeCluster, load: Load) -> None:
    """Until everything holds."""
    deadline = time.monotonic() + QUIET_S
    found = ["nothing was looked at"]
    while found:
        assert time.monotonic() < deadline, "\n".join(found)
        await asyncio.sleep(0.5)
        with suppress(OSError):  # a part is just being started again
            found = await faults(cluster, kube, load)


async def faults(cluster: Scheduled, kube: KubeCluster, load: Load) -> list[str]:
    """In words. Pods and ledger are read one after the other, so only what lasts is one."""
    there = {each["metadata"]["name"]: each for each in await asyncio.to_thread(kube.admin.items, load.pods)}
    records = {name: await cluster.record(found["metadata"]["uid"]) for name, found in load.made.items()}
    stay = load.made.keys() - load.left
    bound = {name: there[name] for name in stay & there.keys() if there[name]["spec"].get("nodeName")}
    found = [f"{name} is gone: {story(records[name])}" for name in stay - there.keys()]
    found += [f"{name} waits and does not say why" for name in stay & there.keys() - bound if not says_why(there[name])]
    if len(bound) != (most := min(len(stay), len(NODES) * DEVICES * PER_DEVICE)):
        found.append(f"{len(bound)} pods are bound, {most} fit")
    for name, each in bound.items():
        if (said := place_of(each)) != (known := place_in(records[name])):
            found.append(f"{name} is on {said}, the ledger says {known}: {story(records[name])}")
    by_id = {record.request_id: record for record in records.values() if record is not None}
    reserved = {node: await cluster.reservations(node) for node in NODES}
    found += ledger_faults(by_id, reserved)
    uids = Counter(each.request_id for reservations in reserved.values() for each in reservations)
    wanted = Counter(each["metadata"]["uid"] for each in bound.values())
    found += [f"{uid} has a reservation and is not bound: {story(by_id.get(uid))}" for uid in uids - wanted]
    return [*found, *over_committed(bound.values())]


def says_why(found: Json) -> bool:
    ours, its = condition(found), scheduled(found)
    return bool(ours.get("status") == "False" and ours["message"] and its.get("reason") == "Unschedulable")


def place_of(found: Json) -> tuple[str, str]:
    return found["spec"]["nodeName"], found["metadata"].get("annotations", {}).get("laxity.dev/devices", "none")


def place_in(record: RequestRecord | None) -> tuple[str | None, str] | None:
    if record is None or record.state != "started":
        return None
    (replica,) = record.replicas
    return replica.node, ",".join(replica.devices)


def story(record: RequestRecord | None) -> list[str]:
    return [f"{step.state} {step.detail or ''}".strip() for step in record.steps] if record is not None else []


def over_committed(bound: Iterable[Json]) -> Iterator[str]:
    """By what the pods themselves carry."""
    given = Counter(place_of(each) for each in bound)
    yield from (f"{place} was given to {count} pods" for place, count in given.items() if count > PER_DEVICE)

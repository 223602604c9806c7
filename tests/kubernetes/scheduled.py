"""A Kubernetes with Laxity on it and a stock kube-scheduler that asks it: one of each, or as many as a test wants."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from shared.testing.service_process import ServiceProcess
from shared.testing.wait import until
from tests.kubernetes.api import ApiRefusedError, Json
from tests.kubernetes.bridged import Bridged, Extender, laxity_on
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.parts import Part, free_port
from tests.kubernetes.profile import profile

T = TypeVar("T")
LEASE = {"leaseDuration": "4s", "renewDeadline": "3s", "retryPeriod": "1s"}
"""Shorter than Kubernetes' own, so that another one leads soon."""


@dataclass(frozen=True)
class Brain:
    """A kube-scheduler with a bridge beside it, as they are in one pod."""

    extender: Extender
    scheduler: Part


class Scheduled(Bridged):
    """`extender` and `decides` are the first bridge and the first placer."""

    brains: list[Brain]
    placers: list[ServiceProcess]
    patience = "5s"
    """kube-scheduler's, for an answer of the extender."""
    _nodes: tuple[str, ...] = ()

    @property
    def extender(self) -> Extender:
        return self.brains[0].extender

    @property
    def decides(self) -> ServiceProcess:
        return self.placers[0]

    async def start(
        self, *nodes: str, devices: int = 1, replicas: int = 1, placer: Mapping[str, str] | None = None, **node: str
    ) -> None:
        """`devices` of each node; 0 leaves it to others to tell of them. `replicas`: so many placers, and so many
        schedulers of which one leads, each with its bridge. `placer`: more of what placers are told; `node`: labels.
        """
        self._nodes = nodes
        for name in nodes:
            if devices:
                await self.add_node(name, devices)
            self.kube.add_node(name, node)
        numbers = range(1, replicas + 1)
        self.placers, self.brains = await asyncio.gather(
            asyncio.gather(*(asyncio.to_thread(self.placer, f"p{n}", "kubernetes", **(placer or {})) for n in numbers)),
            asyncio.gather(*(self._brain(number, elected=replicas > 1) for number in numbers)),
        )

    async def _brain(self, number: int, *, elected: bool) -> Brain:
        """An elected one ends by itself where it cannot renew its lease, and nobody here starts it again."""
        port = str(free_port())
        extender = await asyncio.to_thread(self.bridge, f"b{number}", LAXITY_KUBE_BRIDGE_EXTENDER_PORT=port)
        await until(lambda: "the extender listens" in extender.process.log, 20)
        name = f"scheduler-{number}-{self.folder.name}"
        config = self.kube.kubeconfig(name, self._token("scheduler").read_text())
        told = {
            "clientConnection": {"kubeconfig": str(config), "qps": 2000, "burst": 4000},
            "leaderElection": {
                "leaderElect": elected,
                "resourceNamespace": "laxity",
                "resourceName": "laxity-scheduler",
                **LEASE,
            },
        }
        part = await asyncio.to_thread(self.kube.scheduler, profile(extender.url, self.patience) | told, name)
        self._stack.callback(part.kill)
        return Brain(extender, part)

    def end(self) -> None:
        for name in self._nodes:
            self.kube.admin.delete(f"/api/v1/nodes/{name}")

    async def until_bound(self, path: str, timeout_s: float = 60) -> Json:
        return await asyncio.to_thread(
            self.kube.admin.until, path, lambda found: found["spec"].get("nodeName"), timeout_s
        )


@pytest.fixture
async def cluster(kube: KubeCluster, tmp_path: Path) -> AsyncIterator[Scheduled]:
    async with laxity_on(kube, tmp_path, Scheduled) as cluster:
        yield cluster
        cluster.end()


def scheduled(found: Json) -> Json:
    """What kube-scheduler itself says of a pod."""
    conditions = found["status"].get("conditions", [])
    return next((each for each in conditions if each["type"] == "PodScheduled"), {})


def bound(kube: KubeCluster, pods: str, prefix: str) -> dict[str, str]:
    """Nodes of the pods that have one, by name."""
    return {
        name: each["spec"]["nodeName"]
        for each in kube.admin.items(pods)
        if (name := each["metadata"]["name"]).startswith(prefix) and each["spec"].get("nodeName")
    }


async def persist(ask: Callable[[], T]) -> T:
    """As clients do while the API server is away."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return await asyncio.to_thread(ask)
        except (OSError, http.client.HTTPException, ApiRefusedError):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)

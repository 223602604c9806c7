"""Laxity as ``bench-kubernetes`` starts it: real services in processes, and monitors that are only played."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import suppress
from typing import Any, Final

from bench import place_bus, place_bus_roles
from bench.kubernetes_pods import DEVICES, IMAGE, SHARING, request
from shared.messages import NodeFacts, NodeState, PlaceReply
from shared.subjects import NODES, encode, node_key
from shared.testing.service_process import ServiceProcess
from shared.testing.wait import eventually
from tests.kubernetes.bridged import Bridged

MOST_BEATS_PER_S: Final = 200
"""Of all monitors: one machine plays all nodes and runs everything else too, so that a thousand beat every 5 s."""
IN_FLIGHT: Final = 64
ANSWER_S: Final = 60.0
QUIET: Final = {"LAXITY_CHECK": "false", "LAXITY_LOG_LEVEL": "warning"}


class Laxity(Bridged):
    """nats-server, node-list, placer and bridge, with a memory ledger."""

    def prepare(self) -> None:
        """Here placers make pods too."""
        super().prepare()
        rbac = "rbac.authorization.k8s.io"
        makes = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "patch"]}
        given = {"roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "bench-makes-pods"}}
        given["subjects"] = [{"kind": "ServiceAccount", "namespace": "laxity", "name": "placer"}]  # type: ignore[assignment]
        for kind, more in (("ClusterRole", {"rules": [makes]}), ("ClusterRoleBinding", given)):
            body = {"apiVersion": f"{rbac}/v1", "kind": kind, "metadata": {"name": "bench-makes-pods"}, **more}
            self.kube.admin.apply(f"/apis/{rbac}/v1/{kind.lower()}s/bench-makes-pods", body)

    async def start(self, nodes: list[str], namespace: str, port: int = 0) -> None:
        """`namespace` is that of the pods that the placer makes, `port` where the extender listens."""
        self.client = await place_bus_roles.connect(self.server.url)
        self.states: Counter[str] = Counter()
        await self.client.subscribe("rt.events.place.>", cb=self._heard)
        await place_bus.second_ledger(self.client)
        self._beating = asyncio.create_task(self._beat(nodes))
        placer = {
            "LAXITY_PLACER_KUBERNETES__NAMESPACE": namespace,
            "LAXITY_PLACER_KUBERNETES__IMAGE": IMAGE,
            "LAXITY_PLACER_KUBERNETES__PULL": "never",
            # no kubelet says that a pod runs, and whoever waits for it is not to read it again and again
            "LAXITY_PLACER_KUBERNETES__LOOK_US": str(3_600_000_000),
        }
        self._node_list, self._placer, self._bridge = await asyncio.gather(
            asyncio.to_thread(self._start_node_list),
            asyncio.to_thread(self.placer, "p1", "kubernetes", **QUIET, **placer),
            asyncio.to_thread(self.bridge, "b1", LAXITY_KUBE_BRIDGE_EXTENDER_PORT=str(port), **QUIET),
        )
        for name in nodes:
            await eventually(lambda name=name: self._ready(name), 60)  # type: ignore[misc]

    def _start_node_list(self) -> ServiceProcess:
        usual = {"LAXITY_STORAGE": "memory", "LAXITY_METRICS_PORT": "0"} | QUIET
        started = ServiceProcess("services.node_list", self._folder("n1"), self.server.url, **usual)
        return self._stack.enter_context(started)

    async def _heard(self, message: Any) -> None:
        self.states[json.loads(message.data)["state"]] += 1

    @property
    def failures(self) -> int:
        """Starts and bindings that did not come about, and holds that nobody made use of."""
        return self.states["waiting"] + self.states["failed"] + self.states["expired"]

    async def end(self) -> None:
        self._beating.cancel()
        with suppress(asyncio.CancelledError):
            await self._beating
        await self.client.close()

    @property
    def processes(self) -> dict[str, int]:
        ours = {"placer": self._placer, "node-list": self._node_list, "kube-bridge": self._bridge.process}
        return {name: process.pid for name, process in ours.items()} | {"nats-server": self.server.pid}

    # --- nodes ---

    async def _ready(self, name: str) -> bool | None:
        """Its monitor was heard, and what Kubernetes says of it."""
        found = await self.bus.get(NODES, node_key(name))
        facts = NodeFacts.trusted(found[0]) if found is not None else None
        return (facts is not None and facts.state == NodeState.READY and bool(facts.labels)) or None

    async def _beat(self, nodes: list[str]) -> None:
        """Each node's monitor, once in a period, one after another."""
        beat_us = max(1_000_000, len(nodes) * 1_000_000 // MOST_BEATS_PER_S)
        bodies = {name: json.dumps(metrics(name, beat_us)) for name in nodes}
        counter = 0
        while True:
            counter += 1
            began = time.monotonic()
            for place, (name, body) in enumerate(bodies.items(), 1):
                said = body.replace('"counter": 0', f'"counter": {counter}', 1)
                await self.client.publish(f"rt.metrics.{encode(name)}", said.encode())
                if place % 20 == 0 or place == len(nodes):
                    await asyncio.sleep(max(0.0, began + place / len(nodes) * beat_us / 1e6 - time.monotonic()))

    # --- requests ---

    async def place(self, names: list[str], labels: dict[str, str]) -> None:
        bodies = iter([(name, request(name, labels)) for name in names])

        async def one_after_another() -> None:
            for name, body in bodies:
                answer = await self.client.request("rt.place", body, timeout=ANSWER_S)
                reply = PlaceReply.trusted(answer.data)
                if reply.outcome != "placed":
                    raise RuntimeError(f"{name} is not placed: {reply}")

        await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))

    async def commits_us(self) -> list[float]:
        """Of bare commits of two keys as large as usual, one after another."""
        size = await place_bus.size_of_writes(self.client)
        found: list[float] = (await place_bus_roles.run("commit", self.server.url, 2, size))["took_us"]
        return found


def metrics(name: str, beat_us: int) -> dict[str, Any]:
    """What the monitor of a node with idle devices says."""
    unknown = {"value": None, "reason": "not_supported"}
    device = {
        "model": "fake",
        "regime": SHARING.regime,
        "slice_us": SHARING.slice_us,
        "switch_us": SHARING.switch_us,
        "healthy": True,
        "memory_mib": 80_000,
        "utilisation_ratio": unknown,
        "memory_used_mib": unknown,
    }
    now_us = time.time_ns() // 1_000
    return {
        "node": name,
        "start_id": "bench",
        "counter": 0,
        "at_us": now_us,
        "mono_us": now_us,
        "period_us": beat_us,
        "devices": [{"uuid": f"{name}-gpu-{index}", "index": index} | device for index in range(DEVICES)],
        "cpu_milli": 64_000,
        "memory_mib": 256 * 1024,
    }

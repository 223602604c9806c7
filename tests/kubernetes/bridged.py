"""A Kubernetes with Laxity on it: NATS, placers and bridges as processes, node facts written by hand."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from shared.bus import Bus
from shared.messages import NodeReservations, RequestRecord, Reservation
from shared.settings import ServiceSettings
from shared.subjects import LEDGER, NODES, node_key, request_key
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess
from shared.testing.wait import eventually
from tests.kubernetes.api import Json
from tests.kubernetes.cluster import KubeCluster
from tests.manifests import ROOT
from tests.placer_world import facts

ROLES = ROOT / "k8s/base/roles.yaml"
"""Of placer and bridge, as they are installed."""
B = TypeVar("B", bound="Bridged")


@asynccontextmanager
async def laxity_on(kube: KubeCluster, folder: Path, kind: type[B], storage: str = "memory") -> AsyncIterator[B]:
    """A server with its streams, and the accounts; what is started besides is up to the test."""
    with ExitStack() as stack:
        server = stack.enter_context(NatsServer(folder / "nats"))
        bus = await Bus.connect(ServiceSettings(nats_url=server.url, storage=storage))
        await bus.ensure_streams()
        made = kind(kube, folder, server, bus, stack, storage)
        await asyncio.to_thread(made.prepare)
        yield made
        await bus.close()


class Bridged:
    """``stack`` ends what is started here."""

    def __init__(
        self, kube: KubeCluster, folder: Path, server: NatsServer, bus: Bus, stack: ExitStack, storage: str
    ) -> None:
        self.kube, self.folder, self.server, self.bus, self._stack = kube, folder, server, bus, stack
        self._storage = storage
        self.api_url = kube.url
        """Where the services that are started from now on find the API server."""

    def prepare(self) -> None:
        """The service accounts, with their rights and their files."""
        for namespace in ("laxity", "laxity-pods"):
            self.kube.namespace(namespace)
        for found in yaml.safe_load_all(ROLES.read_text()):
            self.kube.admin.apply(path_of_role(found), found)
        for name in ("placer", "scheduler"):
            self._token(name).write_text(self.kube.account_token("laxity", name))

    def _token(self, account: str) -> Path:
        return self.folder / f"{account}.token"

    def use_token(self, account: str, token: str) -> None:
        """What is started from now on asks the API server with it."""
        self._token(account).write_text(token)

    def bridge(self, name: str = "b1", **env: str) -> Extender:
        return Extender(self._stack.enter_context(self.bridge_process(name, **env)))

    def bridge_process(self, name: str = "b1", **env: str) -> ServiceProcess:
        """Not started yet."""
        folder = self._folder(name)
        fixed = {
            "LAXITY_INSTANCE": name,
            "LAXITY_STORAGE": self._storage,
            "LAXITY_KUBE_BRIDGE_KUBERNETES__SERVER": self.api_url,
            "LAXITY_KUBE_BRIDGE_KUBERNETES__TOKEN_FILE": str(self._token("scheduler")),
            "LAXITY_KUBE_BRIDGE_KUBERNETES__CA_FILE": str(self.kube.ca),
            "LAXITY_KUBE_BRIDGE_EXTENDER_PORT": "0",
            "LAXITY_METRICS_PORT": "0",
        }
        return ServiceProcess("services.kube_bridge", folder, self.server.url, **fixed | env)

    def placer(self, name: str = "p1", backend: str = "fake", **env: str) -> ServiceProcess:
        folder = self._folder(name)
        fixed = {
            "LAXITY_INSTANCE": name,
            "LAXITY_STORAGE": self._storage,
            "LAXITY_PLACER_BACKENDS": json.dumps({"*": backend}),
            "LAXITY_PLACER_STATE_ROOT": str(self.folder / "state"),
            "LAXITY_PLACER_RING_ROOT": str(self.folder / "rings"),
            "LAXITY_PLACER_KUBERNETES__SERVER": self.api_url,
            "LAXITY_PLACER_KUBERNETES__TOKEN_FILE": str(self._token("placer")),
            "LAXITY_PLACER_KUBERNETES__CA_FILE": str(self.kube.ca),
        }
        return self._stack.enter_context(ServiceProcess("services.placer", folder, self.server.url, **fixed | env))

    def service(self, name: str, **env: str) -> ServiceProcess:
        """Any other one of ours."""
        fixed = {"LAXITY_INSTANCE": name, "LAXITY_STORAGE": self._storage}
        process = ServiceProcess(f"services.{name}", self._folder(name), self.server.url, **fixed | env)
        return self._stack.enter_context(process)

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    # --- nodes and the ledger ---

    async def add_node(self, name: str, devices: int, **more: Any) -> None:
        """What the node list would say of it; its devices share by turns."""
        await self.bus.put(NODES, node_key(name), facts(name, devices, **more).to_json())

    async def record(self, uid: str) -> RequestRecord | None:
        found = await self.bus.get(LEDGER, request_key(uid))
        return RequestRecord.trusted(found[0]) if found else None

    async def reach(self, uid: str, *states: str) -> RequestRecord:
        """The record once it is in one of these states."""

        async def look() -> RequestRecord | None:
            record = await self.record(uid)
            return record if record and record.state in states else None

        return await eventually(look, 40)

    async def reservations(self, node: str) -> tuple[Reservation, ...]:
        found = await self.bus.get(LEDGER, node_key(node))
        return NodeReservations.trusted(found[0]).reservations if found else ()

    async def reserved(self, node: str) -> list[str]:
        """Request ids of all that is reserved on a node."""
        return [each.request_id for each in await self.reservations(node)]


class Extender:
    """A bridge's process, asked as kube-scheduler asks it."""

    def __init__(self, process: ServiceProcess) -> None:
        self.process = process

    @property
    def url(self) -> str:
        lines = [line for line in self.process.log.splitlines() if "the extender listens" in line]
        return str(json.loads(lines[-1])["url"])

    def filter(self, pod: Json, nodes: list[str]) -> Json:
        return self.ask("filter", {"Pod": pod, "Nodes": None, "NodeNames": nodes})

    def bind(self, pod: Json, node: str) -> Json:
        meta = pod["metadata"]
        named = {"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"]}
        return self.ask("bind", {**named, "Node": node})

    def numbers(self, metric: str = "laxity_kube_filters_total") -> dict[str, float]:
        """By the value of the metric's label: how often filter was answered, by outcome."""
        url = re.findall(r"http://[0-9.:]+/metrics", self.process.log)[-1]
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  # its own
            text = answer.read().decode()
        return {label: float(number) for label, number in re.findall(rf'{metric}\{{\w+="(\w+)"\}} (\S+)', text)}

    def ask(self, verb: str, body: object) -> Json:
        host, port = self.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.request("POST", f"/{verb}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        assert answer.status == 200, "of any other one kube-scheduler throws the reason away"
        assert isinstance(found, dict)
        return found


def path_of_role(found: Json) -> str:
    meta = found["metadata"]
    place = f"namespaces/{meta['namespace']}/" if "namespace" in meta else ""
    return f"/apis/{found['apiVersion']}/{place}{found['kind'].lower()}s/{meta['name']}"


def pod(name: str, annotations: dict[str, str] | None = None, image: str = "none", **limits: str) -> Json:
    """A pod of ours: ``gpu_milli="250"``, ``gpu_mib``, ``cpu``, ``memory``."""
    ours = {"gpu_milli": "laxity.dev/gpu-milli", "gpu_mib": "laxity.dev/gpu-mib"}
    asked = {ours.get(key, key): value for key, value in limits.items()}
    words = {f"laxity.dev/{word}": text for word, text in (annotations or {}).items()}
    container = {"name": "main", "image": image, "imagePullPolicy": "Never", "resources": {"limits": asked}}
    spec = {
        "schedulerName": "laxity",
        "containers": [container],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
    }
    return {"metadata": {"name": name, "annotations": words}, "spec": spec}


def condition(found: Json) -> Json:
    """Our condition of a pod."""
    return next((each for each in found["status"].get("conditions", []) if each["type"] == "laxity.dev/Placed"), {})

"""All of Laxity with the accounts, policies and configuration of k8s/: pods that people apply run, are judged, and go.

The services are processes here and not pods; kube-scheduler and the kubelet are real. Nothing has more rights than the
manifests give it, and each service has its own key.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from nats.aio.client import Client
from nats.js.errors import KeyNotFoundError

from shared.testing.service_process import ServiceProcess
from tests.kubernetes.api import Json
from tests.kubernetes.image import IMAGE
from tests.kubernetes.installed import Installed, pod
from tests.kubernetes.node import Machine
from tests.kubernetes.parts import Part, free_port, missing_node, program
from tests.manifests import named
from tests.outside import ask, events, until
from tests.secured import connect, secured_server

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240)]

PODS = "/api/v1/namespaces/shop/pods"
DEADLINE = {"laxity.dev/deadline": "50ms", "laxity.dev/runtime": "12ms", "laxity.dev/kind": "firm"}
GPU = {"laxity.dev/gpu-milli": "1000"}
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def node(installed: Installed) -> Machine:
    if reason := missing_node():
        pytest.skip(reason)
    machine = installed.kube.kubelet()
    if not machine.has_programs:
        pytest.skip("no C compiler with a static C library")
    return machine


class Whole:
    """NATS, every service, and kube-scheduler."""

    def __init__(self, installed: Installed, node: Machine, folder: Path, stack: ExitStack) -> None:
        self._kube, self._folder, self._stack = installed.kube, folder, stack
        server, self.keys = secured_server(folder, [node.name], [])
        self.server = stack.enter_context(server)
        self.root = folder / "rings"
        self.placer = self._service(
            "placer",
            LAXITY_PLACER_BACKENDS='{"*": "kubernetes"}',
            LAXITY_PLACER_KUBERNETES__SERVER=self._kube.url,
            LAXITY_PLACER_KUBERNETES__TOKEN_FILE=self._token("placer"),
            LAXITY_PLACER_KUBERNETES__CA_FILE=str(self._kube.ca),
            LAXITY_PLACER_KUBERNETES__PULL="never",
        )
        self._service("node_list")
        self._service("deadline_tracker")
        self._service(
            "monitor",
            LAXITY_MONITOR_NODE=node.name,
            LAXITY_MONITOR_PROBE="fake",
            LAXITY_MONITOR_RING_ROOT=str(self.root),
            LAXITY_MONITOR_POD_ROOT=str(node.folder / "kubelet" / "pods"),
            LAXITY_MONITOR_KUBELET_SOCKET=str(node.folder / "kubelet" / "pod-resources" / "kubelet.sock"),
        )
        self.bridge = self._service(
            "kube_bridge",
            LAXITY_KUBE_BRIDGE_KUBERNETES__SERVER=self._kube.url,
            LAXITY_KUBE_BRIDGE_KUBERNETES__TOKEN_FILE=self._token("scheduler"),
            LAXITY_KUBE_BRIDGE_KUBERNETES__CA_FILE=str(self._kube.ca),
            LAXITY_KUBE_BRIDGE_EXTENDER_PORT=str(port := free_port()),
        )
        self.scheduler = self._scheduler(f"http://127.0.0.1:{port}")

    def _service(self, name: str, **env: str) -> ServiceProcess:
        folder = self._folder / name
        folder.mkdir()
        user = f"monitor-{env['LAXITY_MONITOR_NODE']}" if name == "monitor" else name.replace("_", "-")
        fixed = {"LAXITY_STORAGE": "memory", "LAXITY_NATS_SEED_FILE": str(self.keys / f"{user}.nk"), **env}
        return self._stack.enter_context(ServiceProcess(f"services.{name}", folder, self.server.url, **fixed))

    def _token(self, account: str) -> str:
        path = self._folder / f"{account}.token"
        path.write_text(self._kube.account_token("laxity", account))
        return str(path)

    def _scheduler(self, extender: str) -> Part:
        config: Json = yaml.safe_load(named("ha", "ConfigMap", "scheduler")["data"]["scheduler.yaml"])
        kubeconfig = str(self._kube.kubeconfig("whole", Path(self._token("scheduler")).read_text()))
        config["clientConnection"] = {"kubeconfig": kubeconfig}
        config["extenders"][0]["urlPrefix"] = extender
        file = self._folder / "scheduler.json"
        file.write_text(json.dumps(config))
        lease = "/apis/coordination.k8s.io/v1/namespaces/laxity/leases/laxity-scheduler"
        self._kube.admin.delete(lease)
        command = [program("kube-scheduler"), f"--config={file}", "--bind-address=127.0.0.1"]
        command += [f"--secure-port={free_port()}", f"--authorization-kubeconfig={kubeconfig}"]
        command += [f"--authentication-kubeconfig={kubeconfig}"]
        made = Part("whole-scheduler", command, self._folder, lambda: self._kube.admin.find(lease) is not None)
        self._stack.callback(made.kill)
        made.start()
        return made


@pytest.fixture(scope="module")
def whole(installed: Installed, node: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    installed.clear()
    with ExitStack() as stack:
        yield Whole(installed, node, tmp_path_factory.mktemp("whole"), stack)


@pytest.fixture
async def outside(whole: Whole) -> AsyncIterator[Client]:
    client = await connect(whole.server.url, whole.keys, "operator")
    yield client
    await client.close()


def marked(name: str, annotations: dict[str, str]) -> Json:
    body = pod(name, annotations, limits=GPU, command=["sh", "-c", "marks golden; sleep 600"])
    body["spec"]["containers"][0] |= {"image": IMAGE, "imagePullPolicy": "Never"}
    body["spec"] |= {"terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False}
    return body


async def reserved(client: Client, node: str) -> list[Json]:
    """What the ledger has on a node."""
    bucket = await client.jetstream().key_value("rt_ledger")
    try:
        entry = await bucket.get(f"node.{node}")
    except KeyNotFoundError:
        return []
    found: list[Json] = json.loads(entry.value or b"{}").get("reservations", [])
    return found


async def test_pods_run_with_the_devices_of_their_reservations_and_their_tasks_are_told_and_all_is_given_back(
    installed: Installed, node: Machine, whole: Whole, outside: Client
) -> None:
    admin = installed.kube.admin
    uids = {name: installed.alice.create(PODS, marked(name, DEADLINE))["metadata"]["uid"] for name in NAMES}

    async def all_run() -> bool:
        return all(admin.get(f"{PODS}/{name}")["status"]["phase"] == "Running" for name in NAMES)

    await until(all_run, "all pods run", 90)
    held = {each["request_id"]: each["devices"] for each in await reserved(outside, node.name)}
    assert {uids[name]: node.environment(uids[name])["NVIDIA_VISIBLE_DEVICES"].split(",") for name in NAMES} == held
    assert 3 == len({device for devices in held.values() for device in devices})

    async def told() -> dict[str, int] | None:
        counts: dict[str, int] = dict.fromkeys(uids.values(), 0)
        for _, body in await events(outside, f"rt.events.task.{node.name}"):
            for ring in body["ring"]:
                counts[body["rings"][ring]["request_id"]] += 1
        return counts if all(count >= 28 for count in counts.values()) else None

    await until(told, "begins and ends of all pods", 60)

    for name in NAMES:
        installed.alice.delete(f"{PODS}/{name}", grace_s=0)

    async def free() -> bool:
        return not await reserved(outside, node.name) and not list(whole.root.iterdir())

    await until(free, "nothing is reserved, and no ring is left", 60)


async def test_a_request_of_an_outside_client_is_a_pod_in_its_own_namespace(
    installed: Installed, node: Machine, whole: Whole, outside: Client
) -> None:
    request = {
        "request_id": "from-outside",
        "image": IMAGE,
        "command": ["sh", "-c", "marks golden; sleep 600"],
        "gpu": {"count": 1},
        "realtime": {"deadline_us": 50_000, "runtime_us": 12_000},
    }
    placed = await ask(outside, "rt.place", request)
    assert "placed" == placed["outcome"]
    (devices,) = [each["devices"] for each in placed["placements"]]

    async def running() -> Json | None:
        found = installed.kube.admin.items("/api/v1/namespaces/laxity-pods/pods")
        return next((each for each in found if each["status"].get("phase") == "Running"), None)

    its_pod = await until(running, "its pod runs", 60)
    assert devices == node.environment(its_pod["metadata"]["uid"])["NVIDIA_VISIBLE_DEVICES"].split(",")

    async def told() -> bool:
        batches = [body for _, body in await events(outside, f"rt.events.task.{node.name}")]
        return any(ring["request_id"] == "from-outside" for body in batches for ring in body["rings"])

    await until(told, "its tasks", 60)
    assert (await ask(outside, "rt.release", {"request_id": "from-outside"}))["outcome"] in {"stopping", "released"}

    async def gone() -> bool:
        left = installed.kube.admin.items("/api/v1/namespaces/laxity-pods/pods")
        return not left and not await reserved(outside, node.name)

    await until(gone, "the pod and its reservation are gone", 60)


async def test_an_impossible_deadline_stays_pending_and_says_why(
    installed: Installed, whole: Whole, outside: Client
) -> None:
    impossible = {"laxity.dev/deadline": "5ms", "laxity.dev/runtime": "12ms", "laxity.dev/kind": "hard"}
    installed.alice.create(PODS, marked("hopeless", impossible))

    def placed(found: Json) -> Any:
        conditions = found["status"].get("conditions", [])
        return next((each for each in conditions if each["type"] == "laxity.dev/Placed"), None)

    found = installed.kube.admin.until(f"{PODS}/hopeless", placed)
    assert "False" == placed(found)["status"]
    assert "nodeName" not in found["spec"]
    assert "12 ms" in placed(found)["message"]
    installed.alice.delete(f"{PODS}/hopeless", grace_s=0)


async def test_nothing_was_refused_for_want_of_a_right(whole: Whole) -> None:
    """After the tests above; the last one of its file."""
    logs = [whole.placer.log, whole.bridge.log, whole.scheduler.log]
    lines = [line for log in logs for line in log.lower().splitlines()]
    assert [] == [
        line for line in lines if any(word in line for word in ("forbidden", " 403", "permissions violation"))
    ]

"""The gate of a real node's device and pods that share it: each waits for its turn through a volume of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from tests.fake_nvml.build import FakeDriver, build_fake_nvml
from tests.kubernetes.api import Json
from tests.kubernetes.image import IMAGE
from tests.kubernetes.installed import Installed, pod
from tests.kubernetes.node import Machine
from tests.kubernetes.parts import missing_node
from tests.kubernetes.running import running
from tests.outside import ask, connect, until, value

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

PODS = "/api/v1/namespaces/shop/pods"
SOMEBODY = 1234
SDK = """
import laxity
for _ in range(3):
    with laxity.task("seen from outside", deadline_us=50_000) as task:
        assert task.turn is not None
"""


@pytest.fixture
def node(installed: Installed) -> Machine:
    if reason := missing_node():
        pytest.skip(reason)
    machine = installed.kube.kubelet()
    if not machine.has_programs:
        pytest.skip("no C compiler with a static C library")
    installed.clear()
    return machine


@pytest.fixture
def nats_url(installed: Installed, node: Machine, tmp_path: Path) -> Iterator[str]:
    """Of a server with a placer, a node list, and a monitor of gated GPUs, whose driver is a library without one."""
    token = tmp_path / "placer.token"
    token.write_text(installed.kube.account_token("laxity", "placer"))
    told = {
        "placer": {
            "LAXITY_PLACER_BACKENDS": '{"*": "kubernetes"}',
            "LAXITY_PLACER_KUBERNETES__SERVER": installed.kube.url,
            "LAXITY_PLACER_KUBERNETES__TOKEN_FILE": str(token),
            "LAXITY_PLACER_KUBERNETES__CA_FILE": str(installed.kube.ca),
        },
        "node_list": {},
        "monitor": {
            "LAXITY_MONITOR_NODE": node.name,
            "LAXITY_MONITOR_PROBE": "nvml",
            "LAXITY_MONITOR_REGIME": "gated",
            "LAXITY_MONITOR_NVML_HOST_PIDS": "true",  # this driver has the pids that a test gives it
            "LAXITY_MONITOR_RING_ROOT": str(tmp_path / "rings"),
            "LAXITY_MONITOR_POD_ROOT": str(node.folder / "kubelet" / "pods"),
            **FakeDriver(build_fake_nvml(tmp_path), tmp_path / "profile").environment,
        },
    }
    with running(tmp_path, told) as url:
        yield url


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Client]:
    client = await connect(nats_url)

    async def known() -> bool:
        return bool((await ask(client, "rt.nodes", {}))["devices"])

    await until(known, "the node's devices are known", 60)
    yield client
    await client.close()


def gated(installed: Installed, name: str, *command: str) -> Json:
    body = pod(name, {"laxity.dev/gate": "true"}, limits={"laxity.dev/gpu-milli": "250"}, command=list(command))
    main = body["spec"]["containers"][0]
    main |= {"image": IMAGE, "imagePullPolicy": "Never", "securityContext": {"runAsUser": SOMEBODY}}
    body["spec"] |= {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
    }
    return installed.alice.create(PODS, body)["metadata"]


async def placed(client: Client, meta: Json) -> list[str]:
    """The devices that a pod was bound with. What it declares is far more than it takes: nobody overruns."""
    timing = {"deadline_us": 2_000_000, "period_us": 2_000_000, "runtime_us": 200_000, "gate": True}
    request = {
        "request_id": meta["uid"],
        "pods": [{name: meta[name] for name in ("namespace", "name", "uid")}],
        "gpu": {"count": 1, "share": 0.25},
        "realtime": timing,
        "strategy": "binpack",
        "queue": True,  # a node that has just joined takes nothing yet
    }
    assert (await ask(client, "rt.place", request))["outcome"] in {"placed", "queued"}
    record = await reached(client, meta["uid"], "started")
    devices: list[str] = record["replicas"][0]["devices"]
    return devices


async def reached(client: Client, uid: str, *states: str) -> Json:
    async def record() -> Json | None:
        found = await value(client, "rt_ledger", f"request.{uid}")
        return found if found and found["state"] in states else None

    return await until(record, f"it is {' or '.join(states)}", 60)


async def test_pods_of_one_device_have_it_in_turn_and_a_program_with_the_sdk_too(
    installed: Installed, node: Machine, client: Client
) -> None:
    stays = gated(installed, "stays", "sleep", "600")
    turning = [gated(installed, f"turns-{number}", "turns", "20", "4000") for number in range(2)]
    devices = [await placed(client, each) for each in (stays, *turning)]
    assert [devices[0]] * 3 == devices, "they share it"

    installed.kube.admin.until(f"{PODS}/stays", lambda found: found["status"]["phase"] == "Running")
    assert "1" == node.environment(stays["uid"])["LAXITY_GATE"]
    done = with_the_sdk(node.pid(stays["uid"]))
    assert (0, "") == (done.returncode, done.stderr)

    records = [await reached(client, each["uid"], "exited") for each in turning]
    assert [0, 0] == [record["exit_code"] for record in records], "3: two had a turn at once; 5: there was no gate"
    for name in ("stays", "turns-0", "turns-1"):
        installed.alice.delete(f"{PODS}/{name}", grace_s=0)
    folders = [node.folder / "kubelet" / "pods" / each["uid"] for each in (stays, *turning)]

    async def gone() -> bool:
        return not any(folder.exists() for folder in folders)

    await until(gone, "the kubelet could take their volumes away, although the gate was in them", 60)


def with_the_sdk(pid: int) -> subprocess.CompletedProcess[str]:
    """As a program in that pod: its folder and its user; the image of the tests has no Python."""
    told = {"LAXITY_GATE": "1", "LAXITY_RING_DIR": f"/proc/{pid}/root/run/laxity/ring"}
    command = [sys.executable, "-c", SDK]
    env = os.environ | told
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

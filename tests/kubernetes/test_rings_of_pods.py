"""Pods on a real kubelet tell their tasks through the volumes that the policy gives them, and end although we look."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.monitor.gate.boxes import Boxes
from services.monitor.pod_folders import LOOK_US, PodFolders
from services.monitor.rings import RingDirectory
from shared.messages import Kind, Realtime
from tests.kubernetes.image import IMAGE
from tests.kubernetes.installed import Installed, binding, pod
from tests.kubernetes.node import Machine
from tests.kubernetes.parts import missing_node
from tests.monitor_folders import labels_of

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

PODS = "/api/v1/namespaces/shop/pods"
ENDS_AT_ONCE = {"terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False}
GATED = Realtime(deadline_us=50_000, period_us=40_000, runtime_us=12_000, kind=Kind.HARD, gate=True)


@pytest.fixture(scope="module")
def node(installed: Installed) -> Machine:
    if reason := missing_node():
        pytest.skip(reason)
    installed.clear()
    return installed.kube.kubelet()


class Looks:
    """What the monitor and its gate do with the folders of this node, again and again."""

    def __init__(self, node: Machine, root: Path) -> None:
        self.root = root
        self.folders = PodFolders(node.folder / "kubelet" / "pods", root)
        self.rings, self.boxes = RingDirectory(root), Boxes(root)
        self.gates: dict[str, socket.socket] = {}
        self.records: dict[str, int] = {}
        self.clock_us = 0

    def look(self) -> None:
        self.clock_us += LOOK_US
        self.folders.look(self.clock_us)
        gone = self.rings.scan().gone
        for reader in [*self.rings.readers, *gone]:
            self.records[reader.container] = self.records.get(reader.container, 0) + len(reader.read().rows)
        for reader in gone:
            reader.close()
        changes = self.boxes.look()
        self.gates |= {found.token: found.listener for found in changes.new}
        for token in changes.gone:
            self.gates.pop(token).close()

    def until(self, wanted: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not wanted():
            assert time.monotonic() < deadline, (self.records, self.folders.counts, list(self.root.iterdir()))
            self.look()
            time.sleep(0.05)


@pytest.fixture
def looks(node: Machine, tmp_path: Path) -> Iterator[Looks]:
    made = Looks(node, tmp_path / "rings")
    yield made
    made.rings.close()
    for listener in made.gates.values():
        listener.close()


def test_tasks_of_a_pod_are_read_with_its_labels_and_it_ends_with_nothing_left(
    installed: Installed, node: Machine, looks: Looks, tmp_path: Path
) -> None:
    if not node.has_programs:
        pytest.skip("no C compiler with a static C library")
    labels = labels_of(tmp_path / "made", "laxity-1", realtime=GATED, device="GPU-1") / "container.json"
    command = ["sh", "-c", "env; marks golden; sleep 600"]
    body = pod("marked", {"laxity.dev/deadline": "50ms"}, limits={"laxity.dev/gpu-milli": "250"}, command=command)
    body["spec"]["containers"][0] |= {
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "securityContext": {"runAsUser": 1234},
    }
    body["spec"] |= {**ENDS_AT_ONCE, "restartPolicy": "Never"}
    made = installed.alice.create(PODS, body)

    carried = {"laxity.dev/devices": "GPU-1", "laxity.dev/generation": "1", "laxity.dev/labels": labels.read_text()}
    bound = binding("marked", node.name, carried)
    bound["metadata"] |= {"uid": made["metadata"]["uid"], "labels": {"laxity.dev/container": "laxity-1"}}
    installed.kube.api_of("laxity", "placer").create(f"{PODS}/marked/binding", bound)
    installed.kube.admin.until(f"{PODS}/marked", lambda it: it["status"]["phase"] == "Running")
    looks.until(lambda: looks.records.get("laxity-1", 0) >= 28)

    told = node.environment(made["metadata"]["uid"])
    assert ("GPU-1", "GPU-1", "laxity-1", "50000", "/run/laxity/ring") == tuple(
        told[name]
        for name in (
            "NVIDIA_VISIBLE_DEVICES",
            "LAXITY_DEVICES",
            "LAXITY_CONTAINER",
            "LAXITY_DEADLINE_US",
            "LAXITY_RING_DIR",
        )
    )
    assert ["laxity-1"] == [path.name for path in looks.root.iterdir()]
    assert (looks.root / "laxity-1" / "gate.sock").is_socket()

    installed.alice.delete(f"{PODS}/marked", grace_s=0)
    looks.until(lambda: not list(looks.root.iterdir()))
    looks.until(lambda: not (looks.folders._pods / made["metadata"]["uid"]).exists())  # the kubelet could clean up
    assert {} == looks.folders.counts


def test_KU17_each_of_two_equal_pods_has_its_own_devices_whichever_was_bound_first(
    installed: Installed, node: Machine
) -> None:
    devices, uids = {"a": "GPU-1", "b": "GPU-2"}, {}
    for name in devices:
        body = pod(name, {"laxity.dev/deadline": "50ms"}, command=["sleep", "600"])
        body["spec"]["containers"][0] |= {"image": IMAGE, "imagePullPolicy": "Never"}
        body["spec"] |= ENDS_AT_ONCE
        uids[name] = installed.alice.create(PODS, body)["metadata"]["uid"]
    placer = installed.kube.api_of("laxity", "placer")
    for name in ("b", "a"):
        bound = binding(name, node.name, {"laxity.dev/devices": devices[name]})
        bound["metadata"]["uid"] = uids[name]
        placer.create(f"{PODS}/{name}/binding", bound)
    for name, device in devices.items():
        installed.kube.admin.until(f"{PODS}/{name}", lambda it: it["status"]["phase"] == "Running")
        assert device == node.environment(uids[name])["NVIDIA_VISIBLE_DEVICES"]
        installed.alice.delete(f"{PODS}/{name}", grace_s=0)
        installed.kube.admin.until_gone(f"{PODS}/{name}")


def test_a_pod_of_the_profile_that_has_no_devices_starts_with_none(installed: Installed, node: Machine) -> None:
    """Bound without a word of devices, as by kube-bridge where nothing of ours is asked for."""
    body = pod("plain", command=["sh", "-c", "sleep 600"])
    body["spec"]["containers"][0] |= {"image": IMAGE, "imagePullPolicy": "Never"}
    body["spec"] |= ENDS_AT_ONCE
    made = installed.alice.create(PODS, body)

    installed.kube.api_of("laxity", "scheduler").create(f"{PODS}/plain/binding", binding("plain", node.name))
    installed.kube.admin.until(f"{PODS}/plain", lambda it: it["status"]["phase"] == "Running")

    assert "void" == node.environment(made["metadata"]["uid"])["NVIDIA_VISIBLE_DEVICES"]
    installed.alice.delete(f"{PODS}/plain", grace_s=0)
    installed.kube.admin.until_gone(f"{PODS}/plain")

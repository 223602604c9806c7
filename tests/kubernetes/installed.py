"""A Kubernetes of its own with the manifests of k8s/ applied: their policies hold for all of a cluster."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.kubernetes.api import ApiRefusedError, Json
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.parts import missing
from tests.manifests import ROOT, kubectl

PLACER = "system:serviceaccount:laxity:placer"


class Installed:
    """The API server with overlay ``ha``, and people who use it."""

    def __init__(self, kube: KubeCluster) -> None:
        self.kube = kube
        self._config = kube.kubeconfig("kubectl", kube.token())
        self.kubectl("apply", "-k", str(ROOT / "k8s/overlays/ha"))
        for namespace in ("laxity-pods", "shop"):
            kube.namespace(namespace)  # no controller makes the account that its pods have
        kube.grant("people", "cluster-admin", "alice")
        self.alice = kube.api_as("alice")
        """May do everything that rights can allow."""
        self._wait_for_policies()

    def kubectl(self, *words: str) -> str:
        command = [kubectl(), "--kubeconfig", str(self._config), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert 0 == done.returncode, f"{words}: {done.stderr}"
        return done.stdout

    def clear(self) -> None:
        """What tests before have left would be scheduled too."""
        pods = "/api/v1/namespaces/shop/pods"
        self.kube.admin.delete(pods, grace_s=0)
        self.kube.admin.until(pods, lambda found: not found["items"])

    def _wait_for_policies(self) -> None:
        """Each takes some seconds until it holds."""
        deadline = time.monotonic() + 30
        while not self._hold():
            assert time.monotonic() < deadline, "the policies do not hold after 30 s"
            time.sleep(0.1)

    def _hold(self) -> bool:
        pods = "/api/v1/namespaces/shop/pods?dryRun=All"
        forged = pod("probe", {"laxity.dev/devices": "all"})
        unreadable = pod("probe", {"laxity.dev/deadline": "soon"})
        refused = [self.alice.ask("POST", pods, body)[0] == 422 for body in (forged, unreadable)]
        status, made = self.alice.ask("POST", pods, pod("probe"))
        injected = status == 201 and "laxity.dev/devices" in made["metadata"].get("annotations", {})
        return all(refused) and injected and self._guards_bindings() and self._sees_debugging()

    def _guards_bindings(self) -> bool:
        path, body = "/api/v1/namespaces/shop/bindings?dryRun=All", binding("probe", "n", {"laxity.dev/devices": "x"})
        return self.alice.ask("POST", path, body)[0] == 422

    def _sees_debugging(self) -> bool:
        pods = "/api/v1/namespaces/shop/pods"
        with suppress(ApiRefusedError):  # it is there
            self.alice.create(pods, pod("probe"))
        body = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "cuda"}]}}
        found = self.alice.patch(f"{pods}/probe/ephemeralcontainers?dryRun=All", body)
        return "env" in found["spec"]["ephemeralContainers"][0]


@pytest.fixture(scope="session")
def installed() -> Iterator[Installed]:
    """Skips with the reason where there is no Kubernetes."""
    if reason := missing():
        pytest.skip(reason)
    with KubeCluster() as kube:
        yield Installed(kube)


def pod(
    name: str,
    annotations: dict[str, str] | None = None,
    scheduler: str | None = "laxity",
    limits: dict[str, str] | None = None,
    **container: object,
) -> Json:
    """A pod of a user. ``container``: more of its one container."""
    main = {"name": "main", "image": "detector:1", "resources": {"limits": limits or {}}, **container}
    spec: Json = {"containers": [main], **({"schedulerName": scheduler} if scheduler else {})}
    return {"metadata": {"name": name, "annotations": annotations or {}}, "spec": spec}


def binding(name: str, node: str, annotations: dict[str, str] | None = None) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "annotations": annotations or {}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }

"""What an overlay has put into a cluster goes with it: nothing of it is left, in any namespace or outside of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.parts import missing
from tests.manifests import ROOT, kubectl, objects

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

NAMESPACES = ("laxity", "laxity-nodes", "laxity-pods")


@pytest.fixture
def cluster() -> Iterator[KubeCluster]:
    """With its controllers, which end namespaces."""
    if reason := missing():
        pytest.skip(reason)
    with KubeCluster() as kube:
        kube.controller_manager()
        yield kube


def names(config: Path, kinds: str) -> set[str]:
    """Of all objects of these kinds, as kubectl names them."""
    return set(run(config, "get", kinds, "--all-namespaces", "--output=name").split())


def run(config: Path, *words: str) -> str:
    command = [kubectl(), "--kubeconfig", str(config), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=True).stdout


def test_after_an_uninstall_nothing_is_left(cluster: KubeCluster) -> None:
    config, overlay = cluster.kubeconfig("kubectl", cluster.token()), str(ROOT / "k8s/overlays/demo")
    kinds = ",".join(
        sorted({f"{found['kind']}.{group(found)}" for found in objects("demo")} | {"Pod.v1.", "ReplicaSet.v1.apps"})
    )
    before = names(config, kinds)
    run(config, "apply", "-k", overlay)
    # the controllers are at work: there is more than was applied
    cluster.admin.until("/api/v1/namespaces/laxity/pods", lambda found: len(found["items"]) >= 5)
    assert len(names(config, kinds) - before) > len(objects("demo"))

    run(config, "delete", "-k", overlay, "--wait=false")
    for name in NAMESPACES:
        cluster.admin.until_gone(f"/api/v1/namespaces/{name}", timeout_s=90)

    assert set() == names(config, kinds) - before


def group(found: dict[str, str]) -> str:
    """As kubectl wants it behind a kind: version.group."""
    name, _, version = found["apiVersion"].rpartition("/")
    return f"{version}.{name}"

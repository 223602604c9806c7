"""What only tests of Kubernetes share."""

import hashlib
from collections.abc import Iterator

import pytest

from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.installed import installed
from tests.kubernetes.scheduled import cluster

__all__ = ["cluster", "installed"]


@pytest.fixture
def pods(kube: KubeCluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The path of the pods of this test alone."""
    name = f"test-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]}"
    path = f"/api/v1/namespaces/{kube.namespace(name)}/pods"
    yield path
    for one in kube.admin.items(path):
        kube.admin.delete(f"{path}/{one['metadata']['name']}", grace_s=0)

"""The Kubernetes that tests share, one for each run; conftest.py has it for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.node import Machine
from tests.kubernetes.parts import missing, missing_node


@pytest.fixture(scope="session")
def kube() -> Iterator[KubeCluster]:
    """etcd and an API server; skips with the reason where there is none. What a test changes it puts back."""
    if reason := missing():
        pytest.skip(reason)
    with KubeCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def machine(kube: KubeCluster) -> Machine:
    """A real kubelet with containerd, as node ``real-1``; skips with the reason where none can run."""
    if reason := missing_node():
        pytest.skip(reason)
    return kube.kubelet()

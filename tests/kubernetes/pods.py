"""What tests tell a placer's backend of the tests' Kubernetes, and how they look at its pods; no tests live here."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.placer.backends.kubernetes_options import KubernetesOptions
from tests.kubernetes.api import ApiRefusedError, Json
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.image import IMAGE


def kubernetes_options(kube: KubeCluster, folder: Path, **more: Any) -> KubernetesOptions:
    """A namespace of its own for each test, so that tests share a cluster."""
    namespace = kube.namespace(f"t-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}")
    token = folder / "token"
    token.write_text(kube.token())
    told = {"image": IMAGE, "pull": "never", "stop_grace_us": 1_000_000, "look_us": 500_000}
    return KubernetesOptions(
        server=kube.url, ca_file=kube.ca, token_file=token, namespace=namespace, **{**told, **more}
    )


def pods_in(kube: KubeCluster, namespace: str) -> list[Json]:
    return kube.admin.items(f"/api/v1/namespaces/{namespace}/pods")


def secret(kube: KubeCluster, namespace: str, name: str, **values: str) -> None:
    with suppress(ApiRefusedError):  # it is there
        kube.admin.create(f"/api/v1/namespaces/{namespace}/secrets", {"metadata": {"name": name}, "stringData": values})

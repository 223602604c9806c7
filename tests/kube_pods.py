"""Pods and nodes as the API has them, for tests of what reads them."""

from __future__ import annotations

from typing import Any


def container(name: str = "app", **requests: Any) -> dict[str, Any]:
    return {"name": name, "image": "image:1", "resources": {"requests": requests} if requests else {}}


def pod(  # what tests vary, by name
    name: str = "web",
    uid: str = "u-1",
    *,
    gpu_milli: int | None = None,
    gpu_mib: int | None = None,
    extra: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    cpu: str | None = None,
    memory: str | None = None,
    node: str = "",
    phase: str = "Pending",
    **spec: Any,
) -> dict[str, Any]:
    """Limits as an API server shows them: with the same requests. Annotations without their group."""
    ours = {"laxity.dev/gpu-milli": gpu_milli, "laxity.dev/gpu-mib": gpu_mib, "cpu": cpu, "memory": memory}
    asked = {key: str(value) for key, value in ours.items() if value is not None} | (extra or {})
    one = {"name": "app", "image": "image:1", "resources": {"limits": asked, "requests": asked} if asked else {}}
    return {
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": uid,
            "annotations": {f"laxity.dev/{word}": text for word, text in (annotations or {}).items()},
        },
        "spec": {"schedulerName": "laxity", "containers": [one], **({"nodeName": node} if node else {}), **spec},
        "status": {"phase": phase},
    }


def node(name: str, *, cpu: str = "8", memory: str = "16Gi", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"kubernetes.io/hostname": name}},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": cpu, "memory": memory},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }

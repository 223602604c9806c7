"""What Kubernetes says of a node beside what its monitor says: merged into the node's facts; pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shared.messages import HeardDevice, Heartbeat, KubeNodeFacts

_BY_READY = {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/unschedulable"}
"""Taints that say what is said otherwise, too."""
_KEEPS_AWAY = {"NoSchedule", "NoExecute"}


def merged(
    metrics: Heartbeat, kube: KubeNodeFacts | None, tolerated: Collection[str], before: str | None = None
) -> Mapping[str, Any]:
    """Fields of NodeFacts. A node has what both say that it has, and foreign use is the larger of both. `before`: what
    closed it when that was last written, which holds until Kubernetes says something.
    """
    if kube is None:
        return {
            "labels": metrics.labels,
            "cpu_milli": metrics.cpu_milli,
            "memory_mib": metrics.memory_mib,
            "foreign_cpu_milli": metrics.foreign_cpu_milli,
            "foreign_memory_mib": metrics.foreign_memory_mib,
            **({"closed": before} if before else {}),
        }
    return {
        "labels": kube.labels | metrics.labels,
        "cpu_milli": _least(metrics.cpu_milli, kube.cpu_milli),
        "memory_mib": _least(metrics.memory_mib, kube.memory_mib),
        "foreign_cpu_milli": _most(metrics.foreign_cpu_milli, kube.foreign_cpu_milli),
        "foreign_memory_mib": _most(metrics.foreign_memory_mib, kube.foreign_memory_mib),
        "closed": closed(kube, tolerated),
    }


def claim_holder(device: HeardDevice, kube: KubeNodeFacts) -> str | None:
    """Whom Kubernetes gave the device by a claim."""
    return kube.claimed.get(device.uuid) or kube.claimed.get(device.parent or "") or kube.claimed_unknown


def closed(kube: KubeNodeFacts, tolerated: Collection[str]) -> str | None:
    """Why Kubernetes would let nothing new onto it; None where it would, or does not say."""
    if kube.gone:
        return "the cluster has no such node any more"
    if kube.publishes_ours:
        return "its kubelet gives out laxity.dev resources itself"
    if kube.unschedulable:
        return "cordoned"
    if kube.ready is not True:
        return f"not ready: {kube.reason or 'its kubelet is not heard'}"
    for taint in kube.taints:
        if taint.effect in _KEEPS_AWAY and taint.key not in _BY_READY and taint.key not in tolerated:
            return f"taint {taint.key}{f'={taint.value}' if taint.value else ''}:{taint.effect}"
    return None


def _least(of_monitor: int, of_kube: int | None) -> int:
    return of_monitor if of_kube is None else min(of_monitor, of_kube)


def _most(of_monitor: int | None, of_kube: int | None) -> int | None:
    """Unknown where one of both is."""
    return None if of_monitor is None or of_kube is None else max(of_monitor, of_kube)

"""What people ask of pods by name: where each is bound, or why it is not; pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

from services.kube_bridge.seen import PodSeen
from services.kube_bridge.view import View
from shared.messages import PodFound, PodsQuery, PodsReply

MOST: Final = 100
"""Pods of one name, each in a namespace of its own, of which one answer tells."""


def about(query: PodsQuery, pods: Mapping[str, PodSeen], view: View, missing: Sequence[str]) -> PodsReply:
    """In the order of their namespaces."""
    named = [pod for pod in pods.values() if pod.name == query.name and query.namespace in {None, pod.namespace}]
    found = sorted(named, key=lambda pod: pod.namespace)[:MOST]
    return PodsReply(pods=tuple(_told(pod, view) for pod in found), not_loaded=tuple(missing))


def _told(pod: PodSeen, view: View) -> PodFound:
    said = asdict(pod.says) if pod.says is not None else {}
    return PodFound(
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.uid,
        request_id=_request_id(pod, view),
        node=pod.node or None,
        devices=pod.devices,
        ended=pod.ended,
        unscheduled=pod.unscheduled or None,
        **said,
    )


def _request_id(pod: PodSeen, view: View) -> str | None:
    """That of its gang, where it is part of one. The pod's own labels know it for longer than the ledger."""
    known = view.of_pod(pod.uid)
    if known is not None:
        return known.request_id
    return pod.request_id or (pod.uid if pod.wants and pod.ours else None)

"""The bridge's numbers for /metrics: what it answered, what it gave back, and where pods and ledger differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from services.kube_bridge.core import Core
from shared.metrics import Metric, Sample

_LOADED: Final = Metric(
    "laxity_kube_loaded", "gauge", "1 once pods, nodes and the ledger are known: before it nothing is answered."
)
_FILTERS: Final = Metric(
    "laxity_kube_filters_total",
    "counter",
    "Answers to filter by outcome; known_refusal cost nothing, ahead was held before its turn.",
    ("outcome",),
)
_BINDS: Final = Metric("laxity_kube_binds_total", "counter", "Answers to bind by outcome.", ("outcome",))
_RELEASES: Final = Metric(
    "laxity_kube_releases_total",
    "counter",
    "Requests of pods that were over; missed: their end was not seen.",
    ("how",),
)
_DRIFT: Final = Metric("laxity_kube_drift", "gauge", "Pods of which API server and ledger differ.", ("kind",))
_PODS: Final = Metric("laxity_kube_pods", "gauge", "Pods of the cluster that are known.")
METRICS: Final = (_LOADED, _FILTERS, _BINDS, _RELEASES, _DRIFT, _PODS)


def numbers(core: Core) -> Iterator[Sample]:
    yield from _LOADED.of(not core.missing)
    yield from _PODS.of(len(core.releasing.pods))
    for name, count in core.counters.items():
        group, _, word = name.partition(".")
        metric = {"filter": _FILTERS, "bind": _BINDS, "releases": _RELEASES}.get(group)
        if metric is not None:
            yield from metric.of(count, word)
    for kind, count in Counter(drift.kind for drift in core.releasing.drifts.values()).items():
        yield from _DRIFT.of(count, kind)

"""Packs nodes full, by the arithmetic of kube-scheduler's MostAllocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.placer.core.columns import Floats, Ints
from services.placer.core.strategies.base import Candidates, Ranking

FULL_SCORE = 100


@dataclass(frozen=True)
class Binpack:
    """The node whose resources are used most with the request on it; there, the device with the least left.

    Source: Kubernetes `noderesources/most_allocated.go`: per resource floor(100 used / capacity), a resource of which a
    node has none is skipped, the weighted mean rounded down. Unlike there, nothing is made up for containers
    that declare no CPU or memory.
    """

    cpu: int = 1
    memory: int = 1
    gpu: int = 100
    name: str = "binpack"

    def rank(self, rows: Candidates) -> Ranking:
        used = np.minimum(rows.used_after, rows.capacity)
        total, by = weighed(rows, used * FULL_SCORE // np.maximum(rows.capacity, 1), self)
        return Ranking(keys=(-total, rows.share_after, rows.whole_after), total=total, by=by)


class Weights(Protocol):
    """How much each resource counts."""

    @property
    def cpu(self) -> int: ...
    @property
    def memory(self) -> int: ...
    @property
    def gpu(self) -> int: ...


def weighed(rows: Candidates, scores: Ints, strategy: Weights) -> tuple[Floats, dict[str, Floats]]:
    """The weighted mean, rounded down to hundredths, and its parts before rounding.

    A resource of which the node has none scores 0 and counts nothing.
    """
    weights = np.array([getattr(strategy, resource) for resource in rows.resources])
    weight = np.maximum((rows.capacity > 0) @ weights, 1)
    total: Floats = (scores @ weights // weight) / FULL_SCORE
    parts = (scores * weights).T / (weight * FULL_SCORE)
    return total, dict(zip(rows.resources, parts, strict=True))

"""Packs nodes full, by the arithmetic of kube-scheduler's MostAllocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.strategies.base import Candidates, Floats, Ranking

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
        scores = {resource: filled(rows, resource) for resource in rows.capacity}
        total, by = weighed(rows, scores, {"cpu": self.cpu, "memory": self.memory, "gpu": self.gpu})
        return Ranking(keys=(-total, np.round(rows.share_after, 9), rows.whole_after), total=total, by=by)


def filled(rows: Candidates, resource: str) -> Ints:
    """floor(100 used / capacity) of a resource, used being at most the capacity; 0 where there is none."""
    capacity = rows.capacity[resource]
    used = np.minimum(rows.used_after[resource], capacity)
    score: Ints = used * FULL_SCORE // np.maximum(capacity, 1)
    return score


def weighed(
    rows: Candidates, scores: Mapping[str, Ints], weights: Mapping[str, int]
) -> tuple[Floats, dict[str, Floats]]:
    """The weighted mean, rounded down to hundredths, and its parts before rounding."""
    there = {resource: weights[resource] * (rows.capacity[resource] > 0) for resource in scores}
    weight: Ints = np.maximum(np.sum(list(there.values()), axis=0), 1)
    points = {resource: there[resource] * scores[resource] for resource in scores}
    total: Floats = (np.sum(list(points.values()), axis=0) // weight) / FULL_SCORE
    return total, {resource: value / weight / FULL_SCORE for resource, value in points.items()}

"""Spreads over nodes, by the arithmetic of kube-scheduler's LeastAllocated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.strategies.base import Candidates, Ranking
from services.placer.core.strategies.binpack import FULL_SCORE, weighed


@dataclass(frozen=True)
class Spread:
    """The node whose resources are used least with the request on it; there, the device with the most left.

    Source: Kubernetes `noderesources/least_allocated.go`: per resource floor(100 (capacity - used) / capacity), a
    resource of which a node has none is skipped, the weighted mean rounded down.
    """

    cpu: int = 1
    memory: int = 1
    gpu: int = 100
    name: str = "spread"

    def rank(self, rows: Candidates) -> Ranking:
        scores = {resource: free(rows, resource) for resource in rows.capacity}
        total, by = weighed(rows, scores, {"cpu": self.cpu, "memory": self.memory, "gpu": self.gpu})
        return Ranking(keys=(-total, -np.round(rows.share_after, 9), -rows.whole_after), total=total, by=by)


def free(rows: Candidates, resource: str) -> Ints:
    """floor(100 free / capacity) of a resource; 0 where there is none."""
    capacity = rows.capacity[resource]
    score: Ints = np.maximum(capacity - rows.used_after[resource], 0) * FULL_SCORE // np.maximum(capacity, 1)
    return score

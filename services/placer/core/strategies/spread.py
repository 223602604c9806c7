"""Spreads over nodes, by the arithmetic of kube-scheduler's LeastAllocated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.placer.core.strategies.base import Candidates, Compiled, Ranking
from services.placer.core.strategies.binpack import FULL_SCORE, weighed
from services.placer.core.strategies.nodes import Asked


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

    def compiled(self, asked: Asked, resources: tuple[str, ...]) -> Compiled | None:  # noqa: ARG002
        weights = np.array((self.cpu, self.memory, self.gpu), np.int64)
        return Compiled("spread", (weights,), 3, resources, of_nodes=1)

    def rank(self, rows: Candidates) -> Ranking:
        capacity = rows.capacity
        free = np.maximum(capacity - rows.used_after, 0)
        total, by = weighed(rows, free * FULL_SCORE // np.maximum(capacity, 1), self)
        return Ranking((-total, -rows.share_after, -rows.whole_after), total, by, of_nodes=1)

"""Packs nodes full, by the arithmetic of kube-scheduler's MostAllocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.placer.core.columns import Floats, Ints
from services.placer.core.strategies.base import Candidates, Compiled, Ranking
from services.placer.core.strategies.nodes import Asked

FULL_SCORE = 100


@dataclass(frozen=True)
class Binpack:
    """The node whose resources are used most with the request on it; there, the device with the least left.

    Source: Kubernetes `noderesources/most_allocated.go`: per resource floor(100 used / capacity), a resource of which a
    node has none is skipped, the weighted mean rounded down. With a `shape` it is `requested_to_capacity_ratio.go`:
    the shape maps that utilisation (100 where more is used than there is) to a score of 0 to 10, resources that score
    0 do not count in the weights, and the weighted mean is rounded. Unlike there, nothing is made up for containers
    that declare no CPU or memory.
    """

    cpu: int = 1
    memory: int = 1
    gpu: int = 100
    shape: tuple[tuple[int, int], ...] = ()
    """Points (utilisation 0 to 100, score 0 to 10) in the order of the utilisation, joined by straight lines."""
    name: str = "binpack"

    def __post_init__(self) -> None:
        if min(self.cpu, self.memory, self.gpu) < 0:
            raise ValueError("cpu, memory, gpu: found a weight below 0, allowed: 0 or more")
        points = [utilisation for utilisation, _ in self.shape]
        if points != sorted({*points}) or any(not (0 <= u <= 100 and 0 <= score <= 10) for u, score in self.shape):
            raise ValueError(f"shape: found {self.shape}, allowed: utilisations 0 to 100 going up, scores 0 to 10")

    def compiled(self, asked: Asked, resources: tuple[str, ...]) -> Compiled | None:  # noqa: ARG002
        weights = np.array((self.cpu, self.memory, self.gpu), np.int64)
        return None if self.shape else Compiled("binpack", (weights,), 3, resources, of_nodes=1)

    def rank(self, rows: Candidates) -> Ranking:
        capacity = rows.capacity
        scores = np.minimum(rows.used_after, capacity) * FULL_SCORE // np.maximum(capacity, 1)
        total, by = (shaped if self.shape else weighed)(rows, scores, self)
        return Ranking((-total, rows.share_after, rows.whole_after), total, by, of_nodes=1)


def broken_line(shape: Sequence[tuple[int, int]]) -> Ints:
    """The score at each utilisation of 0 to 100, in whole numbers cut off towards 0 as there."""
    line = np.empty(FULL_SCORE + 1, np.int64)
    (start, score), *others = shape
    line[: start + 1] = score
    for end, next_score in others:
        steps = np.arange(1, end - start + 1)
        line[start + 1 : end + 1] = score + np.trunc((next_score - score) * steps / (end - start))
        start, score = end, next_score
    line[start:] = score
    return line


def shaped(rows: Candidates, utilisation: Ints, strategy: Binpack) -> tuple[Floats, dict[str, Floats]]:
    """The mean of the shape's scores, weighed by those that are not 0, rounded to hundredths, and its parts."""
    line = broken_line([(point, score * FULL_SCORE // 10) for point, score in strategy.shape])
    scores = np.where(rows.capacity > 0, line[utilisation], 0)
    weights = np.array([getattr(strategy, resource) for resource in rows.resources])
    weight = np.maximum((scores > 0) @ weights, 1)
    total: Floats = np.floor(scores @ weights / weight + 0.5) / FULL_SCORE
    return total, dict(zip(rows.resources, (scores * weights).T / (weight * FULL_SCORE), strict=True))


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
    resources, capacity = rows.resources, rows.capacity
    each = (strategy.cpu, strategy.memory, strategy.gpu)[: len(resources)]
    weights, weight = np.array(each), max(sum(each), 1)
    if np.count_nonzero(capacity) < capacity.size:
        weight = np.maximum((capacity > 0) @ weights, 1)
    total: Floats = (scores @ weights // weight) / FULL_SCORE
    parts = (scores * weights).T / (weight * FULL_SCORE)
    return total, dict(zip(resources, parts, strict=True))

"""What a strategy that looks at whole nodes sees of them, and how its scores become a ranking of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from services.placer.core.columns import Floats, Ints
from services.placer.core.strategies.base import Ranking
from shared.messages import SHARE_WHOLE_MICRO

PARTS: Final = 0
"""The class of requests for part of one device; the class of others is their number of devices."""

_MOST_BITS: Final = 62

_NOT_THIS: Final = 2.0**40
"""The key of a row that a strategy does not choose on its node: larger than that of any that it chooses."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of the rows in question, one array element each, and of their devices a line each."""

    share_free: Ints
    """Millionths of each device; 0 where there is none, or an unhealthy one."""
    cpu_free: Ints
    memory_free: Ints
    """-1 where unknown."""
    model: Ints
    """The cluster's number of the model of the first device."""
    devices: Ints
    """How many are healthy."""
    classes: Ints
    """Bit c is set where a request of class c is on the node."""
    of_row: Ints
    """Which of these nodes each row is on; the rows of a node stand together."""
    place: Ints
    """Which device of its node each row is, 0 for a request without gpu."""

    @cached_property
    def idle(self) -> Ints:
        """Millionths free on all devices together."""
        idle: Ints = self.share_free.sum(axis=1)
        return idle

    @cached_property
    def whole(self) -> Ints:
        """How many devices nobody uses."""
        whole: Ints = np.count_nonzero(self.share_free == SHARE_WHOLE_MICRO, axis=1)
        return whole

    @cached_property
    def least(self) -> Ints:
        """The least that is free on a device that can take the request."""
        starts = np.searchsorted(self.of_row, np.arange(len(self.cpu_free)))
        least: Ints = np.minimum.reduceat(self.share_free[self.of_row, self.place], starts)
        return least


@dataclass(frozen=True)
class Asked:
    """One replica, as it changes a node; `share_micro` is of each of `count` devices."""

    count: int
    share_micro: int
    cpu_milli: int
    memory_mib: int

    @property
    def partial(self) -> bool:
        """Part of one device."""
        return self.count == 1 and self.share_micro < SHARE_WHOLE_MICRO

    @property
    def gpu_micro(self) -> int:
        return self.count * self.share_micro

    @property
    def bit(self) -> int:
        """Of its class, in `Nodes.classes`."""
        return 1 << (PARTS if self.partial else min(self.count, _MOST_BITS))


def by_node(nodes: Nodes, asked: Asked, score: Ints, scale: float) -> Ranking:
    """From a score of each node, the largest first; on a node the device with the least left that suffices."""
    mine = score[nodes.of_row]
    key = -mine.astype(np.float64)
    if asked.partial:
        snug = nodes.share_free[nodes.of_row, nodes.place] == nodes.least[nodes.of_row]
        key = np.where(snug, key, _NOT_THIS)
    return Ranking(keys=(key,), total=_total(mine, scale), by={})


def by_device(nodes: Nodes, score: Ints, scale: float) -> Ranking:
    """From a score of each device of each node, the largest first; one column stands for all devices of a node."""
    return by_row(score[nodes.of_row, 0 if score.shape[1] == 1 else nodes.place], scale)


def by_row(score: Ints, scale: float) -> Ranking:
    """From a score of each row, the largest first; what is `scale` or more shows as 1, what is below 0 as 0."""
    return Ranking(keys=(-score,), total=_total(score, scale), by={})


def _total(score: Ints, scale: float) -> Floats:
    total: Floats = np.minimum(np.maximum(score / scale, 0.0), 1.0)
    return total

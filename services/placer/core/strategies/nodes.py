"""What a strategy that looks at whole nodes sees of them, and how its scores become a ranking of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from services.placer.core.columns import Bools, Floats, Ints
from services.placer.core.strategies.base import Ranking
from shared.messages import SHARE_WHOLE_MICRO

PARTS: Final = 0
"""The class of requests for part of one device; the class of others is their number of devices."""

_MOST_BITS: Final = 62

_NOT_THIS: Final = 2.0**40
"""The key of a row that a strategy does not choose on its node: larger than that of any that it chooses."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of the rows in question: one array element each, and of their devices one line each."""

    share_free: Ints
    """Millionths of each device; 0 where there is none, or an unhealthy one."""
    open: Bools
    """Devices that can take the request: the rows, no one for a request without gpu."""
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
    """Which of these nodes each row is on."""
    place: Ints
    """Which device of the node each row is."""


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
    if not asked.count:
        return _ranking(score[nodes.of_row], np.ones(len(nodes.of_row), np.bool_), scale)
    free = nodes.share_free[nodes.of_row, nodes.place]
    return _ranking(score[nodes.of_row], free == snuggest(nodes)[nodes.of_row], scale)


def by_device(nodes: Nodes, asked: Asked, score: Ints, scale: float) -> Ranking:
    """From a score of each device of each node: a node counts as its best device, which is the one to take."""
    if not asked.count:
        return _ranking(score[nodes.of_row, 0], np.ones(len(nodes.of_row), np.bool_), scale)
    best = np.where(nodes.open, score, np.iinfo(np.int64).min).max(axis=1)
    mine = score[nodes.of_row, nodes.place]
    return _ranking(mine, mine == best[nodes.of_row], scale)


def snuggest(nodes: Nodes) -> Ints:
    """The least that is free on a device that can take the request, by node."""
    least: Ints = np.where(nodes.open, nodes.share_free, 2 * SHARE_WHOLE_MICRO).min(axis=1)
    return least


def _ranking(score: Ints, chosen: Bools, scale: float) -> Ranking:
    total: Floats = np.minimum(np.maximum(score / scale, 0.0), 1.0)
    return Ranking(keys=(np.where(chosen, -score.astype(np.float64), _NOT_THIS),), total=total, by={})

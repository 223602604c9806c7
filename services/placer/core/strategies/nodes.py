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


@dataclass(eq=False)
class Nodes:
    """The nodes of the rows in question, one array element each, and of their devices a line each."""

    share_free: Ints
    """Millionths of each device; 0 where there is none, or an unhealthy one."""
    idle: Ints
    """Millionths free on all devices together."""
    whole: Ints
    """How many devices nobody uses."""
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
    def least(self) -> Ints:
        """The least that is free on a device that can take the request."""
        least = np.full(len(self.cpu_free), SHARE_WHOLE_MICRO)
        np.minimum.at(least, self.of_row, self.share_free[self.of_row, self.place])
        return least


@dataclass(eq=False)
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


class Change:
    """Nodes without and with one more request: what has two lines is first of now and then of after it.

    A place is where the request could go: a row where it takes part of a device; else a node, since all devices of a
    node that can take it are wholly free, and it does not matter which. What stands at others is of no use.
    """

    def __init__(self, nodes: Nodes, asked: Asked) -> None:
        self.nodes, self.asked = nodes, asked
        self.of_place: Ints | slice = nodes.of_row if asked.partial else slice(None)
        """The node of each place."""
        self.cpu: Ints = np.array((nodes.cpu_free, nodes.cpu_free - asked.cpu_milli))
        """Of each node, in two lines."""

    @cached_property
    def device(self) -> Ints:
        """Millionths free on the device that a part is taken of, in two lines; for each place."""
        nodes = self.nodes
        device: Ints = nodes.share_free[nodes.of_row, nodes.place] - np.array([[0], [self.asked.share_micro]])
        return device

    @cached_property
    def whole_after(self) -> Ints:
        """Devices that nobody uses once the request is there; for each place."""
        whole: Ints = self.nodes.whole[self.of_place]
        return whole - ((self.device[0] == SHARE_WHOLE_MICRO) if self.asked.partial else self.asked.count)

    def of_rows(self, places: Ints) -> Ints:
        """What is said of places, row by row."""
        return places if self.asked.partial else places[self.nodes.of_row]


def by_node(nodes: Nodes, asked: Asked, score: Ints, scale: float) -> Ranking:
    """From a score of each node, the largest first; on a node the device with the least left that suffices."""
    mine = score[nodes.of_row]
    key = -mine.astype(np.float64)
    if asked.partial:
        snug = nodes.share_free[nodes.of_row, nodes.place] == nodes.least[nodes.of_row]
        key = np.where(snug, key, _NOT_THIS)
    return Ranking(keys=(key,), total=_total(mine, scale), by={})


def by_row(score: Ints, scale: float) -> Ranking:
    """From a score of each row, the largest first; what is `scale` or more shows as 1, what is below 0 as 0."""
    return Ranking(keys=(-score,), total=_total(score, scale), by={})


def _total(score: Ints, scale: float) -> Floats:
    total: Floats = np.minimum(np.maximum(score / scale, 0.0), 1.0)
    return total

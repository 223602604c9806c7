"""What a strategy gets and gives: arrays in, arrays out; it never sees the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.placer.core.columns import Array, Ints

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Candidates:
    """The rows that can take one replica, one array element each; for a request without gpu a row is a node.

    `..._after` is with the replica placed there. What concerns a device is empty space where there is none.
    """

    promises: bool
    """The request is firm or hard."""
    share_after: Floats
    """Free part of the device, 0..1."""
    memory_after: Floats
    """Free part of the device's memory, 0..1; NaN where unknown."""
    whole_after: Ints
    """Devices of the node that nobody uses."""
    slack: Floats
    """Slack at the tightest point as part of the request's deadline; NaN where nothing is promised."""
    promised: Ints
    """Firm and hard residents of the device."""
    risk: Ints
    """What the node list says: 0 guaranteed, 1 tight, 2 at risk."""
    used_after: Mapping[str, Ints]
    """Of the node, by resource: `cpu` and `memory`, and `gpu` where the request asks for it."""
    capacity: Mapping[str, Ints]
    """Of the node, in the same units."""


@dataclass(frozen=True)
class Ranking:
    """The order of the rows: smallest keys first, the first key counting most.

    `total`, 0..1, is what people see, and `by` its parts. Every value depends on its own row alone.
    """

    keys: tuple[Array, ...]
    total: Floats
    by: Mapping[str, Floats]


class Strategy(Protocol):
    """A frozen dataclass whose fields are its parameters. Called once for all rows that can take a replica."""

    @property
    def name(self) -> str:
        """As requests say it."""
        ...

    def rank(self, rows: Candidates) -> Ranking: ...


def summed(by: Mapping[str, Floats]) -> Floats:
    """The total of parts that add up; rounded, so that equals are equal whatever the order of the sum."""
    total: Floats = np.round(np.clip(np.sum(list(by.values()), axis=0), 0.0, 1.0), 9)
    return total

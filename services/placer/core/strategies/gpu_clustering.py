"""Keeps requests of one class together: parts of devices, single devices, pairs of them, and so on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from services.placer.core.strategies.base import Candidates, Ranking
from services.placer.core.strategies.nodes import by_node

_LARGEST_MICRO: Final = 8_000_000


@dataclass(frozen=True)
class GpuClustering:
    """Score = floor(25 x used / 8 devices), and 75 where only this class is, 50 where it is among others, 25 on a node
    without any; the device with the least left. Without gpu all nodes are equal.

    Source: the baseline of Weng et al. (ATC'23), after Gandiva (OSDI'18).
    """

    name: str = "gpu-clustering"

    def rank(self, rows: Candidates) -> Ranking:
        nodes, asked = rows.nodes, rows.asked
        if not asked.count:
            return by_node(nodes, asked, np.zeros(len(nodes.devices), np.int64), 100)
        others = np.where(nodes.classes & asked.bit, 50, np.where(nodes.classes == 0, 25, 0))
        company = np.where(nodes.classes == asked.bit, 75, others)
        used = 25 * (_LARGEST_MICRO - nodes.idle) // _LARGEST_MICRO
        return by_node(nodes, asked, used + company, 100)

"""Fills devices that are in use first, then free devices of nodes in use, then idle nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.placer.core.strategies.base import Candidates, Ranking
from services.placer.core.strategies.nodes import by_node
from shared.messages import SHARE_WHOLE_MICRO


@dataclass(frozen=True)
class GpuPacking:
    """Source: the baseline of Weng et al. (ATC'23), after a preprint on MLaaS in the wild (NSDI'22).

    A part of a device in use scores 100 - a tenth of the free percent, at least 50; wholly free devices 50 - how many,
    at least 33; an idle node 33 - its devices. Without gpu all nodes are equal.
    """

    name: str = "gpu-packing"

    def rank(self, rows: Candidates) -> Ranking:
        nodes, asked = rows.nodes, rows.asked
        if not asked.count:
            return by_node(nodes, asked, np.zeros(len(nodes.devices), np.int64), 100)
        free = nodes.least
        used = np.maximum(100 - free // 10_000 // 10, 50)
        score = np.where(free == SHARE_WHOLE_MICRO, max(50 - asked.count, 33), used)
        idle = np.maximum(33 - nodes.devices, 0)
        return by_node(nodes, asked, np.where(nodes.whole == nodes.devices, idle, score), 100)

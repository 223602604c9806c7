"""Packing by the dot product of what is free and what is asked: the node with the smallest."""

from __future__ import annotations

from dataclasses import dataclass

from services.placer.core.strategies.base import Candidates, Ranking
from services.placer.core.strategies.nodes import by_node


@dataclass(frozen=True)
class DotProd:
    """Score = floor(100 (1 - free · asked / 2)), vectors of CPU / 128 cores and device time / 8 devices.

    Source: the baseline of Weng et al. (ATC'23), as bestfit; the device with the least left.
    """

    name: str = "dotprod"

    def rank(self, rows: Candidates) -> Ranking:
        nodes, asked = rows.nodes, rows.asked
        cpu = nodes.cpu_free * (15_625 * asked.cpu_milli)
        gpu = nodes.idle * (4 * asked.gpu_micro)
        # 50 (cpu · cpu / 128_000² + gpu · gpu / 8_000_000²) on one denominator, rounded up in integers
        return by_node(nodes, asked, 100 + -(cpu + gpu) // (512 * 10**10), 100)

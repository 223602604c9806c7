"""Best fit over CPU and device time together: the node with the least left over."""

from __future__ import annotations

from dataclasses import dataclass

from services.placer.core.strategies.base import Candidates, Ranking
from services.placer.core.strategies.nodes import by_node


@dataclass(frozen=True)
class BestFit:
    """Score = floor(100 (1 - (CPU left / 128 cores + devices left / 8) / 2)); on a node the device with the least left.

    Source: the baseline of Weng et al. (ATC'23), whose rescaling does not change the order. The constants are the
    largest node of their cluster; a node with more left scores below 0.
    """

    name: str = "bestfit"

    def rank(self, rows: Candidates) -> Ranking:
        nodes, asked = rows.nodes, rows.asked
        cpu = nodes.cpu_free - asked.cpu_milli
        gpu = nodes.idle - asked.gpu_micro
        # 100 (1/2 cpu / 128_000 + 1/2 gpu / 8_000_000) on one denominator, rounded up in integers
        return by_node(nodes, asked, 100 + -(125 * cpu + 2 * gpu) // 320_000, 100)

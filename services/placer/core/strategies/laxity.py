"""Our own strategy for shared devices: what is scarce, what rests are worth, and what is left without CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.strategies.base import Candidates, Ranking
from services.placer.core.strategies.nodes import by_row
from services.placer.core.strategies.outlook import CERTAIN, Outlook

POINT: Final = 10**9
"""One point of the score, which is an integer, so that equals are equal on every machine."""


@dataclass(frozen=True)
class Laxity:
    """FGD's gradient with five corrections; never refuses what fits.

    Score of a device, in steps of `step` points =
    usable x (less fragment, in devices, each kind weighing more the scarcer its places are and needing its memory too)
    + served x (less that expected requests could not take because the node's CPU or memory ends first)
    - rest x (worth of the device's rest that is lost)
    + (less stranded devices, those without `cpu_per_device_milli` beside them)
    - snug x (free GPU after / 8 devices + free CPU after / 128 cores),
    too small to matter but among near equals: it makes the result independent of the order of names.
    docs/placement.md has the formulas and where the weights come from.
    """

    outlook: Outlook = field(default_factory=Outlook)
    usable: float = 0.5
    served: float = 0.1
    rest: int = 13
    cpu_per_device_milli: int = 7_700
    snug: float = 0.02
    step: float = 0.001
    name: str = "laxity"

    def rank(self, rows: Candidates) -> Ranking:
        nodes, asked, outlook = rows.nodes, rows.asked, self.outlook
        score = self._of_nodes(rows)[nodes.of_row]
        usable = outlook.scarce.gained(nodes, asked)
        usable = usable[nodes.of_row, 0 if usable.shape[1] == 1 else nodes.place] + asked.gpu_micro * CERTAIN
        served = outlook.served.gained(nodes, asked) + asked.gpu_micro * CERTAIN
        score += usable // _per_device(self.usable) + served // _per_device(self.served)
        if asked.partial:
            score -= self.rest * outlook.rests.lost(nodes.share_free[nodes.of_row, nodes.place], asked.share_micro)
        return by_row((score + 1) // round(self.step * POINT), 1 / self.step)

    def _of_nodes(self, rows: Candidates) -> Ints:
        """The parts that are the same for all devices of a node."""
        nodes, asked = rows.nodes, rows.asked
        idle = nodes.idle
        idle_after, cpu_after = idle - asked.gpu_micro, nodes.cpu_free - asked.cpu_milli
        stranded = self._stranded(idle, nodes.cpu_free) - self._stranded(idle_after, cpu_after)
        gpu, cpu = round(self.snug * POINT / 8_000), round(self.snug * POINT / 128)
        points: Ints = stranded - (idle_after * gpu + cpu_after * cpu) // 1_000
        return points

    def _stranded(self, idle_micro: Ints, cpu_milli: Ints) -> Ints:
        """Free devices that have no CPU beside them, in POINTs."""
        cpu = cpu_milli * POINT // self.cpu_per_device_milli
        stranded: Ints = np.maximum(idle_micro * (POINT // 1_000_000) - cpu, 0)
        return stranded


def _per_device(weight: float) -> int:
    """What divides weighed millionths so that one device makes `weight` points."""
    return round(CERTAIN * 1_000_000 / (weight * POINT))

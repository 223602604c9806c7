"""Our own strategy for shared devices: what is scarce, what rests are worth, and what is left without CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.strategies.base import Candidates, Ranking
from services.placer.core.strategies.nodes import by_device
from services.placer.core.strategies.outlook import CERTAIN, Outlook

POINT: Final = 10**9
"""One point of the score, which is an integer, so that equals are equal on every machine."""


@dataclass(frozen=True)
class Laxity:
    """FGD's gradient with four corrections; never refuses what fits.

    Score of a device = fragment x (less fragment, in devices, each kind weighing more the scarcer its places are and
    needing its memory too) - rest x (worth of the device's rest that is lost) + (less stranded devices, those without
    `cpu_per_device_milli` beside them) - snug x (free GPU after / 8 devices + free CPU after / 128 cores), in steps of
    `step` points. The last term is too small to matter but among near equals: it makes the result
    independent of the order of names.
    """

    outlook: Outlook = field(default_factory=Outlook)
    fragment: float = 0.5
    rest: int = 13
    cpu_per_device_milli: int = 7_700
    snug: float = 0.02
    step: float = 0.001
    name: str = "laxity"

    def rank(self, rows: Candidates) -> Ranking:
        nodes, asked, outlook = rows.nodes, rows.asked, self.outlook
        idle = nodes.share_free.sum(axis=1)
        idle_after, cpu_after = idle - asked.gpu_micro, nodes.cpu_free - asked.cpu_milli
        less = outlook.scarce.gained(nodes, asked) + asked.gpu_micro * CERTAIN
        score = less // round(CERTAIN * 1_000_000 / (self.fragment * POINT))
        stranded = self._stranded(idle, nodes.cpu_free) - self._stranded(idle_after, cpu_after)
        gpu, cpu = round(self.snug * POINT / 8_000), round(self.snug * POINT / 128)
        score = score + (stranded - (idle_after * gpu + cpu_after * cpu) // 1_000)[:, None]
        if asked.partial:
            score -= self.rest * outlook.rests.lost(nodes.share_free, asked.share_micro)
        return by_device(nodes, (score + 1) // round(self.step * POINT), 1 / self.step)

    def _stranded(self, idle_micro: Ints, cpu_milli: Ints) -> Ints:
        """Free devices that have no CPU beside them, in POINTs."""
        cpu = cpu_milli * POINT // self.cpu_per_device_milli
        stranded: Ints = np.maximum(idle_micro * (POINT // 1_000_000) - cpu, 0)
        return stranded

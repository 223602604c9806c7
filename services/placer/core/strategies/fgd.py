"""Fragmentation gradient descent: the node where a request makes least idle device time useless to others."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.strategies.base import Candidates, Ranking
from services.placer.core.strategies.nodes import by_device
from services.placer.core.strategies.outlook import Outlook

_FULL: Final = 100
_STEPS: Final = tuple(math.log(score / (_FULL - score)) for score in range(1, _FULL))
"""Where 100 sigmoid(x) reaches 1, 2, ... 99; 0 for 50."""


@dataclass(frozen=True)
class Fgd:
    """Source: Weng et al., "Beware of Fragmentation" (ATC'23), and their simulator.

    Score = floor(100 sigmoid(less fragment, in devices)), the same for every unit of the measure, so that many nodes
    tie and the order of names decides: without the coarse steps the policy does not reach its published results.
    """

    outlook: Outlook = field(default_factory=Outlook)
    name: str = "fgd"

    def rank(self, rows: Candidates) -> Ranking:
        nodes, asked, total = rows.nodes, rows.asked, self.outlook.plain_total
        less = self.outlook.plain.gained(nodes, asked) + asked.gpu_micro * total
        return by_device(nodes, _steps(total * 1_000_000).searchsorted(less, "right"), _FULL)


@lru_cache(maxsize=64)
def _steps(unit: int) -> Ints:
    """What reaches each score, as integers: no error of rounding takes 50 from what changes nothing."""
    return np.array([math.ceil(step * unit) for step in _STEPS], np.int64)

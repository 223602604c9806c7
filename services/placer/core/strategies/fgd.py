"""Fragmentation gradient descent: the node where a request makes least idle device time useless to others."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.strategies.base import Candidates, Compiled, Ranking
from services.placer.core.strategies.nodes import Asked, Change
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
    as_published: bool = False
    """Rounded as that simulator rounds, at many times the cost: in runs that are compared with its own."""
    name: str = "fgd"

    def compiled(self, asked: Asked, resources: tuple[str, ...]) -> Compiled | None:  # noqa: ARG002
        steps = _steps(self.outlook.plain_total, asked.gpu_micro)
        return None if self.as_published else Compiled("fgd", self.outlook.plain.tables(steps), 1)

    def rank(self, rows: Candidates) -> Ranking:
        change, outlook = Change(rows.nodes, rows.asked), self.outlook
        gained, steps = outlook.plain.gained(change), _steps(outlook.plain_total, change.asked.gpu_micro)
        score = steps.searchsorted(gained, "right")
        if self.as_published:
            same = np.flatnonzero(gained == steps[_FULL // 2 - 1])
            score[same] -= outlook.float_sums.below(change, same)
        score = change.of_rows(score)
        return Ranking(keys=(-score,), total=score / _FULL, by={})


@lru_cache(maxsize=256)
def _steps(total: int, gpu_micro: int) -> Ints:
    """How much more must be usable once so much is taken to reach each score; `total` is the weight of all kinds.

    In integers: no error of rounding takes 50 from what changes nothing.
    """
    return np.array([math.ceil(step * total * 1_000_000) - gpu_micro * total for step in _STEPS], np.int64)

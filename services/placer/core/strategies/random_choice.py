"""Any node that can take the request, and any device there: what a comparison must beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.placer.core.strategies.base import Candidates, Ranking


@dataclass(frozen=True)
class Random:
    """All rows are equal. The tie-break among them is drawn from a hash of the request's id (table.py), first the node,
    then the device, so that every node is as likely as any other, and the same request goes to the same place again.

    Source: the baseline of Weng et al. (ATC'23).
    """

    name: str = "random"

    def rank(self, rows: Candidates) -> Ranking:
        return Ranking(keys=(np.zeros(len(rows), np.int64),), total=np.zeros(len(rows)), by={})

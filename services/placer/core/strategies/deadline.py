"""The default strategy: keeps deadlines, then keeps room for shorter ones, then keeps devices whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.placer.core.columns import Floats, Ints
from services.placer.core.strategies.base import Candidates, Compiled, Ranking, summed
from services.placer.core.strategies.nodes import Asked

_IDLE = 0.1
"""Part of the idle devices in the score: enough to tell nodes apart, too little to break a second device."""


@dataclass(frozen=True)
class Deadline:
    """Best fit on slack among devices that hold what they promise.

    Firm and hard requests go where the node list sees a guarantee, then where it is tight; nobody goes where
    somebody is at risk unless there is nothing else. Among those the smallest slack that suffices is taken, so that
    devices with much slack stay free for short deadlines; then what leaves the least behind. Requests that are promised
    nothing keep away from devices that promise something. The weights add up to 1; half of `standing` is more
    than the other two together, so that the total tells the same order.
    """

    standing: float = 0.7
    slack: float = 0.2
    fragmentation: float = 0.1
    name: str = "deadline"

    def compiled(self, asked: Asked, resources: tuple[str, ...]) -> Compiled | None:  # noqa: ARG002
        weights = np.array((self.standing, self.slack, self.fragmentation, _IDLE))
        return Compiled("deadline", (weights,), 3 if asked.count > 1 else 2, ("standing", "slack", "fragmentation"))

    def rank(self, rows: Candidates) -> Ranking:
        risk = rows.risk
        risk = risk if rows.promises else np.where(risk > 1, 2, 0)
        by = {
            "standing": self.standing * (1 - risk / 2),
            "slack": self.slack * self._snug(rows),
            "fragmentation": self.fragmentation * self._unbroken(rows, whole := rows.whole_after),
        }
        total = summed(by)
        if rows.count > 1:  # of several devices the worst risk counts, then the worst total, be they of two
            return Ranking(keys=(risk, -total, whole), total=total, by=by)
        return Ranking(keys=(2 * risk - total, whole), total=total, by=by)

    def _snug(self, rows: Candidates) -> Floats:
        """1 where no slack is left over; where nothing is promised, 1 on devices that promise nothing either."""
        alone: Floats = (rows.promised == 0).astype(np.float64)
        if (slack := rows.slack) is None:
            return alone
        snug: Floats = np.where(np.isnan(slack), alone, 1 - np.minimum(np.maximum(slack, 0), 1))
        return snug

    def _unbroken(self, rows: Candidates, whole_after: Ints) -> Floats:
        """1 where nothing is left of the device (memory without time is nothing) and no other one lies idle."""
        share, memory = rows.share_after, rows.memory_after
        both = np.where(np.isnan(memory), share, (share + memory) / 2)
        left = np.where(share > 0, both, 0.0)
        unbroken: Floats = (1 - left) * (1 - _IDLE) + _IDLE / (1 + whole_after)
        return unbroken

"""The fragmentation measure as FGD's own simulator sums it up, for runs that are to go as they were published.

It adds floats, kind after kind, apart by why a kind cannot use what is idle, and then these sums. Where a request only
changes such a reason the measure is the same and its last digit is not: a score of 50 then reads 49.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from services.placer.core.columns import Array, Bools, Floats, Ints
from services.placer.core.strategies.nodes import Change
from services.placer.core.strategies.workload import Workload
from shared.messages import SHARE_WHOLE_MICRO

_MILLI: Final = 1_000
_BOTH, _DEVICES, _USED, _CPU, _NONE, _NONE_CPU, _MODEL = range(7)
"""What a kind lacks: both, devices, nothing, CPU; of one without gpu: nothing, CPU; the model."""
_ORDER: Final = (_BOTH, _DEVICES, _CPU, _NONE, _NONE_CPU, _MODEL)


class FloatSums:
    """Of the kinds of a workload that are looked at, in their order."""

    def __init__(self, workload: Workload, models: Sequence[str]) -> None:
        """`models` by the cluster's numbers."""
        total, head = sum(kind.number for kind in workload.kinds), sum(kind.number for kind in workload.head)
        self._kinds = [(kind.shape, kind.number / total / (head / total)) for kind in workload.head]
        self._let_in = np.array([[shape.admits(name) for name in (*models, "")] for shape, _ in self._kinds], np.bool_)

    def below(self, change: Change, places: Ints) -> Bools:
        """At which of these places the difference of the sums, in thousandths of a device, shows as less than 50."""
        of = np.arange(len(change.nodes.cpu_free))[change.of_place][places]
        model, cpu = np.minimum(change.nodes.model[of], self._let_in.shape[1] - 1), change.cpu[:, of]
        free = change.nodes.share_free[of]
        more = self._of(model, cpu[1], _taken(change, places, free)) - self._of(model, cpu[0], free)
        below: Bools = 100 / (1 + np.exp(more / 1_000)) < 50
        return below

    def _of(self, model: Ints, cpu: Ints, free: Ints) -> Floats:
        milli = free // _MILLI
        idle, here = milli.sum(axis=1), np.arange(len(model))
        sums = np.zeros((7, len(model)))
        for (shape, often), let_in in zip(self._kinds, self._let_in, strict=True):
            cpu_lacks = cpu < shape.cpu_milli
            if not shape.count:
                sums[np.where(cpu_lacks, _NONE_CPU, _NONE), here] += often * idle
                continue
            enough = milli >= shape.share_micro // _MILLI
            lacks = np.count_nonzero(enough, axis=1) < shape.count
            why: Array = np.where(lacks, np.where(cpu_lacks, _BOTH, _DEVICES), np.where(cpu_lacks, _CPU, _USED))
            why[~let_in[model]] = _MODEL
            useless = np.where(why == _USED, (milli * ~enough).sum(axis=1), idle)
            sums[np.where(why == _USED, _DEVICES, why), here] += often * useless
        total: Floats = np.zeros(len(model))
        for lack in _ORDER:
            total = total + sums[lack]
        return total


def _taken(change: Change, places: Ints, free: Ints) -> Ints:
    """What is free of each device once the request is there; of whole ones the first are taken."""
    left, asked = free.copy(), change.asked
    if asked.partial:
        left[np.arange(len(places)), change.nodes.place[places]] -= asked.share_micro
    elif asked.count:
        whole = free == SHARE_WHOLE_MICRO
        left[whole & (whole.cumsum(axis=1) <= asked.count)] = 0
    return left

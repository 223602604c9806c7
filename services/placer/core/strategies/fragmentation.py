"""How much of a node's idle device time no expected request could use: the fragmentation measure, in exact integers.

Weng et al., "Beware of Fragmentation" (ATC'23): for a kind of request all that is idle on a node is fragment, but for
the devices that the kind could use now. Which kinds a node's model and CPU let in falls into few cases, and what of
them a device's free share lets in depends on few thresholds: a table by both is all there is to look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.strategies.nodes import Change, Nodes
from services.placer.core.strategies.workload import Wanted
from shared.messages import SHARE_WHOLE_MICRO


class Usable:
    """Σ over kinds of request of weight x (free millionths that the kind could use), of nodes."""

    def __init__(self, kinds: Sequence[Wanted], weights: Sequence[int], models: Sequence[str]) -> None:
        """`models` by the cluster's numbers; kinds without gpu use nothing."""
        pairs = [(kind, weight) for kind, weight in zip(kinds, weights, strict=True) if kind.shape.count]
        self._shares = _levels(kind.shape.share_micro for kind, _ in pairs)
        self._cpu = _levels(kind.shape.cpu_milli for kind, _ in pairs)
        self._most = max((kind.shape.count for kind, _ in pairs), default=1)
        self._models = len(models)
        cases = (len(models) + 1, len(self._cpu) + 1)
        width = max(len(self._shares), self._most) + 1
        single, several = np.zeros((*cases, width), np.int64), np.zeros((*cases, width), np.int64)
        for kind, weight in pairs:
            shape = kind.shape
            cpu = int(np.searchsorted(self._cpu, shape.cpu_milli, "right"))
            share = int(np.searchsorted(self._shares, shape.share_micro, "right"))
            let_in = [*(shape.admits(model) for model in models), not shape.models]
            table, place = (single, share) if shape.count == 1 else (several, shape.count)
            table[let_in, cpu:, place:] += weight
        several *= SHARE_WHOLE_MICRO
        self._cases = (np.arange(np.prod(cases)) * width).reshape(cases)
        self._single, self._several = single.reshape(-1), several.reshape(-1)

    def tables(self, steps: Ints) -> tuple[Ints, ...]:
        """What a kernel looks at; `steps` are levels of what is gained."""
        sizes = np.array((self._models, self._most))
        return self._shares, self._cpu, self._single, self._several, steps, sizes

    def of(self, nodes: Nodes) -> Ints:
        """What could be used of each node."""
        cases = self._case(nodes.model, nodes.cpu_free)
        usable: Ints = self._devices(cases[:, None], nodes.share_free).sum(axis=1)
        return usable + self._whole(cases, nodes.whole)

    def gained(self, change: Change) -> Ints:
        """How much more could be used of the node of each place were the request placed there."""
        nodes, asked, of = change.nodes, change.asked, change.of_place
        cases = self._case(nodes.model, change.cpu)
        each = self._devices(cases[:, :, None], nodes.share_free).sum(axis=2)
        gained: Ints = (each[1] - each[0])[of]
        now, then = cases[0], cases[1][of]
        if asked.partial:
            before, after = self._devices(then, change.device)
            gained = gained + after - before
        elif asked.count:
            gained -= asked.count * SHARE_WHOLE_MICRO * self._single.take(then + len(self._shares))
        if self._most > 1:
            gained += self._whole(then, change.whole_after) - self._whole(now, nodes.whole)[of]
        return gained

    def _case(self, model: Ints, cpu: Ints) -> Ints:
        cases: Ints = self._cases[np.minimum(model, self._models), self._cpu.searchsorted(cpu, "right")]
        return cases

    def _devices(self, cases: Ints, free: Ints) -> Ints:
        """What the kinds that want one device could use of each."""
        value: Ints = self._single.take(cases + self._shares.searchsorted(free, "right"))
        value *= free
        return value

    def _whole(self, cases: Ints, count: Ints) -> Ints:
        """What the kinds that want several devices could use of so many whole ones."""
        value: Ints = self._several.take(cases + np.minimum(count, self._most)) * count
        return value


def fragments(table: Usable, nodes: Nodes, total: int) -> Ints:
    """Fragment millionths of each node, times `total`, which is the weight of all kinds together."""
    fragment: Ints = nodes.idle * total - table.of(nodes)
    return fragment


def _levels(values: Iterable[int]) -> Ints:
    """From which amounts on there is enough for more kinds; what is not needed always suffices."""
    return np.array(sorted({value for value in values if value > 0}), np.int64)

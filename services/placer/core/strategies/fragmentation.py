"""How much of a node's idle device time no expected request could use: the fragmentation measure, in exact integers.

Weng et al., "Beware of Fragmentation" (ATC'23): for a kind of request all that is idle on a node is fragment, but for
the devices that the kind could use now. Which kinds a node's model, CPU and memory let in falls into few cases, and
what of them a device's free share lets in depends on few thresholds: a table by both is all there is to look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.strategies.nodes import Asked, Nodes
from services.placer.core.strategies.workload import Wanted
from shared.messages import SHARE_WHOLE_MICRO


class Usable:
    """Σ over kinds of request of weight x (free millionths that the kind could use), of nodes."""

    def __init__(self, kinds: Sequence[Wanted], weights: Sequence[int], models: Sequence[str], *, memory: bool) -> None:
        """`models` by the cluster's numbers. `memory`: a kind can use nothing where less than its mean memory is free.

        Kinds without gpu use nothing.
        """
        pairs = [(kind, weight) for kind, weight in zip(kinds, weights, strict=True) if kind.shape.count]
        self._shares = _levels(kind.shape.share_micro for kind, _ in pairs)
        self._cpu = _levels(kind.shape.cpu_milli for kind, _ in pairs)
        self._memory = _levels(kind.memory_mib if memory else 0 for kind, _ in pairs)
        self._most = max((kind.shape.count for kind, _ in pairs), default=1)
        self._models = len(models)
        cases = (len(models) + 1, len(self._cpu) + 1, len(self._memory) + 1)
        width = max(len(self._shares), self._most) + 1
        single, several = np.zeros((*cases, width), np.int64), np.zeros((*cases, width), np.int64)
        for kind, weight in pairs:
            shape = kind.shape
            cpu = int(np.searchsorted(self._cpu, shape.cpu_milli, "right"))
            mib = int(np.searchsorted(self._memory, kind.memory_mib if memory else 0, "right"))
            share = int(np.searchsorted(self._shares, shape.share_micro, "right"))
            let_in = [*(shape.admits(model) for model in models), not shape.models]
            table, place = (single, share) if shape.count == 1 else (several, shape.count)
            table[let_in, cpu:, mib:, place:] += weight
        several *= SHARE_WHOLE_MICRO
        self._cases = (np.arange(np.prod(cases)) * width).reshape(cases)
        self._single, self._several = single.reshape(-1), several.reshape(-1)

    def of(self, nodes: Nodes) -> Ints:
        """What could be used of each node."""
        cases, levels = self._case(nodes), self._level(nodes.share_free)
        usable: Ints = self._devices(cases, levels, nodes.share_free).sum(axis=1)
        return usable + self._whole(cases, nodes.whole)

    def gained(self, nodes: Nodes, asked: Asked) -> Ints:
        """How much more could be used of each node were the request placed there, by node and device.

        One column for a request that takes whole devices or none, since it does not matter which. What stands at a
        device that cannot take the request is of no use.
        """
        free, levels, whole = nodes.share_free, self._level(nodes.share_free), nodes.whole
        now, then = self._case(nodes), self._case(nodes, asked)
        each = self._devices(then, levels, free)
        gain: Ints = each.sum(axis=1) - self._devices(now, levels, free).sum(axis=1) - self._whole(now, whole)
        if not asked.partial:
            taken = asked.count * SHARE_WHOLE_MICRO * self._single.take(then + len(self._shares))
            gain += self._whole(then, np.maximum(whole - asked.count, 0)) - taken
            return gain[:, None]
        left = free - asked.share_micro
        intact = self._whole(then, whole)
        broken = self._whole(then, np.maximum(whole - 1, 0)) - intact
        gained: Ints = self._devices(then, self._level(left), left) - each + (gain + intact)[:, None]
        gained += np.where(free == SHARE_WHOLE_MICRO, broken[:, None], 0)
        return gained

    def _case(self, nodes: Nodes, asked: Asked | None = None) -> Ints:
        cpu, memory = (asked.cpu_milli, asked.memory_mib) if asked else (0, 0)
        by_cpu = self._cpu.searchsorted(np.maximum(nodes.cpu_free - cpu, 0), "right")
        by_memory = self._memory.searchsorted(np.maximum(nodes.memory_free - memory, 0), "right")
        cases: Ints = self._cases[np.minimum(nodes.model, self._models), by_cpu, by_memory]
        return cases

    def _level(self, free: Ints) -> Ints:
        """How many thresholds the free share of a device reaches."""
        level: Ints = self._shares.searchsorted(free, "right")
        return level

    def _devices(self, cases: Ints, levels: Ints, free: Ints) -> Ints:
        """What the kinds that want one device could use of each."""
        value: Ints = self._single.take(cases[:, None] + levels)
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
    return np.array(sorted(set(values)), np.int64)

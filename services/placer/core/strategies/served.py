"""How much of a node's idle device time expected requests could take before its CPU or memory ends; integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from services.placer.core.columns import Bools, Ints
from services.placer.core.strategies.nodes import Asked, Nodes
from services.placer.core.strategies.workload import Wanted
from shared.messages import SHARE_WHOLE_MICRO

_UNIT_MICRO: Final = 1_000
"""Shares are looked at in thousandths of a device: what is asked rounded up, what is free rounded down."""
_WHOLE: Final = SHARE_WHOLE_MICRO // _UNIT_MICRO
_PARTS: Final = 1_000
"""Copies are counted in thousandths."""
_ANY: Final = 2**62


class Served:
    """Σ over kinds of weight x (millionths that copies of the kind could take of a node, if at least one fits).

    Copies = the least of what the devices, the CPU and the memory suffice for; the last two in fractions.
    """

    def __init__(self, kinds: Sequence[Wanted], weights: Sequence[int], models: Sequence[str]) -> None:
        """`models` by the cluster's numbers; kinds without gpu take nothing."""
        pairs = [(kind, weight) for kind, weight in zip(kinds, weights, strict=True) if kind.shape.count]
        shapes = [kind.shape for kind, _ in pairs]
        sizes = sorted({-(-shape.share_micro // _UNIT_MICRO) for shape in shapes if shape.count == 1})
        counts = sorted({shape.count for shape in shapes if shape.count > 1})
        self._copies = np.arange(_WHOLE + 1)[:, None] // np.array(sizes, np.int64)
        self._counts = np.array(counts, np.int64)
        columns = {(1, size): place for place, size in enumerate(sizes)}
        columns |= {(count, _WHOLE): len(sizes) + place for place, count in enumerate(counts)}
        self._column = np.array(
            [columns[shape.count, -(-shape.share_micro // _UNIT_MICRO)] for shape in shapes], np.int64
        )
        self._cpu = np.array([shape.cpu_milli for shape in shapes], np.int64)
        self._memory = np.array([kind.memory_mib for kind, _ in pairs], np.int64)
        self._worth = np.array([kind.shape.gpu_micro * weight // _PARTS for kind, weight in pairs], np.int64)
        let_in = [[shape.admits(model) for shape in shapes] for model in models]
        self._let_in = np.array([*let_in, [not s.models for s in shapes]], np.bool_).reshape(
            len(models) + 1, len(shapes)
        )

    def gained(self, nodes: Nodes, asked: Asked) -> Ints:
        """How much more could be taken were the request placed: by row, since it matters which device it takes a part of."""
        free = nodes.share_free // _UNIT_MICRO
        whole = np.count_nonzero(nodes.share_free == SHARE_WHOLE_MICRO, axis=1)
        single = self._copies[free].sum(axis=1)
        let_in = self._let_in[np.minimum(nodes.model, len(self._let_in) - 1)]
        now = self._taken(self._joined(single, whole), self._limits(nodes.cpu_free, nodes.memory_free, let_in))
        limits = self._limits(nodes.cpu_free - asked.cpu_milli, nodes.memory_free - asked.memory_mib, let_in)
        if not asked.partial:
            left = self._joined(single - asked.count * self._copies[_WHOLE], whole - asked.count)
            gained: Ints = (self._taken(left, limits) - now)[nodes.of_row]
            return gained
        of, before = nodes.of_row, nodes.share_free[nodes.of_row, nodes.place]
        after = (before - asked.share_micro) // _UNIT_MICRO
        single = single[of] - self._copies[before // _UNIT_MICRO] + self._copies[after]
        left = self._joined(single, whole[of] - (before == SHARE_WHOLE_MICRO))
        return self._taken(left, limits[of]) - now[of]

    def _joined(self, single: Ints, whole: Ints) -> Ints:
        """Copies by the devices, a column for each kind."""
        several = whole[:, None] // self._counts
        joined: Ints = np.concatenate([single, several], axis=1)[:, self._column]
        return joined

    def _limits(self, cpu: Ints, memory: Ints, let_in: Bools) -> Ints:
        """Thousandths of copies by CPU and memory, a column for each kind; 0 where not one fits."""
        by_cpu = np.where(self._cpu, cpu[:, None] * _PARTS // np.maximum(self._cpu, 1), _ANY)
        by_memory = np.where(self._memory, np.maximum(memory, 0)[:, None] * _PARTS // np.maximum(self._memory, 1), _ANY)
        least: Ints = np.minimum(by_cpu, by_memory)
        least[(least < _PARTS) | ~let_in] = 0
        return least

    def _taken(self, copies: Ints, limits: Ints) -> Ints:
        taken: Ints = np.minimum(copies * _PARTS, limits) @ self._worth
        return taken

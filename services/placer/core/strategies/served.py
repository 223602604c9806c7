"""How much of a node's idle device time expected requests could take before its CPU or memory ends; integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.strategies.nodes import Asked, Nodes
from services.placer.core.strategies.workload import Wanted
from shared.messages import SHARE_WHOLE_MICRO

_UNIT_MICRO: Final = 1_000
"""Shares are looked at in thousandths of a device: what is asked rounded up, what is free rounded down."""
_WHOLE: Final = SHARE_WHOLE_MICRO // _UNIT_MICRO
_COPY: Final = 1_000
"""Copies are counted in thousandths."""
_ANY: Final = 2**60
_MOST_DEVICES: Final = 1_024


class Served:
    """Σ over kinds of weight x (millionths that copies of the kind could take of a node, if at least one fits).

    Copies = the least of what the devices, the CPU and the memory suffice for; the last two in fractions. All arrays
    have a column for each kind that wants devices.
    """

    def __init__(self, kinds: Sequence[Wanted], weights: Sequence[int], models: Sequence[str]) -> None:
        """`models` by the cluster's numbers; kinds without gpu take nothing."""
        pairs = [(kind, weight) for kind, weight in zip(kinds, weights, strict=True) if kind.shape.count]
        shapes = [kind.shape for kind, _ in pairs]
        size = np.array([-(-shape.share_micro // _UNIT_MICRO) for shape in shapes], np.int64)
        count = np.array([shape.count for shape in shapes], np.int64)
        self._of_device = np.where(count == 1, np.arange(_WHOLE + 1)[:, None] // np.maximum(size, 1) * _COPY, 0)
        self._of_whole = np.where(count > 1, np.arange(_MOST_DEVICES)[:, None] // np.maximum(count, 1) * _COPY, 0)
        self._cpu = _Need([shape.cpu_milli for shape in shapes])
        self._memory = _Need([kind.memory_mib for kind, _ in pairs])
        self._worth = np.array([kind.shape.gpu_micro * weight // _COPY for kind, weight in pairs], np.int64)
        let_in = [[shape.admits(model) for shape in shapes] for model in models]
        let_in.append([not shape.models for shape in shapes])
        self._let_in = np.array(let_in, np.bool_).reshape(len(let_in), len(shapes))

    def gained(self, nodes: Nodes, asked: Asked) -> Ints:
        """How much more could be taken of the node of each row were the request placed on that row."""
        whole = np.minimum(nodes.whole, _MOST_DEVICES - 1)
        single = self._of_device.take(nodes.share_free // _UNIT_MICRO, axis=0).sum(axis=1)
        limits, limits_after = self._limits(nodes, asked)
        now = self._taken(single + self._of_whole.take(whole, axis=0), limits)
        if not asked.partial:
            left = single - asked.count * self._of_device[_WHOLE]
            left += self._of_whole.take(np.maximum(whole - asked.count, 0), axis=0)
            gained: Ints = (self._taken(left, limits_after) - now)[nodes.of_row]
            return gained
        of, before = nodes.of_row, nodes.share_free[nodes.of_row, nodes.place]
        left = single[of] - self._of_device.take(before // _UNIT_MICRO, axis=0)
        left += self._of_device.take((before - asked.share_micro) // _UNIT_MICRO, axis=0)
        left += self._of_whole.take(whole[of] - (before == SHARE_WHOLE_MICRO), axis=0)
        return self._taken(left, limits_after[of]) - now[of]

    def _limits(self, nodes: Nodes, asked: Asked) -> tuple[Ints, Ints]:
        """Copies by CPU and memory, now and with the request; 0 where not one fits or the model is another."""
        cpu = np.concatenate([nodes.cpu_free, nodes.cpu_free - asked.cpu_milli])
        memory = np.maximum(np.concatenate([nodes.memory_free, nodes.memory_free - asked.memory_mib]), 0)
        least = np.minimum(self._cpu.copies(cpu), self._memory.copies(memory))
        least *= least >= _COPY
        now, after = least[: len(nodes.cpu_free)], least[len(nodes.cpu_free) :]
        let_in = self._let_in.take(np.minimum(nodes.model, len(self._let_in) - 1), axis=0)
        return now * let_in, after * let_in

    def _taken(self, copies: Ints, limits: Ints) -> Ints:
        taken: Ints = np.minimum(copies, limits) @ self._worth
        return taken


class _Need:
    """What one copy of each kind needs of a resource of the node."""

    def __init__(self, needs: Sequence[int]) -> None:
        need = np.array(needs, np.int64)
        self._each, self._none = np.maximum(need, 1), np.where(need, 0, _ANY)

    def copies(self, free: Ints) -> Ints:
        copies: Ints = (free * _COPY)[:, None] // self._each
        copies += self._none
        return copies

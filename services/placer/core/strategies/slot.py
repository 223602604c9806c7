"""Fixed slots: nodes are grouped by size, and a request of a size goes to the nodes of its group alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from services.placer.core.strategies.base import Candidates, Compiled, Ranking
from services.placer.core.strategies.nodes import Asked


@dataclass(frozen=True, eq=False)
class Slot:
    """SLOT-1, SLOT-2, SLOT-4, SLOT-8: what a node's label `laxity.dev/slot` says it takes.

    A request of s devices (a share is of one) goes to the smallest group whose size is at least s: how many more of a
    size fit does not depend on what others take. `fallback` names, for a size, the groups that it may go to when
    its own is full, in this order; without it there is none. A request without gpu may go anywhere. In a group the
    fullest node is taken first, and there the device with the least left.
    """

    sizes: tuple[int, ...] = (1, 2, 4, 8)
    fallback: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    name: str = "slot"

    def __post_init__(self) -> None:
        if not self.sizes or list(self.sizes) != sorted({*self.sizes}) or self.sizes[0] < 1:
            raise ValueError(f"sizes: found {list(self.sizes)}, allowed: whole numbers above 0, going up")
        known = set(self.sizes)
        for size, others in self.fallback.items():
            if size not in known or not known >= set(others):
                raise ValueError(f"fallback: found {size}: {list(others)}, allowed: sizes among {list(self.sizes)}")

    def groups(self, count: int) -> tuple[int, ...] | None:
        """The groups that a request of so many devices may go to, its own first; None: anywhere."""
        if not count:
            return None
        own = next((size for size in self.sizes if size >= count), None)
        return () if own is None else (own, *(size for size in self.fallback.get(own, ()) if size >= count))

    def compiled(self, asked: Asked, resources: tuple[str, ...]) -> Compiled | None:
        groups = np.array(self.groups(asked.count) or (), np.int64)
        return Compiled("slot", (groups,), 2, resources[-1:], of_nodes=1)

    def rank(self, rows: Candidates) -> Ranking:
        order = np.zeros(len(rows.slot))
        for place, size in enumerate(self.groups(rows.count) or ()):
            order[rows.slot == size] = place
        used, capacity = rows.used_after[:, -1], rows.capacity[:, -1]
        total = np.round(np.minimum(used, capacity) / np.maximum(capacity, 1), 9)
        return Ranking((2 * order - total, rows.share_after), total, {rows.resources[-1]: total}, of_nodes=1)

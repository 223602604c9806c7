"""What the filters say of every row for one kind of request, kept in step with the cluster node by node.

The filters that look at what the node list says alone run when that changes; a change of what is reserved runs the
others, on the rows of that node that are left.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.placer.core.columns import Array, Ints
from services.placer.core.filters import DEVICE_FILTERS, NODE_FILTERS, Sifted, sift
from services.placer.core.room import room
from services.placer.core.rows import Ask, Rows

_NOT_SEEN: Final = 0
"""Changes of a cluster are numbered from 1."""


class Sieve:
    """`first`: for each device row (node row for a request without gpu) the filter that ruled it out, or -1."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.seen = _NOT_SEEN
        self.first: Array = np.zeros(0, np.int8)
        self._settled: Array = np.zeros(0, np.int8)
        self._filters = DEVICE_FILTERS if ask.demand.count else NODE_FILTERS
        self._by_facts = [one for one in self._filters if one.settled]
        self._by_use = self._filters[len(self._by_facts) :]
        self._empty: dict[int, tuple[int, Ints]] = {}

    @classmethod
    def of(cls, ask: Ask) -> Sieve:
        """The one of this kind of request, up to date."""
        sieve: Sieve = ask.cluster.memo.get((cls, ask.kind), lambda: cls(ask)) if ask.kept else cls(ask)
        sieve.refresh()
        return sieve

    def refresh(self) -> None:
        """Sends the rows of nodes that have changed through the filters again."""
        cluster = self.ask.cluster
        if self.seen == cluster.changes:
            return
        self._grow()
        changed = cluster.changed_since(self.seen)
        changed = changed[cluster.nodes["known"][changed]]
        told = changed[cluster.nodes["facts_changed"][changed] > self.seen]
        if len(told):
            rows = self.ask.on(told)
            self._settled[rows.index] = sift(rows, self._by_facts).first
            self.first[rows.index] = self._settled[rows.index]
        rows = self.ask.on(changed)
        self._use(rows.where(self._settled[rows.index] < 0))
        self.seen = cluster.changes

    def sifted(self) -> Sifted:
        """All rows in the order of names."""
        rows = self.ask.everywhere()
        return Sifted(rows, self.first[rows.index], self._filters)

    def passing(self, slots: Ints) -> Rows:
        """The rows of these nodes that can take a replica."""
        slots = slots[self.ask.cluster.nodes["known"][slots]]
        rows = self.ask.on(slots)
        return rows.where(self.first[rows.index] < 0)

    def empty_room(self, limit: int) -> Ints:
        """Replicas that would fit on each node were all reservations gone and all devices well, by node row."""
        changed = int(self.ask.cluster.nodes["facts_changed"].max(initial=_NOT_SEEN))
        seen, found = self._empty.get(limit, (None, None))
        if found is None or seen != changed:
            found = room(self.sifted(), limit, empty=True)
            self._empty = {limit: (changed, found)}
        return found

    def _use(self, rows: Rows) -> None:
        first = sift(rows, self._by_use).first
        first[first >= 0] += len(self._by_facts)
        self.first[rows.index] = first

    def _grow(self) -> None:
        columns = self.ask.cluster.devices if self.ask.demand.count else self.ask.cluster.nodes
        if (missing := len(columns) - len(self.first)) > 0:
            more = np.zeros(max(missing, len(self.first)), np.int8)
            self.first, self._settled = np.concatenate([self.first, more]), np.concatenate([self._settled, more])

"""What the filters say of every row for one kind of request, kept in step with the cluster node by node.

Filters that look at what the node list says alone are asked when that changes; a change of what is reserved asks the
others, of the rows that are left. Why a row was passed over is worked out only when somebody wants to know.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.placer.core.cluster import FIRST_ROW, ROOM, SHARES, UNKNOWN
from services.placer.core.columns import Array, Bools, Ints
from services.placer.core.demand import Demand
from services.placer.core.filters import DEVICE_FILTERS, NODE_FILTERS, Sifted, sift
from services.placer.core.prospects import Prospects
from services.placer.core.room import room
from services.placer.core.rows import Ask, Rows
from shared.messages import SHARE_WHOLE_MICRO

_ALL: Final = np.uint32(0x01010101)
"""Four times true, read as one number: found sooner than by `all`."""


class Sieve:
    """Changes of a cluster are numbered from 1: what has seen 0 has seen nothing."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self._filters = DEVICE_FILTERS if ask.demand.count else NODE_FILTERS
        self._by_facts = [one for one in self._filters if one.settled]
        self._by_use = self._filters[len(self._by_facts) :]
        self._settled: Array = np.zeros(0, np.int8)
        """For each row the filter among those of facts that ruled it out, or -1; and up to which change."""
        self._settled_seen = 0
        self._open: Bools = np.zeros(0, np.bool_)
        """The nodes of which such filters left a row."""
        self._partly = False
        """Whether they ruled out devices of such nodes that are well: of others nothing is free."""
        self.needs = _needs(ask.demand)
        self._first: Array = np.zeros(0, np.int8)
        """As `_settled`, for all filters."""
        self._first_seen = 0
        self._empty: dict[int, tuple[int, Ints]] = {}

    @classmethod
    def of(cls, ask: Ask) -> Sieve:
        """The one of this kind of request."""
        found: Sieve = ask.cluster.memo.get((cls, ask.kind), lambda: cls(ask)) if ask.kept else cls(ask)
        return found

    def passing(self, slots: Ints) -> Prospects:
        """The rows of these nodes that can take a replica: what all filters leave, without a word about the others."""
        self._settle()
        ask, cluster, demand = self.ask, self.ask.cluster, self.ask.demand
        held = cluster.nodes["held"].take(slots, axis=0)
        room = (held[:, ROOM] >= self.needs).view(np.uint32).ravel() == _ALL  # most nodes of a full cluster have none
        room &= self._open.take(slots)
        slots, held = slots[room], held[room]
        if not demand.count:
            return Prospects(ask, slots, held, slots, np.arange(len(slots)))
        enough = held[:, SHARES] >= demand.share_micro
        of_row, place = np.divmod(enough.ravel().nonzero()[0], enough.shape[1])  # sooner than `nonzero` of a matrix
        index = held[:, FIRST_ROW].take(of_row) + place
        if self._partly:
            well = self._settled.take(index) < 0
            index, of_row = index[well], of_row[well]
        load = cluster.devices["load"].take(index)
        verdicts = cluster.verdicts(demand, load)
        good = verdicts.column("admitted", load)
        if demand.device_memory_mib:
            good &= cluster.devices["memory_free"].take(index) >= demand.device_memory_mib  # known, as facts say
        if demand.count > 1:
            good &= (np.bincount(of_row[good], minlength=len(slots)) >= demand.count)[of_row]
        if np.count_nonzero(good) < len(good):
            index, of_row, load = index[good], of_row[good], load[good]
        return Prospects(ask, slots, held, index, of_row, (verdicts, load))

    def standing(self) -> tuple[Bools, Array]:
        """The nodes that facts leave open, and of each row whether it is ruled out (not below 0); empty if none is."""
        self._settle()
        return self._open, self._settled if self._partly else self._settled[:0]

    def sifted(self) -> Sifted:
        """All rows."""
        cluster = self.ask.cluster
        if self._first_seen < cluster.changes:
            changed = cluster.changed_since(self._first_seen)
            left = self.open(changed)
            first = sift(left, self._by_use).first
            first[first >= 0] += len(self._by_facts)
            every = self.ask.on(changed).index
            self._first[every] = self._settled[every]
            self._first[left.index] = first
            self._first_seen = cluster.changes
        rows = self.ask.everywhere()
        return Sifted(rows, self._first[rows.index], self._filters)

    def empty_room(self, limit: int) -> Ints:
        """Replicas that would fit on each node were all reservations gone and all devices well, by node row."""
        seen, found = self._empty.get(limit, (0, None))
        if found is None or seen < self.ask.cluster.facts_changes:
            found = room(self.sifted(), limit, empty=True)
            self._empty = {limit: (self.ask.cluster.facts_changes, found)}
        return found

    def open(self, slots: Ints) -> Rows:
        """The rows of these nodes that only what is reserved can keep from taking a replica."""
        self._settle()
        rows = self.ask.on(slots)
        return rows.where(self._settled[rows.index] < 0)

    def _settle(self) -> None:
        """Asks the filters of facts about nodes whose facts have changed."""
        cluster = self.ask.cluster
        if self._settled_seen == cluster.facts_changes:
            return
        self._grow()
        told = (cluster.nodes["facts_changed"] > self._settled_seen).nonzero()[0]
        rows = self.ask.on(told)
        self._settled[rows.index] = first = sift(rows, self._by_facts).first
        self._open[told] = False
        self._open[rows.node[first < 0]] = True
        if self.ask.demand.count:
            self._partly |= bool((self._open[rows.node] & rows.of_device("healthy") & (first >= 0)).any())
        self._settled_seen = cluster.facts_changes

    def _grow(self) -> None:
        columns = self.ask.cluster.devices if self.ask.demand.count else self.ask.cluster.nodes
        if (missing := len(self.ask.cluster.nodes) - len(self._open)) > 0:
            self._open = np.concatenate([self._open, np.zeros(max(missing, len(self._open)), np.bool_)])
        if (missing := len(columns) - len(self._settled)) > 0:
            more = np.zeros(max(missing, len(self._settled)), np.int8)
            self._settled, self._first = np.concatenate([self._settled, more]), np.concatenate([self._first, more])


def _needs(demand: Demand) -> Ints:
    """How much of ROOM a node needs at least to have room for a replica; UNKNOWN suffices where nothing is asked."""
    whole = demand.count if demand.share_micro == SHARE_WHOLE_MICRO else 0
    return np.array((demand.cpu_milli or UNKNOWN, demand.memory_mib or UNKNOWN, demand.share_micro, whole), np.int64)

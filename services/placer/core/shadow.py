"""Where a request that cannot be placed now would lack least: what to keep for it; decides nothing.

What is lacking is counted in devices: the share that is not free on the devices that lack least, whole where a
deadline stands in the way, and CPU and memory as parts of the node. How long those who are there will stay is known
of nobody; the place that lacks least is taken for the one that will be free first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.placer.core.cluster import Cluster
from services.placer.core.columns import Bools, Floats, Ints
from services.placer.core.rows import Ask, Rows
from services.placer.core.sieve import Sieve
from shared.messages import SHARE_WHOLE_MICRO, ShadowPlace

NEVER = np.inf


@dataclass(frozen=True)
class Shadow:
    """`lacks`: what must be freed until it fits there, in devices."""

    places: tuple[ShadowPlace, ...]
    lacks: float


def rows_at(cluster: Cluster, places: Iterable[ShadowPlace]) -> Iterator[tuple[int, Ints]]:
    """Node row and device rows of each place; those that are not known any more are left out."""
    for place in places:
        slot, facts = cluster.slot(place.node), cluster.facts(place.node)
        if slot is not None and facts is not None:
            first = int(cluster.nodes["first_row"][slot])
            wanted = [first + at for at, device in enumerate(facts.devices) if device.uuid in place.devices]
            yield slot, np.array(wanted, np.int64)


def shadow(ask: Ask, replicas: Sequence[int], barred: Sequence[ShadowPlace]) -> Shadow | None:
    """Where these replicas lack least, one after another; None where the healthy nodes could not take them even empty.

    `barred`: what is kept for others already.
    """
    search = _Search(ask, len(replicas), barred)
    search.fill(search.rows)
    places, lacks = [], 0.0
    for replica in replicas:
        slot = search.least()
        if slot is None:
            return None
        lacks += float(search.total[slot])
        places.append(search.place(replica, slot))
    return Shadow(tuple(places), round(lacks, 6))


def lacking(ask: Ask, places: Sequence[ShadowPlace], barred: Sequence[ShadowPlace]) -> float | None:
    """What these places lack now; None where one of them cannot be counted on any more."""
    search, lacks = _Search(ask, len(places), barred), 0.0
    known = list(rows_at(ask.cluster, places))
    for place, (slot, devices) in zip(places, known, strict=False):
        mine = np.isin(search.rows.index, devices) if ask.demand.count else search.rows.index == slot
        search.fill(search.rows.where(mine))
        if search.total[slot] == NEVER:
            return None
        lacks += float(search.total[slot])
        search.take(slot)
        assert place.node == ask.cluster.name(slot)
    return round(lacks, 6) if len(known) == len(places) else None


class _Search:
    """`total` is what each node lacks for one more replica, `rows` what could take one if others left."""

    def __init__(self, ask: Ask, replicas: int, barred: Sequence[ShadowPlace]) -> None:
        self._ask, self._demand = ask, ask.demand
        nodes, devices = len(ask.cluster.nodes), len(ask.cluster.devices)
        self.rows = _foreseeable(ask, barred)
        self.total: Floats = np.full(nodes, NEVER)
        self._devices: Ints = np.zeros((nodes, ask.demand.count), np.int64)
        self._most = Sieve.of(ask).empty_room(replicas)
        self._here: Ints = np.zeros(nodes, np.int64)
        self._taken: Ints = np.zeros(devices, np.int64)
        """By device row and by node row: how many replicas are planned there."""

    def fill(self, rows: Rows) -> None:
        """Works out the nodes of these rows, from these alone."""
        self.total[rows.slots] = NEVER
        count = self._demand.count
        if not count:
            self.total[rows.index] = self._node_lacks(rows.index)
            return
        lacks = self._device_lacks(rows)
        order = np.lexsort((rows.of_device("rank"), lacks, rows.node))
        starts = np.flatnonzero(np.diff(rows.node[order], prepend=-1))
        enough = np.diff(np.append(starts, len(order))) >= count
        chosen = order[starts[enough][:, None] + np.arange(count)]
        slots = rows.node[chosen[:, 0]]
        self.total[slots] = lacks[chosen].sum(axis=1) + self._node_lacks(slots)
        self._devices[slots] = rows.index[chosen]

    def least(self) -> int | None:
        """The node that lacks least, the first by name among equals."""
        equals = np.flatnonzero(self.total == self.total.min(initial=NEVER))
        if not len(equals) or self.total[equals[0]] == NEVER:
            return None
        return int(equals[self._ask.cluster.nodes["rank"][equals].argmin()])

    def place(self, replica: int, slot: int) -> ShadowPlace:
        cluster = self._ask.cluster
        devices = tuple(cluster.device(row).uuid for row in self._devices[slot].tolist())
        self.take(slot)
        self.fill(self.rows.where(self.rows.node == slot))
        return ShadowPlace(replica=replica, node=cluster.name(slot), devices=devices)

    def take(self, slot: int) -> None:
        """One more replica is planned there."""
        self._here[slot] += 1
        self._taken[self._devices[slot]] += 1

    def _device_lacks(self, rows: Rows) -> Floats:
        demand, times = self._demand, self._taken[rows.index] + 1
        share = demand.share_micro * times
        lacks = _part(share, rows.of_device("share_free"), np.full(len(rows), SHARE_WHOLE_MICRO))
        if demand.device_memory_mib:
            memory = demand.device_memory_mib * times
            short = _part(memory, rows.of_device("memory_free"), rows.of_device("memory_capacity"))
            lacks = np.maximum(lacks, short)
        if len(rows):
            late: Bools = ~rows.verdict("admitted")
            lacks = np.where(late, np.maximum(lacks, 1.0), lacks)
        return lacks

    def _node_lacks(self, slots: Ints) -> Floats:
        nodes, times = self._ask.cluster.nodes, self._here[slots] + 1
        lacks: Floats = np.where(times > self._most[slots], NEVER, 0.0)
        for name, asked in (("cpu", self._demand.cpu_milli), ("memory", self._demand.memory_mib)):
            if asked:
                lacks = lacks + _part(asked * times, nodes[f"{name}_free"][slots], nodes[f"{name}_capacity"][slots])
        return lacks


def _part(asked: Ints, free: Ints, capacity: Ints) -> Floats:
    """How much of a whole is lacking; NEVER where the whole is less than what is asked."""
    short = np.maximum(asked - free, 0) / np.maximum(capacity, 1)
    part: Floats = np.where(asked > capacity, NEVER, short)
    return part


def _foreseeable(ask: Ask, barred: Sequence[ShadowPlace]) -> Rows:
    """The rows that nothing but what is reserved or kept keeps from taking a replica, without those barred."""
    sifted = Sieve.of(ask).sifted()
    rows = sifted.rows.where(sifted.held_up | (sifted.first < 0))
    for slot, devices in rows_at(ask.cluster, barred):
        there = np.isin(rows.index, devices) if ask.demand.count else rows.index == slot
        rows = rows.where(~there)
    return rows

"""Whose leaving could make room on a node: sets of reservations that free enough, fewest and smallest first.

What is counted here are sums, which is quick; whether a set makes room only the filters can say (`room_without`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from services.placer.core.cluster import UNKNOWN
from services.placer.core.rows import Ask
from services.placer.core.sieve import Sieve
from shared.messages import Reservation

Held = tuple[Reservation, ...]
"""What leaves as one: on one node, all of one request, or one replica."""
_MOST_HELD: Final = 24
"""Of one node, in sets of several, those that hold least."""


@dataclass(frozen=True)
class Leaving:
    node: str
    gone: Held


def nearest(ask: Ask, most: int) -> list[str]:
    """Nodes that only what is reserved keeps from taking a replica: past most filters first, then the emptiest."""
    sifted = Sieve.of(ask).sifted()
    rows, first = sifted.rows.where(sifted.held_up), sifted.first[sifted.held_up]
    several = "whole_free" if ask.demand.count > 1 else "share_free"
    free = rows.of_node(several if ask.demand.count else "cpu_free")
    order = np.lexsort((rows.of_node("rank"), -free, -first.astype(np.int64)))
    return [ask.cluster.name(slot) for slot in list(dict.fromkeys(rows.node[order].tolist()))[:most]]


def leaving(
    ask: Ask, nodes: Iterable[str], size: int, units: Callable[[Sequence[Reservation]], Iterable[Held]]
) -> list[Leaving]:
    """Sets of `size` units, each set of one node, that free enough there; those that free least first."""
    found = [Leaving(node, gone) for node in nodes for gone in _enough(ask, node, size, units)]
    return sorted(found, key=lambda each: (_amount(each.gone), each.node, _names(each.gone)))


def room_without(ask: Ask, each: Leaving) -> bool:
    """Whether a replica fits on the node once these have left."""
    with ask.cluster.trial():
        leave(ask, each)
        return room_on(ask, each.node)


def leave(ask: Ask, each: Leaving) -> None:
    """Takes them off; for use in a trial."""
    kept = tuple(held for held in ask.cluster.reservations(each.node) if held not in each.gone)
    ask.cluster.set_reservations(each.node, kept)


def room_on(ask: Ask, node: str) -> bool:
    """Whether a replica fits on the node as it is."""
    slot = ask.cluster.slot(node)
    assert slot is not None, "a node that rows were found on"
    sieve = Sieve.of(ask)
    return len(sieve.passing(np.array([slot]))) > 0


def by_request(reservations: Sequence[Reservation]) -> Iterator[Held]:
    """All that one request holds together."""
    for name in sorted({held.request_id for held in reservations}):
        yield tuple(held for held in reservations if held.request_id == name)


def _enough(ask: Ask, node: str, size: int, units: Callable[[Sequence[Reservation]], Iterable[Held]]) -> Iterator[Held]:
    gap = _Gap(ask, node)
    held = sorted(units(ask.cluster.reservations(node)), key=lambda each: (_amount(each), _names(each)))
    for chosen in combinations(held if size == 1 else held[:_MOST_HELD], size):
        gone = tuple(reservation for each in chosen for reservation in each)
        if gap.closed_by(gone):
            yield gone


class _Gap:
    """What a replica lacks on one node, in sums; where more is reserved than there is, less than it lacks."""

    def __init__(self, ask: Ask, node: str) -> None:
        self._demand, cluster = ask.demand, ask.cluster
        slot = cluster.slot(node)
        assert slot is not None
        self._cpu = ask.demand.cpu_milli - int(cluster.nodes["cpu_free"][slot])
        self._memory = ask.demand.memory_mib - int(cluster.nodes["memory_free"][slot])
        self._devices: dict[str, tuple[int, int]] = {}
        if not ask.demand.count:
            return
        rows = Sieve.of(ask).open(np.array([slot]))
        for row, share, memory in zip(
            rows.index.tolist(),
            rows.of_device("share_free").tolist(),
            rows.of_device("memory_free").tolist(),
            strict=True,
        ):
            self._devices[cluster.device(row).uuid] = (
                share,
                ask.demand.device_memory_mib if memory == UNKNOWN else memory,
            )

    def closed_by(self, gone: Held) -> bool:
        demand = self._demand
        if demand.cpu_milli and self._cpu > sum(held.cpu_milli for held in gone):
            return False
        if demand.memory_mib and self._memory > sum(held.memory_mib for held in gone):
            return False
        free = dict(self._devices)
        for held in gone:
            for uuid in held.devices:
                if uuid in free:
                    share, memory = free[uuid]
                    free[uuid] = share + held.share_micro, memory + held.device_memory_mib
        wide = [share >= demand.share_micro and memory >= demand.device_memory_mib for share, memory in free.values()]
        return sum(wide) >= demand.count


def _amount(gone: Held) -> tuple[int, int, int]:
    """Millionths of devices, CPU and memory, in this order."""
    share = sum(len(held.devices) * held.share_micro for held in gone)
    return share, sum(held.cpu_milli for held in gone), sum(held.memory_mib for held in gone)


def _names(gone: Held) -> list[tuple[str, int]]:
    return [(held.request_id, held.replica) for held in gone]

"""The best place on each node for one replica: a row, for several devices the node's best set of them."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from services.placer.core.cluster import Cluster, name_hash
from services.placer.core.columns import Array, Bools, Columns, Floats, Ints
from services.placer.core.prospects import Prospects
from services.placer.core.rows import Rows, begins
from services.placer.core.strategies.base import Ranking, Strategy

_FEW: Final = 500
"""Rows that are sorted sooner than looked through key by key: it is about as quick at so many."""

_FIBONACCI: Final = np.uint64(0x9E3779B97F4A7C15)
"""For hashing: 2**64 over the golden ratio."""
_HALF: Final = np.uint64(32)


class Options(NamedTuple):
    """At most one option for each node: `count` of its device rows (none without gpu), and how good it is.

    Smallest keys first, the first one counting most, then the tie-break; `by` has a row for each of the total's
    `parts`.
    """

    node: Ints
    devices: Ints
    keys: tuple[Array, ...]
    total: Floats
    parts: tuple[str, ...]
    by: tuple[Floats, ...]
    unproven: Bools


def options(rows: Rows, strategy: Strategy, tie: Tie) -> Options:
    """Of rows that all can take the demand, node by node."""
    ranking, count = strategy.rank(Prospects(rows)), rows.ask.demand.count
    if count > 1:
        return _sets(rows, ranking, tie)
    best = _first_of_each(rows, ranking.keys, tie)
    chosen = rows if isinstance(best, slice) else rows.where(best)
    return Options(
        node=chosen.node,
        devices=chosen.index[:, None] if count else np.zeros((len(chosen), 0), np.int64),
        keys=tuple(key[best] for key in ranking.keys),
        total=ranking.total[best],
        parts=tuple(ranking.by),
        by=tuple(part[best] for part in ranking.by.values()),
        unproven=_unproven(chosen),
    )


class Tie:
    """What decides among equals: the order of names, or with a `word` a shuffle that depends on it and the names."""

    def __init__(self, cluster: Cluster, word: str) -> None:
        self._cluster, self._word = cluster, word
        self._salt = np.uint64(name_hash(word))

    def of_devices(self, rows: Ints) -> Array:
        return self._of(self._cluster.devices, rows)

    def of_nodes(self, slots: Ints) -> Array:
        return self._of(self._cluster.nodes, slots)

    def _of(self, columns: Columns, rows: Ints) -> Array:
        if not self._word:
            return columns["rank"][rows]
        mixed = (columns["hash"][rows] ^ self._salt) * _FIBONACCI
        shuffled: Array = mixed ^ (mixed >> _HALF)
        return shuffled


def _first_of_each(rows: Rows, keys: tuple[Array, ...], tie: Tie) -> Ints | slice:
    """The place of the smallest keys on each node; all places where each node has one row."""
    starts = rows.begins().nonzero()[0]
    if len(starts) == len(rows):
        return slice(None)
    if len(rows) > _FEW:
        return _narrowed(rows, keys, tie, starts)
    order = np.lexsort((tie.of_devices(rows.index), *reversed(keys), rows.node))
    first: Ints = order[begins(rows.node[order])]
    return first


def _narrowed(rows: Rows, keys: tuple[Array, ...], tie: Tie, starts: Ints) -> Ints:
    """The same for many rows, of which few are left after a key or two: no sorting."""
    run = np.arange(len(starts)).repeat(np.diff(starts, append=len(rows)))
    left: Bools | None = None
    for key in (*keys, None):
        values = tie.of_devices(rows.index) if key is None else key
        if left is not None:
            values = np.where(left, values, values.max())
        smallest = values == np.minimum.reduceat(values, starts)[run]
        left = smallest if left is None else smallest & left
        if np.count_nonzero(left) == len(starts):
            break
    assert left is not None, "there is always the tie-break"
    places: Ints = left.nonzero()[0]
    return places


def _sets(rows: Rows, ranking: Ranking, tie: Tie) -> Options:
    """One option per node: its best devices, of one group where one has enough, and the smallest such group.

    A set has the worst of its devices' keys and the mean of their totals; one within a group comes first.
    """
    count, ties = rows.ask.demand.count, tie.of_devices(rows.index)
    groups = rows.node * len(rows.ask.cluster.codes) + rows.of_device("group")
    _, which, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    size, first = sizes[which], np.full(len(sizes), ties.max(initial=0), ties.dtype)
    np.minimum.at(first, which, ties)
    preference = np.where(size >= count, size, 2 * len(rows) - size)
    order = np.lexsort((ties, *reversed(ranking.keys), first[which], preference, rows.node))
    starts = begins(rows.node[order]).nonzero()[0]
    chosen = order[starts[:, None] + np.arange(count)]
    split = (preference[chosen[:, 0]] > len(rows)).astype(np.int64)
    return Options(
        node=rows.node[chosen[:, 0]],
        devices=rows.index[chosen],
        keys=(split, *(key[chosen].max(axis=1) for key in ranking.keys)),
        total=np.round(ranking.total[chosen].mean(axis=1), 9),
        parts=tuple(ranking.by),
        by=tuple(part[chosen].mean(axis=1) for part in ranking.by.values()),
        unproven=_unproven(rows)[chosen].any(axis=1),
    )


def _unproven(rows: Rows) -> Bools:
    if not rows.ask.demand.count or not rows.ask.demand.task:
        return np.zeros(len(rows), np.bool_)
    unproven: Bools = rows.verdict("unproven")
    return unproven

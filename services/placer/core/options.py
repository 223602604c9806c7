"""The best place on each node for one replica: a row, for several devices the node's best set of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.placer.core.cluster import name_hash
from services.placer.core.columns import Array, Bools, Floats, Ints
from services.placer.core.prospects import Prospects
from services.placer.core.rows import Rows
from services.placer.core.strategies.base import Ranking, Strategy


@dataclass(frozen=True)
class Options:
    """At most one option for each node: `count` of its device rows (none without gpu), and how good it is.

    Smallest keys first, the first one counting most, then `tie`; `by` has a row for each of the total's `parts`.
    """

    node: Ints
    devices: Ints
    keys: tuple[Array, ...]
    tie: Array
    total: Floats
    parts: tuple[str, ...]
    by: Floats
    unproven: Bools


def options(rows: Rows, strategy: Strategy, tie: str) -> Options:
    """Of rows that all can take the demand, node by node."""
    ranking, ties, count = strategy.rank(Prospects(rows)), _ties(rows, tie), rows.ask.demand.count
    if count > 1:
        return _sets(rows, ranking, ties)
    best = _first_of_each(rows.node, (*ranking.keys, ties))
    chosen = rows.where(best)
    return Options(
        node=chosen.node,
        devices=chosen.index[:, None] if count else np.zeros((len(best), 0), np.int64),
        keys=tuple(key[best] for key in ranking.keys),
        tie=ties[best],
        total=ranking.total[best],
        parts=tuple(ranking.by),
        by=np.array([part[best] for part in ranking.by.values()]),
        unproven=_unproven(chosen),
    )


def _first_of_each(node: Ints, keys: tuple[Array, ...]) -> Ints:
    """The place of the smallest keys on each node; the rows of a node stand together and differ in the last key."""
    new = np.ones(len(node), np.bool_)
    np.not_equal(node[1:], node[:-1], out=new[1:])
    starts = new.nonzero()[0]
    if len(starts) == len(node):
        return starts
    run, left = new.cumsum() - 1, None
    for key in keys:
        values = key if left is None else np.where(left, key, key.max())
        smallest = values == np.minimum.reduceat(values, starts)[run]
        left = smallest if left is None else smallest & left
        if np.count_nonzero(left) == len(starts):
            break
    assert left is not None, "a ranking has keys, a tie-break at least"
    places: Ints = left.nonzero()[0]
    return places


def _sets(rows: Rows, ranking: Ranking, ties: Array) -> Options:
    """One option per node: its best devices, of one group where one has enough, and the smallest such group.

    A set has the worst of its devices' keys and the mean of their totals; one within a group comes first.
    """
    count = rows.ask.demand.count
    groups = rows.node * len(rows.ask.cluster.codes) + rows.of_device("group")
    _, which, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    size, first = sizes[which], np.full(len(sizes), ties.max(initial=0), ties.dtype)
    np.minimum.at(first, which, ties)
    preference = np.where(size >= count, size, 2 * len(rows) - size)
    order = np.lexsort((ties, *reversed(ranking.keys), first[which], preference, rows.node))
    starts = np.flatnonzero(np.diff(rows.node[order], prepend=-1))
    chosen = order[starts[:, None] + np.arange(count)]
    split = (preference[chosen[:, 0]] > len(rows)).astype(np.int64)
    return Options(
        node=rows.node[chosen[:, 0]],
        devices=rows.index[chosen],
        keys=(split, *(key[chosen].max(axis=1) for key in ranking.keys)),
        tie=ties[chosen[:, 0]],
        total=np.round(ranking.total[chosen].mean(axis=1), 9),
        parts=tuple(ranking.by),
        by=np.array([part[chosen].mean(axis=1) for part in ranking.by.values()]),
        unproven=_unproven(rows)[chosen].any(axis=1),
    )


def _unproven(rows: Rows) -> Bools:
    if not rows.ask.demand.count or not rows.ask.demand.task:
        return np.zeros(len(rows), np.bool_)
    unproven: Bools = rows.verdict("unproven")
    return unproven


def _ties(rows: Rows, tie: str) -> Array:
    """What decides among equals: the order of names, or with `tie` a shuffle that depends on it and the names."""
    column = rows.of_device if rows.ask.demand.count else rows.of_node
    if not tie:
        return column("rank")
    return shuffled(column("hash"), tie)


def shuffled(hashes: Array, tie: str) -> Array:
    """The same order for the same `tie` and names, another for another."""
    mixed = (hashes ^ np.uint64(name_hash(tie))) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing
    order: Array = mixed ^ (mixed >> np.uint64(32))
    return order

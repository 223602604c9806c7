"""The best place on each node for one replica: a row, for several devices the node's best set of them."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from services.placer.core.cluster import Cluster
from services.placer.core.columns import Array, Bools, Columns, Ints, name_hash
from services.placer.core.prospects import Prospects
from services.placer.core.rows import begins
from services.placer.core.strategies.base import Ranking, Strategy

_FEW: Final = 500
"""Rows that are sorted sooner than looked through key by key: it is about as quick at so many."""

_FIBONACCI: Final = np.uint64(0x9E3779B97F4A7C15)
"""For hashing: 2**64 over the golden ratio."""
_HALF: Final = np.uint64(32)


class Options(NamedTuple):
    """At most one option for each node.

    `columns` are so many keys (smallest first, the first one counting most, then the tie-break), the total, its
    `parts`, a device row for each that is asked for, and, where a deadline may be unproven, whether it is.
    """

    node: Ints
    keys: int
    parts: tuple[str, ...]
    columns: tuple[Array, ...]


def first_device(keys: int, parts: tuple[str, ...]) -> int:
    """Where the rows of devices begin among the columns of Options."""
    return keys + 1 + len(parts)


def options(rows: Prospects, strategy: Strategy, tie: Tie) -> Options:
    """Of rows that all can take the demand, node by node."""
    ranking, count = strategy.rank(rows), rows.count
    if count > 1:
        return _sets(rows, ranking, tie)
    best = _first_of_each(rows, ranking.keys[ranking.of_nodes :], tie)
    node = rows.of_row[best]
    at = node if ranking.of_nodes else best
    columns = [
        *[key[node] for key in ranking.keys[: ranking.of_nodes]],
        *[key[best] for key in ranking.keys[ranking.of_nodes :]],
        ranking.total[at],
        *[part[at] for part in ranking.by.values()],
    ]
    if count:
        columns.append(rows.index[best])
    if rows.unproven:
        columns.append(rows.verdict("unproven")[best])
    return Options(rows.slots[node], len(ranking.keys), tuple(ranking.by), tuple(columns))


class Tie:
    """What decides among equals: the order of names, or with a `word` a shuffle that depends on it and the names."""

    def __init__(self, cluster: Cluster, word: str) -> None:
        self._cluster, self._word = cluster, word
        self._salt = np.uint64(name_hash(word))

    def of_devices(self, rows: Ints) -> Array:
        return self._of(self._cluster.devices, rows)

    def of_nodes(self, slots: Ints) -> Array:
        return self._of(self._cluster.nodes, slots)

    def _of(self, columns: Columns, rows: Ints | slice) -> Array:
        if not self._word:
            return columns["rank"][rows]
        mixed = (columns["hash"][rows] ^ self._salt) * _FIBONACCI
        shuffled: Array = mixed ^ (mixed >> _HALF)
        return shuffled


class KeptTie(Tie):
    """The same, worked out for all rows at once: for words that come again and again."""

    def __init__(self, cluster: Cluster, word: str) -> None:
        super().__init__(cluster, word)
        self._seen = -1
        self._devices: Array = np.zeros(0)
        self._nodes: Array = np.zeros(0)

    @classmethod
    def of(cls, cluster: Cluster, word: str) -> KeptTie:
        """The one of this word that all tables share."""
        found: KeptTie = cluster.memo.get((cls, word), lambda: cls(cluster, word))
        return found

    def of_devices(self, rows: Ints) -> Array:
        self._refresh()
        return self._devices.take(rows)

    def of_nodes(self, slots: Ints) -> Array:
        self._refresh()
        return self._nodes.take(slots)

    def all_devices(self) -> Array:
        """By device row."""
        self._refresh()
        return self._devices

    def all_nodes(self) -> Array:
        """By node row."""
        self._refresh()
        return self._nodes

    def _refresh(self) -> None:
        cluster = self._cluster
        if self._seen == cluster.names_changes:
            return
        cluster.all_slots()  # brings the ranks up to date
        self._seen, every = cluster.names_changes, slice(None)
        self._devices, self._nodes = self._of(cluster.devices, every), self._of(cluster.nodes, every)


def _first_of_each(rows: Prospects, keys: tuple[Array, ...], tie: Tie) -> Ints | slice:
    """The place of the smallest keys on each node; all places where each node has one row."""
    starts = begins(rows.of_row).nonzero()[0]
    if len(starts) == len(rows):
        return slice(None)
    if len(rows) > _FEW:
        return _narrowed(rows, keys, tie, starts)
    first: Ints = np.lexsort((tie.of_devices(rows.index), *reversed(keys), rows.of_row))[starts]
    return first


def _narrowed(rows: Prospects, keys: tuple[Array, ...], tie: Tie, starts: Ints) -> Ints:
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


def _sets(rows: Prospects, ranking: Ranking, tie: Tie) -> Options:
    """One option per node: its best devices, of one group where one has enough, and the smallest such group.

    A set has the worst of its devices' keys and the mean of their totals; one within a group comes first.
    """
    count, of_nodes, ties = rows.count, ranking.of_nodes, tie.of_devices(rows.index)
    size, first = _groups(rows, ties)
    preference = np.where(size >= count, size, 2 * len(rows) - size)
    order = np.lexsort((ties, *reversed(ranking.keys[of_nodes:]), first, preference, rows.of_row))
    starts = begins(rows.of_row).nonzero()[0]
    chosen = order[starts[:, None] + np.arange(count)]
    split = (preference[chosen[:, 0]] > len(rows)).astype(np.int64)
    node = rows.of_row[starts]

    def each(values: Array) -> Array:
        """A line for each set, a column for each of its devices."""
        return values[node][:, None] if of_nodes else values[chosen]

    columns = (
        split,
        *(key[node] for key in ranking.keys[:of_nodes]),
        *(key[chosen].max(axis=1) for key in ranking.keys[of_nodes:]),
        np.round(each(ranking.total).mean(axis=1), 9),
        *(each(part).mean(axis=1) for part in ranking.by.values()),
        *rows.index[chosen].T,
    )
    if rows.unproven:
        columns += (rows.verdict("unproven")[chosen].any(axis=1),)
    return Options(rows.slots[node], 1 + len(ranking.keys), tuple(ranking.by), columns)


def _groups(rows: Prospects, ties: Array) -> tuple[Ints, Array]:
    """For each row, how many there are of its node and group, and the tie-break of the first of them."""
    group = rows.of_row * len(rows.ask.cluster.codes) + rows.of_device("group")
    order = group.argsort(kind="stable")
    new = begins(group[order])
    starts, run = new.nonzero()[0], np.empty(len(order), np.int64)
    run[order] = new.cumsum() - 1
    return np.bincount(run)[run], np.minimum.reduceat(ties[order], starts)[run]

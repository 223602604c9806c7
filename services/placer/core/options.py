"""The places that one replica could take, ranked: a row for each, for several devices a node's best set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.placer.core.cluster import UNKNOWN, name_hash
from services.placer.core.columns import Array, Bools, Ints
from services.placer.core.feasible import NO_SLACK
from services.placer.core.rows import Rows
from services.placer.core.strategies.base import Candidates, Floats, Ranking, Strategy
from shared.messages import SHARE_WHOLE_MICRO, Kind, Score


@dataclass(frozen=True)
class Options:
    """Each option is a node and `count` of its device rows (none without gpu). Smallest keys first, then `tie`."""

    node: Ints
    devices: Ints
    keys: tuple[Array, ...]
    total: Floats
    by: dict[str, Floats]
    unproven: Bools
    tie: Array

    def __len__(self) -> int:
        return len(self.node)

    def best(self, first: Sequence[Array] = (), among: Bools | None = None) -> int | None:
        """The place of the best option; `first` are keys that count more than the strategy's own."""
        left = np.arange(len(self)) if among is None else np.flatnonzero(among)
        for key in (*first, *self.keys, self.tie):
            if len(left) < 2:
                break
            values = key[left]
            left = left[values == values.min()]
        return int(left[0]) if len(left) else None

    def score(self, place: int) -> Score:
        by = {name: round(float(part[place]), 6) for name, part in self.by.items()}
        return Score(total=round(float(self.total[place]), 6), by=by)

    def without(self, node: int) -> Options:
        return self._where(self.node != node)

    def plus(self, other: Options) -> Options:
        """Both together; the other's are options of the same demand by the same strategy."""
        return Options(
            node=np.concatenate([self.node, other.node]),
            devices=np.concatenate([self.devices, other.devices]),
            keys=tuple(np.concatenate(pair) for pair in zip(self.keys, other.keys, strict=True)),
            total=np.concatenate([self.total, other.total]),
            by={name: np.concatenate([part, other.by[name]]) for name, part in self.by.items()},
            unproven=np.concatenate([self.unproven, other.unproven]),
            tie=np.concatenate([self.tie, other.tie]),
        )

    def _where(self, keep: Bools) -> Options:
        return Options(
            node=self.node[keep],
            devices=self.devices[keep],
            keys=tuple(key[keep] for key in self.keys),
            total=self.total[keep],
            by={name: part[keep] for name, part in self.by.items()},
            unproven=self.unproven[keep],
            tie=self.tie[keep],
        )


def options(rows: Rows, strategy: Strategy, tie: str) -> Options:
    """Of rows that all can take the demand."""
    ranking, ties, count = strategy.rank(candidates(rows)), _ties(rows, tie), rows.ask.demand.count
    if count < 2:
        return Options(
            node=rows.node,
            devices=rows.index[:, None] if count else np.zeros((len(rows), 0), np.int64),
            keys=ranking.keys,
            total=ranking.total,
            by=dict(ranking.by),
            unproven=_unproven(rows),
            tie=ties,
        )
    return _sets(rows, ranking, ties)


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
        total=np.round(ranking.total[chosen].mean(axis=1), 9),
        by={name: part[chosen].mean(axis=1) for name, part in ranking.by.items()},
        unproven=_unproven(rows)[chosen].any(axis=1),
        tie=ties[chosen[:, 0]],
    )


def candidates(rows: Rows) -> Candidates:
    """What a strategy is told about rows that can take the demand."""
    demand, nothing = rows.ask.demand, np.zeros(len(rows))
    used, capacity = _node_use(rows)
    share_after = whole_after = memory_after = slack = nothing
    if demand.count:
        share_free = rows.of_device("share_free")
        share_after = (share_free - demand.share_micro) / SHARE_WHOLE_MICRO
        memory_after, slack = _memory_after(rows), _slack(rows)
        broken = np.where(share_free == SHARE_WHOLE_MICRO, demand.count, 0)
        whole_after = rows.of_node("whole_free") - broken
    return Candidates(
        promises=demand.kind is not Kind.SOFT,
        share_after=share_after,
        memory_after=memory_after,
        whole_after=whole_after.astype(np.int64),
        slack=slack,
        promised=rows.of_device("promised") if demand.count else nothing.astype(np.int64),
        risk=rows.of_device("risk") if demand.count else nothing.astype(np.int64),
        used_after=used,
        capacity=capacity,
    )


def _node_use(rows: Rows) -> tuple[dict[str, Ints], dict[str, Ints]]:
    """Used with the demand, and capacity, of the node of each row; unknown use counts as none, for ranking only."""
    demand, used, capacity = rows.ask.demand, {}, {}
    for resource, asked in (("cpu", demand.cpu_milli), ("memory", demand.memory_mib)):
        capacity[resource] = rows.of_node(f"{resource}_capacity")
        free = rows.of_node(f"{resource}_free")
        used[resource] = asked + np.where(free == UNKNOWN, 0, capacity[resource] - free)
    if demand.count:
        capacity["gpu"] = rows.of_node("devices") * SHARE_WHOLE_MICRO
        used["gpu"] = capacity["gpu"] - rows.of_node("share_free") + demand.count * demand.share_micro
    return used, capacity


def _memory_after(rows: Rows) -> Floats:
    free, capacity = rows.of_device("memory_free"), rows.of_device("memory_capacity")
    after = (free - rows.ask.demand.device_memory_mib) / np.maximum(capacity, 1)
    known: Floats = np.where(free == UNKNOWN, np.nan, np.clip(after, 0, 1))
    return known


def _slack(rows: Rows) -> Floats:
    realtime, slack = rows.ask.demand.request.realtime, rows.verdict("slack")
    if realtime is None:
        return np.full(len(rows), np.nan)
    part: Floats = np.where(slack == NO_SLACK, np.nan, slack / realtime.deadline_us)
    return part


def _unproven(rows: Rows) -> Bools:
    if not rows.ask.demand.count:
        return np.zeros(len(rows), np.bool_)
    unproven: Bools = rows.verdict("unproven")
    return unproven


def _ties(rows: Rows, tie: str) -> Array:
    """What decides among equals: the order of names, or with `tie` a shuffle that depends on it and the names."""
    column = rows.of_device if rows.ask.demand.count else rows.of_node
    if not tie:
        return column("rank")
    mixed = (column("hash") ^ np.uint64(name_hash(tie))) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing
    shuffled: Array = mixed ^ (mixed >> np.uint64(32))
    return shuffled

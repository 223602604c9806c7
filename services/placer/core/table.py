"""Each node's best option for one kind of request by one strategy, kept in step with the cluster node by node.

This is what makes decisions cheap: a kind that was asked for before costs the nodes that have changed since, and one
look over all nodes. docs/placement.md has the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.placer.core.columns import Array, Floats, Ints
from services.placer.core.options import KeptTie, Options, Tie, options
from services.placer.core.outcome import Assignment
from services.placer.core.rows import Ask
from services.placer.core.sieve import Sieve
from services.placer.core.strategies.base import Strategy
from services.placer.core.strategies.random_choice import Random
from shared.messages import RunnerUp, Score

_FEW = 500
"""Nodes that are sorted sooner than looked through key by key."""
_NONE = np.inf
"""The first key of a node that has no option."""


class Table:
    """A column entry for each node row. Options are compared by their keys, then by the tie-break."""

    def __init__(self, sieve: Sieve, strategy: Strategy, tie: str) -> None:
        self.sieve = sieve
        self._strategy, self._cluster = strategy, sieve.ask.cluster
        self._tie = KeptTie.of(self._cluster, tie)
        self._seen = 0
        self._size = 0
        self._parts: tuple[str, ...] = ()
        self._columns: list[Array] = []
        """Of each node, as in Options. The first is looked through."""
        self._keys, self._devices = 0, slice(0)
        self._drawn: Tie | None = None
        """Where the strategy is chance: what this decision draws by. The table is the same for all."""

    @classmethod
    def of(cls, ask: Ask, strategy: Strategy, tie: str) -> Table:
        """The one of this kind of request, up to date."""
        if isinstance(strategy, Random):
            return cls._of(ask, strategy, "").drawing(f"{tie}/{ask.demand.request.request_id}")
        return cls._of(ask, strategy, tie)

    @classmethod
    def _of(cls, ask: Ask, strategy: Strategy, tie: str) -> Table:
        def make() -> Table:
            return cls(Sieve.of(ask), strategy, tie)

        # by identity: a strategy may have parameters that are long to compare; the table keeps it, so its id stays its
        table: Table = ask.cluster.memo.get((cls, ask.kind, id(strategy), tie), make) if ask.kept else make()
        table.refresh()
        return table

    def drawing(self, lot: str) -> Table:
        """Itself, equals being drawn by `lot` from now on."""
        self._drawn = Tie(self._cluster, lot)
        return self

    def refresh(self) -> None:
        """Makes the options of nodes that have changed anew."""
        if self._seen == self._cluster.changes:
            return
        changed = self._cluster.changed_since(self._seen)
        self._grow(len(self._cluster.nodes))
        if self._columns:
            self._columns[0][changed] = _NONE
        rows = self.sieve.passing(changed)
        if len(rows):
            self._write(options(rows, self._strategy, self._tie))
        self._seen = self._cluster.changes

    def best(self, first: Sequence[Array] = ()) -> tuple[int | None, int | None]:
        """The node of the best option and that of the second best; `first` are keys that count more than its own."""
        if not self._columns:
            return None, None
        strongest, *others = self._columns[: self._keys]
        if first:
            return self._two((strongest != _NONE).nonzero()[0], (*first, strongest, *others))
        equals = self._equals(strongest)
        if len(equals) != 1:
            return self._two(equals, others)
        best = int(equals[0])
        least, strongest[best] = strongest[best], _NONE
        second, _ = self._two(self._equals(strongest), others)
        strongest[best] = least
        return best, second

    def _equals(self, strongest: Floats) -> Ints:
        """The nodes with the smallest first key, none where none has an option."""
        least = strongest[strongest.argmin()]
        equals: Ints = (strongest == least).nonzero()[0]
        return equals if least != _NONE else equals[:0]

    def _two(self, left: Ints, keys: Sequence[Array]) -> tuple[int | None, int | None]:
        """The node among these with the smallest keys, then the tie-break, and the next one."""
        if len(left) > _FEW:
            left = self._leading(left, keys)
        if len(left) < 2:
            return (int(left[0]) if len(left) else None), None
        best, second, *_ = left[np.lexsort((self._ties(left), *(key[left] for key in reversed(keys))))].tolist()
        return best, second

    def _leading(self, left: Ints, keys: Sequence[Array]) -> Ints:
        """Of many nodes two or more that come before all others, without sorting."""
        for key in (*keys, None):
            values = self._ties(left) if key is None else key[left]
            ordered = values.copy()
            ordered.partition(1)
            left = left[values <= ordered[1]]
            if ordered[0] < ordered[1] or len(left) <= _FEW:
                break
        return left

    def _ties(self, left: Ints) -> Array:
        """What decides among these nodes where their keys are equal."""
        if self._drawn is not None:
            return self._drawn.of_nodes(left)
        if self.sieve.ask.demand.count:
            return self._tie.of_devices(self._columns[self._devices.start][left])
        return self._tie.of_nodes(left)

    def assignment(self, replica: int, node: int) -> Assignment:
        """A node's option."""
        if self._drawn is None:
            rows = [column.item(node) for column in self._columns[self._devices]]
        else:
            drawn = options(self.sieve.passing(np.array([node])), self._strategy, self._drawn)
            rows = [column.item(0) for column in drawn.columns[self._devices]]
        uuids = [self._cluster.device(row).uuid for row in rows]
        return Assignment(replica, self._cluster.name(node), tuple(uuids))

    def unproven(self, node: int) -> bool:
        return any(column.item(node) for column in self._columns[self._devices.stop :])

    def score(self, node: int) -> Score:
        total, *parts = [round(column.item(node), 6) for column in self._columns[self._keys : self._devices.start]]
        return Score(total=total, by=dict(zip(self._parts, parts, strict=True)))

    def runner_up(self, node: int | None) -> RunnerUp | None:
        if node is None:
            return None
        return RunnerUp(node=self._cluster.name(node), total=round(self._columns[self._keys].item(node), 6))

    def _write(self, fresh: Options) -> None:
        node, columns = fresh.node, fresh.columns
        if not self._columns:
            self._parts, self._keys = fresh.parts, fresh.keys
            self._devices = slice(fresh.first_device, fresh.first_device + self.sieve.ask.demand.count)
            self._columns = [np.full(self._size, _NONE), *(np.zeros(self._size, each.dtype) for each in columns[1:])]
        for column, values in zip(self._columns, columns, strict=True):
            column[node] = values

    def _grow(self, nodes: int) -> None:
        if nodes <= self._size:
            return
        more = max(nodes - self._size, self._size)
        self._size += more
        if self._columns:
            self._columns = [np.concatenate([column, np.zeros(more, column.dtype)]) for column in self._columns]
            self._columns[0][-more:] = _NONE

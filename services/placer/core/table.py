"""Each node's best option for one kind of request by one strategy, kept in step with the cluster node by node.

This is what makes decisions cheap: a kind that was asked for before costs the nodes that have changed since, and one
look over all nodes. docs/placement.md has the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.placer.core import kernels
from services.placer.core.columns import Array, Floats, Ints
from services.placer.core.options import KeptTie, Tie, first_device, options
from services.placer.core.outcome import Assignment
from services.placer.core.rows import Ask
from services.placer.core.sieve import Sieve
from services.placer.core.strategies import Strategy, compiled
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
        self._named = -1
        """Up to which change of names its columns reach."""
        self._options: Floats = np.zeros((0, 0))
        """A line for each of Options' columns, an element for each node. The first line is looked through."""
        self._parts: tuple[str, ...] = ()
        self._keys, self._devices = 0, slice(0)
        self._compiled = kernels.HERE and self._cluster.compiled
        self._kernel = self._made()
        self._drawn: Tie | None = None
        """Where the strategy is chance: what this decision draws by. The table is the same for all."""

    def _made(self) -> kernels.Kernel | None:
        ask = self.sieve.ask
        known = compiled(self._strategy, ask.asked, ask.resources) if self._compiled else None
        if known is None:
            return None
        self._lay_out(known.keys + (ask.demand.count > 1), known.parts)
        return kernels.Kernel(self.sieve, self._tie, known)

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
        if self._named != self._cluster.names_changes:
            self._grow()
        if self._kernel:
            self._kernel.refresh(self._cluster.changed_since(self._seen, once=False), self._options)
        else:
            self._rank(self._cluster.changed_since(self._seen))
        self._seen = self._cluster.changes

    def best(self, first: Sequence[Array] = ()) -> tuple[int | None, int | None]:
        """The node of the best option and that of the second best; `first` are keys that count more than its own."""
        if not self._keys:
            return None, None
        if self._compiled and not first and self._drawn is None:
            count = self.sieve.ask.demand.count
            ties = self._tie.all_devices() if count else self._tie.all_nodes()
            return kernels.best(self._options, ties, self._keys, self._devices.start if count else 0)
        strongest, *others = self._options[: self._keys]
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
            return self._tie.of_devices(self._options[self._devices.start, left].astype(np.int64))
        return self._tie.of_nodes(left)

    def chosen(self, replica: int, node: int) -> tuple[Assignment, Score, bool]:
        """A node's option, its score to six places, and whether a deadline is unproven there."""
        line = self._options[:, node].tolist()
        rows = line[self._devices]
        if self._drawn is not None:
            drawn = options(self.sieve.passing(np.array([node])), self._strategy, self._drawn)
            rows = [column.item(0) for column in drawn.columns[self._devices]]
        total, *parts = [_to_six_places(value) for value in line[self._keys : self._devices.start]]
        score = Score(total=total, by=dict(zip(self._parts, parts, strict=True)))
        uuids = tuple([self._cluster.device(int(row)).uuid for row in rows])
        return Assignment(replica, self._cluster.name(node), uuids), score, any(line[self._devices.stop :])

    def runner_up(self, node: int | None) -> RunnerUp | None:
        if node is None:
            return None
        total = _to_six_places(self._options.item(self._keys, node))
        return RunnerUp(node=self._cluster.name(node), total=total)

    def _rank(self, changed: Ints) -> None:
        """What a kernel does, in numpy."""
        self._options[:1, changed] = _NONE
        rows = self.sieve.passing(changed)
        if not len(rows):
            return
        fresh = options(rows, self._strategy, self._tie)
        if not self._keys:
            self._lay_out(fresh.keys, fresh.parts)
        for line, values in zip(self._options, fresh.columns, strict=True):
            line[fresh.node] = values

    def _lay_out(self, keys: int, parts: tuple[str, ...]) -> None:
        demand = self.sieve.ask.demand
        first = first_device(keys, parts)
        self._keys, self._parts, self._devices = keys, parts, slice(first, first + demand.count)
        lines = self._devices.stop + (demand.count > 0 and demand.task is not None)
        self._options = np.full((lines, self._options.shape[1]), _NONE)

    def _grow(self) -> None:
        lines, size = self._options.shape
        if (missing := len(self._cluster.nodes) - size) > 0:
            more = np.full((lines, max(missing, size)), _NONE)
            self._options = np.concatenate([self._options, more], axis=1)
        self._named = self._cluster.names_changes


def _to_six_places(value: float) -> float:
    """As `round` does, in half the time."""
    return round(value * 1e6) / 1e6

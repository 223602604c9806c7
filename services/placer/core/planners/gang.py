"""Plans all replicas of a request, each against what is there with those planned before it; all of them or none."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.demand import NEWCOMER
from services.placer.core.outcome import MAX_GANG_NODES, Assignment
from services.placer.core.room import room
from services.placer.core.rows import Ask
from services.placer.core.strategies import Strategy
from services.placer.core.table import Table
from shared.messages import Reason, RunnerUp, Score

SpreadOver = Literal["node", "pack"] | None


class Wish(NamedTuple):
    """How the replicas are to be placed. `others` are those of the same request that have their places already."""

    strategy: Strategy
    replicas: tuple[int, ...]
    spread_over: SpreadOver = None
    tie: str = ""
    others: tuple[Assignment, ...] = ()


class Plan(NamedTuple):
    """Where not `complete`, `reasons` say why there was no place for the replica after those in `assignments`."""

    assignments: tuple[Assignment, ...] = ()
    score: Score | None = None
    runner_up: RunnerUp | None = None
    unproven: bool = False
    complete: bool = True
    reasons: tuple[Reason, ...] = ()

    @property
    def nodes(self) -> int:
        return len({assignment.node for assignment in self.assignments})

    @property
    def wide(self) -> bool:
        """Over more nodes than one placement may touch."""
        return len(self.assignments) > MAX_GANG_NODES and self.nodes > MAX_GANG_NODES


def plan(ask: Ask, wish: Wish) -> Plan:
    """Replicas are alike and nodes independent, so taking the best place for each in turn misses none that fits.

    Leaves the cluster as it was.
    """
    table = Table.of(ask, wish.strategy, wish.tie)
    if len(wish.replicas) == 1 and wish.spread_over is None:
        return _single(wish.replicas[0], table)
    with ask.cluster.trial():
        return _Board(ask, wish, table).fill()


def _single(replica: int, table: Table) -> Plan:
    best, second = table.best()
    if best is None:
        return Plan(complete=False, reasons=table.sieve.sifted().reasons())
    assignment, score, unproven = table.chosen(replica, best)
    return Plan((assignment,), score, table.runner_up(second), unproven)


class _Board:
    """The table of the request; after each replica only the options of its node are made anew."""

    def __init__(self, ask: Ask, wish: Wish, table: Table) -> None:
        self._ask, self._wish, self._table = ask, wish, table
        self._here = np.zeros(len(ask.cluster.nodes) if wish.spread_over else 0, np.int64)
        """Replicas of this request on each node, where it matters."""
        for other in wish.others if wish.spread_over else ():
            if (slot := ask.cluster.slot(other.node)) is not None:
                self._here[slot] += 1
        packs = wish.spread_over == "pack"
        self._room = room(self._table.sieve.sifted(), len(wish.replicas)) if packs else np.zeros(0, np.int64)

    def fill(self) -> Plan:
        done: list[Assignment] = []
        score: Score | None = None
        runner_up: RunnerUp | None = None
        unproven = False
        for replica in self._wish.replicas:
            best, second = self._table.best(self._spreading(len(self._wish.replicas) - len(done)))
            if best is None:
                reasons = self._table.sieve.sifted().reasons()
                return Plan(tuple(done), score, runner_up, complete=False, reasons=reasons)
            assignment, its_score, its_unproven = self._table.chosen(replica, best)
            if not done:
                score, runner_up = its_score, self._table.runner_up(second)
            unproven |= its_unproven
            done.append(assignment)
            if len(done) < len(self._wish.replicas):
                self._reserve(done[-1], best)
        return Plan(tuple(done), score, runner_up, unproven)

    def _spreading(self, missing: int) -> list[Ints]:
        """Spread: nodes with the fewest of this request first. Pack: nodes with some of it, then the roomiest.

        Of nodes that take all that is missing none is roomier than another: the strategy chooses.
        """
        if self._wish.spread_over == "node":
            return [self._here]
        if self._wish.spread_over == "pack":
            return [np.where(self._here > 0, -missing - 1, -np.minimum(self._room, missing))]
        return []

    def _reserve(self, assignment: Assignment, node: int) -> None:
        cluster, demand = self._ask.cluster, self._ask.demand
        taken = demand.reservation(demand.request.request_id or NEWCOMER, assignment.replica, 0, assignment.devices)
        cluster.set_reservations(assignment.node, (*cluster.reservations(assignment.node), taken))
        if self._wish.spread_over:
            self._here[node] += 1
        self._table.refresh()

"""Plans all replicas of a request, each against what is there with those planned before it; all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from services.placer.core.columns import Array
from services.placer.core.demand import NEWCOMER
from services.placer.core.filters import sift
from services.placer.core.options import options
from services.placer.core.outcome import Assignment
from services.placer.core.room import room
from services.placer.core.rows import Ask
from services.placer.core.strategies import Strategy
from shared.messages import Reason, RunnerUp, Score

SpreadOver = Literal["node", "pack"] | None


@dataclass(frozen=True)
class Wish:
    """How the replicas are to be placed. `others` are those of the same request that have their places already."""

    strategy: Strategy
    replicas: tuple[int, ...]
    spread_over: SpreadOver = None
    tie: str = ""
    others: tuple[Assignment, ...] = ()


@dataclass(frozen=True)
class Plan:
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


def plan(ask: Ask, wish: Wish) -> Plan:
    """Replicas are alike and nodes independent, so taking the best place for each in turn misses none that fits.

    Leaves the cluster as it was.
    """
    if len(wish.replicas) == 1 and wish.spread_over is None:
        return _Board(ask, wish).fill()
    with ask.cluster.trial():
        return _Board(ask, wish).fill()


class _Board:
    """The options for the next replica; after each one only those of its node are made anew."""

    def __init__(self, ask: Ask, wish: Wish) -> None:
        self._ask, self._wish = ask, wish
        self._sifted = sift(ask.everywhere())
        self._options = options(self._sifted.passing, wish.strategy, wish.tie)
        self._here = np.zeros(len(ask.cluster.nodes), np.int64)
        for other in wish.others:
            if (slot := ask.cluster.slot(other.node)) is not None:
                self._here[slot] += 1
        packs = wish.spread_over == "pack"
        self._room = room(ask, len(wish.replicas)) if packs else np.zeros(0, np.int64)

    def fill(self) -> Plan:
        done: list[Assignment] = []
        first = Plan()
        unproven = False
        for replica in self._wish.replicas:
            keys = self._spreading(len(self._wish.replicas) - len(done))
            best = self._options.best(keys)
            if best is None:
                reasons = sift(self._ask.everywhere()).reasons()
                return replace(first, assignments=tuple(done), complete=False, reasons=reasons)
            if not done:
                first = Plan(score=self._options.score(best), runner_up=self._runner_up(best, keys))
            unproven |= bool(self._options.unproven[best])
            done.append(self._assign(replica, best))
            if len(done) < len(self._wish.replicas):
                self._reserve(done[-1], int(self._options.node[best]))
        return replace(first, assignments=tuple(done), unproven=unproven)

    def _spreading(self, missing: int) -> list[Array]:
        """Spread: nodes with the fewest of this request first. Pack: nodes with some of it, then the roomiest.

        Of nodes that take all that is missing none is roomier than another: the strategy chooses.
        """
        here = self._here[self._options.node]
        if self._wish.spread_over == "node":
            return [here]
        if self._wish.spread_over == "pack":
            return [np.where(here > 0, -missing - 1, -np.minimum(self._room[self._options.node], missing))]
        return []

    def _runner_up(self, best: int, keys: Sequence[Array]) -> RunnerUp | None:
        place = self._options.best(keys, self._options.node != self._options.node[best])
        if place is None:
            return None
        node = self._ask.cluster.name(int(self._options.node[place]))
        return RunnerUp(node=node, total=round(float(self._options.total[place]), 6))

    def _assign(self, replica: int, place: int) -> Assignment:
        cluster = self._ask.cluster
        devices = tuple(cluster.device(int(row)).uuid for row in self._options.devices[place])
        return Assignment(replica, cluster.name(int(self._options.node[place])), devices)

    def _reserve(self, assignment: Assignment, slot: int) -> None:
        cluster, demand, wish = self._ask.cluster, self._ask.demand, self._wish
        taken = demand.reservation(demand.request.request_id or NEWCOMER, assignment.replica, 0, assignment.devices)
        cluster.set_reservations(assignment.node, (*cluster.reservations(assignment.node), taken))
        self._here[slot] += 1
        fresh = options(sift(self._ask.on(slot)).passing, wish.strategy, wish.tie)
        self._options = self._options.without(slot).plus(fresh)

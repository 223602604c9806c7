"""A request and everything its decision depends on, so that it can be asked again with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from services.placer.core.capabilities import Capabilities
from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import MAX_GANG_NODES, Assignment
from services.placer.core.planners.gang import Plan, Wish, plan
from services.placer.core.rows import Ask
from services.placer.core.strategies import STRATEGIES, Strategy, slots_of
from shared.messages import PlaceRequest, Reservation


@dataclass(frozen=True)
class Tenant:
    """Of one replica that may be moved: what was asked for, and where the other replicas of its request are."""

    request: PlaceRequest
    others: tuple[Assignment, ...] = ()


Tenants = Callable[[Reservation], Tenant | None]
"""Who holds a reservation; None for one that stays where it is."""


def nobody(_: Reservation) -> Tenant | None:
    """Where it is not known who may be moved."""
    return None


@dataclass(frozen=True)
class Question:
    """`replicas` are to be placed, `others` of the same request have their places already.

    `tenants` and their `strategies` are for plans that move somebody.
    """

    cluster: Cluster
    request: PlaceRequest
    strategy: Strategy
    replicas: tuple[int, ...]
    capabilities: Mapping[str, Capabilities]
    set_aside: frozenset[str] = frozenset()
    others: tuple[Assignment, ...] = ()
    tie: str = ""
    kept: bool = True
    """False for what is asked once: it does not push out what is remembered of others."""
    tenants: Tenants = nobody
    strategies: Mapping[str, Strategy] = field(default_factory=lambda: STRATEGIES)

    @cached_property
    def ask(self) -> Ask:
        demand = Demand.of(self.request)
        slots = slots_of(self.strategy, demand.count)
        return Ask(self.cluster, demand, self.capabilities, self.set_aside, self.kept, slots)

    def plan(self) -> Plan:
        """A plan over more nodes than one placement may touch is made again, on as few as possible."""
        wish = Wish(self.strategy, self.replicas, self.request.spread_over, self.tie, self.others)
        first = plan(self.ask, wish)
        return first if first.nodes <= MAX_GANG_NODES else plan(self.ask, replace(wish, spread_over="pack"))

    def fits(self) -> bool:
        found = self.plan()
        return found.complete and found.nodes <= MAX_GANG_NODES

"""A request and everything its decision depends on, so that it can be asked again with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from services.placer.core.capabilities import Capabilities
from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import Assignment
from services.placer.core.planners.gang import Plan, Wish, plan
from services.placer.core.rows import Ask
from services.placer.core.strategies import STRATEGIES, Strategy, slots_of, strategy_named
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


@dataclass
class Question:
    """`replicas` are to be placed, `others` of the same request have their places already. Not to be changed: `replace`
    makes another one (frozen ones take several times as long to make, and each decision makes one).

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

    @classmethod
    def about(  # noqa: PLR0913  # all that a decision depends on
        cls,
        cluster: Cluster,
        request: PlaceRequest,
        *,
        capabilities: Mapping[str, Capabilities],
        strategies: Mapping[str, Strategy],
        only: tuple[int, ...] | None,
        set_aside: frozenset[str] = frozenset(),
        others: tuple[Assignment, ...],
        tie: str,
        tenants: Tenants,
    ) -> Self:
        """With the strategy that the request names, for all its replicas where `only` is None.

        Raises FieldError for a strategy that does not exist.
        """
        strategy = strategy_named(request.strategy, strategies)
        replicas = tuple(range(request.replicas)) if only is None else only
        return cls(
            cluster,
            request,
            strategy,
            replicas,
            capabilities,
            set_aside,
            others,
            tie,
            tenants=tenants,
            strategies=strategies,
        )

    def __post_init__(self) -> None:
        demand = Demand.of(self.request)
        slots = slots_of(self.strategy, demand.count)
        self.ask = Ask(self.cluster, demand, self.capabilities, self.set_aside, self.kept, slots)

    def plan(self) -> Plan:
        """A plan over more nodes than one placement may touch is made again, on as few as possible."""
        wish = Wish(self.strategy, self.replicas, self.request.spread_over, self.tie, self.others)
        first = plan(self.ask, wish)
        return plan(self.ask, wish._replace(spread_over="pack")) if first.wide else first

    def fits(self) -> bool:
        found = self.plan()
        return found.complete and not found.wide

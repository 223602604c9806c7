"""A cluster on which one strategy places: the placer's own decisions and reservations, no time, no queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import Assignment, Decision, Fits
from services.placer.core.outlooks import Learned, looking_ahead, outlook_on
from services.placer.core.pipeline import decide
from services.placer.core.strategies import STRATEGIES, Strategy, strategy_named
from services.placer.core.strategies.random_choice import Random
from services.placer.core.strategies.workload import Workload
from shared.messages import NodeFacts, PlaceRequest


class World:
    """Fragments are measured by `workload`; with `foresight` strategies know it, else they learn from what comes.

    Raises FieldError for a strategy that does not exist.
    """

    def __init__(
        self,
        nodes: Iterable[NodeFacts],
        strategy: str,
        workload: Workload,
        *,
        foresight: bool,
        tie: str = "",
        strategies: Mapping[str, Strategy] = STRATEGIES,
    ) -> None:
        self._by_chance = isinstance(strategy_named(strategy, strategies), Random)
        self.strategy = strategy
        self.nodes = sorted(nodes, key=lambda facts: facts.node)
        self.cluster = Cluster()
        for facts in self.nodes:
            self.cluster.set_facts(facts.node, facts, 0)
        self.outlook = outlook_on(self.cluster, workload)
        self._tie = tie
        self._learned = Learned(looking_ahead(self.outlook, strategies) if foresight else strategies)
        self._learns = not foresight
        self._asked: dict[int, tuple[PlaceRequest, PlaceRequest]] = {}

    def expect(self, request: PlaceRequest) -> None:
        """A new request came: without foresight, strategies that look ahead learn from it."""
        if self._learns:
            self._learned.note(self.cluster, request)

    def place(self, request: PlaceRequest, name: str, tie: str | None = None) -> Decision:
        """Decides by the strategy of this world and reserves; equals go by `tie`, or by name where it is empty."""
        asked = self._with_strategy(request, name)
        decision = decide(
            self.cluster,
            asked,
            0,
            strategies=self._learned.strategies,
            tie=self._tie if tie is None else tie,
            advise=False,
        )
        if isinstance(decision, Fits):
            self._reserve(asked, name, decision.assignments)
        return decision

    def leave(self, places: Iterable[Assignment], name: str) -> None:
        for node in {place.node for place in places}:
            held = self.cluster.reservations(node)
            self.cluster.set_reservations(node, tuple(one for one in held if one.request_id != name))

    def _reserve(self, asked: PlaceRequest, name: str, places: Iterable[Assignment]) -> None:
        demand = Demand.of(asked)
        for place in places:
            taken = demand.reservation(name, place.replica, 1, place.devices)
            self.cluster.set_reservations(place.node, (*self.cluster.reservations(place.node), taken))

    def _with_strategy(self, request: PlaceRequest, name: str) -> PlaceRequest:
        """Requests that were one object stay one, unless chance is to go by the name."""
        if id(request) not in self._asked:
            self._asked[id(request)] = request, request.model_copy(update={"strategy": self.strategy})
        asked = self._asked[id(request)][1]
        return asked.model_copy(update={"request_id": name}) if self._by_chance else asked

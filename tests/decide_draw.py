"""Draws clusters and requests to decide about, whatever they may look like."""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from hypothesis import strategies as st

from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import Fits
from services.placer.core.pipeline import decide
from services.placer.core.question import Tenant
from services.placer.core.strategies import STRATEGIES
from shared.messages import (
    ClassStanding,
    DeviceFacts,
    DeviceStanding,
    Gpu,
    Kind,
    NodeFacts,
    NodeState,
    PlaceRequest,
    Realtime,
    Regime,
    Reservation,
)

T = TypeVar("T")
SHARES = (0.1, 0.15, 0.25, 1 / 3, 0.5, 0.75, 1.0)


class Draw:
    """Draws worlds from one seed: drawing every number by hypothesis costs more than the decisions themselves."""

    def __init__(self, seed: int) -> None:
        self._chance = Random(seed)
        self.bodies: dict[str, PlaceRequest] = {}

    def one(self, *values: T) -> T:
        return self._chance.choice(values)

    def mostly(self, usual: T, *others: T) -> T:
        """The usual value four times in five: rare things are found by being rare one by one."""
        return usual if self._chance.random() < 0.8 else self._chance.choice(others)

    def device(self, node: str, index: int) -> DeviceFacts:
        standing = self.mostly(None, *DeviceStanding)
        return DeviceFacts(
            uuid=f"GPU-{node}-{index}",
            index=index,
            model=self.mostly("H100", "L4"),
            regime=self.mostly(Regime.TIME_SLICED, *Regime),
            slice_us=self.mostly(2_000, None),
            switch_us=100,
            group=self.one(None, "x", "y"),
            healthy=self.mostly("yes", "no") == "yes",
            memory_mib=self.mostly(16_384, 8_192, None),
            foreign_share_micro=self.mostly(0, None, 200_000, 1_000_000),
            foreign_memory_mib=self.mostly(0, None, 1_000, 20_000),
            classes={"any": ClassStanding(standing=standing, slack_us=None)} if standing else {},
        )

    def node(self, name: str) -> NodeFacts:
        return NodeFacts(
            node=name,
            state=self.mostly(NodeState.READY, *NodeState),
            at_us=0,
            devices=tuple(self.device(name, index) for index in range(self.mostly(3, 0, 1, 4))),
            labels=self.mostly({"rack": "1"}, {}),
            cpu_milli=self.mostly(8_000, 1_000),
            memory_mib=self.mostly(65_536, 1_024),
            foreign_cpu_milli=self.mostly(0, 500, None),
            foreign_memory_mib=self.mostly(0, 2_000),
        )

    def realtime(self) -> Realtime:
        deadline_us = self.one(5_000, 20_000, 50_000, 200_000)
        return Realtime(
            deadline_us=deadline_us,
            period_us=self.one(None, deadline_us, 2 * deadline_us),
            runtime_us=self.one(1_000, 4_000, 12_000),
            kind=self.one(*Kind),
            gate=self.one("gate", "none") == "gate",
        )

    def gpu(self) -> Gpu:
        count = self.one(1, 1, 1, 2, 3)
        return Gpu(
            count=count,
            share=self.one(*SHARES) if count == 1 else 1.0,
            memory_mib=self.mostly(0, 4_096, 12_000),
            models=self.mostly(None, ("H100",), ("A10",)),
        )

    def request(self) -> PlaceRequest:
        gpu = self.mostly(self.gpu(), None)
        return PlaceRequest(
            command=("serve",),
            request_id=f"r-{self._chance.randrange(10**6)}",
            gpu=gpu,
            cpu_milli=self.one(0, 0, 600, 3_000),
            memory_mib=self.one(0, 0, 900, 30_000),
            realtime=self.one(None, self.realtime()) if gpu else None,
            replicas=self.one(1, 1, 1, 2, 5),
            spread_over=self.one(None, "node", "pack"),
            node_selector=self.mostly({}, {"rack": "1"}),
            candidates=self.mostly(None, ("n0", "n1"), ("n9",)),
            strategy=self.one(*sorted(STRATEGIES)),
        )

    def cluster(self) -> Cluster:
        """A few nodes, with what a few requests were given on them."""
        made = Cluster()
        for index in range(self.mostly(3, 0, 1, 2, 4)):
            facts = self.node(f"n{index}")
            made.set_facts(facts.node, facts, 0)
        for asked in [self.request() for _ in range(self.one(0, 3, 6, 9))]:
            decision = decide(made, asked, 0, advise=False)
            if isinstance(decision, Fits):
                reserve(made, asked, decision)
                self.bodies[asked.request_id or ""] = asked
        return made

    def tenant(self, held: Reservation) -> Tenant | None:
        """Of what `cluster` put there, but for one request in five that nobody knows."""
        asked = self.bodies.get(held.request_id)
        return Tenant(asked) if asked and int(held.request_id.removeprefix("r-")) % 5 else None

    def shuffled(self, values: Sequence[T]) -> list[T]:
        return self._chance.sample(values, len(values))


draws = st.builds(Draw, st.integers(0, 2**32))


def reserve(made: Cluster, asked: PlaceRequest, decision: Fits) -> None:
    for a in decision.assignments:
        taken = Demand.of(asked).reservation(asked.request_id or "", a.replica, 1, a.devices)
        made.set_reservations(a.node, (*made.reservations(a.node), taken))


def facts_of(made: Cluster) -> list[NodeFacts]:
    found = [made.facts(made.name(int(slot))) for slot in made.all_slots()]
    return [facts for facts in found if facts]

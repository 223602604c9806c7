"""Real-time containers on simulated devices: choosers place them by the placer's own decisions, then time passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import Fits
from services.placer.core.pipeline import decide
from services.placer.core.strategies import Strategy
from shared.admission import RtTask, Sharing
from shared.messages import (
    SHARE_WHOLE_MICRO,
    DeviceFacts,
    Gpu,
    Kind,
    NodeFacts,
    NodeState,
    PlaceRequest,
    Realtime,
    Regime,
)
from shared.testing.devices import Container, run, sporadic

GATED: Final = Sharing(Regime.GATED, handover_us=60)
TIME_SLICED: Final = Sharing(Regime.TIME_SLICED, slice_us=2_000, switch_us=100)
MEMORY_MIB: Final = 256
"""Of the node, for each container: who spreads by memory spreads by number."""


def share_micro(task: RtTask) -> int:
    """The part of a device's time that it takes, rounded up."""
    return -(-SHARE_WHOLE_MICRO * task.runtime_us // task.period_us)


def declared(task: RtTask, kind: Kind) -> Realtime:
    """What a container with this task says of it."""
    return Realtime(
        deadline_us=task.deadline_us,
        period_us=task.period_us,
        runtime_us=task.runtime_us,
        kind=kind,
        host_us=task.host_us,
        segments=task.segments,
        gate=task.gate,
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A container and its recurring task; with `phase_us` all its releases are known, else they come by chance."""

    name: str
    task: RtTask
    phase_us: int | None = None

    @property
    def utilisation(self) -> float:
        return self.task.runtime_us / self.task.period_us


@dataclass(frozen=True, slots=True)
class Chooser:
    """How a scheduler sees the cluster. One that is told no deadlines fills devices up to a part of their time."""

    name: str
    strategy: Strategy
    told: bool = False
    fill_ratio: float = 1.0

    def request(self, wanted: Wanted) -> PlaceRequest:
        """What is told no deadlines asks as a container that is promised nothing."""
        share = min(SHARE_WHOLE_MICRO, round(share_micro(wanted.task) / self.fill_ratio)) / SHARE_WHOLE_MICRO
        return PlaceRequest(
            request_id=wanted.name,
            command=("serve",),
            gpu=Gpu(share=share),
            memory_mib=MEMORY_MIB,
            realtime=declared(wanted.task, Kind.FIRM if self.told else Kind.SOFT),
            strategy=self.strategy.name,
        )


class Placing:
    """A cluster in the eyes of one chooser, and who is on which device."""

    def __init__(self, chooser: Chooser, nodes: Iterable[NodeFacts]) -> None:
        self._chooser, self._cluster = chooser, Cluster()
        self._strategies = {chooser.strategy.name: chooser.strategy}
        self.held: dict[str, list[Wanted]] = {}
        for facts in nodes:
            self._cluster.set_facts(facts.node, facts, 0)

    def ask(self, wanted: Wanted) -> bool:
        """Whether it was given a device."""
        request = self._chooser.request(wanted)
        decision = decide(self._cluster, request, 0, strategies=self._strategies, advise=False)
        if not isinstance(decision, Fits):
            return False
        self.hold(wanted, decision.assignments[0].node)
        return True

    def hold(self, wanted: Wanted, node: str) -> None:
        """It is there, whoever decided that."""
        taken = Demand.of(self._chooser.request(wanted)).reservation(wanted.name, 0, 1, (node,))
        self._cluster.set_reservations(node, (*self._cluster.reservations(node), taken))
        self.held.setdefault(node, []).append(wanted)


def node(name: str, sharing: Sharing) -> NodeFacts:
    """A node of which nothing is ever scarce but its one device, which has its name."""
    device = DeviceFacts(
        uuid=name,
        index=0,
        model="GPU",
        healthy=True,
        memory_mib=81_559,
        regime=sharing.regime,
        slice_us=sharing.slice_us,
        switch_us=sharing.switch_us,
        handover_us=sharing.handover_us,
    )
    memory_mib = 64 * MEMORY_MIB
    return NodeFacts(
        node=name, state=NodeState.READY, at_us=0, devices=(device,), cpu_milli=64_000, memory_mib=memory_mib
    )


# ---------------------------------------------------------------------------------------- time passes


@dataclass(frozen=True, slots=True)
class Kept:
    """Of some tasks: how many met and how many missed their deadlines."""

    met: int = 0
    missed: int = 0

    @property
    def ratio(self) -> float:
        return self.met / max(1, self.met + self.missed)

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.met + other.met, self.missed + other.missed)


def played(
    held: Mapping[str, Sequence[Wanted]], sharings: Mapping[str, Sharing], horizon_us: int, seed: object
) -> dict[str, Kept]:
    """What became of each container's tasks that were due by the horizon.

    Its releases and runtimes are the same wherever it is: a period and up to a tenth more apart, 80 to 100 % of the
    declared runtime.
    """
    found: dict[str, Kept] = {}
    for device, residents in held.items():
        containers = [_container(wanted, horizon_us, Random(f"{seed} {wanted.name}")) for wanted in residents]
        found |= dict.fromkeys((wanted.name for wanted in residents), Kept())
        for job in run(sharings[device], containers, horizon_us):
            if job.due_us <= horizon_us:
                missed = job.missed(horizon_us)
                found[job.container] += Kept(not missed, missed)
    return found


def _container(wanted: Wanted, horizon_us: int, chance: Random) -> Container:
    task = replace(wanted.task, kind=Kind.FIRM)
    first_us, most_us = wanted.phase_us, 0
    if first_us is None:
        first_us, most_us = chance.randrange(task.period_us), task.period_us // 10
    least_us = task.runtime_us * 4 // 5
    runtimes = {
        number: chance.randint(max(1, least_us), task.runtime_us) for number in range(horizon_us // task.period_us + 1)
    }
    return Container(wanted.name, task, sporadic(first_us, task.period_us, chance, most_us), runtimes)


def total(found: Iterable[Kept]) -> Kept:
    return sum(found, Kept())

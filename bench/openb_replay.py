"""Replays an openb run through the placer's own core: `decide`, then the reservation; measures, judges nothing."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.openb_trace import PERCENT_MICRO, Floats, Ints, Pod, Run, curve, nodes
from services.placer.core.cluster import Cluster
from services.placer.core.outcome import Assignment, Fits
from services.placer.core.outlooks import looking_ahead, outlook_on
from services.placer.core.pipeline import decide
from services.placer.core.strategies.fragmentation import fragments
from services.placer.core.strategies.nodes import Nodes
from shared.messages import PlaceRequest

Place = Assignment | None


class World:
    """An openb cluster, and what one policy that knows the trace's workload has placed on it."""

    def __init__(self, run: Run, policy: str) -> None:
        self.cluster = Cluster()
        for facts in nodes(run):
            self.cluster.set_facts(facts.node, facts, 0)
        self.outlook = outlook_on(self.cluster, run.trace.workload)
        self._strategies = looking_ahead(self.outlook)
        self._policy = policy
        self._requests: dict[int, PlaceRequest] = {}

    def place(self, pod: Pod, name: str, tie: str = "") -> Place:
        """Decides and reserves; None where the pod does not fit."""
        request = self._request(pod, name)
        decision = decide(self.cluster, request, 0, strategies=self._strategies, tie=tie, advise=False)
        if not isinstance(decision, Fits):
            return None
        (place,) = decision.assignments
        taken = pod.demand.reservation(name, 0, 1, place.devices)
        self.cluster.set_reservations(place.node, (*self.cluster.reservations(place.node), taken))
        return place

    def leave(self, place: Assignment, name: str) -> None:
        held = self.cluster.reservations(place.node)
        self.cluster.set_reservations(place.node, tuple(one for one in held if one.request_id != name))

    def _request(self, pod: Pod, name: str) -> PlaceRequest:
        """Pods that ask for the same share one request, unless chance is to go by its name."""
        if (found := self._requests.get(id(pod.request))) is None:
            found = self._requests[id(pod.request)] = pod.request.model_copy(update={"strategy": self._policy})
        return found.model_copy(update={"request_id": name}) if self._policy == "random" else found


class _State(NamedTuple):
    """A node's row, and what is left on it."""

    slot: int
    cpu: int
    shares: Ints


class Watch:
    """What is left on the node of each placement, so that the fragments can be worked out afterwards."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._start = [self._state(slot) for slot in world.cluster.all_slots().tolist()]
        self._steps: list[_State | None] = []

    def note(self, place: Place) -> None:
        slot = None if place is None else self._world.cluster.slot(place.node)
        self._steps.append(None if slot is None else self._state(slot))

    def fragments(self) -> Floats:
        """The fragment amount of the cluster after each step, in percent of all devices."""
        placed = [step for step in self._steps if step is not None]
        start, after = self._fragments(self._start), iter(self._fragments(placed).tolist())
        now = dict(zip((state.slot for state in self._start), start.tolist(), strict=True))
        total, found = sum(now.values()), []
        for step in self._steps:
            if step is not None:
                before, now[step.slot] = now[step.slot], next(after)
                total += now[step.slot] - before
            found.append(total)
        return np.array(found, np.float64) / self._world.outlook.plain_total / PERCENT_MICRO

    def _state(self, slot: int) -> _State:
        known = self._world.cluster.nodes
        return _State(slot, int(known["cpu_free"][slot]), known["shares"][slot].copy())

    def _fragments(self, states: list[_State]) -> Ints:
        cluster, outlook = self._world.cluster, self._world.outlook
        slots, nothing = np.array([state.slot for state in states]), np.zeros(len(states), np.int64)
        seen = Nodes(
            share_free=np.array([state.shares for state in states]),
            cpu_free=np.array([state.cpu for state in states]),
            memory_free=nothing,
            model=cluster.devices["model"][cluster.nodes["first_row"][slots]],
            devices=nothing,
            classes=nothing,
            of_row=nothing,
            place=nothing,
        )
        return fragments(outlook.plain, seen, outlook.plain_total)


@dataclass(frozen=True, eq=False)
class Replay:
    """What came of a run; percent of all devices' time, after each arrival."""

    run: Run
    policy: str
    places: tuple[Place, ...]
    allocated: Floats
    fragments: Floats
    decisions_per_s: float

    @property
    def arrived(self) -> Floats:
        arrived: Floats = _asked(self.run, len(self.places)).cumsum() / PERCENT_MICRO
        return arrived

    def allocation_curve(self) -> dict[int, float]:
        return curve(self.arrived, self.allocated)

    def fragment_curve(self) -> dict[int, float]:
        return curve(self.arrived, self.fragments)

    @property
    def digest(self) -> str:
        """The same for the same placements, ranks being in the names of nodes."""
        lines = ("-" if place is None else f"{place.node} {' '.join(place.devices)}" for place in self.places)
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def replay(run: Run, policy: str, *, random_ties: bool = False, most: int | None = None) -> Replay:
    """Pods never leave and never wait. `random_ties`: equals are drawn anew for each arrival, else they go by rank."""
    world, places = World(run, policy), list[Place]()
    watch = Watch(world)
    started = time.process_time()
    for number, pod in enumerate(run.arrivals[:most]):
        name = f"{run.seed}-{number}"
        places.append(world.place(run.trace.pods[pod], name, name if random_ties else ""))
        watch.note(places[-1])
    seconds = time.process_time() - started
    placed = np.array([place is not None for place in places])
    allocated = np.where(placed, _asked(run, len(places)), 0).cumsum() / PERCENT_MICRO
    return Replay(run, policy, tuple(places), allocated, watch.fragments(), len(places) / seconds)


def _asked(run: Run, count: int) -> Ints:
    asked: Ints = run.trace.gpu_micro[np.array(run.arrivals[:count])]
    return asked

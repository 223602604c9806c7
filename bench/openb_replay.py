"""Replays an openb run through the placer's own core: `decide`, then the reservation; measures, judges nothing."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import numpy as np

from bench.openb_trace import PERCENT_MICRO, Run, nodes
from cli.simulate.trace import Arrival
from cli.simulate.watch import Watch, curve
from cli.simulate.world import World
from services.placer.core.columns import Floats, Ints
from services.placer.core.outcome import Assignment, Fits
from services.placer.core.strategies import STRATEGIES
from services.placer.core.strategies.fgd import Fgd

Place = Assignment | None
AS_PUBLISHED = {**STRATEGIES, "fgd": Fgd(as_published=True)}


def world_of(run: Run, policy: str) -> World:
    """The run's cluster under a policy that knows the trace's workload."""
    return World(nodes(run), policy, run.trace.workload, foresight=True, strategies=AS_PUBLISHED)


def placed(world: World, pod: Arrival, name: str, tie: str = "") -> Place:
    """Decides and reserves; None where the pod does not fit."""
    decision = world.place(pod.request, name, tie)
    return decision.assignments[0] if isinstance(decision, Fits) else None


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
    world, places = world_of(run, policy), list[Place]()
    watch = Watch(world)
    started = time.process_time()
    for number, pod in enumerate(run.arrivals[:most]):
        name = f"{run.seed}-{number}"
        place = placed(world, run.trace.arrivals[pod], name, name if random_ties else "")
        places.append(place)
        watch.note([place.node] if place else ())
    seconds = time.process_time() - started
    there = np.array([place is not None for place in places])
    allocated = np.where(there, _asked(run, len(places)), 0).cumsum() / PERCENT_MICRO
    fragments = watch.fragments() * 1_000_000 / PERCENT_MICRO
    return Replay(run, policy, tuple(places), allocated, fragments, len(places) / seconds)


def _asked(run: Run, count: int) -> Ints:
    asked: Ints = run.trace.gpu_micro[np.array(run.arrivals[:count])]
    return asked

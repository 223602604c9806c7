"""How many decisions the strategies that look ahead make on the openb cluster; ``make bench-placer`` reports it.

The cluster is filled by the trace's own pods in a published order, until it is as full as the synthetic one of that
bench. Then pods arrive as before, and others leave by chance, so many that it stays so full.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import cycle
from random import Random
from typing import Final

import numpy as np

from bench.openb_replay import placed
from bench.openb_trace import Run, folder, nodes, runs
from cli.simulate.trace import Arrival
from cli.simulate.world import World
from services.placer.core.demand import Demand
from services.placer.core.outcome import Assignment

STRATEGIES: Final = ("fgd", "laxity")
TARGET_RATE: Final = 5_000
NODES: Final = 1_213
FULL: Final = 0.9
SEED: Final = 42


def here() -> bool:
    """Whether the data are there ($LAXITY_DATA)."""
    return folder().exists()


class Steady:
    """Pods of a run in a cluster that others leave; the time that each decision took is kept."""

    def __init__(self, run: Run, strategy: str) -> None:
        self.world = World(nodes(run), strategy, run.trace.workload, foresight=True)
        self._capacity = int(self.world.cluster.nodes["share_free"].sum())
        self._held = 0
        self._pods: Iterator[Arrival] = (run.trace.arrivals[pod] for pod in cycle(run.arrivals))
        self._chance = Random(SEED)
        self._live: list[tuple[str, Assignment, int]] = []
        """Name, place, and millionths of a device that are held there."""
        self._number = 0
        self.took_us: list[float] = []
        self.refused = 0

    @property
    def allocated(self) -> float:
        return self._held / self._capacity

    def arrive(self) -> None:
        """One decision, its reservation, and as many departures as keep the level."""
        self._number += 1
        pod, name, before = next(self._pods), str(self._number), time.perf_counter()
        place = placed(self.world, pod, name)
        self.took_us.append((time.perf_counter() - before) * 1e6)
        if place is None:
            self.refused += 1
        else:
            demand = Demand.of(pod.request)
            held = demand.count * demand.share_micro
            self._live.append((name, place, held))
            self._held += held
        while self.allocated > FULL:
            self._leave()

    def _leave(self) -> None:
        place = self._chance.randrange(len(self._live))
        self._live[place], self._live[-1] = self._live[-1], self._live[place]
        name, where, held = self._live.pop()
        self._held -= held
        self.world.leave([where], name)


def measure(strategy: str, decisions: int = 3_000) -> dict[str, float]:
    """On the 1,213 nodes, full and warm; departures count in the rates and not in p50 and p99."""
    (run,) = runs("default", [SEED])
    steady = Steady(run, strategy)
    for _ in range(len(run.trace.arrivals)):
        steady.arrive()
    steady.took_us.clear()
    steady.refused = 0
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(decisions):
        steady.arrive()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    took = np.array(steady.took_us)
    return {
        "decisions_per_s": round(decisions / wall_s, 1),
        "decisions_per_cpu_s": round(decisions / cpu_s, 1),
        "p50_us": round(float(np.percentile(took, 50)), 1),
        "p99_us": round(float(np.percentile(took, 99)), 1),
        "refused_ratio": round(steady.refused / decisions, 4),
        "allocated_ratio": round(steady.allocated, 4),
    }

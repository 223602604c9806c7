"""How many decisions the placer's core makes, and how long one takes: ``make bench-placer``.

A decision is `decide` and the reservation of what it gave, on a full cluster that is warm: about 90 % allocated, a
hundred kinds of request coming and others leaving, all in one process and on the path that a placer takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import Fits
from services.placer.core.pipeline import decide
from shared.messages import (
    DeviceFacts,
    Gpu,
    Kind,
    NodeFacts,
    NodeState,
    PlaceRequest,
    Realtime,
    Regime,
    Reservation,
)

OUT = Path("build/bench/placer.json")
SIZES = (100, 1_000, 10_000)
FULL = 0.9
DEVICES = 8
GIB = 1024
LEFT_OUT = {"fgd", "laxity"}
"""Strategies that are measured on the openb cluster instead."""
TARGET_RATE, TARGET_P99_US = 2_000, 5_000


def node(number: int, chance: Random) -> NodeFacts:
    """Eight GPUs of one model in two groups, mostly time-sliced; the CPU is the scarcer partner on some."""
    name = f"node-{number:05d}"
    model, memory_gib = chance.choices([("H100", 80), ("A100", 40), ("L4", 24)], [5, 3, 2])[0]
    regime = chance.choices([Regime.TIME_SLICED, Regime.GATED, Regime.EXCLUSIVE], [8, 1, 1])[0]
    devices = tuple(
        DeviceFacts(
            uuid=f"GPU-{number}-{index}",
            index=index,
            model=model,
            regime=regime,
            slice_us=2_000,
            switch_us=100,
            group=f"{name}/{index // 4}",
            healthy=chance.random() > 0.002,
            memory_mib=memory_gib * GIB,
        )
        for index in range(DEVICES)
    )
    return NodeFacts(
        node=name,
        state=NodeState.READY,
        at_us=0,
        devices=devices,
        labels={"zone": f"z{number % 4}"},
        cpu_milli=chance.choice((64_000, 96_000, 128_000)),
        memory_mib=chance.choice((384, 512, 768)) * GIB,
    )


def kinds(strategy: str, chance: Random, count: int = 100) -> list[PlaceRequest]:
    """Different requests: shares, whole devices, several, without a GPU; with and without deadlines."""
    made: dict[str, PlaceRequest] = {}
    while len(made) < count:
        one = _kind(strategy, chance)
        made.setdefault(one.model_dump_json(), one)
    return list(made.values())


def _kind(strategy: str, chance: Random) -> PlaceRequest:
    form = chance.choices(["share", "whole", "several", "cpu"], [45, 35, 8, 12])[0]
    cpu_milli, memory_mib = chance.choice((500, 1_000, 2_000, 4_000, 8_000)), chance.choice((1, 2, 4, 16)) * GIB
    gpu: Gpu | None = None
    realtime: Realtime | None = None
    if form == "share":
        share = chance.choice((0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75))
        gpu = Gpu(share=share, memory_mib=chance.choice((0, 2, 4, 8)) * GIB, models=_models(chance))
        if chance.random() < 0.5:
            deadline_us = chance.choice((20_000, 50_000, 100_000, 250_000))
            realtime = Realtime(
                deadline_us=deadline_us,
                runtime_us=chance.choice((1_000, 2_000, 5_000)),
                kind=chance.choice((Kind.FIRM, Kind.FIRM, Kind.SOFT)),
                gate=chance.random() < 0.2,
            )
    elif form != "cpu":
        count = 1 if form == "whole" else chance.choice((2, 2, 4, 8))
        gpu = Gpu(count=count, models=_models(chance))
        cpu_milli, memory_mib = cpu_milli * count, memory_mib * count
    selector = {"zone": f"z{chance.randrange(4)}"} if chance.random() < 0.05 else {}
    return PlaceRequest(
        command=("serve",),
        gpu=gpu,
        cpu_milli=cpu_milli,
        memory_mib=memory_mib,
        realtime=realtime,
        node_selector=selector,
        strategy=strategy,
    )


def _models(chance: Random) -> tuple[str, ...] | None:
    return chance.choices([None, ("H100",), ("H100", "A100")], [7, 2, 1])[0]


@dataclass
class Load:
    """A cluster under arrivals and departures, and how long its decisions took."""

    cluster: Cluster
    asked: list[PlaceRequest]
    chance: Random
    tie: str = "bench"
    capacity: int = 0
    held: int = 0
    live: list[tuple[str, Reservation]] = field(default_factory=list)
    number: int = 0
    took_us: list[float] = field(default_factory=list)
    fitted: list[bool] = field(default_factory=list)

    def arrive(self) -> bool:
        """One decision, timed with the reservation that follows."""
        request = self.chance.choice(self.asked)
        self.number += 1
        name = f"r-{self.number}"
        before = time.perf_counter_ns()
        decision = decide(self.cluster, request, 0, tie=self.tie, advise=False)
        if isinstance(decision, Fits):
            self._reserve(request, name, decision)
        self.took_us.append((time.perf_counter_ns() - before) / 1_000)
        self.fitted.append(isinstance(decision, Fits))
        return isinstance(decision, Fits)

    def _reserve(self, request: PlaceRequest, name: str, decision: Fits) -> None:
        demand = Demand.of(request)
        for each in decision.assignments:
            taken = demand.reservation(name, each.replica, 1, each.devices)
            self.cluster.set_reservations(each.node, (*self.cluster.reservations(each.node), taken))
            self.live.append((each.node, taken))
            self.held += len(taken.devices) * taken.share_micro

    def depart(self) -> None:
        """Somebody leaves, any of them."""
        place = self.chance.randrange(len(self.live))
        self.live[place], self.live[-1] = self.live[-1], self.live[place]
        where, gone = self.live.pop()
        kept = tuple(each for each in self.cluster.reservations(where) if each is not gone)
        self.cluster.set_reservations(where, kept)
        self.held -= len(gone.devices) * gone.share_micro

    def fill(self) -> None:
        """Up to the level, by the same decisions."""
        while self.held < FULL * self.capacity:
            self.arrive()
        self.took_us.clear()
        self.fitted.clear()

    def steady(self, decisions: int) -> float:
        """Arrivals, each with as many departures as keep the level; seconds in all."""
        before = time.perf_counter()
        for _ in range(decisions):
            self.arrive()
            while self.held > FULL * self.capacity:
                self.depart()
        return time.perf_counter() - before


def loaded(nodes: int, strategy: str, seed: int, kind_count: int = 100) -> Load:
    chance = Random(seed)
    cluster = Cluster()
    for number in range(nodes):
        facts = node(number, chance)
        cluster.set_facts(facts.node, facts, 0)
    healthy = int(cluster.nodes["devices"].sum())
    return Load(cluster, kinds(strategy, Random(seed + 1), kind_count), chance, capacity=healthy * 1_000_000)


def measure(nodes: int, strategy: str, decisions: int, seed: int) -> dict[str, float]:
    load = loaded(nodes, strategy, seed)
    began = time.perf_counter()
    load.fill()
    filled_s = time.perf_counter() - began
    load.steady(min(decisions, 2_000))
    load.took_us.clear()
    load.fitted.clear()
    cpu = time.process_time()
    wall_s = load.steady(decisions)
    cpu_s = time.process_time() - cpu
    took = np.array(load.took_us)
    return {
        "decisions_per_s": round(decisions / wall_s, 1),
        "decisions_per_cpu_s": round(decisions / cpu_s, 1),
        "p50_us": round(float(np.percentile(took, 50)), 1),
        "p99_us": round(float(np.percentile(took, 99)), 1),
        "refused_ratio": round(1 - sum(load.fitted) / len(load.fitted), 4),
        "fill_s": round(filled_s, 2),
    }


if __name__ == "__main__":
    import sys

    print(measure(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), 42))

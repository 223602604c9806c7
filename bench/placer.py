"""How many decisions the placer's core makes, and how long one takes: ``make bench-placer``.

A decision is `decide` and the reservation of what it gave, on a full cluster that is warm: about 90 % allocated, a
hundred kinds of request coming and others leaving, all in one process and on the path that a placer takes. The rate
is over everything, departures too, in the time of the process; beside it by the wall clock, which is also that of
everybody else on the machine, and so are the times of single decisions. Kinds that nobody has asked for before are
measured beside it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from bench import openb_speed
from bench import report as form
from services.placer.core import kernels
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

LARGEST = 10_000
SIZES = (100, 1_000, LARGEST)
STRATEGIES = ("binpack", "spread", "deadline", "slot")
"""Of those that are measured on a synthetic cluster; `fgd` and `laxity` are measured on that of openb."""
FULL = 0.9
DEVICES = 8
GIB = 1024
KINDS = 100
SLOTS = (1, 1, 1, 2, 2, 4, 8, 8, 8)
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
        labels={"zone": f"z{number % 4}", "laxity.dev/slot": str(SLOTS[number % len(SLOTS)])},
        cpu_milli=chance.choice((64_000, 96_000, 128_000)),
        memory_mib=chance.choice((384, 512, 768)) * GIB,
    )


def kinds(strategy: str, chance: Random, count: int = KINDS) -> list[PlaceRequest]:
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
    """By the wall clock: asking for the time of the process costs more than much of what is measured."""
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
        """Node after node by hand, up to the level, three of four full as packing leaves them; decisions follow."""
        asked = [request for request in self.asked if request.gpu and not request.realtime]
        for slot in self.cluster.all_slots().tolist():
            facts = self.cluster.facts(self.cluster.name(slot))
            level = DEVICES if self.chance.random() < 0.75 else self.chance.uniform(0.2, 1.0) * DEVICES
            assert facts
            taken = self._filled(facts, asked, round(level * 1_000_000))
            self.cluster.set_reservations(facts.node, tuple(taken))
            self.live += [(facts.node, each) for each in taken]

    def _filled(self, facts: NodeFacts, asked: list[PlaceRequest], level: int) -> list[Reservation]:
        """What a node holds that is filled up to a level, first devices first."""
        free = {device.uuid: 1_000_000 for device in facts.devices if device.healthy}
        taken: list[Reservation] = []
        for _ in range(40):
            demand = Demand.of(self.chance.choice(asked))
            devices = [uuid for uuid, share in free.items() if share >= demand.share_micro][: demand.count]
            held = demand.count * demand.share_micro
            if len(devices) < demand.count or held > level:
                continue
            level -= held
            self.held += held
            self.number += 1
            free.update({uuid: free[uuid] - demand.share_micro for uuid in devices})
            taken.append(demand.reservation(f"r-{self.number}", 0, 1, tuple(devices)))
        return taken

    def forget(self) -> None:
        """What was measured so far was the way to a steady state."""
        self.took_us.clear()
        self.fitted.clear()

    def steady(self, decisions: int) -> float:
        """Arrivals, each with as many departures as keep the level; seconds in all.

        Somebody leaves after a refusal too: else a strategy that keeps sizes apart ends with groups that stay full.
        """
        before = time.perf_counter()
        for _ in range(decisions):
            if not self.arrive():
                self.depart()
            while self.held > FULL * self.capacity:
                self.depart()
        return time.perf_counter() - before


class Filled:
    """A full cluster, made once for all strategies: each finds it as it was filled."""

    def __init__(self, nodes: int, seed: int) -> None:
        self._seed, chance = seed, Random(seed)
        cluster = Cluster()
        for number in range(nodes):
            facts = node(number, chance)
            cluster.set_facts(facts.node, facts, 0)
        healthy = int(cluster.nodes["devices"].sum())
        self._first = Load(cluster, self._kinds(STRATEGIES[0]), chance, capacity=healthy * 1_000_000)
        self._first.fill()
        self._held = {name: cluster.reservations(name) for name in map(cluster.name, cluster.all_slots().tolist())}

    def _kinds(self, strategy: str) -> list[PlaceRequest]:
        return kinds(strategy, Random(self._seed + 1))

    def warm(self, strategy: str) -> Load:
        """Under arrivals by this strategy that have been going on for a while."""
        first = self._first
        for name, held in self._held.items():
            first.cluster.set_reservations(name, held)
        chance = Random()
        chance.setstate(first.chance.getstate())
        load = replace(first, asked=self._kinds(strategy), chance=chance, live=first.live.copy(), took_us=[], fitted=[])
        load.steady(10 * KINDS)
        load.forget()
        return load


def measure(filled: Filled, strategy: str, decisions: int, seed: int) -> dict[str, float]:
    """Of kinds that were asked for before, and of some that were not."""
    load = filled.warm(strategy)
    cpu_before = time.process_time()
    wall_s = load.steady(decisions)
    cpu_s = time.process_time() - cpu_before
    took, fitted = np.array(load.took_us), np.array(load.fitted)
    return {
        "decisions_per_s": round(decisions / wall_s, 1),
        "decisions_per_cpu_s": round(decisions / cpu_s, 1),
        "p50_us": round(float(np.percentile(took, 50)), 1),
        "p99_us": round(float(np.percentile(took, 99)), 1),
        "refused_ratio": round(1 - float(fitted.mean()), 4),
        "allocated_ratio": round(load.held / load.capacity, 4),
        "new_kind_p50_us": round(new_kinds(load, strategy, seed), 1),
    }


def new_kinds(load: Load, strategy: str, seed: int, count: int = 20) -> float:
    """The median time of the first decision of a kind."""
    load.forget()
    chance = Random(f"{seed} {strategy}")  # others than those of the strategies before: what filters say is shared
    for request in kinds(strategy, chance, count):
        load.asked = [request.model_copy(update={"cpu_milli": request.cpu_milli + chance.randrange(1, 400)})]
        load.arrive()
    return float(np.median(load.took_us))


def report(results: dict[tuple[str, int], dict[str, float]], decisions: int) -> dict[str, Any]:
    """In the form of all benches."""
    figures = {
        f"{strategy}_{nodes}_{name}": value for (strategy, nodes), row in results.items() for name, value in row.items()
    }
    ratios: dict[str, float] = {}
    holds: dict[str, bool] = {}
    largest = max(nodes for _, nodes in results)
    for strategy in dict.fromkeys(strategy for strategy, _ in results):
        row, smaller = results[strategy, largest], results.get((strategy, largest // 10))
        ratios[f"{strategy}_new_kind_over_known"] = round(row["new_kind_p50_us"] / row["p50_us"], 2)
        if smaller:
            growth = round(row["p50_us"] / smaller["p50_us"], 3)
            ratios[f"{strategy}_p50_growth_for_10_times_the_nodes"] = growth
            holds[f"{strategy}: cost grows no faster than the devices"] = growth <= 10
        holds[f"{strategy}: {TARGET_RATE} decisions/s at {largest} nodes"] = row["decisions_per_cpu_s"] >= TARGET_RATE
        holds[f"{strategy}: p99 at most {TARGET_P99_US} us at {largest} nodes"] = row["p99_us"] <= TARGET_P99_US
    return form.found(
        "placer",
        figures,
        ratios,
        holds,
        f"{decisions} decisions of {KINDS} kinds each (a third of that below {LARGEST} nodes), one "
        "process. Real: the placer's core. Simulated: the "
        f"cluster, {DEVICES} devices a node, filled by hand to about {FULL:.0%} and then by {10 * KINDS} decisions. "
        f"Ranked by {'compiled kernels' if kernels.HERE else 'numpy, as no kernels are compiled here'}. "
        "Without advice what would make a refused request fit. Departures count in the rates, not in p50 and p99. "
        "decisions_per_cpu_s is by the time of the process, asked for once before and once after all of them; "
        "decisions_per_s and the times of single decisions (p50, p99, new kinds) are by the wall clock.",
    )


NAMES = ("nodes", "per s", "per cpu s", "p50 us", "p99 us", "refused", "full", "new us")
WIDTHS = (7, 9, 11, 9, 9, 9, 7, 9)
HEAD = "strategy  " + "".join(f"{name:>{width}}" for name, width in zip(NAMES, WIDTHS, strict=True))


def show(strategy: str, nodes: int, row: dict[str, float]) -> None:
    """One line for people."""
    print(
        f"{strategy:<10}{nodes:>7}{row['decisions_per_s']:>9.0f}{row['decisions_per_cpu_s']:>11.0f}{row['p50_us']:>9.0f}"
        f"{row['p99_us']:>9.0f}{row['refused_ratio']:>9.1%}{row['allocated_ratio']:>7.0%}"
        + (f"{row['new_kind_p50_us']:>9.0f}" if "new_kind_p50_us" in row else ""),
        flush=True,
    )


def with_openb(told: dict[str, Any]) -> None:
    """Adds what the strategies that look ahead do on openb's cluster, where its data are there."""
    if not openb_speed.here():
        told["notes"] += f" {' and '.join(openb_speed.STRATEGIES)} were not measured: the openb data are not here."
        return
    for strategy in openb_speed.STRATEGIES:
        row = openb_speed.measure(strategy)
        show(strategy, openb_speed.NODES, row)
        told["figures"].update({f"{strategy}_openb_{name}": value for name, value in row.items()})
        name = f"{strategy}: {openb_speed.TARGET_RATE} decisions/s on openb's nodes"
        told["holds"][name] = row["decisions_per_cpu_s"] >= openb_speed.TARGET_RATE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of nodes")
    parser.add_argument("--decisions", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    results: dict[tuple[str, int], dict[str, float]] = {}
    print(HEAD)
    for nodes in map(int, args.sizes.split(",")):
        filled = Filled(nodes, args.seed)
        for strategy in args.strategies.split(","):
            decisions = args.decisions if nodes >= LARGEST else args.decisions // 3
            results[strategy, nodes] = measure(filled, strategy, decisions, args.seed)
            show(strategy, nodes, results[strategy, nodes])
    told = report(results, args.decisions)
    with_openb(told)
    form.show(told)
    form.keep(told)


if __name__ == "__main__":
    main()

"""The openb data as our own messages: nodes, requests, arrival orders and the published curves; replays nothing.

The files and what they mean: OPENB.md and the README beside the data, in $LAXITY_DATA (../shared/data by default).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.placer.core.demand import Demand
from services.placer.core.outlooks import shape_of
from services.placer.core.strategies.workload import Workload
from shared.messages import DeviceFacts, Gpu, NodeFacts, NodeState, PlaceRequest, Regime

TRACES = ("default", "gpushare40", "gpushare100", "multigpu20", "multigpu50", "gpuspec10", "gpuspec33", "cpu250")
PUBLISHED = {
    "fgd": "06-FGD",
    "bestfit": "05-BestFit",
    "gpu-packing": "04-GpuPacking",
    "gpu-clustering": "03-GpuClustering",
    "dotprod": "02-DotProd",
    "random": "01-Random",
}
GPUS = 6_212
PERCENT_MICRO = GPUS * 10_000
"""One percent of the cluster's device time, in millionths of a device."""
MOST_PERCENT = 130

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def folder() -> Path:
    return Path(os.environ.get("LAXITY_DATA", "../shared/data")) / "openb"


@dataclass(frozen=True)
class Pod:
    """One line of a pod list; times in seconds, None where the list has none."""

    request: PlaceRequest
    demand: Demand
    created_s: int | None = None
    deleted_s: int | None = None

    @property
    def gpu_micro(self) -> int:
        return self.demand.count * self.demand.share_micro


@dataclass(frozen=True, eq=False)
class Trace:
    """`pods` in the order of the file, which is that of their names."""

    name: str
    pods: tuple[Pod, ...]

    @cached_property
    def workload(self) -> Workload:
        """What the published comparison lets the policies know: the pods of the trace, each once."""
        return Workload.of((shape_of(pod.demand), pod.demand.memory_mib) for pod in self.pods)

    @cached_property
    def gpu_micro(self) -> Ints:
        return np.array([pod.gpu_micro for pod in self.pods])


@dataclass(frozen=True, eq=False)
class Run:
    """Which pods arrive, one after another, and the rank of each node, which breaks ties."""

    trace: Trace
    seed: int
    arrivals: Sequence[int]
    ranks: Sequence[int]


@lru_cache(maxsize=16)
def trace(name: str) -> Trace:
    with (folder() / f"openb_pod_list_{name}.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    alike: dict[tuple[str, ...], tuple[PlaceRequest, Demand]] = {}
    return Trace(name, tuple(_pod(row, alike) for row in rows))


def _pod(row: dict[str, str], alike: dict[tuple[str, ...], tuple[PlaceRequest, Demand]]) -> Pod:
    """Pods that ask for the same share one request."""
    count, spec = int(row["num_gpu"]), row.get("gpu_spec") or ""
    key = (row["cpu_milli"], row["memory_mib"], row["num_gpu"], row["gpu_milli"], spec)
    if key not in alike:
        share = int(row["gpu_milli"]) / 1000 if count else 1.0
        gpu = Gpu(count=count, share=share, models=tuple(spec.split("|")) if spec else None) if count else None
        request = PlaceRequest(
            command=("pod",), gpu=gpu, cpu_milli=int(row["cpu_milli"]), memory_mib=int(row["memory_mib"])
        )
        alike[key] = request, Demand.of(request)
    times = (row.get("creation_time"), row.get("deletion_time"))
    created, deleted = (int(time) if time else None for time in times)
    return Pod(*alike[key], created, deleted)


def runs(name: str, seeds: Sequence[int] | None = None) -> list[Run]:
    """The published runs that have an order file; that of `default` also serves those that differ in models only."""
    file = "default" if name.startswith("gpuspec") else name
    arrivals, ranks = (_numbers(folder() / "order" / f"{kind}_{file}.txt") for kind in ("arrivals", "noderank"))
    wanted = [seed for seed in arrivals if seeds is None or seed in seeds]
    return [Run(trace(name), seed, arrivals[seed], ranks[seed]) for seed in wanted]


def shuffled(name: str, seed: int) -> Run:
    """An own order by the published rule, from numpy's generator: all pods shuffled, then more drawn, up to 130 %."""
    of, chance = trace(name), np.random.default_rng(seed)
    order = chance.permutation(len(of.pods)).tolist()
    total, most = int(of.gpu_micro.sum()), MOST_PERCENT * PERCENT_MICRO
    while total > most:
        total -= int(of.gpu_micro[order.pop(int(chance.integers(len(order))))])
    while True:
        drawn = int(chance.integers(len(of.pods)))
        if total + of.pods[drawn].demand.share_micro > most:
            return Run(of, seed, order, chance.permutation(len(_node_rows())).tolist())
        order.append(drawn)
        total += int(of.gpu_micro[drawn])


def in_file_order(run: Run) -> Run:
    """The same pods, those of the trace in the order of the file, then those drawn again as they were."""
    count = min(len(run.trace.pods), len(run.arrivals))
    return Run(run.trace, run.seed, [*sorted(run.arrivals[:count]), *run.arrivals[count:]], run.ranks)


def nodes(run: Run) -> list[NodeFacts]:
    """Named so that the order of names is that of the ranks. Device memory and deadlines do not count in this trace."""
    return [_node(f"{rank:04d}-{row['sn']}", row) for rank, row in zip(run.ranks, _node_rows(), strict=True)]


def _node(name: str, row: dict[str, str]) -> NodeFacts:
    devices = tuple(
        DeviceFacts(
            uuid=f"{name}.{index}",
            index=index,
            model=row["model"],
            healthy=True,
            memory_mib=None,
            regime=Regime.TIME_SLICED,
            slice_us=2_000,
            switch_us=100,
        )
        for index in range(int(row["gpu"]))
    )
    cpu_milli, memory_mib = int(row["cpu_milli"]), int(row["memory_mib"])
    return NodeFacts(
        node=name, state=NodeState.READY, at_us=0, devices=devices, cpu_milli=cpu_milli, memory_mib=memory_mib
    )


@lru_cache(maxsize=1)
def _node_rows() -> list[dict[str, str]]:
    with (folder() / "openb_node_list_gpu_node.csv").open() as lines:
        return list(csv.DictReader(lines))


def _numbers(file: Path) -> dict[int, list[int]]:
    pairs = (line.split(":") for line in file.read_text().splitlines() if line.strip())
    return {int(seed): [int(number) for number in numbers.split()] for seed, numbers in pairs}


def curve(arrived_percent: Floats, values: Floats) -> dict[int, float]:
    """Published form: the mean of the rounded values over the steps whose arrived percent rounds to x, half to even."""
    levels, rounded = np.rint(arrived_percent).astype(int), np.round(values, 2)
    return {int(level): float(rounded[levels == level].mean()) for level in np.unique(levels)}


def published(name: str, policy: str, seed: int, *, fragments: bool = False) -> dict[int, float]:
    """Allocation (or fragment amount) in % of all devices at each listed percent of arrived demand, if published."""
    file = "analysis_frag_discrete_subset_2dp.csv" if fragments else "analysis_allo_discrete.csv"
    row = _table(file).get((f"openb_pod_list_{name}", PUBLISHED.get(policy, ""), str(seed)), {})
    return {int(level): float(value) for level, value in row.items() if level.isdigit() and value}


@lru_cache(maxsize=2)
def _table(file: str) -> dict[tuple[str, str, str], dict[str, str]]:
    with (folder() / "expected" / file).open() as lines:
        return {(row["workload"], row["sc_policy"], row["seed"]): row for row in csv.DictReader(lines)}

"""The published runs of the openb data: arrival orders, ranks of nodes and curves; replays nothing.

The files and what they mean: OPENB.md and the README beside the data, in $LAXITY_DATA (../shared/data by default).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from cli.simulate.trace import Trace, arrivals_of_csv, nodes_of_csv
from shared.messages import NodeFacts

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


def folder() -> Path:
    return Path(os.environ.get("LAXITY_DATA", "../shared/data")) / "openb"


@dataclass(frozen=True, eq=False)
class Run:
    """Which pods arrive, one after another, and the rank of each node, which breaks ties."""

    trace: Trace
    seed: int
    arrivals: Sequence[int]
    ranks: Sequence[int]


@lru_cache(maxsize=16)
def trace(name: str) -> Trace:
    return Trace(name, arrivals_of_csv(folder() / f"openb_pod_list_{name}.csv"))


def runs(name: str, seeds: Sequence[int] | None = None) -> list[Run]:
    """The published runs that have an order file; that of `default` also serves those that differ in models only."""
    file = "default" if name.startswith("gpuspec") else name
    arrivals, ranks = (_numbers(folder() / "order" / f"{kind}_{file}.txt") for kind in ("arrivals", "noderank"))
    wanted = [seed for seed in arrivals if seeds is None or seed in seeds]
    return [Run(trace(name), seed, arrivals[seed], ranks[seed]) for seed in wanted]


def shuffled(name: str, seed: int) -> Run:
    """An own order by the published rule, from numpy's generator: all pods shuffled, then more drawn, up to 130 %."""
    of, chance = trace(name), np.random.default_rng(seed)
    order = chance.permutation(len(of.arrivals)).tolist()
    total, most = int(of.gpu_micro.sum()), MOST_PERCENT * PERCENT_MICRO
    while total > most:
        total -= int(of.gpu_micro[order.pop(int(chance.integers(len(order))))])
    while True:
        drawn = int(chance.integers(len(of.arrivals)))
        if total + of.arrivals[drawn].demand.share_micro > most:
            return Run(of, seed, order, chance.permutation(_node_count()).tolist())
        order.append(drawn)
        total += int(of.gpu_micro[drawn])


def in_file_order(run: Run) -> Run:
    """The same pods, those of the trace in the order of the file, then those drawn again as they were."""
    count = min(len(run.trace.arrivals), len(run.arrivals))
    return Run(run.trace, run.seed, [*sorted(run.arrivals[:count]), *run.arrivals[count:]], run.ranks)


@lru_cache(maxsize=2)
def nodes(run: Run) -> tuple[NodeFacts, ...]:
    """Named so that the order of names is that of the ranks. Device memory and deadlines do not count in this trace."""
    return tuple(nodes_of_csv(_node_list(), lambda place, name: f"{run.ranks[place]:04d}-{name}"))


@lru_cache(maxsize=1)
def _node_count() -> int:
    return len(nodes_of_csv(_node_list()))


def _node_list() -> Path:
    return folder() / "openb_node_list_gpu_node.csv"


def _numbers(file: Path) -> dict[int, list[int]]:
    pairs = (line.split(":") for line in file.read_text().splitlines() if line.strip())
    return {int(seed): [int(number) for number in numbers.split()] for seed, numbers in pairs}


def published(name: str, policy: str, seed: int, *, fragments: bool = False) -> dict[int, float]:
    """Allocation (or fragment amount) in % of all devices at each listed percent of arrived demand, if published."""
    file = "analysis_frag_discrete_subset_2dp.csv" if fragments else "analysis_allo_discrete.csv"
    row = _table(file).get((f"openb_pod_list_{name}", PUBLISHED.get(policy, ""), str(seed)), {})
    return {int(level): float(value) for level, value in row.items() if level.isdigit() and value}


@lru_cache(maxsize=2)
def _table(file: str) -> dict[tuple[str, str, str], dict[str, str]]:
    with (folder() / "expected" / file).open() as lines:
        return {(row["workload"], row["sc_policy"], row["seed"]): row for row in csv.DictReader(lines)}

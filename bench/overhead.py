"""`make bench-overhead`: what tasks lose by being marked, and what the monitor of a node costs.

Tasks are real work of 1, 5 and 20 ms in a process of its own, marked or not from one to the next in random order, and
twice unmarked: how these two differ is the spread of the machine. The monitor is a real process beside a real server.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Final

import psutil

import laxity
from bench.monitor_load import EVENTS_PER_S, Cost, open_rings, play, settings
from bench.report import tell
from laxity.ring import Ring
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess

LENGTHS_MS: Final = (1, 5, 20)
ON, OFF, AGAIN = "on", "off", "off again"
TICK_S: Final = 0.02
BARE: Final = """
import asyncio, sys, nats
async def main():
    client = await nats.connect(sys.argv[1])
    body = b"x" * int(sys.argv[2])
    while True:
        await asyncio.sleep(0.005)
        if body:
            await client.publish("bare", body)
asyncio.run(main())
"""
NOTES: Final = (
    "Loss: time of marked tasks over that of unmarked ones, less 1; spread: the same of unmarked over unmarked. "
    "CPU is that of the process, user and system, in percent of a core."
)


# --- tasks ---


def work(rounds: int) -> int:
    """Arithmetic alone: what it takes depends on nothing outside."""
    total = 0
    for each in range(rounds):
        total += each * each & 7
    return total


def rounds_of(length_ms: int) -> int:
    """How much work takes so long here, at its fastest."""
    best = min(_timed(20_000, OFF) for _ in range(20))
    return max(1, round(20_000 * length_ms * 1_000_000 / best))


def _timed(rounds: int, how: str) -> int:
    began = time.perf_counter_ns()
    if how == ON:
        with laxity.task("work", deadline_us=1_000_000):
            work(rounds)
    else:
        work(rounds)
    return time.perf_counter_ns() - began


def tasks(length_ms: int, seconds: float) -> dict[str, list[int]]:
    """Times of each kind, as many of one as of the others."""
    rounds, times = rounds_of(length_ms), {ON: list[int](), OFF: list[int](), AGAIN: list[int]()}
    chance, until = random.Random(length_ms), time.monotonic() + seconds
    while time.monotonic() < until:
        for how in chance.sample([*times], 3):
            times[how].append(_timed(rounds, how))
    return times


def loss(times: dict[str, list[int]], of: str, by: str) -> tuple[float, float, float]:
    """In throughput, in the median and in p99, of one kind against another."""
    one, other = sorted(times[of]), sorted(times[by])
    last = len(one) * 99 // 100
    return mean(one) / mean(other) - 1, median(one) / median(other) - 1, one[last] / other[last] - 1


# --- the monitor ---


@contextmanager
def monitor(folder: Path, url: str) -> Iterator[psutil.Process]:
    env = settings(folder / "rings") | {"LAXITY_STORAGE": "memory"}
    with ServiceProcess("services.monitor", folder, url, **env) as process:
        yield psutil.Process(process.pid)


@contextmanager
def bare(url: str, size: int) -> Iterator[psutil.Process]:
    """A loop that wakes every 5 ms and publishes one batch."""
    process = subprocess.Popen([sys.executable, "-c", BARE, url, str(size)])
    try:
        time.sleep(1.0)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def cpu_percent(process: psutil.Process, rings: list[Ring], seconds: float, events_per_s: int) -> float:
    cost = Cost(process)
    play(rings, seconds, events_per_s, TICK_S)
    return cost.percent


def monitored(seconds: float, turns: int) -> dict[str, float]:
    """Medians over turns, each kind once a turn."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name, "nats")) as server:
        folder = Path(name)
        rings = open_rings(folder / "rings")
        with monitor(folder, server.url) as ours, bare(server.url, 0) as empty, bare(server.url, 4_000) as publishing:
            play(rings, 3.0, EVENTS_PER_S, TICK_S)
            for _ in range(turns):
                for what, process, events in (
                    ("monitor_idle_percent", ours, 0),
                    ("monitor_busy_percent", ours, EVENTS_PER_S),
                    ("bare_empty_percent", empty, 0),
                    ("bare_publishing_percent", publishing, 0),
                ):
                    found.setdefault(what, []).append(cpu_percent(process, rings, seconds, events))
            memory = Cost(ours).memory_mib
        for ring in rings:
            ring.close()
    return {what: median(values) for what, values in found.items()} | {"monitor_memory_mb": memory}


# --- both ---


def measure(seconds: float, turns: int) -> None:
    figures: dict[str, float] = {"load_average": os.getloadavg()[0]}
    holds: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as root:
        os.environ["LAXITY_RING_DIR"] = root
        for length_ms in LENGTHS_MS:
            times = tasks(length_ms, seconds)
            marked, spread = loss(times, ON, OFF), loss(times, AGAIN, OFF)
            names = ("throughput", "median", "p99")
            figures[f"{length_ms}_ms_tasks_of_each"] = len(times[ON])
            for name, lost, by_chance in zip(names, marked, spread, strict=True):
                figures |= {f"{length_ms}_ms_{name}_loss": lost, f"{length_ms}_ms_{name}_spread": by_chance}
            holds[f"{length_ms} ms: throughput loss <= 0.5 % + spread"] = marked[0] <= 0.005 + abs(spread[0])
            holds[f"{length_ms} ms: p99 <= +1 % + spread"] = marked[2] <= 0.01 + abs(spread[2])
        os.environ.pop("LAXITY_RING_DIR")
    figures |= monitored(seconds, turns)
    holds |= {
        "monitor idle <= 2 % of a core": figures["monitor_idle_percent"] <= 2,
        "monitor at 5,000 events/s <= 10 %": figures["monitor_busy_percent"] <= 10,
        "monitor <= 60 MB": figures["monitor_memory_mb"] <= 60,
    }
    ratios = {"busy, ours / bare loop that publishes": _ratio(figures, "monitor_busy", "bare_publishing")}
    ratios |= {"idle, ours / empty bare loop": _ratio(figures, "monitor_idle", "bare_empty")}
    tell("overhead", {name: round(value, 5) for name, value in figures.items()}, ratios, holds, NOTES)


def _ratio(figures: dict[str, float], of: str, by: str) -> float:
    return round(figures[f"{of}_percent"] / max(0.01, figures[f"{by}_percent"]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="per length of task, and per turn of the monitor")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    measure(args.seconds, args.turns)


if __name__ == "__main__":
    main()

"""`make bench-overhead`: what tasks lose by being marked, and what the monitor of a node costs.

Tasks are real work of 1, 5 and 20 ms in a process of its own, marked or not from one to the next in random order, and
twice unmarked: how these two differ is the spread of the machine. What marks cost here is what they cost after other
work, when little of them is left in the processor's caches; `bench-sdk` says what they cost one after the other. The
monitor is a real process beside a real server.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import psutil
from prometheus_client import CollectorRegistry, Histogram

import laxity
from bench.monitor_load import EVENTS_PER_S, Cost, open_rings, play, settings
from bench.report import tell
from laxity.ring import Ring
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess

LENGTHS_MS: Final = (1, 5, 20)
LEAST: Final = 1_000
"""Tasks of each kind: the 99th percentile of fewer is that of two or three of them."""
ON, OFF, AGAIN, TIMED = "on", "off", "off again", "timed"
HISTOGRAM: Final = Histogram("work_seconds", "bench", registry=CollectorRegistry())
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
    "Loss: time of a marked task over that of the unmarked one beside it, less 1, the median of all; spread: the same "
    "of unmarked over unmarked; timer_loss: of tasks in a histogram timer of prometheus_client. Judged by processor "
    "time: on a shared machine the wall's is mostly that of others. The monitor's CPU is its process's, user and "
    "system, in percent of a core."
)


# --- tasks ---


class Taken(NamedTuple):
    """Times of one task, in nanoseconds."""

    cpu: int
    wall: int


def work(rounds: int) -> None:
    """One call into C. A loop in Python took up to 7 % more or less time by where its numbers happened to lie."""
    hashlib.pbkdf2_hmac("sha256", b"laxity", b"overhead", rounds)


def rounds_of(length_ms: int) -> int:
    """How much work takes so long here, at its fastest."""
    best = min(timed(2_000, OFF).wall for _ in range(20))
    return max(1, round(2_000 * length_ms * 1_000_000 / best))


def begun(how: str) -> Callable[[], object] | None:
    """Begins the mark of a task and says how to end it."""
    if how == ON:
        return laxity.begin("work", deadline_us=1_000_000).end
    if how == TIMED:
        timer = HISTOGRAM.time()
        timer.__enter__()
        return lambda: timer.__exit__(None, None, None)
    return None


def timed(rounds: int, how: str) -> Taken:
    wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    end = begun(how)
    work(rounds)
    if end is not None:
        end()
    return Taken(time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns)


def tasks(length_ms: int, seconds: float) -> dict[str, list[Taken]]:
    """Times of each kind, as many of one as of the others."""
    rounds, times = rounds_of(length_ms), {how: list[Taken]() for how in (ON, OFF, AGAIN, TIMED)}
    chance, until = random.Random(length_ms), time.monotonic() + seconds
    while time.monotonic() < until or len(times[OFF]) < LEAST:
        for how in chance.sample([*times], len(times)):
            times[how].append(timed(rounds, how))
    return times


def loss(one: Sequence[int], other: Sequence[int]) -> dict[str, float]:
    """Of one kind against another, pair by pair: in throughput, in p99, and of a task in microseconds.

    The machine's own speed changes by much more than what is looked for, within seconds; pairs are milliseconds apart.
    """
    last = len(one) * 99 // 100
    return {
        "throughput": median(mine / its for mine, its in zip(one, other, strict=True)) - 1,
        "p99": sorted(one)[last] / sorted(other)[last] - 1,
        "us": median(mine - its for mine, its in zip(one, other, strict=True)) / 1_000,
    }


def compared(length_ms: int, times: dict[str, list[Taken]]) -> tuple[dict[str, float], dict[str, bool]]:
    """Figures and what holds, of tasks of one length."""
    figures: dict[str, float] = {f"{length_ms}_ms_tasks_of_each": len(times[ON])}
    for clock in Taken._fields:
        by = {how: [getattr(taken, clock) for taken in each] for how, each in times.items()}
        for what, how in (("loss", ON), ("spread", AGAIN), ("timer_loss", TIMED)):
            lost = loss(by[how], by[OFF])
            figures |= {f"{length_ms}_ms_{clock}_{name}_{what}": value for name, value in lost.items()}
    cpu = f"{length_ms}_ms_cpu"
    allowed = {name: abs(figures[f"{cpu}_{name}_spread"]) for name in ("throughput", "p99")}
    holds = {
        f"{length_ms} ms: throughput loss <= 0.5 % + spread": figures[f"{cpu}_throughput_loss"]
        <= 0.005 + allowed["throughput"],
        f"{length_ms} ms: p99 <= +1 % + spread": figures[f"{cpu}_p99_loss"] <= 0.01 + allowed["p99"],
    }
    return figures, holds


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
        assert laxity.enabled()
        for length_ms in LENGTHS_MS:
            found, held = compared(length_ms, tasks(length_ms, seconds))
            figures, holds = figures | found, holds | held
        os.environ.pop("LAXITY_RING_DIR")
    figures |= monitored(seconds, turns)
    holds |= {
        "monitor idle <= 2 % of a core": figures["monitor_idle_percent"] <= 2,
        "monitor at 5,000 events/s <= 10 %": figures["monitor_busy_percent"] <= 10,
        "monitor <= 60 MB": figures["monitor_memory_mb"] <= 60,
    }
    ratios = {"busy, ours / bare loop that publishes": _ratio(figures, "monitor_busy", "bare_publishing")}
    ratios |= {"idle, ours / empty bare loop": _ratio(figures, "monitor_idle", "bare_empty")}
    for length_ms in LENGTHS_MS:
        ours_us, timer_us = (figures[f"{length_ms}_ms_cpu_us_{what}"] for what in ("loss", "timer_loss"))
        ratios[f"{length_ms} ms, lost to marks / to a histogram timer"] = round(ours_us / timer_us, 2)
    tell("overhead", {name: round(value, 5) for name, value in figures.items()}, ratios, holds, NOTES)


def _ratio(figures: dict[str, float], of: str, by: str) -> float:
    return round(figures[f"{of}_percent"] / max(0.01, figures[f"{by}_percent"]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="per length of task at least, and per turn of the monitor"
    )
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    measure(args.seconds, args.turns)


if __name__ == "__main__":
    main()

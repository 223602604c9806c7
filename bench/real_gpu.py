"""On a real NVIDIA GPU: `make bench-real-gpu`. Where there is none it says so and measures nothing.

Processes with tasks on CUDA share the GPU as containers do by default, in time slices. Compared are the times of tasks
by their rings with those of CUDA's events (attribution), what the probe tells of each sharer, slice L and switch cost
theta of THEORY.md, section 1, by traces and by copies of one kernel, and tasks that are marked with some that are not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import laxity
from bench.cuda import CudaError, Gpu
from bench.report import tell
from laxity.ring import BEGIN, HEADER_SIZE
from services.monitor.probes.cpu import CoreSettings, CpuProbe, usable_cores
from services.monitor.probes.gpu import GpuProbe, GpuSharing
from services.monitor.probes.nvml_process import NvmlProcess
from services.monitor.slices import Run, judge

SHARERS: Final = 3
KERNEL_US: Final = 20_000
"""Of the sharers' tasks, alone: many slices."""
SHORT_US: Final = 1_000
"""Of the tasks that are marked or not."""
HELD_BYTES: Final = 64 << 20
PAUSE_NS: Final = 20_000
MOST_MARKS: Final = 65_536
RECORDS: Final = 16_384
LEFT_OUT: Final = 3
"""Tasks at the start and end of each sharer, when it may have had more of the GPU than its share."""
ON, OFF, AGAIN = "on", "off", "off again"


# --- what the numbers say ---


def attribution_error(task_us: Sequence[float], event_us: Sequence[float]) -> float:
    """How far the time of tasks by their ring is from that of the same ones by CUDA's events, as a share of it."""
    return sum(task_us) / sum(event_us) - 1


def switch_us(alone_us: float, together_us: float, copies: int, slice_us: float) -> float:
    """Theta by copies of one kernel (THEORY, section 1): (E_n - n * E_1) / (n * E_1) * L; never below zero."""
    return max(0.0, (together_us - copies * alone_us) / (copies * alone_us) * slice_us)


def runs_of(marks: Sequence[int], process: int) -> list[Run]:
    """When a process had the GPU: began, ended, began, ended, … in nanoseconds of the GPU's clock."""
    return [Run(began, ended, process) for began, ended in zip(marks[::2], marks[1::2], strict=True)]


def task_times_us(ring: bytes) -> list[float]:
    """From begin to end of each ended task, in the order of the begins, of a ring that nothing was overwritten in."""
    begun: dict[int, int] = {}
    took: dict[int, float] = {}
    for seq, stamp_ns, task, _, kind, _, _, _ in struct.iter_unpack("<QQQQBB22sQ", ring[HEADER_SIZE:]):
        if seq and kind == BEGIN:
            begun[task] = stamp_ns
        elif seq:
            took[task] = (stamp_ns - begun[task]) / 1_000
    return [took[task] for task in begun if task in took]


def lost(times: dict[str, list[float]], of: str) -> float:
    """Throughput lost by tasks of one kind, against those that are not marked."""
    return mean(times[of]) / mean(times[OFF]) - 1


# --- one process that shares the GPU ---


def rounds_of(gpu: Gpu, length_us: int, out: int) -> int:
    """How much work takes so long, alone."""
    return max(1, round(1_000_000 * length_us / min(gpu.run("work", 1_000_000, out) for _ in range(5))))


def share(rounds: int, seconds: float) -> list[float]:
    """Tasks one after the other, each marked; returns their microseconds by CUDA's events."""
    gpu, took = Gpu(), list[float]()
    out = gpu.allocate(HELD_BYTES)
    gpu.run("work", 1, out)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with laxity.task("work", deadline_us=10_000_000):
            took.append(gpu.run("work", rounds, out))
    return took


def trace(seconds: float) -> list[int]:
    gpu = Gpu()
    marks = gpu.allocate(8 * MOST_MARKS)
    gpu.run("trace", int(seconds * 1e9), PAUSE_NS, marks, MOST_MARKS)
    number, *found = gpu.read_words(marks, MOST_MARKS)
    return found[:number]


def mark(seconds: float) -> dict[str, list[float]]:
    """Short tasks, marked or not in random order, and twice unmarked; microseconds by the host's clock."""
    gpu, times = Gpu(), {how: list[float]() for how in (ON, OFF, AGAIN)}
    out = gpu.allocate(8)
    rounds = rounds_of(gpu, SHORT_US, out)
    assert laxity.enabled()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for how in random.sample([*times], len(times)):
            began_ns = time.perf_counter_ns()
            task = laxity.begin("work", deadline_us=1_000_000) if how == ON else None
            gpu.run("work", rounds, out)
            if task is not None:
                task.end()
            times[how].append((time.perf_counter_ns() - began_ns) / 1_000)
    return times


# --- all of them ---


class Sharer:
    """A process that does one of these, with a folder for its ring as a container has."""

    def __init__(self, root: Path, *words: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="c", dir=root))
        env = os.environ | {"LAXITY_RING_DIR": str(self._folder), "LAXITY_RING_RECORDS": str(RECORDS)}
        command = [sys.executable, "-m", "bench.real_gpu", *words]
        self._process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    def said(self) -> Any:
        """Once it is done; raises CudaError."""
        output = self._process.communicate()[0]
        if self._process.returncode:
            raise CudaError(f"a process on the GPU ended with {self._process.returncode}")
        return json.loads(output)

    def task_times_us(self) -> list[float]:
        (ring,) = self._folder.iterdir()
        return task_times_us(ring.read_bytes())


def sharers_seen(root: Path) -> int:
    """How many containers the probe tells to hold memory of a GPU."""
    driver = NvmlProcess(deadline_s=10, first_deadline_s=60, pause_s=1)
    probe = GpuProbe(CpuProbe(root, {core: CoreSettings() for core in usable_cores()}), driver, GpuSharing())
    containers = probe.read().containers
    driver.restart()  # which ends the present one
    held = [reading.value for each in containers if each.use for reading in each.use.gpus.values()]
    return sum(isinstance(value, int) and value << 20 >= HELD_BYTES for value in held)


def shared(root: Path, rounds: int, seconds: float) -> tuple[list[float], float, int]:
    """Each sharer's error of attribution, the median task by CUDA's events, and how many the probe saw."""
    sharers = [Sharer(root, "--share", str(rounds), "--seconds", str(seconds)) for _ in range(SHARERS)]
    time.sleep(seconds / 2)
    seen = sharers_seen(root)
    events = [sharer.said() for sharer in sharers]
    errors = [attribution_error(one.task_times_us(), event_us) for one, event_us in zip(sharers, events, strict=True)]
    return errors, median(us for event_us in events for us in event_us[LEFT_OUT:-LEFT_OUT]), seen


def measure(root: Path, seconds: float) -> None:
    rounds, name = Sharer(root, "--calibrate").said()
    alone_us = median(Sharer(root, "--share", str(rounds), "--seconds", str(seconds)).said())
    errors, together_us, seen = shared(root, rounds, 2 * seconds)
    tracers = [Sharer(root, "--trace", "--seconds", "1.5") for _ in range(2)]
    traced = judge([run for number, one in enumerate(tracers) for run in runs_of(one.said(), number)])
    times = Sharer(root, "--mark", "--seconds", str(seconds)).said()
    figures: dict[str, float] = {
        "sharers": SHARERS,
        "sharers_seen_by_the_probe": seen,
        "worst_attribution_error": max(errors, key=abs),
        "task_alone_us": alone_us,
        "task_shared_us": together_us,
        "marked_loss": lost(times, ON),
        "marked_spread": lost(times, AGAIN),
    }
    holds = {
        "attribution within 5 % of CUDA's events": max(map(abs, errors)) <= 0.05,
        "the probe tells of each sharer": seen == SHARERS,
        "slice and switch cost are measured": traced.slice_us is not None,
        "throughput loss <= 0.5 % + spread": figures["marked_loss"] <= 0.005 + abs(figures["marked_spread"]),
    }
    if traced.slice_us is not None and traced.switch_us is not None:
        by_copies_us = switch_us(alone_us, together_us, SHARERS, traced.slice_us)
        figures |= {"slice_us": traced.slice_us, "switch_us": traced.switch_us, "switch_by_copies_us": by_copies_us}
    tell("real_gpu", figures, {}, holds, f"Real: {name}. Tasks are {KERNEL_US} us of one thread's arithmetic, alone.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    for word in ("--calibrate", "--trace", "--mark"):
        parser.add_argument(word, action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.calibrate:
        gpu = Gpu()
        print(json.dumps([rounds_of(gpu, KERNEL_US, gpu.allocate(8)), gpu.name]))
    elif chosen.share:
        print(json.dumps(share(chosen.share, chosen.seconds)))
    elif chosen.trace:
        print(json.dumps(trace(chosen.seconds)))
    elif chosen.mark:
        print(json.dumps(mark(chosen.seconds)))
    else:
        try:
            Gpu()
        except CudaError as error:
            tell("real_gpu", {}, {}, {}, f"Not run, nothing was measured: {error}.")
            return
        with tempfile.TemporaryDirectory() as root:
            measure(Path(root), chosen.seconds)


if __name__ == "__main__":
    main()

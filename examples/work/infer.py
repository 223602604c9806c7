"""A small neural network that answers once per period, each answer one task with a deadline.

Started by Laxity it gets its deadline from LAXITY_DEADLINE_US and marks its tasks in a ring; started by hand, with
LAXITY_DEADLINE_US set to anything, it does the same work and marks nothing.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

import laxity

Floats = NDArray[np.float32]

PIXELS, HIDDEN, CLASSES, BATCH = 256, 128, 10, 8
OF_BUDGET = 0.8
"""Part of the declared runtime that is used: a runtime is the worst case, not the mean."""


class Network:
    """Two hidden layers over a batch of pictures; the weights are drawn once, since only the work counts here."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        sizes = (PIXELS, HIDDEN, HIDDEN, CLASSES)
        self.layers = [
            draw.standard_normal(shape, dtype=np.float32) / np.float32(shape[0] ** 0.5) for shape in pairwise(sizes)
        ]

    def answer(self, pictures: Floats) -> list[int]:
        """The likeliest class of each picture."""
        *hidden, last = self.layers
        for layer in hidden:
            pictures = np.maximum(pictures @ layer, 0)
        return [int(best) for best in (pictures @ last).argmax(axis=1)]


def repetitions(network: Network, pictures: Floats, runtime_us: int) -> int:
    """How often the network is asked per task, so that a task takes about its declared runtime on this machine.

    Measured in processor time, and the quickest of many counts: others on the machine do not spoil it.
    """
    quickest_ns = min(_timed(network, pictures) for _ in range(60))
    return max(1, int(OF_BUDGET * runtime_us * 1000 / quickest_ns))


def _timed(network: Network, pictures: Floats) -> int:
    began_ns = time.thread_time_ns()
    for _ in range(4):
        network.answer(pictures)
    return max(1, (time.thread_time_ns() - began_ns) // 4)


def serve(period_us: int, runtime_us: int, tasks: int) -> None:
    """One task per period, ``tasks`` of them, or for ever where that is 0."""
    network, draw = Network(seed=1), np.random.default_rng(2)
    pictures = draw.random((BATCH, PIXELS), dtype=np.float32)
    times = repetitions(network, pictures, runtime_us)
    print(f"{times} passes a task", flush=True)
    time.sleep(period_us / 1e6)  # where processor time is dealt out in portions, measuring has spent the present one
    due_s, done = time.monotonic(), 0
    while not tasks or done < tasks:
        with laxity.task("infer"):
            for _ in range(times):
                network.answer(pictures)
        done += 1
        due_s = max(due_s + period_us / 1e6, time.monotonic())  # what came too late is not made up for
        time.sleep(max(0.0, due_s - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--period-us", type=int, default=100_000)
    parser.add_argument("--runtime-us", type=int, default=5_000)
    parser.add_argument("--tasks", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    serve(args.period_us, args.runtime_us, args.tasks)


if __name__ == "__main__":
    main()

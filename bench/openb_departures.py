"""The openb trace with its own creation and deletion times on a cluster that is just full: who waits, and how much.

The trace runs three times in a row and is measured from the second time on. Its own demand is a fraction of a percent
of the cluster, so lives are stretched by one factor for all, such that the demand, were nobody to wait, is in the mean
what the cluster has; arrivals keep their times. Who does not fit waits, as `laxity simulate` plays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.openb_replay import world_of
from bench.openb_trace import GPUS, Run, runs
from cli.simulate.play import WAITING, Play, Step
from cli.simulate.trace import SECOND_US, Arrival
from services.placer.core.columns import Floats, Ints

_TIMES = 3
_DEVICES_MICRO = GPUS * 1_000_000


@dataclass(frozen=True)
class Waiting:
    """Means over time in % of all devices; `left_waiting` pods are without a place at the end."""

    policy: str
    offered: float
    allocated: float
    waiting: float
    left_waiting: int
    stretch: float


@dataclass(frozen=True)
class Story:
    """Pods in the order in which they come, lives as in the trace; measured from `start_us` to `end_us`."""

    pods: Sequence[Arrival]
    born_us: Ints
    life_us: Ints
    gpu_micro: Ints
    start_us: int
    end_us: int

    @classmethod
    def of(cls, run: Run) -> Story:
        """The trace again and again, measured from the second time on; who leaves at once stays a second."""
        once = sorted(run.trace.arrivals, key=lambda pod: pod.at_us or 0)
        born = np.array([pod.at_us or 0 for pod in once])
        life = np.array([max(SECOND_US, pod.stay_us or 0) for pod in once])
        span, pods = int(born[-1] - born[0]), once * _TIMES
        times = np.concatenate([born + turn * span for turn in range(_TIMES)])
        gpu = np.array([pod.gpu_micro for pod in pods])
        return cls(pods, times, np.tile(life, _TIMES), gpu, int(born[0]) + span, int(times[-1]))

    def offered(self, stretch: float) -> float:
        """Demand were nobody to wait, as a part of what the cluster has."""
        ends: Floats = np.minimum(self.born_us + self.life_us * stretch, self.end_us)
        there = np.maximum(ends - np.maximum(self.born_us, self.start_us), 0)
        return float((there * self.gpu_micro).sum()) / (self.end_us - self.start_us) / _DEVICES_MICRO

    def stretch(self) -> float:
        """By which lives are multiplied so that the offered demand is 1."""
        low, high = 1.0, 100_000.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.offered(middle) < 1 else (low, middle)
        return high

    def arrivals(self, stretch: float) -> list[Arrival]:
        lives = (self.life_us * stretch).astype(np.int64)
        times = zip(self.pods, self.born_us.tolist(), lives.tolist(), strict=True)
        return [replace(pod, at_us=born_us, stay_us=life_us) for pod, born_us, life_us in times]

    def mean(self, steps: Sequence[Step], column: str) -> float:
        """Of a sum of the steps over the time that is measured, in % of all devices."""
        since = np.clip([step.at_us for step in steps] + [self.end_us], self.start_us, self.end_us)
        values = np.array([getattr(step, column) for step in steps], np.float64)
        return float((values * np.diff(since)).sum()) / (self.end_us - self.start_us) / _DEVICES_MICRO * 100


def departures(policy: str, seed: int = 42) -> Waiting:
    """`default` on the node order of a published seed."""
    (run,) = runs("default", [seed])
    story = Story.of(run)
    stretch = story.stretch()
    played = Play(world_of(run, policy), story.arrivals(stretch)).through()
    return Waiting(
        policy=policy,
        offered=round(100 * story.offered(stretch), 2),
        allocated=round(story.mean(played.steps, "held_micro"), 3),
        waiting=round(story.mean(played.steps, "waiting_micro"), 3),
        left_waiting=list(played.fates).count(WAITING),
        stretch=round(stretch, 1),
    )

"""The openb trace with its own creation and deletion times on a cluster that is just full: who waits, and how much.

The trace runs three times in a row. Its own demand is a fraction of a percent of the cluster, so lives are stretched by
one factor for all, such that the demand, were nobody to wait, is in the mean what the cluster has; arrivals keep their
times. A pod that does not fit waits; after a departure those that wait are tried again in the order of their arrival.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from bench.openb_replay import placed, world_of
from bench.openb_trace import GPUS, Run, runs
from cli.simulate.trace import SECOND_US, Arrival
from services.placer.core.columns import Floats, Ints
from services.placer.core.outcome import Assignment

_TIMES = 3


@dataclass(frozen=True)
class Waiting:
    """Means over time in % of all devices; `waited` in % of the pods that asked for a device while measured."""

    policy: str
    offered: float
    allocated: float
    waiting: float
    waited: float
    stretch: float


@dataclass(frozen=True)
class Story:
    """When pods come and how long they stay, in seconds; measured from `start` to `end`."""

    pods: list[Arrival]
    born_s: Ints
    life_s: Ints
    gpu_micro: Ints
    start_s: int
    end_s: int

    @classmethod
    def of(cls, run: Run) -> Story:
        """The trace again and again, measured from the second time on."""
        once = sorted(run.trace.arrivals, key=lambda pod: pod.at_us or 0)
        born = np.array([(pod.at_us or 0) // SECOND_US for pod in once])
        life = np.array([max(1, (pod.stay_us or 0) // SECOND_US) for pod in once])
        span, pods = int(born[-1] - born[0]), once * _TIMES
        times = np.concatenate([born + turn * span for turn in range(_TIMES)])
        gpu = np.array([pod.gpu_micro for pod in pods])
        return cls(pods, times, np.tile(life, _TIMES), gpu, int(born[0]) + span, int(times[-1]))

    @property
    def room(self) -> float:
        """Device time of the cluster while measured, in millionths of a device times seconds."""
        return float(self.end_s - self.start_s) * GPUS * 1_000_000

    def offered(self, stretch: float) -> float:
        """Demand were nobody to wait, as a part of what the cluster has."""
        ends: Floats = np.minimum(self.born_s + self.life_s * stretch, self.end_s)
        there = np.maximum(ends - np.maximum(self.born_s, self.start_s), 0)
        return float((there * self.gpu_micro).sum()) / self.room

    def stretch(self) -> float:
        """By which lives are multiplied so that the offered demand is 1."""
        low, high = 1.0, 100_000.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.offered(middle) < 1 else (low, middle)
        return high


class Play:
    """The story on one policy's world, one event after another; a deletion comes before a creation of the same time."""

    def __init__(self, run: Run, policy: str) -> None:
        self._story, self._world = Story.of(run), world_of(run, policy)
        self._stretch = self._story.stretch()
        self._ends: list[tuple[float, int, Assignment]] = []
        self._queue: dict[int, Arrival] = {}
        self._held = self._waiting = 0
        self._now, self._allocated_sum, self._waiting_sum = 0.0, 0.0, 0.0
        self._late: set[int] = set()

    def through(self, policy: str) -> Waiting:
        story = self._story
        for number, pod in enumerate(story.pods):
            self._until(float(story.born_s[number]))
            if not self._start(number, pod):
                self._queue[number] = pod
                self._waiting += pod.gpu_micro
                self._late.add(number)
        counted = {
            number for number, gpu in enumerate(story.gpu_micro) if gpu and story.born_s[number] >= story.start_s
        }
        return Waiting(
            policy=policy,
            offered=round(100 * story.offered(self._stretch), 2),
            allocated=round(100 * self._allocated_sum / story.room, 3),
            waiting=round(100 * self._waiting_sum / story.room, 3),
            waited=round(100 * len(self._late & counted) / len(counted), 2),
            stretch=round(self._stretch, 1),
        )

    def _until(self, time_s: float) -> None:
        while self._ends and self._ends[0][0] <= time_s:
            end_s, number, place = heapq.heappop(self._ends)
            self._pass(end_s)
            self._world.leave([place], str(number))
            self._held -= self._story.pods[number].gpu_micro
            if not self._ends or self._ends[0][0] > end_s:
                self._again()
        self._pass(time_s)

    def _pass(self, time_s: float) -> None:
        counted = max(0.0, time_s - max(self._now, self._story.start_s))
        self._allocated_sum += counted * self._held
        self._waiting_sum += counted * self._waiting
        self._now = time_s

    def _again(self) -> None:
        """Tries those that wait; of pods that ask for the same, none after one that does not fit."""
        refused: set[int] = set()
        for number, pod in list(self._queue.items()):
            if id(pod.request) in refused:
                continue
            if self._start(number, pod):
                del self._queue[number]
                self._waiting -= pod.gpu_micro
            else:
                refused.add(id(pod.request))

    def _start(self, number: int, pod: Arrival) -> bool:
        place = placed(self._world, pod, str(number))
        if place is not None:
            life_s = float(self._story.life_s[number]) * self._stretch
            heapq.heappush(self._ends, (self._now + life_s, number, place))
            self._held += pod.gpu_micro
        return place is not None


def departures(policy: str, seed: int = 42) -> Waiting:
    """`default` on the node order of a published seed."""
    (run,) = runs("default", [seed])
    return Play(run, policy).through(policy)

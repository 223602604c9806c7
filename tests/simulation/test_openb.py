"""The first arrivals of the openb trace through the placer's core; `make bench-openb` replays all of it."""

import os

import numpy as np
import pytest

from bench.openb_departures import Story
from bench.openb_replay import placed, replay, world_of
from bench.openb_speed import Steady
from bench.openb_trace import Run, folder, in_file_order, published, runs, shuffled, trace
from cli.simulate.trace import Arrival
from cli.simulate.watch import curve
from cli.simulate.world import World
from shared.messages import SHARE_WHOLE_MICRO

pytestmark = pytest.mark.skipif(
    not folder().exists(), reason=f"no openb data in {os.environ.get('LAXITY_DATA', '../shared/data')} (LAXITY_DATA)"
)

PREFIX = 600
SHORT = 30
GOLDEN = {
    "fgd": "266ba02e96c9e816",
    "laxity": "295e37b78538aa20",
    "random": "d2f0e1e8ba8f2f34",
    "bestfit": "325f7be3a6ef7aa6",
    "dotprod": "d0b41bbb4b6922db",
    "gpu-packing": "4d5fd799f4ceb302",
    "gpu-clustering": "7465995f34b39b4d",
}
"""Digests of the first placements on `default`, seed 42: of runs whose published figures were all as published."""


@pytest.fixture(scope="module")
def run() -> Run:
    return runs("default", [42])[0]


@pytest.mark.parametrize("policy", GOLDEN)
def test_the_first_arrivals_go_where_they_went_in_the_runs_that_matched_the_published_ones(run, policy):
    done = replay(run, policy, most=PREFIX)
    assert GOLDEN[policy] == done.digest
    if policy in ("fgd", "bestfit"):
        close = 0.0051, 0.0101  # both sides are rounded to hundredths
        expected = published("default", policy, 42), published("default", policy, 42, fragments=True)
        whole = range(1, int(done.arrived[-1]))
        for found, known, off in zip((done.allocation_curve(), done.fragment_curve()), expected, close, strict=True):
            assert [level for level in whole if abs(found[level] - known[level]) > off] == []


class Plain:
    """FGD once more, from its definition, over all nodes and kinds each time, in floats: what the core must equal."""

    def __init__(self, run: Run, world: World) -> None:
        slots = world.cluster.all_slots()  # by name, which is by rank
        facts = [world.cluster.facts(world.cluster.name(slot)) for slot in slots.tolist()]
        self.names = [fact.node for fact in facts]
        self.free = np.array([[SHARE_WHOLE_MICRO] * len(f.devices) + [0] * (8 - len(f.devices)) for f in facts])
        self.cpu = np.array([fact.cpu_milli for fact in facts])
        self.memory = np.array([fact.memory_mib for fact in facts])
        self.model = [fact.devices[0].model for fact in facts]
        self.kinds = run.trace.workload.head
        self.total = sum(kind.number for kind in self.kinds)
        self.let_in = [np.array([kind.shape.admits(model) for model in self.model]) for kind in self.kinds]

    def fragment(self, free, cpu):
        """Of each node, in millionths x the number of requests."""
        idle = free.sum(axis=1)
        fragment = np.zeros(len(cpu), np.int64)
        for kind, let_in in zip(self.kinds, self.let_in, strict=True):
            shape, enough = kind.shape, free >= max(1, kind.shape.share_micro)
            usable = let_in & (cpu >= shape.cpu_milli) & (enough.sum(axis=1) >= shape.count) & (shape.count > 0)
            fragment += kind.number * np.where(usable, (free * ~enough).sum(axis=1), idle)
        return fragment

    def place(self, pod: Arrival):
        demand, before = pod.demand, self.fragment(self.free, self.cpu)
        enough = self.free >= max(1, demand.share_micro)
        shape = pod.request.gpu
        fits = (
            (self.cpu >= demand.cpu_milli) & (self.memory >= demand.memory_mib) & (enough.sum(axis=1) >= demand.count)
        )
        fits &= np.array([not shape or not shape.models or model in shape.models for model in self.model])
        best = -1, -1, ()
        partial = demand.count == 1 and demand.share_micro < SHARE_WHOLE_MICRO
        for place in range(8 if partial else 1):
            free = self.free.copy()
            if partial:
                free[:, place] -= demand.share_micro
            else:
                free[enough & (enough.cumsum(axis=1) <= demand.count)] = 0 if demand.count else free.max()
                free = free if demand.count else self.free
            delta = (before - self.fragment(free, self.cpu - demand.cpu_milli)) / self.total / 1_000_000
            score = np.floor(100 / (1 + np.exp(-delta)) + 1e-9)
            score[~fits | ~(enough[:, place] if partial else fits)] = -1
            node = int(score.argmax())
            if (score[node], -node) > (best[0], -best[1]):
                best = float(score[node]), node, (place,)
        return self._take(best[1], best[2] if partial else np.flatnonzero(enough[best[1]])[: demand.count], demand)

    def _take(self, node, places, demand):
        self.cpu[node] -= demand.cpu_milli
        self.memory[node] -= demand.memory_mib
        self.free[node, list(places)] -= demand.share_micro
        return self.names[node], tuple(f"{self.names[node]}.{place}" for place in places)


def test_fgd_places_as_its_definition_says(run):
    plain = Plain(run, world_of(run, "fgd"))
    pods = [run.trace.arrivals[pod] for pod in run.arrivals[:SHORT]]
    places = replay(run, "fgd", most=SHORT).places
    assert [plain.place(pod) for pod in pods] == [(place.node, place.devices) for place in places if place]


def test_an_own_shuffle_has_every_pod_once_and_then_some_again_up_to_130_percent():
    made = shuffled("default", 7)
    pods = made.trace.arrivals
    assert list(range(len(pods))) == sorted(made.arrivals[: len(pods)])
    assert 129.8 < sum(pods[pod].gpu_micro for pod in made.arrivals) / 62_120_000 < 130.2
    assert made.arrivals == shuffled("default", 7).arrivals
    assert list(range(1_213)) == sorted(made.ranks)


def test_a_trace_that_asks_for_too_much_loses_pods_by_chance():
    made = shuffled("multigpu50", 7)
    assert len(made.arrivals) < len(made.trace.arrivals)
    assert 129 < sum(made.trace.arrivals[pod].gpu_micro for pod in made.arrivals) / 62_120_000 <= 130


def test_file_order_changes_the_order_and_not_what_arrives(run):
    other = in_file_order(run)
    assert sorted(run.arrivals) == sorted(other.arrivals)
    assert list(range(100)) == other.arrivals[:100]


def test_the_published_curve_is_the_mean_over_what_rounds_to_a_percent():
    found = curve(np.array([0.4, 0.6, 1.4, 1.5]), np.array([0.111, 0.222, 0.333, 9.0]))
    assert {0: 0.11, 1: pytest.approx(0.275), 2: 9.0} == found


def test_lives_are_stretched_so_that_demand_is_what_the_cluster_has(run):
    story = Story.of(run)
    assert 1 == pytest.approx(story.offered(story.stretch()), abs=1e-6)


def test_pods_that_leave_make_room_again(run):
    world, places = world_of(run, "laxity"), {}
    free = world.cluster.nodes["share_free"]
    before = int(free.sum())
    for number, pod in enumerate(trace("default").arrivals[:50]):
        places[str(number)] = placed(world, pod, str(number))
    assert before > free.sum()
    for name, place in places.items():
        world.leave([place], name)
    assert before == free.sum()


def test_the_speed_is_measured_on_the_trace_in_its_published_order(run):
    steady = Steady(run, "fgd")
    for _ in range(SHORT):
        steady.arrive()
    asked = sum(run.trace.arrivals[pod].gpu_micro for pod in run.arrivals[:SHORT])
    assert (SHORT, 0, asked / 6_212_000_000) == (len(steady.took_us), steady.refused, pytest.approx(steady.allocated))

"""What is compiled of the placer decides as numpy does, to the last digit that is told."""

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from decide_draw import Draw, draws, facts_of, reserve
from decide_world import device, firm, node, request
from hypothesis import given, settings

from services.placer.core import kernels
from services.placer.core.capabilities import ALL_CAN_ALL
from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import Fits
from services.placer.core.outlooks import looking_ahead, outlook_on, shape_of
from services.placer.core.pipeline import decide
from services.placer.core.rows import Ask
from services.placer.core.strategies import STRATEGIES, Strategy, compiled, slots_of
from services.placer.core.strategies.nodes import Asked
from services.placer.core.strategies.workload import Workload
from services.placer.core.table import Table
from shared.messages import Gpu, Kind, PlaceRequest

HALF = Asked(count=1, share_micro=500_000, cpu_milli=0, memory_mib=0)
KERNELS = tuple(name for name, one in STRATEGIES.items() if compiled(one, HALF, ("cpu", "memory", "gpu")))

pytestmark = pytest.mark.skipif(not kernels.HERE, reason="services.placer.core._kernels is not compiled here")


def both() -> tuple[Cluster, Cluster]:
    """One decides by kernels, the other by numpy."""
    pair = Cluster(), Cluster()
    pair[1].compiled = False
    return pair


def twins(made: Cluster) -> tuple[Cluster, Cluster]:
    """Both of the same facts and reservations."""
    pair = both()
    for facts in facts_of(made):
        for one in pair:
            one.set_facts(facts.node, facts, 0)
            one.set_reservations(facts.node, made.reservations(facts.node))
    return pair


def expecting(made: Cluster, requests: Iterable[PlaceRequest]) -> Mapping[str, Strategy]:
    """All strategies, those that look ahead with such requests to come."""
    shapes = ((shape_of(demand), 1 + demand.memory_mib // 7) for demand in map(Demand.of, requests))
    return looking_ahead(outlook_on(made, Workload.of(shapes)))


def options_of(cluster: Cluster, asked: PlaceRequest, tie: str, strategy: Strategy) -> dict[str, list[float]]:
    """By what each node with room is ranked."""
    demand = Demand.of(asked)
    table = Table.of(Ask(cluster, demand, ALL_CAN_ALL, slots=slots_of(strategy, demand.count)), strategy, tie)
    keys = table._options[: table._keys]
    return {cluster.name(node): keys[:, node].tolist() for node in np.flatnonzero(keys[:1] < np.inf).tolist()}


def same(pair: tuple[Cluster, Cluster], asked: PlaceRequest, tie: str, known: Mapping[str, Strategy]) -> Fits | None:
    """Asks both and reserves in both what they say."""
    found, expected = (decide(one, asked, 0, tie=tie, strategies=known) for one in pair)
    assert repr(expected) == repr(found)
    ranked, alike = (options_of(one, asked, tie, known[asked.strategy]) for one in pair)
    assert alike == ranked
    if not isinstance(found, Fits):
        return None
    for one in pair:
        reserve(one, asked, found)
    return found


def test_every_ranking_has_a_strategy() -> None:
    assert set(kernels.RANKED) == set(KERNELS)


@settings(max_examples=40)
@given(draws)
def test_both_decide_the_same_while_a_cluster_changes(draw: Draw) -> None:
    pair = twins(draw.cluster())
    asked = [
        draw.request().model_copy(update={"strategy": draw.mostly(draw.one(*KERNELS), *STRATEGIES)}) for _ in range(4)
    ]
    known = expecting(pair[0], [draw.request() for _ in range(9)])
    for number in range(12):
        what, name = draw.one("place", "place", "place", "leave", "node"), f"n{draw.one(0, 1, 2, 3, 4)}"
        held = pair[0].reservations(name)
        if what == "leave" and held:
            gone = draw.one(*held)
            for one in pair:
                one.set_reservations(name, tuple(each for each in one.reservations(name) if each != gone))
        elif what == "node":
            facts = draw.mostly(draw.node(name), None)
            for one in pair:
                one.set_facts(name, facts, 0)
        same(pair, draw.one(*asked).model_copy(update={"request_id": f"c-{number}"}), draw.one("", "placer-1"), known)


@pytest.mark.parametrize("strategy", sorted(KERNELS))
@pytest.mark.parametrize("count", [0, 1, 2, 8])
@pytest.mark.parametrize("kind", [None, *Kind])
def test_both_fill_nodes_of_eight_devices_alike(strategy: str, count: int, kind: Kind | None) -> None:
    pair = both()
    for number in range(6):
        devices = tuple(
            device(
                f"n{number}.{index}",
                index,
                group=f"g{index * (1 + number) // 9}",
                healthy=index != number,
                memory_mib=None if index == 7 else 16_384,
            )
            for index in range(8)
        )
        labels = {"laxity.dev/slot": str((1, 2, 8)[number % 3])}
        facts = node(f"n{number}", devices, cpu_milli=64_000 + number, memory_mib=32_768 * (number < 5), labels=labels)
        for one in pair:
            one.set_facts(facts.node, facts, 0)
    small, placed = request(Gpu(share=0.3, memory_mib=1_024), cpu_milli=100, strategy=strategy), 0
    realtime = firm(100_000, 3_000, kind=kind) if kind and count else None
    asked = request(
        Gpu(count=count) if count else None, cpu_milli=900, memory_mib=64, realtime=realtime, strategy=strategy
    )
    known = expecting(pair[0], (small, asked, request(Gpu(share=0.6), cpu_milli=3_000), request(Gpu(count=2))))
    for number in range(12):
        for each in (small, asked, asked):
            placed += same(pair, each.model_copy(update={"request_id": f"r-{number}"}), "x", known) is not None
    assert placed > 10


def test_a_kernel_says_what_it_was_not_given() -> None:
    made = Cluster()
    made.set_facts("a", node("a", 2), 0)
    with pytest.raises(TypeError, match="found 0 arrays"):
        kernels._kernels.refresh()
    column = made.devices["load"]
    with pytest.raises(TypeError, match="array 3: found elements of 8 bytes, allowed: 1"):
        kernels._kernels.refresh(*[column] * 17)

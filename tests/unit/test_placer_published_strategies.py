"""The published policies by hand, on small clusters: score, order of ties, and which device of a node is taken."""

from collections import Counter

import pytest

from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outlooks import looking_ahead, outlook_on
from services.placer.core.pipeline import decide
from services.placer.core.strategies.workload import Shape, Workload
from shared.messages import Gpu, PlaceRequest
from tests.decide_world import cluster, device, fits, node, request, share, take

WIDE = {"cpu_milli": 96_000, "memory_mib": 393_216}


def wide(name: str, devices: int = 8):
    return node(name, tuple(device(f"{name}.{at}", at, memory_mib=None) for at in range(devices)), **WIDE)


def used(made: Cluster, where: str, *shares: float, cpu_milli: int = 0) -> None:
    """Parts of the first devices of a node are taken."""
    for at, part in enumerate(shares):
        demand = Demand.of(request(Gpu(share=part), cpu_milli=cpu_milli))
        taken = demand.reservation(f"{where}/{at}", 0, 1, (f"{where}.{at}",))
        made.set_reservations(where, (*made.reservations(where), taken))


def chosen(made: Cluster, asked: PlaceRequest, strategy: str, **more) -> tuple[str, float]:
    decision = decide(made, asked.model_copy(update={"strategy": strategy}), 0, **more)
    score = decision.score
    (place,) = decision.assignments
    return (place.devices[0] if place.devices else place.node), score.total


def test_bestfit_takes_the_node_and_the_device_with_the_least_left():
    made = cluster(wide("a"), wide("b"))
    used(made, "b", 0.3, 0.5)
    # 100 (1 - (94/128 + 6.9/8) / 2) = 20.16
    assert ("b.1", 0.20) == chosen(made, share(0.3, cpu_milli=2_000), "bestfit")


def test_dotprod_takes_the_node_whose_free_vector_is_smallest_along_the_request():
    made = cluster(wide("a"), wide("b"))
    used(made, "b", 1.0, cpu_milli=32_000)
    # 100 (1 - (64/128 · 16/128 + 7/8 · 1/8) / 2) = 91.4
    assert ("b.1", 0.91) == chosen(made, request(Gpu(), cpu_milli=16_000), "dotprod")


@pytest.mark.parametrize(
    "asked, expected",
    [
        (share(0.3), ("b.1", 0.95)),
        (share(0.6), ("b.0", 0.93)),
        (share(0.9), ("b.2", 0.49)),
        (request(Gpu(count=2)), ("b.2", 0.48)),
        (request(), ("a", 0.0)),
    ],
)
def test_gpu_packing_fills_used_devices_then_used_nodes(asked, expected):
    made = cluster(wide("a"), wide("b"))
    used(made, "b", 0.3, 0.5)
    assert expected == chosen(made, asked, "gpu-packing")


def test_gpu_packing_opens_the_idle_node_with_the_fewest_devices():
    assert ("b.0", 0.29) == chosen(cluster(wide("a"), wide("b", 4)), share(0.5), "gpu-packing")


def test_gpu_clustering_keeps_classes_together():
    made = cluster(wide("a"), wide("b"), wide("c"))
    used(made, "b", 0.5)
    used(made, "c", 1.0)
    assert ("b.0", 0.76) == chosen(made, share(0.3), "gpu-clustering")
    assert ("c.1", 0.78) == chosen(made, request(Gpu()), "gpu-clustering")
    assert ("a.0", 0.25) == chosen(made, request(Gpu(count=2)), "gpu-clustering")


def test_gpu_clustering_forgets_a_class_that_has_left():
    made = cluster(wide("a"), wide("b"))
    used(made, "b", 0.5)
    made.set_reservations("b", ())
    assert ("a.0", 0.25) == chosen(made, share(0.3), "gpu-clustering")


def expecting(made: Cluster, *shapes: Shape):
    return looking_ahead(outlook_on(made, Workload.of((shape, 0) for shape in shapes)))


def test_fgd_scores_50_where_nothing_changes_and_goes_by_name():
    made = cluster(wide("a"), wide("b"))
    ahead = expecting(made, Shape(0, 1, 1_000_000))
    assert ("a.0", 0.5) == chosen(made, request(Gpu()), "fgd", strategies=ahead)


def test_fgd_puts_a_part_where_it_breaks_no_device_that_is_wanted_whole():
    made = cluster(wide("a"), wide("b"))
    used(made, "b", 0.5)
    ahead = expecting(made, Shape(0, 1, 1_000_000))
    # 0.5 of fragment less: 100 / (1 + exp(-0.5)) = 62.2
    assert ("b.0", 0.62) == chosen(made, share(0.5), "fgd", strategies=ahead)


@pytest.mark.parametrize("strategy", ["fgd", "laxity"])
def test_with_nothing_expected_yet_every_request_still_finds_a_place(strategy):
    made = cluster(wide("a"), node("b", 0, **WIDE))
    for asked in (share(0.5), request(Gpu()), request(Gpu(count=8)), request(cpu_milli=1_000)):
        assert fits(made, asked.model_copy(update={"strategy": strategy})).assignments


def test_laxity_leaves_no_device_without_cpu_beside_it():
    made = cluster(wide("a"), wide("b"))
    used(made, "a", *[1.0] * 4)
    ahead = expecting(made, Shape(8_000, 1, 1_000_000))
    assert "a" == chosen(made, request(cpu_milli=48_000), "laxity", strategies=ahead)[0]


def test_laxity_fills_a_rest_that_the_size_is_made_for():
    made = cluster(wide("a"))
    used(made, "a", 0.5, 0.3)
    ahead = expecting(made, *[Shape(0, 1, 500_000)] * 3, *[Shape(0, 1, 700_000)] * 2, Shape(0, 1, 300_000))
    assert "a.1" == chosen(made, share(0.7), "laxity", strategies=ahead)[0]
    assert "a.0" == chosen(made, share(0.5), "laxity", strategies=ahead)[0]


def test_random_draws_every_node_and_device_alike_and_the_same_again_for_the_same_request():
    made = cluster(*(wide(f"n{at}", 4) for at in range(5)))
    used(made, "n0", 0.9, 0.9, 0.9)
    asked = [share(0.5, request_id=f"r{number}") for number in range(1_000)]
    first = [chosen(made, one, "random")[0] for one in asked]
    assert first == [chosen(made, one, "random")[0] for one in asked]
    nodes, devices = Counter(name.split(".")[0] for name in first), Counter(name for name in first if name[:2] == "n1")
    assert all(140 <= count <= 260 for count in nodes.values())
    assert 5 == len(nodes)
    assert {"n0.3"} == {name for name in first if name[:2] == "n0"}
    assert all(25 <= count <= 80 for count in devices.values())
    assert 4 == len(devices)


def test_random_does_not_say_no_where_there_is_room():
    made = cluster(wide("a", 1))
    asked = share(1.0, request_id="one", strategy="random")
    take(made, asked, fits(made, asked))
    refused = decide(made, share(0.1, request_id="two", strategy="random"), 0)
    assert ["not_now.share"] == [reason.code for reason in refused.reasons]

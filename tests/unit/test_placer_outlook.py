"""What the strategies that look ahead work out: usable and served device time, prices of rests, weights of kinds."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placer.core.cluster import Cluster
from services.placer.core.outlooks import Learned, outlook_on
from services.placer.core.strategies.fragmentation import Usable, fragments
from services.placer.core.strategies.nodes import Asked, Change, Nodes
from services.placer.core.strategies.outlook import CERTAIN, Outlook, Room, scarce_weights
from services.placer.core.strategies.rests import WORTH, Rests
from services.placer.core.strategies.workload import Shape, Wanted, Workload
from services.placer.core.strategies.worth import Worth
from shared.errors import FieldError
from shared.messages import Gpu
from tests.decide_world import cluster, device, node, request

MODELS = ("A", "B")
WHOLE = 1_000_000
KINDS = [
    Wanted(Shape(4_000, 1, 500_000), 30, 8_192),
    Wanted(Shape(8_000, 1, WHOLE, ("A",)), 40, 16_384),
    Wanted(Shape(2_000, 1, 300_000, ("A", "B")), 10, 0),
    Wanted(Shape(16_000, 2, WHOLE), 5, 65_536),
    Wanted(Shape(8_000, 0, 0), 15, 4_096),
]
shares = st.sampled_from([0, 100_000, 300_000, 499_999, 500_000, 700_000, WHOLE])
machines = st.tuples(
    st.lists(shares, min_size=4, max_size=4), st.integers(0, 40_000), st.integers(0, 131_072), st.integers(0, 2)
)
requests = st.sampled_from(
    [Asked(1, 300_000, 2_000, 1_024), Asked(1, WHOLE, 8_000, 0), Asked(2, WHOLE, 4_000, 0), Asked(0, 0, 3_000, 512)]
)


def seen(machines: Sequence[tuple[list[int], int, int, int]]) -> Nodes:
    """Every device of every machine is a row."""
    free = np.array([machine[0] for machine in machines])
    rows = list(product(range(len(machines)), range(free.shape[1])))
    return Nodes(
        share_free=free,
        idle=free.sum(axis=1),
        whole=(free == WHOLE).sum(axis=1),
        cpu_free=np.array([machine[1] for machine in machines]),
        memory_free=np.array([machine[2] for machine in machines]),
        model=np.array([machine[3] for machine in machines]),
        devices=np.full(len(machines), free.shape[1]),
        classes=np.zeros(len(machines), np.int64),
        of_row=np.array([row[0] for row in rows]),
        place=np.array([row[1] for row in rows]),
    )


def usable(machine: tuple[list[int], int, int, int], *, memory: bool) -> int:
    """By the definition, kind by kind and device by device."""
    free, cpu, mib, model = machine
    total = 0
    for kind in KINDS:
        shape, fitting = kind.shape, [share for share in free if share >= kind.shape.share_micro]
        admitted = not shape.models or (model < len(MODELS) and MODELS[model] in shape.models)
        if shape.count and admitted and len(fitting) >= shape.count and cpu >= shape.cpu_milli:
            total += kind.number * sum(fitting) * (not memory or mib >= kind.memory_mib)
    return total


def placed(
    machine: tuple[list[int], int, int, int], asked: Asked, place: int
) -> tuple[list[int], int, int, int] | None:
    """The machine with the request on it; None where it does not fit there."""
    free, cpu, mib, model = machine
    left = list(free)
    chosen = [place] if asked.partial else [at for at, share in enumerate(free) if share == WHOLE][: asked.count]
    for at in chosen:
        left[at] -= asked.share_micro
    fits = min(left) >= 0 and len(chosen) == asked.count and cpu >= asked.cpu_milli and mib >= asked.memory_mib
    return (left, cpu - asked.cpu_milli, mib - asked.memory_mib, model) if fits else None


@given(found=st.lists(machines, min_size=1, max_size=5), asked=requests)
def test_usable_is_what_the_definition_says_before_and_after_a_placement(found, asked):
    table, change = Usable(KINDS, [kind.number for kind in KINDS], MODELS), Change(seen(found), asked)
    assert [usable(machine, memory=False) for machine in found] == table.of(seen(found)).tolist()
    gained = change.of_rows(table.gained(change)).reshape(len(found), 4)
    for at, place in product(range(len(found)), range(4)):
        if (after := placed(found[at], asked, place)) is not None:
            assert usable(after, memory=False) - usable(found[at], memory=False) == gained[at, place]


def served(machine: tuple[list[int], int, int, int]) -> int:
    free, cpu, mib, model = machine
    total = 0
    for kind in KINDS:
        shape = kind.shape
        if not shape.count or (shape.models and (model >= len(MODELS) or MODELS[model] not in shape.models)):
            continue
        one = shape.count == 1
        copies = sum(share // shape.share_micro for share in free) if one else free.count(WHOLE) // shape.count
        limits = [copies * 1_000, cpu * 1_000 // shape.cpu_milli]
        limits += [mib * 1_000 // kind.memory_mib] if kind.memory_mib else []
        total += kind.number * shape.gpu_micro // 1_000 * min(limits) * (min(limits) >= 1_000)
    return total


def points(machine: tuple[list[int], int, int, int], rests: Rests) -> int:
    free, cpu, _, _ = machine
    return min(sum(free) * 1_000, cpu * WORTH // 7_700) + 13 * sum(int(rests.value[share // 1_000]) for share in free)


@given(found=st.lists(machines, min_size=1, max_size=5), asked=requests)
def test_worth_is_what_its_definition_says_before_and_after_a_placement(found, asked):
    found = [([share - share % 1_000 for share in machine[0]], *machine[1:]) for machine in found]
    numbers, rests = [kind.number for kind in KINDS], Rests.of({300_000: 10, 500_000: 30})
    table = Worth(KINDS, numbers, MODELS, rests, rest=13, cpu_per_device_milli=7_700)
    change = Change(seen(found), asked)
    gained = change.of_rows(table.gained(change)).reshape(len(found), 4, 3)
    for at, place in product(range(len(found)), range(4)):
        if (after := placed(found[at], asked, place)) is not None:
            had, has = ((usable(one, memory=True), served(one), points(one, rests)) for one in (found[at], after))
            assert [new - old for new, old in zip(has, had, strict=True)] == gained[at, place].tolist()


def test_of_an_idle_node_all_is_fragment_for_requests_without_gpu():
    table = Usable(KINDS, [kind.number for kind in KINDS], MODELS)
    idle = seen([([WHOLE] * 4, 40_000, 131_072, 0)])
    assert [15 * 4 * WHOLE] == fragments(table, idle, 100).tolist()


def test_two_sizes_that_fill_a_device_together_are_worth_one_together():
    rests = Rests.of({600_000: 10, 400_000: 10})
    assert WORTH == rests.price[600] + rests.price[400]


def test_a_size_that_goes_twice_into_a_device_is_worth_half():
    rests = Rests.of({500_000: 7, 0: 3, WHOLE: 9})
    assert WORTH // 2 == rests.price[500]
    assert [0, WORTH // 2, WORTH // 2, WORTH] == rests.value[[499, 500, 999, 1000]].tolist()


def test_a_rest_that_nothing_fits_in_is_worth_nothing_and_breaking_a_device_for_it_costs_that():
    rests = Rests.of({810_000: 10})
    assert WORTH == rests.price[810]
    assert 0 == rests.value[190]
    assert rests.value[1_000] == rests.value[190] + rests.priced(810_000)


def test_nothing_is_worth_nothing_and_a_whole_device_one():
    assert (0, WORTH) == (Rests.of({810_000: 10}).priced(0), Rests.of({810_000: 10}).priced(WHOLE))


def test_without_parts_a_rest_is_worth_nothing_but_a_whole_device():
    rests = Rests.of({})
    assert [0, 0, WORTH] == rests.value[[0, 999, 1000]].tolist()


@given(st.dictionaries(st.integers(10, 999).map(lambda milli: milli * 1_000), st.integers(1, 100), max_size=6))
def test_no_mix_of_sizes_in_a_device_is_worth_more_than_the_device(numbers):
    rests = Rests.of(numbers)
    assert (np.diff(rests.value) >= 0).all()
    for size in numbers:
        lost = rests.value[size // 1_000 :] - rests.value[: 1_001 - size // 1_000] - rests.priced(size)
        assert (lost >= -WORTH // 10**5).all()


def test_a_kind_weighs_more_the_fewer_places_there_are_for_it():
    rooms = (Room("A", 8, 96_000, 90), Room("B", 8, 96_000, 10))
    kinds = [
        Wanted(Shape(4_000, 1, WHOLE, ("A",)), 10),
        Wanted(Shape(4_000, 1, WHOLE, ("B",)), 10),
        Wanted(Shape(1, 0, 0), 20),
    ]
    common, rare, none = scarce_weights(kinds, rooms)
    assert rare > 5 * common
    assert CERTAIN // 2 == none
    assert abs(CERTAIN // 2 - common - rare) <= 1


def test_the_head_of_a_workload_is_the_shortest_run_that_makes_up_95_percent():
    shapes = [(Shape(1_000, 1, WHOLE), 90), (Shape(2_000, 1, WHOLE), 5), (Shape(3_000, 1, WHOLE), 5)]
    workload = Workload.of((shape, 10) for shape, number in shapes for _ in range(number))
    assert [1_000, 3_000] == [kind.shape.cpu_milli for kind in workload.head]
    assert 10 == workload.head[0].memory_mib


def test_an_outlook_knows_the_models_and_rooms_of_the_cluster():
    made = cluster(node("a", 2), node("b", 2), node("c", (device("x", 0, model="L4"),), cpu_milli=4_000), node("d", 0))
    outlook = outlook_on(made, Workload())
    assert {Room("H100", 2, 8_000, 2), Room("L4", 1, 4_000, 1)} == set(outlook.rooms)
    assert {"H100", "L4"} == set(outlook.models) - {""}


def test_a_placer_learns_what_it_is_asked_for():
    made, learned = cluster(node("a", 2)), Learned()
    before = learned.strategies["laxity"]
    for _ in range(64):
        assert before is learned.strategies["laxity"]
        learned.note(made, request(Gpu(share=0.5), cpu_milli=2_000))
    outlook: Outlook = learned.strategies["laxity"].outlook  # type: ignore[attr-defined]
    assert [(Shape(2_000, 1, 500_000), 64)] == [(kind.shape, kind.number) for kind in outlook.workload.kinds]
    assert learned.strategies["binpack"] is not None


def test_who_asks_for_what_there_is_not_is_told_so_and_counts_for_nobody():
    made, learned = cluster(node("a", 2)), Learned()
    for _ in range(2):
        with pytest.raises(FieldError, match=r"gpu\.share"):
            learned.note(made, request(Gpu(share=1e-9)))
    for name in map(str, range(64)):
        learned.note(made, request(Gpu(share=0.5), cpu_milli=2_000, name=name))
    outlook: Outlook = learned.strategies["laxity"].outlook  # type: ignore[attr-defined]
    assert [(Shape(2_000, 1, 500_000), 64)] == [(kind.shape, kind.number) for kind in outlook.workload.kinds]


def test_what_was_learned_long_ago_counts_less_and_is_forgotten():
    made, learned = Cluster(), Learned()
    learned.note(made, request(Gpu(share=0.5)))
    for _ in range(60):
        learned.note(made, request(Gpu(), replicas=1_000))
    outlook: Outlook = learned.strategies["fgd"].outlook  # type: ignore[attr-defined]
    assert [WHOLE] == [kind.shape.share_micro for kind in outlook.workload.kinds]

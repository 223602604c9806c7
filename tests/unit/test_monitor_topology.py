"""Which GPUs are near each other: groups from NVLinks and PCIe as drivers tell them, and what stays as it was."""

from __future__ import annotations

import pytest

from services.monitor.probes.nvml_process import Asked, AskedLevels, AskedLinks, RawGpu
from services.monitor.probes.topology import Topology

GPU, SWITCH, UNKNOWN = 0, 2, 255
SOCKET, SYSTEM = 40, 50


def bus(index: int) -> str:
    return f"0000000{index}:1B:00.0"


def gpu(index: int, links: list[tuple[int, int]] | None = None, levels: list[tuple[int, int]] | None = None) -> RawGpu:
    """``links``: what kind of thing is at the other end, and at which place on the bus."""
    found = None if links is None else tuple((kind, bus(at)) for kind, at in links)
    return RawGpu(
        index=index,
        uuid=Asked(value=f"g{index}"),
        pci_bus_id=Asked(value=bus(index)),
        links=AskedLinks(value=found, reason=None if found is not None else "not_supported"),
        levels=AskedLevels(value=None if levels is None else tuple(levels)),
    )


def groups(*gpus: RawGpu) -> dict[str, str]:
    topology = Topology()
    topology.take(gpus)
    return topology.groups()


def test_gpus_that_nvlink_bridges_are_a_group() -> None:
    pairs = [gpu(0, [(GPU, 2)] * 4), gpu(1, [(GPU, 3)]), gpu(2, [(GPU, 0)] * 4), gpu(3, [(GPU, 1)])]
    first, second = f"nvlink-{bus(0)}", f"nvlink-{bus(1)}"
    assert {"g0": first, "g1": second, "g2": first, "g3": second} == groups(*pairs)


def test_gpus_on_switches_reach_each_other_whichever_switch_a_link_ends_at() -> None:
    assert 1 == len(set(groups(*[gpu(n, [(SWITCH, 7 - n)]) for n in range(4)]).values()))


def test_a_link_to_what_is_no_gpu_of_the_machine_links_nobody() -> None:
    told = groups(gpu(0, [(UNKNOWN, 9)], []), gpu(1, [(GPU, 9)], []))
    assert {"g0": f"pcie-{bus(0)}", "g1": f"pcie-{bus(1)}"} == told


def test_gpus_without_nvlink_are_grouped_by_what_is_reached_without_crossing_processors() -> None:
    levels = [[(1, SOCKET), (2, SYSTEM), (3, SYSTEM)], [(2, SYSTEM), (3, SYSTEM)], [(3, 10)], []]
    told = groups(*(gpu(n, None, level) for n, level in enumerate(levels)))
    assert [f"pcie-{bus(n)}" for n in (0, 0, 2, 2)] == [told[f"g{n}"] for n in range(4)]


def test_a_gpu_near_nobody_shares_no_group_with_others_like_it() -> None:
    told = groups(gpu(0, [(GPU, 1)], []), gpu(1, [(GPU, 0)], []), gpu(2, [], []), gpu(3, [], []))
    assert 3 == len(set(told.values()))


@pytest.mark.parametrize("alone", [[], [gpu(0, [(SWITCH, 9)], [])], [gpu(0), gpu(1)]])
def test_where_there_is_one_gpu_or_nothing_is_told_there_is_no_group(alone: list[RawGpu]) -> None:
    assert {} == groups(*alone)


def test_a_gpu_that_is_lost_or_not_asked_in_this_cycle_stays_where_it_was() -> None:
    topology = Topology()
    topology.take([gpu(0, [(GPU, 1)], [(1, SYSTEM)]), gpu(1, [(GPU, 0)], [])])
    before = topology.groups()
    topology.take([RawGpu(index=0, uuid=Asked(value="g0", reason="gpu_lost")), gpu(1)])
    assert (2, before) == (len(before), topology.groups())


def test_a_link_that_went_down_links_no_more() -> None:
    topology = Topology()
    topology.take([gpu(0, [(GPU, 1)], [(1, SYSTEM)]), gpu(1, [(GPU, 0)], [])])
    topology.take([gpu(0, [], [(1, SYSTEM)]), gpu(1, [], [])])
    assert {"g0": f"pcie-{bus(0)}", "g1": f"pcie-{bus(1)}"} == topology.groups()

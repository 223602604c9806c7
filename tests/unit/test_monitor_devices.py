"""Unknown is never told as zero, one bad value never hides another, and an ill device is trusted again slowly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.monitor.core import Core, Probed, ProbeFailed
from services.monitor.devices import RECOVER_AFTER
from services.monitor.probes.base import (
    IMPLAUSIBLE,
    LOST,
    NOT_SUPPORTED,
    RECOVERING,
    STALE,
    UNREADABLE,
    Capacity,
    ContainerReading,
    DeviceReading,
    Reading,
    Snapshot,
)
from shared.effects import Tick
from shared.messages import DeviceMetrics, NodeMetrics, Regime

SECOND_US = 1_000_000


def device(number: int = 0, **values: object) -> DeviceReading:
    good = DeviceReading(
        uuid=f"GPU-{number}",
        index=number,
        model="H200",
        regime=Regime.EXCLUSIVE,
        memory_mib=Reading(1000),
        utilisation_ratio=Reading(0.5),
        memory_used_mib=Reading(10),
        foreign_share_micro=Reading(0),
        foreign_memory_mib=Reading(0),
    )
    return replace(good, **values)  # type: ignore[arg-type]


class Node:
    def __init__(self) -> None:
        self.core = Core("n1", "start", "boot", Capacity(2000, 4096))
        self.now_us = 0
        self.wall_us = 1

    def probe(self, *devices: DeviceReading, **more: object) -> None:
        self.core.handle(Probed(Snapshot(devices, **more)), self.now_us)  # type: ignore[arg-type]
        self.core.check()

    @property
    def metrics(self) -> NodeMetrics:
        (emit,) = self.core.handle(Tick("metrics", self.wall_us), self.now_us)
        assert isinstance(emit.body, NodeMetrics)
        assert emit.body == NodeMetrics.from_json(emit.body.to_json())
        return emit.body

    @property
    def devices(self) -> tuple[DeviceMetrics, ...]:
        return self.metrics.devices


@pytest.mark.parametrize("number", [4_294_967_295, -1, 1.01, float("nan"), float("inf"), 1 << 70])
def test_M14_M15_an_impossible_number_is_rejected_and_counted(number: float) -> None:
    node = Node()
    node.probe(device(utilisation_ratio=Reading(number)))
    assert (None, IMPLAUSIBLE) == (node.devices[0].utilisation_ratio.value, node.devices[0].utilisation_ratio.reason)
    assert 1 == node.metrics.counters["probe.rejected.utilisation_ratio"]


def test_M15_more_memory_used_than_there_is_is_rejected() -> None:
    node = Node()
    node.probe(device(memory_used_mib=Reading(1001)))
    assert IMPLAUSIBLE == node.devices[0].memory_used_mib.reason


@pytest.mark.parametrize("text", ["[n/a]", "ERROR - FAILED TO CONVERT TO STRING", True, [1]])
def test_M26_M28_what_is_no_number_is_unknown(text: object) -> None:
    node = Node()
    node.probe(device(utilisation_ratio=Reading(text)))
    assert (None, UNREADABLE) == (node.devices[0].utilisation_ratio.value, node.devices[0].utilisation_ratio.reason)


def test_M17_one_bad_value_leaves_the_others_of_its_device() -> None:
    node = Node()
    node.probe(device(utilisation_ratio=Reading(None, NOT_SUPPORTED)))
    (told,) = node.devices
    assert (True, 1000, 10.0, 0) == (
        told.healthy,
        told.memory_mib,
        told.memory_used_mib.value,
        told.foreign_share_micro,
    )


def test_M4_an_unknown_value_keeps_its_reason_and_is_no_zero() -> None:
    node = Node()
    node.probe(device(utilisation_ratio=Reading(None, NOT_SUPPORTED), foreign_share_micro=Reading(None, NOT_SUPPORTED)))
    (told,) = node.devices
    assert (None, NOT_SUPPORTED, None) == (
        told.utilisation_ratio.value,
        told.utilisation_ratio.reason,
        told.foreign_share_micro,
    )


def test_M6_coverage_counts_the_values_that_are_known() -> None:
    node = Node()
    node.probe(device(0), device(1, **dict.fromkeys(("memory_mib", "utilisation_ratio"), Reading(None, NOT_SUPPORTED))))
    assert (10, 8) == (node.metrics.counters["probe.fields"], node.metrics.counters["probe.fields_known"])


def test_M21_one_lost_device_leaves_the_others() -> None:
    node = Node()
    node.probe(device(0), device(1), device(2))
    node.probe(device(0), device(2))
    assert [(True, None), (False, LOST), (True, None)] == [(d.healthy, d.reason) for d in node.devices]
    assert (None, LOST) == (node.devices[1].utilisation_ratio.value, node.devices[1].utilisation_ratio.reason)
    assert 1000 == node.devices[1].memory_mib


def test_M22_M23_a_device_that_is_back_is_healthy_again_after_a_few_good_readings() -> None:
    node = Node()
    node.probe(device())
    node.probe()
    seen = []
    for _ in range(RECOVER_AFTER):
        node.probe(device())
        seen.append((node.devices[0].healthy, node.devices[0].reason))
    assert [(False, RECOVERING)] * (RECOVER_AFTER - 1) + [(True, None)] == seen


def test_M22_a_device_that_comes_and_goes_is_not_healthy_in_between() -> None:
    node = Node()
    node.probe(device())
    for _ in range(5):
        node.probe()
        node.probe(device())
        assert not node.devices[0].healthy


def test_M19_a_fault_is_told_with_its_reason_and_ends() -> None:
    node = Node()
    node.probe(device(fault="xid 79"))
    assert [(False, "xid 79")] == [(d.healthy, d.reason) for d in node.devices]
    for _ in range(RECOVER_AFTER):
        node.probe(device())
    assert node.devices[0].healthy


def test_M24_values_of_a_probe_that_hangs_expire() -> None:
    node = Node()
    node.probe(device(), foreign_cpu_milli=Reading(5), containers=(ContainerReading("c"),))
    node.now_us = 3 * SECOND_US
    assert (0.5, True, 5) == (
        node.devices[0].utilisation_ratio.value,
        node.devices[0].healthy,
        node.metrics.foreign_cpu_milli,
    )
    node.core.handle(ProbeFailed("hung"), node.now_us)
    node.now_us += 1
    (told,) = node.devices
    assert (False, STALE, None, STALE) == (
        told.healthy,
        told.reason,
        told.utilisation_ratio.value,
        told.utilisation_ratio.reason,
    )
    assert (None, None, None, ()) == (
        told.foreign_share_micro,
        told.foreign_memory_mib,
        node.metrics.foreign_cpu_milli,
        node.metrics.containers,
    )
    assert 1 == node.metrics.counters["probe.hung"]


def test_M24_after_a_hang_a_device_is_trusted_again_slowly() -> None:
    node = Node()
    node.probe(device())
    node.now_us = 10 * SECOND_US
    node.probe(device())
    assert (False, RECOVERING) == (node.devices[0].healthy, node.devices[0].reason)


def test_M37_the_uuid_identifies_a_device_whatever_its_index() -> None:
    node = Node()
    node.probe(device(0), device(1))
    node.probe(device(0, index=1, utilisation_ratio=Reading(0.1)), device(1, index=0, utilisation_ratio=Reading(0.9)))
    assert [("GPU-1", 0, 0.9), ("GPU-0", 1, 0.1)] == [
        (d.uuid, d.index, d.utilisation_ratio.value) for d in node.devices
    ]


def test_M37_two_devices_of_one_uuid_are_one_and_counted() -> None:
    node = Node()
    node.probe(device(0), device(0, index=1))
    assert 1 == len(node.devices)
    assert 1 == node.metrics.counters["probe.rejected.uuid"]


def test_M7_pids_that_cannot_be_are_left_out() -> None:
    node = Node()
    node.probe(device(), containers=(ContainerReading("c", pids=(0, -1, 17, 1 << 40)),))
    assert [(17,)] == [container.pids for container in node.metrics.containers]


def test_a_device_says_how_old_its_values_are_and_since_when_once_a_cycle_has_missed_it() -> None:
    node = Node()
    node.wall_us = 90 * SECOND_US
    node.now_us = 10 * SECOND_US
    node.probe(device(age_us=300_000))
    assert (300_000, None) == (node.devices[0].age_us, node.devices[0].stale_since_us)
    node.now_us, node.wall_us = 11 * SECOND_US, 91 * SECOND_US
    assert (1_300_000, None) == (node.devices[0].age_us, node.devices[0].stale_since_us)
    node.core.handle(ProbeFailed("hung"), node.now_us)
    assert (1_300_000, 89_700_000) == (node.devices[0].age_us, node.devices[0].stale_since_us)
    node.probe(device())
    assert (0, None) == (node.devices[0].age_us, node.devices[0].stale_since_us)


@pytest.mark.parametrize("devices", [(), (device(fault="gpu_lost", read=False),)], ids=["left out", "told as before"])
def test_a_device_that_a_cycle_did_not_read_is_as_old_as_it_was(devices: tuple[DeviceReading, ...]) -> None:
    node = Node()
    node.probe(device())
    node.now_us = SECOND_US
    node.probe(*devices)
    assert (SECOND_US, 1 - SECOND_US) == (node.devices[0].age_us, node.devices[0].stale_since_us)


def test_where_values_come_from_is_told_once_and_what_differs_by_its_name() -> None:
    node = Node()
    node.probe(device(source="nvml", sources={"memory_mib": "/proc/meminfo"}))
    assert ("nvml", {"memory_mib": "/proc/meminfo"}) == (node.devices[0].source, node.devices[0].sources)


def test_a_plain_number_that_is_unknown_has_its_reason_beside_it() -> None:
    node = Node()
    node.probe(device(memory_mib=Reading(None, NOT_SUPPORTED), foreign_memory_mib=Reading(-1)))
    assert {"memory_mib": NOT_SUPPORTED, "foreign_memory_mib": IMPLAUSIBLE} == node.devices[0].reasons
    node.now_us = 4 * SECOND_US
    assert {"memory_mib": NOT_SUPPORTED, "foreign_memory_mib": STALE, "foreign_share_micro": STALE} == (
        node.devices[0].reasons
    )

"""What a GPU's driver tells of its health, on a driver library without a GPU: what makes it ill, and until when."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from services.monitor.probes.base import DeviceReading, Reading
from services.monitor.probes.gpu import GpuSharing
from services.monitor.probes.nvml_process import AskedXids, NvmlProcess
from services.monitor.probes.xids import Xids
from tests.gpu_node import Node, faults


class Events:
    """A node at whose GPUs something happens: each row of the driver stays until it is said anew."""

    def __init__(self, node: Node, profile: str = "h100") -> None:
        self.node, self.rows = node, dict[str, str]()
        node.driver.plays(profile)
        node.process.restart()

    def says(self, call: str, device: str, answer: str) -> None:
        self.rows[f"{call} {device}"] = answer
        self.node.driver.fails(*(f"{row} {answer}" for row, answer in self.rows.items()))

    def read(self) -> tuple[DeviceReading, ...]:
        return self.node.until(lambda devices: bool(devices) and devices[0].fault != "driver_starting")

    def xids(self, device: int) -> list[tuple[int, int]]:
        return [(seen.xid, seen.count) for seen in self.read()[device].xids]


@pytest.fixture
def events(node: Node) -> Events:
    """One that has been looked at."""
    made = Events(node)
    made.read()
    return made


def asked(*xids: int, instance: int | None = None) -> AskedXids:
    return AskedXids(value=tuple((xid, instance, 1_000 * place) for place, xid in enumerate(xids, start=1)))


# --- XIDs ---


def test_xids_are_counted_by_code_with_the_time_of_the_last(events: Events) -> None:
    began_us = time.time_ns() // 1000
    events.says("EventSetWait_v2", "1", "13:-1 31:-1 13:-1")
    first, second = events.read()
    assert [(13, 2), (31, 1)] == [(seen.xid, seen.count) for seen in second.xids]
    assert all(began_us <= seen.at_us <= time.time_ns() // 1000 for seen in second.xids)
    assert [(), Reading(0)] == [first.xids, first.health["xid"]]
    events.says("EventSetWait_v2", "1", "13:-1 31:-1 13:-1 43:-1")
    assert [(13, 2), (31, 1), (43, 1)] == events.xids(1)
    assert Reading(43) == events.read()[1].health["xid"]


def test_what_happened_before_the_monitor_came_is_not_told(node: Node) -> None:
    events = Events(node)
    events.says("EventSetWait_v2", "0", "79:-1")
    assert [None, None] == faults(events.read())


def test_M19_a_fault_of_a_program_makes_no_gpu_ill_and_one_of_the_card_does(events: Events) -> None:
    events.says("EventSetWait_v2", "0", "13:-1 31:-1 43:-1 63:-1 92:-1")
    assert [None, None] == faults(events.read())
    events.says("EventSetWait_v2", "0", "13:-1 31:-1 43:-1 63:-1 92:-1 62:-1 45:-1")
    first, second = events.read()
    assert ("xid_62", Reading(45), None) == (first.fault, first.health["xid"], second.fault)


def test_M19_a_gpu_is_trusted_again_when_no_fatal_xid_has_come_for_a_while() -> None:
    xids = Xids(60, Counter())
    assert [48, 79] == xids.take("g", asked(48, 13, 79), now_s=100)
    assert [48] == xids.take("g", asked(48), now_s=130)
    assert ["xid_79", "xid_48", None] == [xids.fault("g", None, now_s) for now_s in (159.9, 189.9, 190)]
    assert [(13, 1), (48, 2), (79, 1)] == [(seen.xid, seen.count) for seen in xids.told("g", None)]


def test_events_of_the_other_gpus_are_heard_while_one_is_lost(events: Events) -> None:
    for call in ("DeviceGetHandleByIndex_v2", "DeviceGetMemoryInfo_v2"):
        events.says(call, "1", "error 15")
    events.says("EventSetWait_v2", "1", "79:-1")
    events.says("EventSetWait_v2", "0", "31:-1")
    first, second = events.read()
    assert ([(31, 1)], None) == ([(seen.xid, seen.count) for seen in first.xids], first.fault)
    assert ([(79, 1)], "gpu_lost", Reading(79)) == (
        [(seen.xid, seen.count) for seen in second.xids],
        second.fault,
        second.health["xid"],
    )


def test_a_gpu_whose_events_cannot_be_waited_for_says_why_and_is_heard_again(events: Events) -> None:
    events.says("EventSetWait_v2", "1", "error 999")
    assert [Reading(0), Reading(None, "driver_error")] == [device.health["xid"] for device in events.read()]
    events.says("EventSetWait_v2", "1", "")
    events.read()
    events.says("EventSetWait_v2", "1", "31:-1")
    assert [(31, 1)] == events.xids(1)


@pytest.mark.parametrize(
    "call, answer, reason",
    [
        ("DeviceGetSupportedEventTypes", "error 3", "not_supported"),
        ("DeviceGetSupportedEventTypes", "3", "not_supported"),
        ("DeviceRegisterEvents", "error 4", "no_permission"),
    ],
)
def test_where_the_driver_tells_no_xids_they_are_unknown_and_not_none(
    node: Node, call: str, answer: str, reason: str
) -> None:
    events = Events(node)
    events.says(call, "1", answer)
    first, second = events.read()
    assert (Reading(0), Reading(None, reason), ()) == (first.health["xid"], second.health["xid"], second.xids)


def test_counts_outlive_the_process_that_asks(events: Events, nvml_process: NvmlProcess) -> None:
    events.says("EventSetWait_v2", "0", "31:-1")
    assert [(31, 1)] == events.xids(0)
    nvml_process.restart()
    assert [(31, 1)] == events.xids(0)


def test_a_part_of_a_split_gpu_has_its_own_xids_and_those_of_the_whole(node: Node) -> None:
    events = Events(node, "h200-mig")
    events.read()
    events.says("EventSetWait_v2", "0", "95:2 31:-1")
    first, second, other = events.read()
    assert [("xid_95", [31, 95]), (None, [31]), (None, [])] == [
        (device.fault, [seen.xid for seen in device.xids]) for device in (first, second, other)
    ]


# --- memory that is broken ---


def test_a_card_that_has_no_spare_rows_left_is_ill_also_when_it_is_split_and_does_not_tell_any_more(
    events: Events,
) -> None:
    events.says("DeviceGetRemappedRows", "1", "0 8 1 0")
    assert [None, None] == faults(events.read())  # a reset is due, and nothing is broken until then
    events.says("DeviceGetRemappedRows", "1", "0 8 0 1")
    assert [None, "row_remap_failure"] == faults(events.read())
    events.says("DeviceGetRemappedRows", "1", "error 3")
    assert [None, "row_remap_failure"] == faults(events.read())
    events.says("DeviceGetRemappedRows", "1", "0 0 0 0")
    assert [None, None] == faults(events.read())


@pytest.mark.parametrize("single, double, fault", [(0, 63, None), (30, 34, "retired_pages"), (0, 64, "retired_pages")])
def test_an_older_card_that_can_retire_no_more_pages_is_ill(
    events: Events, single: int, double: int, fault: str | None
) -> None:
    for cause, pages in enumerate((single, double)):
        events.says(f"DeviceGetRetiredPages:{cause}", "0", str(pages))
    device = events.read()[0]
    assert (single, double, fault) == (
        device.health["retired_pages_sbe"].value,
        device.health["retired_pages_dbe"].value,
        device.fault,
    )


def test_another_uncorrected_error_makes_a_gpu_ill_only_where_no_xid_would_tell(node: Node) -> None:
    for supported, expected in (("31", None), ("error 3", "ecc_uncorrected")):
        events = Events(Node(node.driver, node.process, GpuSharing()))
        events.says("DeviceGetSupportedEventTypes", "1", supported)
        events.says("DeviceGetTotalEccErrors:1:1", "1", "7")
        assert [None, None] == faults(events.read())
        events.says("DeviceGetTotalEccErrors:1:1", "1", "8")
        assert [None, expected] == faults(events.read())


def test_a_gpu_is_trusted_again_when_no_uncorrected_error_has_come_for_a_while(node: Node) -> None:
    events = Events(Node(node.driver, node.process, GpuSharing(xid_quiet_s=0.2)))
    events.says("DeviceGetSupportedEventTypes", "0", "error 3")
    events.read()
    events.says("DeviceGetTotalEccErrors:1:1", "0", "1")
    assert "ecc_uncorrected" == events.read()[0].fault
    events.node.until(lambda devices: faults(devices) == [None, None])


def test_unknown_numbers_make_nobody_ill(events: Events) -> None:
    for call in ("DeviceGetRemappedRows", "DeviceGetRetiredPages:[01]", "DeviceGetTotalEccErrors*"):
        events.says(call, "?", "error 999")
    assert [None, None] == faults(events.read())


def test_a_code_that_cannot_be_one_is_none_and_counted() -> None:
    counts: Counter[str] = Counter()
    xids = Xids(60, counts)
    assert [] == xids.take("g", asked(0, 1 << 40), now_s=1)
    assert ((), {"nvml.xid.implausible": 2}) == (xids.told("g", None), counts)


# --- what is linked to what ---


@pytest.mark.parametrize(
    "profile, rows, groups",
    [
        ("h100", (), ["nvlink-00000000:1B:00.0"] * 2),
        ("h100", ("DeviceGetNvLink* ? error 3",), ["pcie-00000000:1B:00.0", "pcie-00000000:43:00.0"]),
        ("h100", ("DeviceGetNvLinkRemoteDeviceType:* ? error 13",), ["pcie-00000000:1B:00.0", "pcie-00000000:43:00.0"]),
        ("h100", ("DeviceGetNvLink* ? error 3", "DeviceGetTopologyCommonAncestor* ? error 3"), [None, None]),
        ("a100-pairs", (), ["nvlink-00000000:1B:00.0", "nvlink-00000000:43:00.0"] * 2),
        ("a100-pairs", ("DeviceGetNvLink* ? error 3",), ["pcie-00000000:1B:00.0"] * 2 + ["pcie-00000000:A1:00.0"] * 2),
        ("geforce", (), [None]),
        ("h200-mig", (), [None, None, "nvlink-00000000:1B:00.0"]),
    ],
)
def test_gpus_have_the_group_that_the_driver_tells(
    node: Node, profile: str, rows: tuple[str, ...], groups: list[str | None]
) -> None:
    events = Events(node, profile)
    node.driver.fails(*rows)
    assert groups == [device.group for device in events.read()]


def test_a_gpu_that_is_lost_at_the_start_leaves_the_others_groups(node: Node) -> None:
    events = Events(node, "a100-pairs")
    node.driver.fails("* 1 error 15")
    found = {device.index: device.group for device in events.read()}
    assert (found[0], "nvlink-00000000:1B:00.0") == (found[2], found[0])

"""What a GPU's driver tells of its health, on a driver library without a GPU: what makes it ill, and until when."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from services.monitor.probes.base import Capacity, DeviceReading, Reading, Snapshot
from services.monitor.probes.gpu import GpuProbe, GpuSharing
from services.monitor.probes.nvml_process import AskedXids, NvmlProcess
from services.monitor.probes.xids import Xids
from tests.fake_nvml.build import FakeDriver, build_fake_nvml

GPU0, GPU1 = (f"GPU-fake0000-0000-0000-0000-00000000000{index}" for index in (0, 1))
LONG_S = 20.0


class Host:
    """The rest of the node: nothing."""

    def capacity(self) -> Capacity:
        return Capacity(8_000, 32_000)

    def read(self) -> Snapshot:
        return Snapshot(())


class Node:
    """A probe and its driver. What happens to GPUs comes on top of what happened before."""

    def __init__(self, driver: FakeDriver, process: NvmlProcess, quiet_s: float = 600) -> None:
        self.driver = driver
        self.probe = GpuProbe(Host(), process, GpuSharing(), quiet_s=quiet_s)
        self.rows: dict[str, str] = {}

    def says(self, call: str, device: str, answer: str) -> None:
        self.rows[f"{call} {device}"] = answer
        self.driver.fails(*(f"{row} {answer}" for row, answer in self.rows.items()))

    def read(self) -> tuple[DeviceReading, ...]:
        """What the driver says now; a new process takes its time."""
        until_s = time.monotonic() + LONG_S
        while True:
            devices = self.probe.read().devices
            if devices and devices[0].fault != "driver_starting":
                return devices
            assert time.monotonic() < until_s

    def xids(self, device: int) -> list[tuple[int, int]]:
        return [(seen.xid, seen.count) for seen in self.read()[device].xids]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
    folder = tmp_path_factory.mktemp("driver")
    made = FakeDriver(build_fake_nvml(folder), folder / "profile")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        yield made


@pytest.fixture
def process(library: FakeDriver) -> Iterator[NvmlProcess]:
    made = NvmlProcess(LONG_S, first_deadline_s=LONG_S, pause_s=0.001)
    yield made
    made.restart()


@pytest.fixture
def node(library: FakeDriver, process: NvmlProcess) -> Node:
    library.plays("h100")
    made = Node(library, process)
    made.read()
    return made


def faults(devices: tuple[DeviceReading, ...]) -> list[str | None]:
    return [device.fault for device in devices]


def asked(*xids: int, instance: int | None = None) -> AskedXids:
    return AskedXids(value=tuple((xid, instance, 1_000 * place) for place, xid in enumerate(xids, start=1)))


# --- XIDs ---


def test_xids_are_counted_by_code_with_the_time_of_the_last(node: Node) -> None:
    began_us = time.time_ns() // 1000
    node.says("EventSetWait_v2", "1", "13:-1 31:-1 13:-1")
    first, second = node.read()
    assert [(13, 2), (31, 1)] == [(seen.xid, seen.count) for seen in second.xids]
    assert all(began_us <= seen.at_us <= time.time_ns() // 1000 for seen in second.xids)
    assert [(), Reading(0)] == [first.xids, first.health["xid"]]
    node.says("EventSetWait_v2", "1", "13:-1 31:-1 13:-1 43:-1")
    assert [(13, 2), (31, 1), (43, 1)] == node.xids(1)
    assert Reading(43) == node.read()[1].health["xid"]


def test_what_happened_before_the_monitor_came_is_not_told(library: FakeDriver, process: NvmlProcess) -> None:
    library.plays("h100")
    node = Node(library, process)
    node.says("EventSetWait_v2", "0", "79:-1")
    assert [None, None] == faults(node.read())


def test_M19_a_fault_of_a_program_makes_no_gpu_ill_and_one_of_the_card_does(node: Node) -> None:
    node.says("EventSetWait_v2", "0", "13:-1 31:-1 43:-1 63:-1 92:-1")
    assert [None, None] == faults(node.read())
    node.says("EventSetWait_v2", "0", "13:-1 31:-1 43:-1 63:-1 92:-1 62:-1 45:-1")
    first, second = node.read()
    assert ("xid_62", Reading(45), None) == (first.fault, first.health["xid"], second.fault)


def test_M19_a_gpu_is_trusted_again_when_no_fatal_xid_has_come_for_a_while() -> None:
    xids = Xids(quiet_s=60)
    assert [48, 79] == xids.take("g", asked(48, 13, 79), now_s=100)
    assert [48] == xids.take("g", asked(48), now_s=130)
    assert ["xid_79", "xid_48", None] == [xids.fault("g", None, now_s) for now_s in (159.9, 189.9, 190)]
    assert [(13, 1), (48, 2), (79, 1)] == [(seen.xid, seen.count) for seen in xids.told("g", None)]


def test_events_of_the_other_gpus_are_heard_while_one_is_lost(node: Node) -> None:
    for call in ("DeviceGetHandleByIndex_v2", "DeviceGetMemoryInfo_v2"):
        node.says(call, "1", "error 15")
    node.says("EventSetWait_v2", "1", "79:-1")
    node.says("EventSetWait_v2", "0", "31:-1")
    first, second = node.read()
    assert ([(31, 1)], None) == ([(seen.xid, seen.count) for seen in first.xids], first.fault)
    assert ([(79, 1)], "gpu_lost", Reading(79)) == (
        [(seen.xid, seen.count) for seen in second.xids],
        second.fault,
        second.health["xid"],
    )


def test_a_gpu_whose_events_cannot_be_waited_for_says_why_and_is_heard_again(node: Node) -> None:
    node.says("EventSetWait_v2", "1", "error 999")
    assert [Reading(0), Reading(None, "driver_error")] == [device.health["xid"] for device in node.read()]
    node.says("EventSetWait_v2", "1", "")
    node.read()
    node.says("EventSetWait_v2", "1", "31:-1")
    assert [(31, 1)] == node.xids(1)


@pytest.mark.parametrize(
    "call, answer, reason",
    [
        ("DeviceGetSupportedEventTypes", "error 3", "not_supported"),
        ("DeviceGetSupportedEventTypes", "3", "not_supported"),
        ("DeviceRegisterEvents", "error 4", "no_permission"),
    ],
)
def test_where_the_driver_tells_no_xids_they_are_unknown_and_not_none(
    library: FakeDriver, process: NvmlProcess, call: str, answer: str, reason: str
) -> None:
    library.plays("h100")
    node = Node(library, process)
    node.says(call, "1", answer)
    first, second = node.read()
    assert (Reading(0), Reading(None, reason), ()) == (first.health["xid"], second.health["xid"], second.xids)


def test_counts_outlive_the_process_that_asks(node: Node, process: NvmlProcess) -> None:
    node.says("EventSetWait_v2", "0", "31:-1")
    assert [(31, 1)] == node.xids(0)
    process.restart()
    assert [(31, 1)] == node.xids(0)


def test_a_part_of_a_split_gpu_has_its_own_xids_and_those_of_the_whole(
    library: FakeDriver, process: NvmlProcess
) -> None:
    library.plays("h200-mig")
    node = Node(library, process)
    node.read()
    node.says("EventSetWait_v2", "0", "95:2 31:-1")
    first, second, other = node.read()
    assert [("xid_95", [31, 95]), (None, [31]), (None, [])] == [
        (device.fault, [seen.xid for seen in device.xids]) for device in (first, second, other)
    ]


def test_a_code_that_cannot_be_one_is_none() -> None:
    xids = Xids(quiet_s=60)
    assert [] == xids.take("g", asked(0, 1 << 40), now_s=1)
    assert () == xids.told("g", None)


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
    library: FakeDriver, process: NvmlProcess, profile: str, rows: tuple[str, ...], groups: list[str | None]
) -> None:
    library.plays(profile)
    library.fails(*rows)
    assert groups == [device.group for device in Node(library, process).read()]


def test_a_gpu_that_is_lost_at_the_start_leaves_the_others_groups(library: FakeDriver, process: NvmlProcess) -> None:
    library.plays("a100-pairs")
    library.fails("* 1 error 15")
    found = {device.index: device.group for device in Node(library, process).read()}
    assert (found[0], "nvlink-00000000:1B:00.0") == (found[2], found[0])

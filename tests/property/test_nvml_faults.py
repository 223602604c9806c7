"""Random faults of NVIDIA's driver, through the unmodified binding: what is published stays true whatever it does.

No value of the machine is zero and no fault says zero where a zero may be meant, so a zero that is published was made
of something unknown. ``make test`` has a thousand faults, ``make test-slow`` ten thousand.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from services.monitor.core import Core, Probed
from services.monitor.probes.base import Capacity
from services.monitor.probes.nvml_process import NvmlProcess
from services.monitor.probes.reasons import Reason
from shared.effects import Tick
from shared.messages import DeviceMetrics, GpuUse, Measured, NodeMetrics
from tests.fake_nvml.build import FakeDriver, build_fake_nvml
from tests.gpu_node import DEADLINE_S, FOREIGN, OURS, Node

MACHINES = ("h100", "h200", "h200-mig", "l40s", "geforce", "gb10", "gb10-zero", "jetson", "jetson-zero", "old", "r510")
HASTE_S = 0.3
"""How long the driver may take in a cycle."""
BUSY = (
    f"DeviceGetComputeRunningProcesses* [0-9]* {FOREIGN}:{100 << 20}",
    f"DeviceGetComputeRunningProcesses* 1 {FOREIGN}:{100 << 20} {OURS}:{50 << 20}",
    "DeviceGetTotalEccErrors* [0-9]* 5",
    "DeviceGetRemappedRows [0-9]* 1 2 1 1",
    "DeviceGetFanSpeed [0-9]* 30",
    "DeviceGetPcieReplayCounter [0-9]* 3",
    "DeviceGetRetiredPages* [0-9]* 1",
    "DeviceGetViolationStatus:? [0-9]* 7 9000",
    "GpmQueryDeviceSupport [0-9]* 1",
    "GpmMetricsGet:* [0-9]* 40",
)
"""What makes a machine one without a zero; a driver refuses what it refuses all the same."""
LIMITS = {
    "memory_mib": 1 << 24,
    "utilisation_ratio": 1,
    "foreign_share_micro": 1_000_000,
    "temperature_celsius": 200,
    "power_mw": 10_000_000,
    "sm_clock_mhz": 20_000,
    "memory_clock_mhz": 50_000,
    "fan_ratio": 2,
    "persistence_mode": 1,
    "row_remap_failure": 1,
    "row_remap_pending": 1,
    "retired_pages_pending": 1,
    "sm_clock_max_mhz": 20_000,
    "xid": 999,
}
"""More than this is no such number, whatever the monitor's own limits say."""
CALLS = (
    *("GetUUID", "GetName", "GetMemoryInfo", "GetMemoryInfo_v2", "GetUtilizationRates", "GetTemperature:0"),
    *("GetPowerUsage", "GetTotalEnergyConsumption", "GetClockInfo:1", "GetClockInfo:2", "GetFanSpeed", "GetMigMode"),
    *("GetCurrentClocksEventReasons", "GetCurrentClocksThrottleReasons", "GetTotalEccErrors:1:1", "GetRemappedRows"),
    *("GetComputeRunningProcesses*", "GetComputeRunningProcesses_v3", "GetGraphicsRunningProcesses*"),
    *("GetComputeMode", "GetPersistenceMode", "GetMaxMigDeviceCount", "GetGpuInstanceId", "GetPciInfo_v3"),
    *("GetRetiredPages*", "GetPcieReplayCounter", "GetMaxClockInfo:1", "GetSupportedEventTypes", "RegisterEvents"),
    *("GetNvLinkState:*", "GetNvLinkRemotePciInfo_v2:*", "GetTopologyCommonAncestor:*", "GetProcessUtilization"),
    "GetViolationStatus:?",
)
GPM = ("GpmQueryDeviceSupport", "GpmMigSampleGet:*", "GpmMigSampleGet:5", "GpmMetricsGet:*", "GpmMetricsGet:1:2")
OF_GPM = ("nan", "-inf", "1e308", "-3", "100.0001", "37.5", "error 4", "error 13", "error 15", "error 25", "error 999")
WIDE = (
    "*",
    "EventSetWait_v2",
    "DeviceGet[A-M]*",
    "DeviceGet[N-Z]*",
    "DeviceGetHandleByIndex_v2",
    "DeviceGetMigDeviceHandleByIndex",
)
OF_ONE_PROCESS = ("not_supported", "implausible")
"""Reasons why a sum over processes is unknown although it is known who they are."""
CODES = (*range(1, 31), 77, 999)
HUGE = (2**32 - 1, 2**31 - 16, 2**31 - 1, 2**63 - 14, 2**63 - 16, 2**64 - 1, 2**64 - 2, 140737488355328, 101, 4096)
TEXTS = ("\udcff\udcfe", "[Unknown Error]", "x" * 90, "ERROR - FAILED TO CONVERT TO STRING", "GPU-\u00e9")
WHOLE = ("error 1", "error 9", "error 18", "error 999", "4294967295", "1", "1", "1", "2")
"""What the count of GPUs may turn into."""


def garbage(draw: random.Random, call: str) -> str:
    if call in ("GetUUID", "GetName"):
        return draw.choice(TEXTS)
    if "Processes" in call:
        pids = (0, 2**32 - 1, 100 << 20, 1 << 23, 32_768, FOREIGN) if draw.random() < 0.5 else (FOREIGN,)
        held = (FOREIGN, 1 << 50, -1, 100 << 20)
        return " ".join(f"{draw.choice(pids)}:{draw.choice(held)}" for _ in range(draw.choice((1, 1, 1, 3))))
    if call == "GetProcessUtilization":
        return " ".join(f"{FOREIGN}:{draw.choice((*HUGE, 40))}:{draw.choice((0, 5_000, -5_000))}" for _ in range(2))
    least = 1_000 if "ViolationStatus" in call else 1  # nanoseconds, of which microseconds are told
    return " ".join(str(max(least, draw.choice((*HUGE, draw.getrandbits(draw.choice((8, 32))))))) for _ in range(5))


def fault(draw: random.Random) -> str:
    """A row; one in a hundred hangs, crashes or delays for longer than there is time."""
    kind = draw.random()
    if kind < 0.004:
        return f"DeviceGetMemoryInfo* {draw.choice('01*')} {draw.choice(('hang', 'crash', 'delay 900'))}"
    if kind < 0.02:
        return f"DeviceGetCount_v2 - {draw.choice(WHOLE)}"
    call, device = draw.choice(CALLS), draw.choice(("0", "0", "1", "1", "0.0", "0.3", "0.?"))
    if kind < 0.03:
        return f"EventSetWait_v2 {device} {draw.choice((13, 79, 4_294_967_295))}:-1 {draw.choice((31, 48))}:2"
    if kind < 0.07:
        return f"{draw.choice(WIDE)} {device} error {draw.choice((15, 16, *CODES))}"
    if kind < 0.10:
        return f"Device{call} {device} delay {draw.choice((1, 2, 5))}"
    if kind < 0.13:
        return f"{draw.choice(GPM)} {device} {draw.choice(OF_GPM)}"
    if kind < 0.45:
        return f"Device{call} {device} error {draw.choice(CODES)}"
    return f"Device{call} {device} {garbage(draw, call)}"


@dataclass
class Watched:
    """A node under faults, and all that has been published of it."""

    node: Node
    draw: random.Random
    core: Core = field(default_factory=lambda: Core("n1", "start", "boot", Capacity(1000, 1000)))
    cycles: int = 0
    injected: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    well: dict[str, dict[str, float | None]] = field(default_factory=dict)
    machine: str = ""

    def boots(self, machine: str) -> None:
        """Another machine: what is known of the one before is no measure for it."""
        self.node.process.restart()
        self.core = Core("n1", "start", "boot", Capacity(1000, 1000))
        self.node = Node(self.node.driver, self.node.process, sys=self.node.sys)
        self.machine = machine
        self.node.driver.plays(machine)
        self.refused = [row for row in self.node.driver.rows if " error " in row]
        self.node.driver.fails(*BUSY, *self.refused)
        self.node.answers()
        self.well = {device.uuid: values(device) for device in self.publishes().devices}
        assert self.well

    def suffers(self, faults: list[str]) -> None:
        self.node.driver.fails(*BUSY, *self.refused, *faults)
        self.injected += len(faults)
        self.kinds.update(row.split(maxsplit=2)[2].split()[0] for row in faults)
        late = self.node.process._asked_s is not None  # what comes is the answer to a question of an earlier cycle
        told = self.publishes()
        listed = {d.uuid for d in told.devices if d.reasons.get("foreign_memory_mib") in (None, *OF_ONE_PROCESS)}
        for container in told.containers:
            for use in container.use.gpus if container.use else ():
                plausible(use, listed)
        for device in told.devices:
            sound(device)
            if not late and self.spared(device, faults):
                changed = values(device).items() - self.well[device.uuid].items()
                changed = {each for each in changed if each[0] != "xid"}  # what happened stays so
                changed = {each for each in changed if why(device, each[0]) != Reason.FIRST_SAMPLE}  # a rate anew
                assert (set(), faults) == (changed, faults), device

    def publishes(self) -> NodeMetrics:
        self.cycles += 1
        now_us = self.cycles * 1_000_000
        self.node.seen.clear()
        began_s = time.monotonic()
        self.node.read()
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        self.core.handle(Probed(self.node.seen[-1]), now_us)
        self.core.check()
        (emit,) = self.core.handle(Tick("metrics", 1), now_us)
        told = NodeMetrics.from_json(emit.body.to_json())
        assert told == emit.body
        return told

    def spared(self, device: DeviceMetrics, faults: list[str]) -> bool:
        """Whether the driver answered in this cycle and nothing was done to this device or to its GPU."""
        if device.stale_since_us is not None or device.uuid not in self.well:
            return False
        touched = {row.split()[1] for row in faults} - {"-"}
        own = {"0.3"} if device.uuid.startswith("MIG") and device.uuid.endswith("3") else {"0.0"}
        own = own | {"0"} if device.uuid.startswith("MIG") else {str(device.index)}
        named = any(row.startswith(("DeviceGetUUID", "* ", "DeviceGet[N-Z]")) for row in faults)  # who is who, then?
        return not named and not any(fnmatchcase(each, on) for each in own for on in touched)


def values(device: DeviceMetrics) -> dict[str, float | None]:
    found = {name: value.value for name, value in device.health.items()}
    return found | {
        "memory_mib": device.memory_mib,
        "utilisation_ratio": device.utilisation_ratio.value,
        "memory_used_mib": device.memory_used_mib.value,
        "foreign_share_micro": device.foreign_share_micro,
        "foreign_memory_mib": device.foreign_memory_mib,
    }


def sound(device: DeviceMetrics) -> None:
    """Each value is a number that can be, and is no zero, or it is null and has a reason; so has one that is ill."""
    for name, value in values(device).items():
        if value is None:
            assert why(device, name) in set(Reason), (name, device)
        else:
            least = 0 if name == "xid" else math.ulp(0)  # none is a code that was heard of
            assert least <= value <= LIMITS.get(name, math.inf), (name, device)
            assert why(device, name) is None, (name, device)
    for name in ("memory_used_mib", "foreign_memory_mib"):
        assert (values(device)[name] or 0) <= (device.memory_mib or math.inf), (name, device)
    assert device.healthy == (device.reason is None)
    assert device.reason is None or device.reason in set(Reason), device


def plausible(use: GpuUse, listed: set[str]) -> None:
    """What a container has of a GPU is a number that can be, or null with a reason; nothing, where all are listed."""
    for value in (use.memory_mib, use.utilisation_ratio, use.busy_us, use.busy_error_us):
        assert value is None or (value.value is None) == (value.reason in set(Reason)), use
    assert 0 <= (use.memory_mib.value or 0) <= LIMITS["memory_mib"], use
    assert use.memory_mib.value != 0 or use.uuid in listed, use
    assert use.utilisation_ratio is None or 0 <= (use.utilisation_ratio.value or 0) <= 1, use


def why(device: DeviceMetrics, name: str) -> str | None:
    if name in device.health:
        return device.health[name].reason
    found = getattr(device, name)
    return found.reason if isinstance(found, Measured) else device.reasons.get(name)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    driver = FakeDriver(build_fake_nvml(tmp_path), tmp_path / "profile")
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
    process = NvmlProcess(HASTE_S, first_deadline_s=DEADLINE_S, pause_s=0.0)
    yield Watched(Node(driver, process, sys=tmp_path), random.Random(20_841))
    process.restart()


def injects(watched: Watched, faults: int) -> None:
    """Machines in turn, on each one to six faults at a time; now and then all is well for a while."""
    draw, machines = watched.draw, itertools.cycle(MACHINES)
    while watched.injected < faults:
        watched.boots(next(machines))
        until = min(faults, watched.injected + 100)
        while watched.injected < until:
            rows = [fault(draw) for _ in range(draw.choice((1, 2, 2, 3, 3, 6)))]
            for _ in range(draw.randint(1, 3)):
                watched.suffers(rows)
            if draw.random() < 0.2:
                watched.suffers([])


def test_a_thousand_faults_leave_all_that_is_published_true(watched: Watched) -> None:
    injects(watched, 1_000)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_faults_leave_all_that_is_published_true(watched: Watched) -> None:
    injects(watched, 10_000)
    print(
        f"{watched.injected} faults in {watched.cycles} cycles, the longest {watched.longest_s:.2f} s of a deadline of"
    )
    print(f"{HASTE_S} s: {', '.join(f'{watched.kinds[kind]} {kind}' for kind in ('error', 'delay', 'hang', 'crash'))}")

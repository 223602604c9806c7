"""A node whose GPUs are those of a driver library without a GPU: the probe, its process, and what they tell."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from structlog.testing import LogCapture

from services.monitor.core import Core, Probed
from services.monitor.probes import proc as procfs
from services.monitor.probes.base import Capacity, ContainerReading, DeviceReading, Reading, Snapshot
from services.monitor.probes.gpu import GpuProbe, GpuSharing
from services.monitor.probes.nvml_process import NvmlProcess
from shared.effects import Tick
from shared.messages import DeviceMetrics, NodeMetrics
from tests.fake_nvml.build import FakeDriver

GPU0, GPU1 = (f"GPU-fake0000-0000-0000-0000-00000000000{index}" for index in (0, 1))
MIG0, MIG3 = (f"MIG-fake0000-0000-0000-0000-00000000000{slot}" for slot in (0, 3))
OURS, FOREIGN = os.getpid(), os.getppid()
NOBODY = next(pid for pid in range(procfs.max_pid(Path("/proc")) or 0, 0, -1) if not Path("/proc", str(pid)).exists())
DEADLINE_S = 20.0


@dataclass
class Host:
    """The rest of the node: one container, and 700 MiB that nobody of ours uses."""

    pids: tuple[int, ...] = (OURS,)
    foreign_mib: int = 700

    def capacity(self) -> Capacity:
        return Capacity(8_000, 32_000)

    def read(self) -> Snapshot:
        containers = (ContainerReading("c", "q", self.pids),)
        return Snapshot((), containers, Reading(100), Reading(self.foreign_mib), {"host": 1})


@dataclass
class Node:
    """A probe, its driver and its last snapshot."""

    driver: FakeDriver
    process: NvmlProcess
    sharing: GpuSharing = field(default_factory=GpuSharing)
    host_pids: bool = True
    sys: Path = Path("/sys")
    seen: list[Snapshot] = field(default_factory=list)
    said: LogCapture = field(default_factory=LogCapture)

    def __post_init__(self) -> None:
        log = structlog.wrap_logger(None, [self.said], structlog.make_filtering_bound_logger("info"))
        self.probe = GpuProbe(Host(), self.process, self.sharing, host_pids=self.host_pids, sys=self.sys, log=log)

    def read(self) -> tuple[DeviceReading, ...]:
        self.seen.append(self.probe.read())
        return self.seen[-1].devices

    def until(self, wanted: Callable[[tuple[DeviceReading, ...]], bool]) -> tuple[DeviceReading, ...]:
        """Read again and again: a new process takes its time."""
        until_s = time.monotonic() + DEADLINE_S
        while not wanted(self.read()):
            assert time.monotonic() < until_s, self.seen[-1]
        return self.seen[-1].devices

    def plays(self, profile: str, *processes: tuple[int, int, int]) -> tuple[DeviceReading, ...]:
        """What is told once the driver answers."""
        self.driver.plays(profile, *processes)
        return self.answers()

    def answers(self) -> tuple[DeviceReading, ...]:
        """What is told once the driver answers."""
        self.until(lambda _: self.process.ask().failed is None)
        return self.read()

    def tells(self, profile: str, *processes: tuple[int, int, int]) -> tuple[DeviceMetrics, ...]:
        """What the monitor publishes of it then."""
        self.plays(profile, *processes)
        return told(self.seen[-1]).devices

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.seen[-1].counts)


def told(*snapshots: Snapshot) -> NodeMetrics:
    """What the monitor says after these cycles."""
    core = Core("n1", "start", "boot", Capacity(1000, 1000))
    for snapshot in snapshots:
        core.handle(Probed(snapshot), 0)
        core.check()
    (emit,) = core.handle(Tick("metrics", 1), 0)
    assert isinstance(emit.body, NodeMetrics)
    return emit.body


def faults(devices: tuple[DeviceReading, ...]) -> list[str | None]:
    return [device.fault for device in devices]

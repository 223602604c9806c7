"""Settings of the monitor: each with its unit, default and reason."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from services.monitor.probes.fake import FakeDevices
from shared.errors import FieldError
from shared.messages import Regime
from shared.settings import ServiceSettings
from shared.subjects import encode


class MonitorSettings(ServiceSettings):
    """Read from the environment: LAXITY_MONITOR_NODE and so on, and what all services share."""

    model_config = SettingsConfigDict(env_prefix="LAXITY_MONITOR_")

    node: str = Field(default_factory=platform.node, min_length=1)
    """Name of the node whose monitor this is; one monitor per node. The host's name where none is given."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the node, for requests' ``node_selector``."""
    ring_root: Path = Path("/run/laxity/rings")
    """Folder with one folder per container, into which the containers' processes put their rings."""
    pod_root: Path | None = None
    """Folder of a kubelet with one folder per pod, `/var/lib/kubelet/pods` unless it says otherwise: pods of ours get a
    link each in ``ring_root``. Absent: the node runs none."""

    kubelet_socket: Path | None = None
    """Socket of a kubelet's pod-resources API, mostly `/var/lib/kubelet/pod-resources/kubelet.sock`: devices that it
    gave to pods by device plugins are not ours. Absent: there is none."""
    kubelet_us: int = Field(default=2_000_000, ge=50_000, le=60_000_000)
    """How often it is asked, in milliseconds of its time each; a device is ours again after five answers without it."""

    poll_us: int = Field(default=5_000, ge=500, le=5_000)
    """How often a ring is looked at of whose deadlines nothing is known; no ring is looked at more often."""
    quiet_us: int = Field(default=50_000, ge=500, le=1_000_000)
    """How often a ring without an open task is looked at in which nothing was for a second; never so seldom that a
    deadline as short as its shortest one could pass meanwhile."""
    idle_us: int = Field(default=20_000, ge=500, le=1_000_000)
    """How often, while there is no ring at all."""
    scan_us: int = Field(default=50_000, ge=1_000, le=10_000_000)
    """How often new rings are looked for: a process's first task may be noticed that much later."""
    batch_us: int = Field(default=50_000, ge=0, le=1_000_000)
    """How long begins and ends may gather, since each batch costs a round trip, half a millisecond of this process and
    more of others; what is too late is sent at once."""
    period_us: int = Field(default=1_000_000, ge=50_000, le=60_000_000)
    """Period of heartbeat, metrics and probe. The node list waits for at least three of them (case T3)."""
    probe_deadline_us: int = Field(default=2_000_000, ge=10_000)
    """How long a cycle of the probe may take before it counts as hung."""
    stale_after_us: int = Field(default=3_000_000, ge=50_000)
    """Age at which a probe's values become unknown: two cycles may fail."""

    probe: Literal["cpu", "fake", "nvml"] = "cpu"
    """What the node's devices are: the machine's cores, made-up ones, or NVIDIA's GPUs."""
    regime: Regime = Regime.TIME_SLICED
    """How devices are shared: kernel and driver slice time unless whoever runs the node says otherwise."""
    regimes: dict[int, Regime] = Field(default_factory=dict)
    """The same for single cores, by their number."""
    measure_slices: bool = True
    """Measure slice and switch cost of time-sliced cores at start: takes half a second per core."""
    slice_us: int | None = Field(default=None, ge=1)
    """Given, it is not measured."""
    switch_us: int | None = Field(default=None, ge=0)
    """Given, it is not measured."""

    gate_margin_us: int = Field(default=1_000, ge=0, le=1_000_000)
    """What a task at the gate may take beyond its runtime, hand-over included; admission adds it to every runtime."""
    gate_overrun: Literal["lose", "end"] = "lose"
    """What becomes of a task that takes longer: its device loses its guarantees until the container is gone, or its
    process is killed. Nobody is killed unless whoever runs the node says so; best-effort tasks are killed always."""

    nvml_regimes: dict[str, Regime] = Field(default_factory=dict)
    """The regime of single GPUs, by their uuid: indices change."""
    nvml_host_pids: bool | None = None
    """Whether the monitor sees the machine's pids, of which the driver speaks. Not given, it is found out."""
    nvml_deadline_us: int = Field(default=1_500_000, ge=10_000)
    """How long NVIDIA's driver may take in a cycle before its process is killed; below ``probe_deadline_us``."""
    nvml_start_us: int = Field(default=60_000_000, ge=10_000)
    """The same for the first answer of a process: a driver that nobody keeps loaded takes seconds per GPU."""
    nvml_retry_us: int = Field(default=1_000_000, ge=1_000)
    """Pause before the driver is tried again after a failure; doubled with each one, up to 30 s."""
    nvml_xid_quiet_us: int = Field(default=600_000_000, ge=0)
    """How long after the last fatal XID a GPU is ill: none says that it is well again, and most need a reset."""

    fake_devices: tuple[FakeDevices, ...] = (FakeDevices(count=4),)
    """Devices of the fake probe, in JSON."""
    fake_control: Path | None = None
    """File from which the fake probe takes faults while it runs."""
    fake_tasks: bool = False
    """Whether containers on made-up devices do the tasks that they declared, on simulated devices in real time."""
    fake_cpu_milli: int = Field(default=64_000, ge=1)
    fake_memory_mib: int = Field(default=512 * 1024, ge=1)

    @property
    def gated(self) -> bool:
        """Whether a device of the node may have a gate: made-up ones run nothing that could wait."""
        regimes = {self.regime, *self.regimes.values(), *self.nvml_regimes.values()}
        return self.probe != "fake" and Regime.GATED in regimes

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        encode(self.node, "node")
        if self.stale_after_us < 2 * self.period_us:
            raise FieldError("stale_after_us", self.stale_after_us, f"at least two periods, {2 * self.period_us}")
        if (self.slice_us is None) != (self.switch_us is None):
            raise FieldError("switch_us", self.switch_us, "given exactly where slice_us is: they are one measurement")
        if self.probe == "nvml" and self.nvml_deadline_us >= self.probe_deadline_us:
            raise FieldError("nvml_deadline_us", self.nvml_deadline_us, f"below {self.probe_deadline_us}")
        return self

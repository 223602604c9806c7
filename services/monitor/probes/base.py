"""The contract of a probe and the plain values that it hands over; no device is read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from services.monitor.probes.reasons import Reason
from shared.messages import Pod, Regime

FIRST_SAMPLE: Final = Reason.FIRST_SAMPLE
NOT_SUPPORTED: Final = Reason.NOT_SUPPORTED
UNREADABLE: Final = Reason.UNREADABLE
IMPLAUSIBLE: Final = Reason.IMPLAUSIBLE
STALE: Final = Reason.STALE
LOST: Final = Reason.LOST
RECOVERING: Final = Reason.RECOVERING
NOT_TOLD_APART: Final = Reason.NOT_TOLD_APART
MIG_ENABLED: Final = Reason.MIG_ENABLED
UNIFIED_MEMORY: Final = Reason.UNIFIED_MEMORY


@dataclass(frozen=True, slots=True)
class Reading:
    """One value as the system gave it, unchecked; None with the code of the reason where it gave none."""

    value: object
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class XidReading:
    """How often a driver reported an error of this code since the probe was made, and when last (wall clock)."""

    xid: int
    count: int
    at_us: int


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device at one moment. The uuid identifies it; the index is a label that may change between boots.

    ``fault`` set: the device itself is ill, and why. A single value that could not be read is no fault of the device.
    """

    uuid: str
    index: int
    model: str
    regime: Regime
    memory_mib: Reading
    utilisation_ratio: Reading
    memory_used_mib: Reading
    foreign_share_micro: Reading
    foreign_memory_mib: Reading
    slice_us: int | None = None
    switch_us: int | None = None
    group: str | None = None
    fault: str | None = None
    health: Mapping[str, Reading] = field(default_factory=dict)
    """Further values by name; those that the receiver does not know are left out."""
    source: str | None = None
    """Where the values come from."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The same for single values, by name, that come from elsewhere."""
    age_us: int = 0
    """The values may be so old already."""
    read: bool = True
    """False: it was not read in this cycle. With a fault only what does not change is told, without one nothing new."""
    xids: tuple[XidReading, ...] = ()
    pci_bus_id: str | None = None
    gpu_instance: int | None = None
    parent: str | None = None
    """Of a MIG device the uuid of its GPU."""
    mig_profile: str | None = None


@dataclass(frozen=True, slots=True)
class GpuTimeReading:
    """``ratio`` of late, ``busy_us`` since the container was first seen on the GPU, and what that may be off by."""

    ratio: Reading
    busy_us: Reading
    error_us: Reading


@dataclass(frozen=True, slots=True)
class ContainerUseReading:
    """What a container's own control group says. ``gpus``: MiB that its processes hold, by the uuid of the device."""

    runtime: str | None = None
    runtime_id: str | None = None
    pod_uid: str | None = None
    cpu_us: Reading = Reading(None, NOT_SUPPORTED)
    memory_mib: Reading = Reading(None, NOT_SUPPORTED)
    memory_limit_mib: Reading = Reading(None, NOT_SUPPORTED)
    throttled_periods: Reading = Reading(None, NOT_SUPPORTED)
    gpus: Mapping[str, Reading] = field(default_factory=dict)
    gpu_times: Mapping[str, GpuTimeReading] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ContainerReading:
    """One container at one moment. ``cpu_ratio`` counts cores: 1.5 is one and a half of them."""

    container: str
    request_id: str | None = None
    pids: tuple[int, ...] = ()
    cpu_ratio: Reading = Reading(None, NOT_SUPPORTED)
    memory_mib: Reading = Reading(None, NOT_SUPPORTED)
    pod: Pod | None = None
    use: ContainerUseReading | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a probe sees in one cycle."""

    devices: tuple[DeviceReading, ...]
    containers: tuple[ContainerReading, ...] = ()
    foreign_cpu_milli: Reading = Reading(0)
    foreign_memory_mib: Reading = Reading(0)
    counts: Mapping[str, int] = field(default_factory=dict)
    """What went wrong on the way, since the probe was made, by name."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a node has for containers beside its devices."""

    cpu_milli: int
    memory_mib: int


class Probe(Protocol):
    """Reads the devices of one node.

    ``capacity`` is called once, before the service is ready; an exception there stops the start. ``read`` is called
    about once a second, always from the same thread, never twice at once. It may block: the caller has a deadline of
    its own after which the last values count as stale, and goes on without it. An exception from ``read`` is counted
    and the cycle gives nothing, so whatever concerns one device or one value has to end in that device's ``fault`` or
    that value's ``reason`` instead: one ill device must not hide its neighbours. A device that cannot be found any
    more is left out; the caller remembers it. Values are handed over as found, the caller rejects what cannot be.
    """

    def capacity(self) -> Capacity: ...

    def read(self) -> Snapshot: ...

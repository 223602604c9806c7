"""What the node believes of its devices: readings checked, expired, and after an illness trusted again slowly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.monitor.probes.base import (
    IMPLAUSIBLE,
    LOST,
    RECOVERING,
    STALE,
    UNREADABLE,
    DeviceReading,
    Reading,
    Snapshot,
)
from shared.errors import clip
from shared.messages import DeviceMetrics, Measured, Xid

RECOVER_AFTER: Final = 3
"""Healthy readings in a row before a device that was ill is promised again: one may lie between two faults."""
MAX_MIB: Final = 1 << 24
"""16 TiB: more is no memory of a device or of a host."""

_LIMITS: Final = {
    "memory_mib": MAX_MIB,
    "utilisation_ratio": 1.0,
    "memory_used_mib": MAX_MIB,
    "foreign_share_micro": 1_000_000,
    "foreign_memory_mib": MAX_MIB,
    "cpu_ratio": 65_536.0,
    "foreign_cpu_milli": 65_536_000,
}

_PLAIN: Final = ("foreign_share_micro", "foreign_memory_mib")
"""Values that are told without their reason: it stands in ``reasons``, as that of memory_mib."""
_HEALTH_LIMITS: Final = {
    "temperature_celsius": 200,
    "power_mw": 10_000_000,
    "energy_mj": 1 << 53,
    "sm_clock_mhz": 20_000,
    "sm_clock_max_mhz": 20_000,
    "memory_clock_mhz": 50_000,
    "throttle_reasons": 1 << 32,
    "power_throttled_us": 1 << 51,
    "thermal_throttled_us": 1 << 51,  # 71 years
    "xid": 999,
    "ecc_corrected": 1 << 53,
    "ecc_uncorrected": 1 << 31,
    "remapped_rows_correctable": 1 << 20,
    "remapped_rows_uncorrectable": 1 << 20,
    "row_remap_pending": 1,
    "row_remap_failure": 1,
    "retired_pages_sbe": 1 << 20,
    "retired_pages_dbe": 1 << 20,
    "retired_pages_pending": 1,
    "pcie_replays": 1 << 31,
    "fan_ratio": 2,  # a fan may turn faster than what it is made for
    "persistence_mode": 1,
}
"""The names that are told, and the largest number that each can be: what a driver gives for unknown is far above."""


def checked(field: str, reading: Reading, counts: Counter[str], limit: float | None = None) -> Measured:
    """The value if it can be one: a finite number from 0 to its limit. Anything else is None, and counted."""
    value = reading.value
    if value is None:
        return Measured(value=None, reason=reading.reason or UNREADABLE)
    if isinstance(value, bool) or not isinstance(value, int | float):
        counts[f"probe.rejected.{field}"] += 1
        return Measured(value=None, reason=UNREADABLE)
    if not math.isfinite(value) or not 0 <= value <= (_LIMITS[field] if limit is None else limit):
        counts[f"probe.rejected.{field}"] += 1
        return Measured(value=None, reason=IMPLAUSIBLE)
    return Measured(value=float(value), reason=None)


def whole(measured: Measured) -> int | None:
    """A checked value as a whole number; None where it is unknown."""
    return None if measured.value is None else int(measured.value)


def coverage(devices: Sequence[DeviceMetrics]) -> tuple[int, int]:
    """How many values the devices have, and how many are known; a device that answers nothing covers nothing."""
    values = [
        value
        for device in devices
        for value in (
            device.memory_mib,
            device.utilisation_ratio.value,
            device.memory_used_mib.value,
            device.foreign_share_micro,
            device.foreign_memory_mib,
        )
    ]
    return len(values), sum(value is not None for value in values)


@dataclass(slots=True)
class _Device:
    reading: DeviceReading
    values: dict[str, Measured]
    seen_us: int
    fault: str | None
    health: dict[str, Measured]
    read_us: int
    missed: bool
    """Whether a cycle has passed since then that did not read it."""
    good: int = 0


class Devices:
    """All devices seen since the start, by uuid. A device that is not seen any more stays, as unhealthy."""

    def __init__(self, stale_after_us: int) -> None:
        self.counts: Counter[str] = Counter()
        self._stale_after_us = stale_after_us
        self._known: dict[str, _Device] = {}

    def take(self, snapshot: Snapshot, now_us: int) -> None:
        """A probe's cycle ended well."""
        seen: set[str] = set()
        for reading in snapshot.devices:
            if reading.uuid in seen or not reading.uuid:
                self.counts["probe.rejected.uuid"] += 1
                continue
            seen.add(reading.uuid)
            self._see(reading, now_us)
        for uuid in self._known.keys() - seen:
            self._known[uuid].fault, self._known[uuid].good = LOST, 0
            self._known[uuid].missed = True

    def miss(self) -> None:
        """A probe's cycle gave nothing."""
        for device in self._known.values():
            device.missed = True

    def metrics(self, now_us: int, wall_us: int) -> tuple[DeviceMetrics, ...]:
        """Every device as it may be told now, in the order of their indices."""
        known = sorted(self._known.values(), key=lambda device: (device.reading.index, device.reading.uuid))
        return tuple(self._tell(device, now_us, wall_us) for device in known)

    def check(self) -> None:
        """Assert that nothing unknown is told as a number and that an ill device says why."""
        for device in self._known.values():
            assert all((v.value is None) == (v.reason is not None) for v in device.values.values()), device
            assert device.fault is None or device.good < RECOVER_AFTER, device

    def _see(self, reading: DeviceReading, now_us: int) -> None:
        values, health = self._values(reading), self._health(reading)
        device = self._known.get(reading.uuid)
        if device is None:
            self._known[reading.uuid] = _Device(
                reading, values, now_us, reading.fault, health, now_us - reading.age_us, not reading.read
            )
            return
        if not reading.read and reading.fault is None:
            device.missed = True  # what is known of it ages
            return
        if device.fault is None and self._stale(device, now_us):
            device.fault, device.good = STALE, 0
        device.reading, device.values, device.health, device.seen_us = reading, values, health, now_us
        device.missed = not reading.read
        if reading.read:
            device.read_us = now_us - reading.age_us
        self._judge(device)

    def _judge(self, device: _Device) -> None:
        if device.reading.fault is not None:
            device.fault, device.good = clip(device.reading.fault), 0
        elif device.fault is not None:
            device.good += 1
            device.fault = RECOVERING if device.good < RECOVER_AFTER else None

    def _values(self, reading: DeviceReading) -> dict[str, Measured]:
        memory = checked("memory_mib", reading.memory_mib, self.counts)
        return {
            "memory_mib": memory,
            "utilisation_ratio": checked("utilisation_ratio", reading.utilisation_ratio, self.counts),
            "memory_used_mib": checked("memory_used_mib", reading.memory_used_mib, self.counts, memory.value),
            "foreign_share_micro": checked("foreign_share_micro", reading.foreign_share_micro, self.counts),
            "foreign_memory_mib": checked("foreign_memory_mib", reading.foreign_memory_mib, self.counts, memory.value),
        }

    def _health(self, reading: DeviceReading) -> dict[str, Measured]:
        return {
            name: checked(name, reading.health[name], self.counts, limit)
            for name, limit in _HEALTH_LIMITS.items()
            if name in reading.health
        }

    def _stale(self, device: _Device, now_us: int) -> bool:
        return now_us - device.seen_us > self._stale_after_us

    def _tell(self, device: _Device, now_us: int, wall_us: int) -> DeviceMetrics:
        """Capacity is a fact that stays; everything that moves is unknown once it is old or its device is gone."""
        gone = device.fault if device.fault == LOST else STALE if self._stale(device, now_us) else None
        moving = {k: Measured(value=None, reason=gone) if gone else v for k, v in device.values.items()}
        reading, fault = device.reading, device.fault or gone
        plain = {"memory_mib": device.values["memory_mib"], **{name: moving[name] for name in _PLAIN}}
        return DeviceMetrics(
            uuid=reading.uuid,
            index=reading.index,
            model=clip(reading.model),
            regime=reading.regime,
            slice_us=reading.slice_us,
            switch_us=reading.switch_us,
            group=reading.group,
            healthy=fault is None,
            reason=fault,
            memory_mib=whole(device.values["memory_mib"]),
            utilisation_ratio=moving["utilisation_ratio"],
            memory_used_mib=moving["memory_used_mib"],
            foreign_share_micro=whole(moving["foreign_share_micro"]),
            foreign_memory_mib=whole(moving["foreign_memory_mib"]),
            pci_bus_id=reading.pci_bus_id,
            gpu_instance=reading.gpu_instance,
            parent=reading.parent,
            mig_profile=reading.mig_profile,
            xids=tuple(Xid(xid=seen.xid, count=seen.count, at_us=seen.at_us) for seen in reading.xids),
            health={k: Measured(value=None, reason=gone) if gone else v for k, v in device.health.items()},
            reasons={name: value.reason for name, value in plain.items() if value.reason},
            **_read(device, now_us, wall_us),
        )


def _read(device: _Device, now_us: int, wall_us: int) -> dict[str, Any]:
    """Where the values come from and when, as far as there is something to say."""
    age_us, reading = now_us - device.read_us, device.reading
    said = {
        "source": reading.source,
        "sources": dict(reading.sources) or None,
        "stale_since_us": wall_us - age_us if device.missed else None,
    }
    return {"age_us": age_us, **{name: value for name, value in said.items() if value is not None}}

"""A probe of made-up devices whose faults can be switched while it runs; the real probes' behaviour, documented."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.monitor.probes.base import Capacity, DeviceReading, Reading, Snapshot
from shared.messages import Regime

GARBAGE: Final = 4_294_967_295
"""What a driver answers for a value that it does not have (case M15)."""


class FakeDevices(BaseModel):
    """Some equal devices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(default=1, ge=1, le=1024)
    model: str = "H200"
    memory_mib: int = Field(default=143_771, ge=1)
    regime: Regime = Regime.EXCLUSIVE
    slice_us: int | None = None
    switch_us: int | None = None
    group: str | None = None


class DeviceFault(BaseModel):
    """What is wrong with, or made up about, one device; absent = nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lost: bool = False
    """It cannot be found."""
    fault: str | None = None
    """It is found and says that it is ill."""
    garbage: bool = False
    """Its numbers are impossible."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Values by the name of their field, as found: numbers, null, or text such as ``[n/a]``."""


class Faults(BaseModel):
    """What is wrong with the probe; the devices by their index."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: str | None = None
    """Every read raises this."""
    hang_ms: int = Field(default=0, ge=0)
    """Every read takes this much longer; other faults are looked at again meanwhile, so that a hang can be ended."""
    devices: dict[int, DeviceFault] = Field(default_factory=dict)


class FakeProbe:
    """Devices of one node. ``control`` is a file with Faults as JSON, read at each cycle; absent = no faults."""

    def __init__(
        self, node: str, devices: tuple[FakeDevices, ...], capacity: Capacity, control: Path | None = None
    ) -> None:
        self._node = node
        self._devices = [device for group in devices for device in [group] * group.count]
        self._capacity = capacity
        self._control = control
        self._malformed = 0
        self._faults = Faults()

    def capacity(self) -> Capacity:
        return self._capacity

    def read(self) -> Snapshot:
        faults = self._after_hanging()
        if faults.error is not None:
            raise OSError(faults.error)
        found = [self._reading(index, faults.devices.get(index, DeviceFault())) for index in range(len(self._devices))]
        counts = {"control_malformed": self._malformed} if self._malformed else {}
        return Snapshot(tuple(device for device in found if device is not None), counts=counts)

    def _after_hanging(self) -> Faults:
        """The faults of this cycle, once it has hung for as long as they say."""
        began_s = time.monotonic()
        while (time.monotonic() - began_s) * 1000 < self._look().hang_ms:
            time.sleep(0.005)
        return self._faults

    def _look(self) -> Faults:
        """What the control file says now: none where it is absent, what it said before where it is malformed."""
        try:
            self._faults = Faults.model_validate_json(self._control.read_bytes()) if self._control else Faults()
        except FileNotFoundError:
            self._faults = Faults()
        except ValidationError:
            self._malformed += 1
        return self._faults

    def _reading(self, index: int, fault: DeviceFault) -> DeviceReading | None:
        device = self._devices[index]
        if fault.lost:
            return None
        values = {
            "memory_mib": device.memory_mib,
            "utilisation_ratio": 0.0,
            "memory_used_mib": 0,
            "foreign_share_micro": 0,
            "foreign_memory_mib": 0,
        }
        found = {k: Reading(fault.values.get(k, GARBAGE if fault.garbage else v)) for k, v in values.items()}
        return DeviceReading(
            uuid=fake_uuid(self._node, index),
            index=index,
            model=device.model,
            regime=device.regime,
            slice_us=device.slice_us,
            switch_us=device.switch_us,
            group=device.group,
            fault=fault.fault,
            memory_mib=found["memory_mib"],
            utilisation_ratio=found["utilisation_ratio"],
            memory_used_mib=found["memory_used_mib"],
            foreign_share_micro=found["foreign_share_micro"],
            foreign_memory_mib=found["foreign_memory_mib"],
        )


def fake_uuid(node: str, index: int) -> str:
    """The same for the same node and index, in the form of a real one."""
    digest = hashlib.sha256(json.dumps([node, index]).encode()).hexdigest()
    return f"FAKE-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"

"""How a processor core is named as a device, for the probe that reports it and the backend that pins to it; no I/O."""

from __future__ import annotations

import re

from shared.errors import FieldError

_CPU_DEVICE = re.compile(r"CPU-(?P<machine>.+)-(?P<core>0|[1-9][0-9]{0,5})", re.DOTALL)


def cpu_device_uuid(machine_id: str, core: int) -> str:
    """The uuid of one core of one machine; FieldError for a core below 0 or a machine without a name."""
    if not machine_id:
        raise FieldError("machine_id", "nothing", "the machine's name")
    if not 0 <= core < 1_000_000:
        raise FieldError("core", core, "0 to 999999")
    return f"CPU-{machine_id}-{core}"


def core_of(uuid: str) -> int | None:
    """The core that stands behind a device's uuid; None where the device is no core."""
    found = _CPU_DEVICE.fullmatch(uuid)
    return int(found["core"]) if found else None

"""What the heartbeats of a node told of its devices' clocks around a task: what held them back, how much; no causes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shared.errors import FieldError
from shared.messages import DeviceMetrics, Measured, NodeMetrics
from shared.units import format_us

TOLD_US: Final = 2_000_000
"""How long before a task's begin a value may have been read to say something of it: two heartbeats, as they are set."""
KEPT: Final = 4
"""Heartbeats of a node, as they came: few are ever read. Tasks come later than these, under load by a lot."""
HELD_BACK: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's bits (nvmlClocksEventReasons) that make a device slower than it was bought; an idle one has others."""
IDLE: Final = 0x01


@dataclass(frozen=True, slots=True)
class Clock:
    """One reading. ``speed``: the clock by the highest that the device has, None where either is unknown."""

    read_us: int
    reasons: tuple[str, ...]
    speed: float | None = None
    text: str = ""


class Clocks:
    """Of one node."""

    def __init__(self) -> None:
        self._bodies: deque[bytes] = deque(maxlen=KEPT)
        self._read: Sequence[NodeMetrics] | None = None

    def heard(self, body: bytes) -> None:
        self._bodies.append(body)
        self._read = None

    def around(self, uuid: str, start_id: str, begin_us: int, at_us: int) -> Clock | None:
        """The slowest reading while a task ran, else the last one before it; None where no such is young enough.

        ``start_id`` is of the monitor whose stamps these are: another one may have another clock.
        """
        found = [
            clock
            for beat in self._beats()
            if beat.start_id == start_id
            for device in beat.devices
            if device.uuid == uuid and (clock := _clock(device, beat.mono_us, at_us))
        ]
        young = [clock for clock in found if begin_us - TOLD_US <= clock.read_us <= at_us]
        meanwhile = [clock for clock in young if clock.read_us >= begin_us]
        return min(meanwhile, key=_slowness) if meanwhile else young[-1] if young else None

    def _beats(self) -> Sequence[NodeMetrics]:
        if self._read is None:
            self._read = [beat for body in self._bodies if (beat := _decoded(body)) is not None]
        return self._read


def _decoded(body: bytes) -> NodeMetrics | None:
    try:
        return NodeMetrics.trusted(body)
    except FieldError:  # not written by us
        return None


def _slowness(clock: Clock) -> tuple[bool, float]:
    return not clock.reasons, 1.0 if clock.speed is None else clock.speed


def _clock(device: DeviceMetrics, told_us: int, at_us: int) -> Clock | None:
    """None of a device that tells nothing of what holds it back."""
    bits = _whole(device.health.get("throttle_reasons"))
    if bits is None or device.age_us is None:
        return None
    read_us = told_us - device.age_us
    reasons = tuple(name for bit, name in HELD_BACK.items() if bits & bit)
    now, most = (_whole(device.health.get(name)) for name in ("sm_clock_mhz", "sm_clock_max_mhz"))
    if not reasons or now is None or not most or bits & IDLE:
        return Clock(read_us, reasons, None, _text(reasons, read_us, at_us))
    text = _text(reasons, read_us, at_us, f", at {now} of {most} MHz")
    return Clock(read_us, reasons, min(1.0, now / most), text)


def _text(reasons: Sequence[str], read_us: int, at_us: int, clock: str = "") -> str:
    return f"{' and '.join(reasons)}{clock}, read {format_us(max(0, at_us - read_us))} before it was late"


def _whole(measured: Measured | None) -> int | None:
    return None if measured is None or measured.value is None else int(measured.value)

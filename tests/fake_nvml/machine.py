"""Writes down what NVIDIA's driver of a machine answers, as rows of a profile, and plays such a profile elsewhere.

    python machine.py capture > PROFILE                              on the machine: this file alone, no package needed
    python -m tests.fake_nvml.machine replay PROFILE -- COMMAND      here: COMMAND finds that driver

Nothing is changed on the machine. A profile names its GPUs by uuid and has the pids that hold their memory.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from ctypes import c_uint, c_ulonglong
from pathlib import Path
from typing import Any, Final

OK, NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE, FUNCTION_NOT_FOUND = 0, 3, 6, 7, 13
LINKS: Final = 18
TEXT_BYTES: Final = 96


class Text(ctypes.Structure):
    _fields_ = (("text", ctypes.c_char * TEXT_BYTES),)


class Utilisation(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class MemoryV2(ctypes.Structure):
    _fields_ = (("version", c_uint), *((name, c_ulonglong) for name in ("total", "reserved", "free", "used")))


class Violation(ctypes.Structure):
    _fields_ = (("reference_us", c_ulonglong), ("violation_ns", c_ulonglong))


class Pci(ctypes.Structure):
    _fields_ = (("legacy", ctypes.c_char * 16), ("numbers", c_uint * 5), ("text", ctypes.c_char * 32))


class ProcessV1(ctypes.Structure):
    _fields_ = (("pid", c_uint), ("bytes", c_ulonglong))


class Process(ctypes.Structure):
    _fields_ = (("pid", c_uint), ("bytes", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint))


CALLS: Final[dict[str, tuple[type, ...]]] = {
    "DeviceGetUUID": (Text,),
    "DeviceGetName": (Text,),
    "DeviceGetPciInfo_v3": (Pci,),
    "DeviceGetMigMode": (c_uint, c_uint),
    "DeviceGetMaxMigDeviceCount": (c_uint,),
    "DeviceGetComputeMode": (c_uint,),
    "DeviceGetPersistenceMode": (c_uint,),
    "DeviceGetMemoryInfo": (Memory,),
    "DeviceGetMemoryInfo_v2": (MemoryV2,),
    "DeviceGetUtilizationRates": (Utilisation,),
    "DeviceGetTemperature:0": (c_uint,),
    "DeviceGetClockInfo:1": (c_uint,),
    "DeviceGetClockInfo:2": (c_uint,),
    "DeviceGetMaxClockInfo:1": (c_uint,),
    "DeviceGetPcieReplayCounter": (c_uint,),
    "DeviceGetGpuInstanceId": (c_uint,),
    "DeviceGetSupportedEventTypes": (c_ulonglong,),
    "DeviceGetFanSpeed": (c_uint,),
    "DeviceGetPowerUsage": (c_uint,),
    "DeviceGetTotalEnergyConsumption": (c_ulonglong,),
    "DeviceGetCurrentClocksEventReasons": (c_ulonglong,),
    "DeviceGetCurrentClocksThrottleReasons": (c_ulonglong,),
    "DeviceGetViolationStatus:0": (Violation,),
    "DeviceGetViolationStatus:1": (Violation,),
    "DeviceGetTotalEccErrors:0:1": (c_ulonglong,),
    "DeviceGetTotalEccErrors:1:1": (c_ulonglong,),
    "DeviceGetRemappedRows": (c_uint, c_uint, c_uint, c_uint),
    "DeviceGetRetiredPagesPendingStatus": (c_uint,),
    **{f"DeviceGetNvLinkState:{link}": (c_uint,) for link in range(LINKS)},
    **{f"DeviceGetNvLinkRemoteDeviceType:{link}": (c_uint,) for link in range(LINKS)},
    **{f"DeviceGetNvLinkRemotePciInfo_v2:{link}": (Pci,) for link in range(LINKS)},
}
"""What each function hands over; its arguments that choose stand behind its name. A new one is one line.

Of GPM nothing is written down: it measures between two questions, and a machine that is played has no such thing.
"""
LISTS: Final = {
    f"DeviceGet{kind}RunningProcesses{version}": ProcessV1 if not version else Process
    for kind in ("Compute", "Graphics")
    for version in ("", "_v2", "_v3")
}


class Driver:
    """The library as it is, without a binding."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")

    def call(self, name: str, *arguments: Any) -> int:
        function = getattr(self._library, f"nvml{name}", None)
        return FUNCTION_NOT_FOUND if function is None else int(function(*arguments))

    def rows(self) -> Iterator[str]:
        code = self.call("InitWithFlags", 0)
        if code != OK:
            yield f"InitWithFlags - error {code}"
            return
        version, count = Text(), c_uint()
        code = self.call("SystemGetDriverVersion", ctypes.byref(version), c_uint(TEXT_BYTES))
        yield f"SystemGetDriverVersion - {_answer(code, version)}"
        code = self.call("DeviceGetCount_v2", ctypes.byref(count))
        yield f"DeviceGetCount_v2 - {_answer(code, count)}"
        for index in range(count.value):
            yield from self._gpu(index)
        for index in range(count.value):
            yield from self._neighbours(index, count.value)

    def _gpu(self, index: int) -> Iterator[str]:
        handle = ctypes.c_void_p()
        code = self.call("DeviceGetHandleByIndex_v2", c_uint(index), ctypes.byref(handle))
        if code != OK:
            yield f"* {index} error {code}"
            return
        yield from self._device(str(index), handle)
        slots = c_uint()
        self.call("DeviceGetMaxMigDeviceCount", handle, ctypes.byref(slots))
        for slot in range(slots.value):
            part = ctypes.c_void_p()
            code = self.call("DeviceGetMigDeviceHandleByIndex", handle, c_uint(slot), ctypes.byref(part))
            if code != NOT_FOUND:  # an empty slot needs no row
                yield f"DeviceGetMigDeviceHandleByIndex {index}.{slot} {_answer(code)}"
            if code == OK:
                yield from self._device(f"{index}.{slot}", part)

    def _neighbours(self, index: int, count: int) -> Iterator[str]:
        """How near the other GPUs are."""
        handles = [ctypes.c_void_p() for _ in range(count)]
        for number, handle in enumerate(handles):
            self.call("DeviceGetHandleByIndex_v2", c_uint(number), ctypes.byref(handle))
        for number in range(index + 1, count):
            level = c_uint()
            near = handles[index], handles[number]
            code = self.call("DeviceGetTopologyCommonAncestor", *near, ctypes.byref(level)) if all(near) else NOT_FOUND
            yield f"DeviceGetTopologyCommonAncestor:{number} {index} {_answer(code, level)}"

    def _device(self, on: str, handle: ctypes.c_void_p) -> Iterator[str]:
        for call, types in CALLS.items():
            name, *which = call.split(":")
            values = [each() for each in types]
            if isinstance(values[0], MemoryV2):
                values[0].version = 2 << 24 | ctypes.sizeof(MemoryV2)
            size = [c_uint(TEXT_BYTES)] if types == (Text,) else []
            code = self.call(name, handle, *map(int, which), *map(ctypes.byref, values), *size)
            if code != NOT_SUPPORTED:  # what a driver without a row answers
                yield f"{call} {on} {_answer(code, *values)}"
        for cause in (0, 1):
            pages = c_uint()
            code = self.call("DeviceGetRetiredPages", handle, cause, ctypes.byref(pages), None)
            yield f"DeviceGetRetiredPages:{cause} {on} {_answer(0 if code == INSUFFICIENT_SIZE else code, pages)}"
        code = self.call("DeviceGetProcessUtilization", handle, None, ctypes.byref(c_uint()), c_ulonglong(0))
        passing = code in (OK, NOT_FOUND, INSUFFICIENT_SIZE)  # samples that would be old by the time they are played
        yield f"DeviceGetProcessUtilization {on} {'none' if passing else _answer(code)}"
        for call, entry in LISTS.items():
            yield from self._processes(call, on, handle, entry)

    def _processes(self, call: str, on: str, handle: ctypes.c_void_p, entry: type[Any]) -> Iterator[str]:
        """No row where nobody is in the list: that is what a driver without a row answers."""
        room = c_uint()
        code = self.call(call, handle, ctypes.byref(room), None)
        if code == INSUFFICIENT_SIZE:
            room.value = room.value * 2 + 5
            entries = (entry * room.value)()
            code = self.call(call, handle, ctypes.byref(room), entries)
            if code == OK:
                held = ((each.pid, each.bytes) for each in entries[: room.value])
                yield f"{call} {on} {' '.join(f'{pid}:{-1 if size == 2**64 - 1 else size}' for pid, size in held)}"
        if code != OK:
            yield f"{call} {on} error {code}"


def _answer(code: int, *values: Any) -> str:
    if code != OK:
        return f"error {code}"
    return " ".join(text for value in values for text in _texts(value)) or "ok"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Text | Pci):
        yield value.text.decode("utf-8", "surrogateescape")
    elif isinstance(value, ctypes.Structure):
        yield from (str(getattr(value, name)) for name, *_ in value._fields_ if name != "version")
    else:
        yield str(value.value)


def capture() -> int:
    """Print the profile; what the driver prints itself goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogateescape")
    os.dup2(2, 1)
    try:
        driver = Driver()
    except OSError as error:
        print(f"no driver here: {error}", file=sys.stderr)
        return 1
    with out:
        out.writelines(f"{row}\n" for row in driver.rows())
    return 0


def replay(profile: Path, command: list[str]) -> int:
    """Run the command with that driver; its exit code."""
    from tests.fake_nvml.build import FakeDriver, build_fake_nvml

    with tempfile.TemporaryDirectory() as folder:
        driver = FakeDriver(build_fake_nvml(Path(folder)), Path(folder, "rows"))
        driver.replays(profile)
        return subprocess.run(command, env={**os.environ, **driver.environment}, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("capture", help="print what this machine's driver answers")
    replayed = commands.add_parser("replay", help="run a command with the driver of a profile")
    replayed.add_argument("profile", type=Path)
    replayed.add_argument("run", nargs="+", metavar="COMMAND")
    chosen = parser.parse_args()
    return capture() if chosen.command == "capture" else replay(chosen.profile, chosen.run)


if __name__ == "__main__":
    sys.exit(main())

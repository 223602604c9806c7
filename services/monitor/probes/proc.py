"""Reads what /proc says of cores, memory and processes, as plain values; what belongs to whom is not decided here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

PAGE_MIB: Final = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
FIRST_PIDNS: Final = "pid:[4026531836]"
"""The pid namespace of the machine (PROC_PID_INIT_INO of the kernel)."""
INTEGRATED_GPUS: Final = ("gpu", "gp10b", "gv11b", "ga10b")
"""How the kernel calls them, behind their address: TX2, Xavier, Orin of older systems; all since."""
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in the flags of /proc/<pid>/stat


class CoreTimes(NamedTuple):
    """Clock ticks since boot of one core: all of them, and the idle ones."""

    total: int
    idle: int


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment. ``start_ticks`` together with the pid identifies it."""

    pid: int
    parent: int
    session: int
    start_ticks: int
    cpu_ticks: int
    resident_pages: int
    kernel: bool


def machine_id(root: Path = Path("/")) -> str:
    """A name of this machine that survives reboots; of this boot where it has none."""
    for place in ("etc/machine-id", "var/lib/dbus/machine-id", "proc/sys/kernel/random/boot_id"):
        try:
            text = (root / place).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            return text
    return "unknown"


def cpu_model(proc: Path) -> str:
    """The name that the processor gives itself, else ``cpu``."""
    try:
        for line in (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model") and value.strip():
                return value.strip()
    except OSError:
        pass
    return "cpu"


def memory_mib(proc: Path) -> dict[str, int | None]:
    """MemTotal and MemAvailable in MiB; None for what is missing or no number."""
    found: dict[str, int | None] = {"MemTotal": None, "MemAvailable": None}
    try:
        text = (proc / "meminfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        key, _, value = line.partition(":")
        amount, _, unit = value.strip().partition(" ")
        if key in found and unit == "kB":
            kib = _number(amount)
            found[key] = None if kib is None else kib // 1024
    return found


def core_times(proc: Path) -> dict[int, CoreTimes]:
    """The times of each core whose line can be read; the others are missing."""
    found: dict[int, CoreTimes] = {}
    try:
        text = (proc / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        name, *fields = line.split()
        core = _number(name[3:]) if name.startswith("cpu") else None
        times = [_number(field) for field in fields[:8]]  # guest time is already counted in user time
        if core is not None and len(times) >= 5 and None not in times:
            ticks = [time for time in times if time is not None]
            found[core] = CoreTimes(sum(ticks), ticks[3] + ticks[4])
    return found


def processes(proc: Path) -> Iterator[Process]:
    """All processes. One that ends while it is looked at is left out (case M38)."""
    with os.scandir(proc) as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isascii() and entry.name.isdigit()]
    yield from filter(None, (process(proc, pid) for pid in pids))


def process(proc: Path, pid: int) -> Process | None:
    """None where it has ended."""
    try:
        return _process(pid, _read(f"{proc}/{pid}/stat"))
    except (OSError, ValueError, IndexError):
        return None


def sees_machine(proc: Path) -> bool:
    """Whether pids are those of the machine: false in a pid namespace of our own. True where that cannot be told."""
    try:
        return str((proc / "self/ns/pid").readlink()) == FIRST_PIDNS
    except OSError:
        return True


def max_pid(proc: Path) -> int | None:
    """The largest pid that there can be; None where it cannot be told."""
    try:
        return _number((proc / "sys/kernel/pid_max").read_text(encoding="ascii", errors="replace").strip())
    except OSError:
        return None


def gpu_load(sys: Path) -> int | None:
    """Load of a chip's own GPU (Jetson) in thousandths; None where the kernel tells of none."""
    for device in sorted((sys / "class/devfreq").glob("*")):
        if device.name.rpartition(".")[2] in INTEGRATED_GPUS:
            try:
                return _number((device / "device/load").read_text(encoding="ascii", errors="replace").strip())
            except OSError:
                continue
    return None


def environment(proc: Path, pid: int) -> dict[str, str]:
    """The variables that a process was started with; none where they may not be read or the process is gone."""
    try:
        raw = _read(f"{proc}/{pid}/environ")
    except OSError:
        return {}
    pairs = (pair.partition(b"=") for pair in raw.split(b"\0"))
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "surrogateescape") for key, _, value in pairs if key}


def affinity(pid: int) -> frozenset[int] | None:
    """The cores that a process may use; None where it is gone or the system does not tell."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except OSError:
        return None


def _read(path: str) -> bytes:
    """A whole file, with a third of the calls of an open file object: a node has hundreds of these each second."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 65_536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _process(pid: int, stat: bytes) -> Process:
    """The name, in brackets, may hold spaces and brackets itself: fields are counted from its last bracket."""
    fields = stat[stat.rindex(b")") + 1 :].split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        resident_pages=int(fields[21]),
        kernel=bool(int(fields[6]) & _KERNEL_THREAD),
    )


def _number(text: str) -> int | None:
    """A count as the kernel writes it; None for ``[n/a]`` and everything else (cases M26, M28)."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None

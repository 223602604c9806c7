"""Processes of this machine as /proc shows them: which one is meant, whether it lives, who belongs to a container."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shared.errors import BackendError

PROC = Path("/proc")
KILL_ROUNDS = 200
KILL_ROUND_S = 0.01


@dataclass(frozen=True)
class Process:
    """One process, told from a later one with the same id by when it started."""

    pid: int
    ticks: int
    """Start, in clock ticks since boot."""

    def alive(self) -> bool:
        """False also for a zombie: it holds nothing and does nothing."""
        fields = stat(self.pid)
        return fields is not None and int(fields[19]) == self.ticks and fields[0] not in {b"Z", b"X"}

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens where it has ended."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def send_to_group(self, number: signal.Signals) -> None:
        """Signal the process group that it leads; nothing happens where the leader has ended."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)


def stat(pid: int) -> list[bytes] | None:
    """/proc/PID/stat from its third field on (the second may contain anything); None where the process is gone."""
    try:
        return (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None


def boot_id() -> str:
    """Names this boot: process ids of another one mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def members(variable: str, value: str, groups: Iterable[str]) -> set[int]:
    """Processes that carry an environment variable, or are in one of the control groups."""
    entry = f"\0{variable}={value}\0".encode()
    carrying = {int(path.name) for path in PROC.iterdir() if path.name.isdigit() and entry in _environment(path)}
    return carrying.union(*(_group_members(Path(group)) for group in groups))


def kill_all(variable: str, value: str, groups: Iterable[str]) -> None:
    """Kill by force until none of ``members`` is left; BackendError where some do not go within two seconds."""
    kept = tuple(groups)
    for _ in range(KILL_ROUNDS):
        left = members(variable, value, kept)
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(KILL_ROUND_S)
    raise BackendError(f"processes {sorted(left)} do not end though they were killed")


def _environment(process: Path) -> bytes:
    """As it was at the process's exec, each entry ended by NUL; nothing for a zombie and for another user's."""
    try:
        return b"\0" + (process / "environ").read_bytes() + b"\0"
    except OSError:
        return b""


def _group_members(group: Path) -> set[int]:
    try:
        return {int(line) for line in (group / "cgroup.procs").read_text(encoding="ascii").split()}
    except OSError:
        return set()

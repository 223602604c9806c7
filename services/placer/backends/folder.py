"""The folder of one container of the process backend: what is written in it, its lock, and how it goes away."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.placer.backends.procs import Process, boot_id
from shared.errors import FieldError
from shared.messages.ledger import ContainerLabels
from shared.subjects import encode

ENDED = ".ended"
"""Beside the folders: those of the containers that were removed, for people who look for a log."""
RING_ENDED = "ended"
"""In a container's ring folder: nothing writes there any more. The monitor removes it once it has read the rings."""
_LONGEST = 200
_PROCESS = f"{os.getpid()}-{os.urandom(4).hex()}"
"""In other containers that share a folder, and after a restart of this one, others have its id too."""
_count = itertools.count()


@dataclass(frozen=True)
class Started:
    command: Process
    shim: Process
    boot_id: str

    def alive(self) -> bool:
        """True while the shim lives, which is until everything of the container has ended."""
        return self.boot_id == boot_id() and self.shim.alive()


@dataclass(frozen=True)
class Folder:
    """Files in it, in the order they are written: lock, labels.json, start.json, started.json, exit.json."""

    path: Path

    def labels(self) -> ContainerLabels | None:
        """None where they cannot be read."""
        try:
            return ContainerLabels.trusted((self.path / "labels.json").read_bytes())
        except (OSError, FieldError):
            return None

    def plan(self) -> dict[str, Any]:
        """What the shim was told; empty where it cannot be read."""
        return _read(self.path / "start.json")

    def started(self) -> Started | None:
        """The processes, once the command was executed."""
        found = _read(self.path / "started.json")
        if not found:
            return None
        shim = Process(found["shim"], found["shim_ticks"])
        return Started(Process(found["pid"], found["ticks"]), shim, found["boot_id"])

    def ended(self) -> dict[str, Any] | None:
        """How the command ended: exit_code, signal, at_us."""
        return _read(self.path / "exit.json") or None

    def write(self, name: str, body: bytes) -> None:
        write_whole(self.path / name, body)

    @contextmanager
    def locked(self, *, make: bool = False) -> Iterator[int | None]:
        """Holds the folder's lock, if it is free: the file that holds it, else None.

        The lock belongs to the open file, so a shim that inherits it keeps it after this one was closed. Only who
        holds it may write labels and start, or move the folder away.
        """
        file = self._open_lock(make=make)
        try:
            yield file if file is not None and self._lock(file) else None
        finally:
            if file is not None:
                os.close(file)

    def _open_lock(self, *, make: bool) -> int | None:
        try:
            if make:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # no folder, or it was moved away between the two steps
            return None

    def _lock(self, file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:  # the folder that we opened may have been moved away, and another one be in its place
            return os.path.samestat(os.fstat(file), (self.path / "lock").stat())
        except FileNotFoundError:
            return False

    def discard(self) -> None:
        """Delete it, of a start that failed; for who holds the lock."""
        shutil.rmtree(self._move_away(), ignore_errors=True)

    def retire(self, kept: int) -> None:
        """Move it to the ended ones, without its environment, and delete all but the newest ``kept`` of those."""
        away = self._move_away()
        (away / "start.json").unlink(missing_ok=True)
        for old in _oldest_first(away.parent)[:-kept]:
            shutil.rmtree(old, ignore_errors=True)

    def _move_away(self) -> Path:
        ended = self.path.parent / ENDED
        ended.mkdir(mode=0o700, exist_ok=True)
        away = ended / f"{self.path.name}.{unused()}"
        os.utime(self.path)
        return self.path.rename(away)


def folder_name(name: str) -> str:
    """A file name for any container name: its token, or where that is too long for a file system its head and hash."""
    token = encode(name, "container")
    if len(token) <= _LONGEST:
        return token
    return f"{token[: _LONGEST - 65]}.{hashlib.sha256(name.encode()).hexdigest()}"


def folders(root: Path) -> list[Folder]:
    """All of them, in no order; none where the root is not there."""
    try:
        return [Folder(path) for path in root.iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        return []


def unused() -> str:
    """What nobody else has in the name of a file, nor will have."""
    return f"{_PROCESS}.{next(_count)}"


def write_whole(path: Path, body: bytes) -> None:
    """Whole or not at all: readers see no half-written file."""
    new = path.with_name(f".{path.name}.{unused()}")
    new.write_bytes(body)
    new.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _oldest_first(root: Path) -> list[Path]:
    def age(path: Path) -> float:
        with suppress(OSError):  # another placer deletes old ones too
            return path.stat().st_mtime
        return 0.0

    return sorted(root.iterdir(), key=age)


def mark_ended(ring: Path) -> None:
    """Leave a ring folder to the monitor, which reads what is in it and then removes it."""
    with suppress(FileNotFoundError):
        (ring / RING_ENDED).touch()

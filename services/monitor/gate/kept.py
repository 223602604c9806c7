"""What a gate leaves for the next one, in its folder: who is on which device, and what is held against whom.

What a former boot left says nothing: its times are of another clock.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from services.monitor.gate.core import Owed

_SINCE: Final = struct.Struct("<Q")
_WHO: Final = struct.Struct("<36s256p")
"""Boot and token; a token is the name of a folder."""
_TURN_BYTES: Final = _SINCE.size + _WHO.size


class Turn(NamedTuple):
    """The turn that was given last; whether it is over the device's lock says."""

    token: str
    since_us: int


class Kept:
    """Used by one gate at a time. What cannot be written or read is counted, as ``unkept`` and ``unread``."""

    def __init__(self, folder: Path, counts: Counter[str]) -> None:
        """OSError where the folder cannot be used."""
        self._owed, self._turns, self._counts = folder / "owed", folder / "turns", counts
        self._owed.mkdir(mode=0o700, exist_ok=True)
        self._turns.mkdir(mode=0o700, exist_ok=True)
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._maps: dict[str, mmap.mmap] = {}

    def owed(self, alive: Set[str]) -> Iterator[tuple[str, Owed]]:
        """By the name of its folder, what was kept of each container that is still there; the rest is removed."""
        for path in sorted(self._owed.iterdir()):
            if path.name in alive and (owed := self._read(path)):
                yield path.name, owed
            else:
                path.unlink()

    def _read(self, path: Path) -> Owed | None:
        try:
            said: dict[str, Any] = json.loads(path.read_bytes())
            if said.pop("boot") != self._boot:
                return None
            touched, neighbours = tuple(said.pop("touched")), tuple(said.pop("neighbours"))
            return Owed(**said, touched=touched, neighbours=neighbours)
        except (ValueError, TypeError, KeyError, AttributeError):  # of another version
            self._counts["unread"] += 1
            return None

    def keep(self, token: str, owed: Owed) -> None:
        """In place of what was kept of this container."""
        new = self._owed / ".new"
        try:
            new.write_text(json.dumps({"boot": self._boot, **asdict(owed)}))
            new.replace(self._owed / token)
        except OSError:
            self._counts["unkept"] += 1

    def forget(self, token: str) -> None:
        """The container is gone for good."""
        (self._owed / token).unlink(missing_ok=True)

    def begin(self, device: str, token: str, since_us: int) -> None:
        """A turn is given: three stores into memory that outlives us."""
        if turn := self._turn(device):
            _SINCE.pack_into(turn, 0, 0)
            _WHO.pack_into(turn, _SINCE.size, self._boot.encode(), token.encode())
            _SINCE.pack_into(turn, 0, since_us)

    def last(self, device: str) -> Turn | None:
        """None where nothing is known."""
        if not (turn := self._turn(device)):
            return None
        (since_us,), (boot, token) = _SINCE.unpack_from(turn), _WHO.unpack_from(turn, _SINCE.size)
        return Turn(token.decode(), since_us) if since_us and boot == self._boot.encode() else None

    def close(self) -> None:
        while self._maps:
            self._maps.popitem()[1].close()

    def _turn(self, device: str) -> mmap.mmap | None:
        if device not in self._maps:
            try:
                self._maps[device] = self._map(self._turns / sha256(device.encode()).hexdigest())
            except OSError:
                self._counts["unkept"] += 1
                return None
        return self._maps[device]

    def _map(self, path: Path) -> mmap.mmap:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _TURN_BYTES)  # a store that finds no room would end us
            return mmap.mmap(descriptor, _TURN_BYTES)
        finally:
            os.close(descriptor)

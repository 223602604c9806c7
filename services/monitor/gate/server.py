"""The gate's sockets, locks and signals, in one thread; who is next is the core's to say."""

from __future__ import annotations

import fcntl
import itertools
import os
import select
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from services.monitor.gate import core
from services.monitor.gate.boxes import Boxes, Found
from services.monitor.gate.kept import Kept
from services.monitor.gate.wire import ASK, GRANT, MESSAGE, RELEASE, VERSION, WELCOME

FOLDER: Final = ".gate"
"""In the ring root: the locks of the devices. No container's folder begins with a dot."""
SCAN_US: Final = 20_000
"""How often new containers are looked for; few start faster than that."""
BEAT_US: Final = 500_000
LOCK_US: Final = 1_000
"""How often a device is looked at on which somebody is whom we do not know, or who is dying."""
MAX_CLIENTS: Final = 64
"""Threads of one container, so that it cannot use up our descriptors."""
_PEER: Final = struct.Struct("3i")


@dataclass(slots=True)
class _Box:
    """One container: what it declared, its socket, and who has come through it."""

    token: str
    terms: core.Terms
    listener: socket.socket
    clients: set[int] = field(default_factory=set)
    inside: int | None = None
    """Its client without a connection, which is on the device since before our start."""


@dataclass(slots=True)
class _Client:
    number: int
    connection: socket.socket
    box: _Box


def now_us() -> int:
    """CLOCK_MONOTONIC in microseconds."""
    return time.monotonic_ns() // 1000


class Server:
    """Serves each container below ``ring_root`` whose labels say ``gate: true``; ``say`` takes what is to be told.

    A lock file per device outlives this process: a client locks it for the length of its turn, through a descriptor
    that comes with its welcome. So nobody is let in beside a holder of before a restart. Who that is, and who overran,
    is kept beside the locks.
    """

    def __init__(self, ring_root: Path, arbiter: core.Arbiter, say: Callable[[dict[str, Any]], None]) -> None:
        self._arbiter, self._say = arbiter, say
        self._locks = ring_root / FOLDER
        self._locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._found = Boxes(ring_root)
        self._recalled = False
        self._owing: dict[str, str] = {}
        """Who overran, by the name of its folder."""
        self._inside: dict[str, int] = {}
        """By device: who is on it since before our start."""
        self._epoll = select.epoll()
        self._boxes: dict[str, _Box] = {}
        self._by_descriptor: dict[int, _Box | _Client] = {}
        self._clients: dict[int, _Client] = {}
        self._numbers = itertools.count(1)
        self._used: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._kept = Kept(self._locks, self._counts)
        self._scan_us = self._beat_us = 0

    def run(self) -> None:
        """For ever. OSError where the ring root cannot be used."""
        one = self._open_lock("")
        fcntl.flock(one, fcntl.LOCK_EX)  # a predecessor that has not quite ended may still let somebody in
        while True:
            self.step()

    def step(self) -> None:
        """Wait for the next thing that happens or is due, and do it."""
        now = now_us()
        if now >= self._scan_us:
            self._scan_us = now + SCAN_US
            self._scan()
        if now >= self._beat_us:
            self._beat_us = now + BEAT_US
            self._say({"beat": dict(self._counts)})
        for device in tuple(self._used):
            if opened := self._look_at(device):
                inside = self._inside.pop(device, None)
                self._feed(opened if inside is None else core.Left(inside))
        if (due_us := self._arbiter.due_us) is not None and due_us <= now_us():
            self._feed(core.Looked())
        self._take([descriptor for descriptor, _ in self._epoll.poll(self._pause_us() / 1_000_000)])

    def close(self) -> None:
        """Let go of everything, as the end of the process would."""
        for descriptor in list(self._by_descriptor):
            self._close(descriptor)
        self._epoll.close()
        self._kept.close()

    def _pause_us(self) -> int:
        now = now_us()
        wanted = [self._scan_us, self._beat_us]
        if (due_us := self._arbiter.due_us) is not None:
            wanted.append(due_us)
        if self._used:
            wanted.append(now + LOCK_US)
        return max(0, min(wanted) - now)

    # --- messages ---

    def _take(self, ready: list[int]) -> None:
        """What comes at the same time is heard whole before somebody is let in: who asks before who is done."""
        later: list[core.Event] = []
        for descriptor in ready:
            match self._by_descriptor.get(descriptor):
                case _Box() as box:
                    self._accept(box)
                case _Client() as client:
                    event = self._read(client)
                    if isinstance(event, core.Asked):
                        self._feed(event)
                    elif event is not None:
                        later.append(event)
        for event in later:
            self._feed(event)

    def _accept(self, box: _Box) -> None:
        try:
            connection, _ = box.listener.accept()
        except OSError:  # gone again, or no descriptor is left: it stays in the queue
            return
        lock = -1
        try:
            connection.settimeout(0)
            if len(box.clients) >= MAX_CLIENTS:
                raise BlockingIOError
            lock = self._open_lock(box.terms.device)
            socket.send_fds(connection, [MESSAGE.pack(WELCOME, VERSION, 0)], [lock])
        except OSError:
            connection.close()
            return
        finally:
            if lock >= 0:
                os.close(lock)
        client = _Client(next(self._numbers), connection, box)
        self._clients[client.number] = client
        box.clients.add(client.number)
        self._watch(connection, client)
        self._feed(core.Joined(client.number, box.terms))

    def _read(self, client: _Client) -> core.Event | None:
        try:
            message = client.connection.recv(MESSAGE.size + 1)
        except BlockingIOError:
            return None
        except OSError:
            message = b""
        if len(message) == MESSAGE.size:
            kind, _, left_us = MESSAGE.unpack(message)
            if kind == ASK:
                return core.Asked(client.number, left_us)
            if kind == RELEASE:
                return core.Released(client.number)
        return self._drop(client)

    def _feed(self, event: core.Event) -> None:
        effects = self._arbiter.handle(event, now_us())
        for effect in effects:  # grows while it is worked through
            if (follows := self._perform(effect)) is not None:
                effects += self._arbiter.handle(follows, now_us())

    def _perform(self, effect: core.Effect) -> core.Event | None:
        """What follows at once from it."""
        match effect:
            case core.Grant():
                return self._grant(effect.client)
            case core.Watch():
                return self._look_at(effect.device)
            case core.End():
                return None if self._end(effect.client) else core.Spared(effect.client)
            case core.Overran():
                self._counts["overruns"] += effect.over
                self._say({"overran": asdict(effect)})
            case core.Standing():
                self._say({"standing": asdict(effect)})
            case core.Owed():
                self._keep(effect)
        return None

    def _grant(self, number: int) -> core.Event | None:
        client = self._clients.get(number)
        if client is None:
            return core.Left(number)
        self._counts["grants"] += 1
        self._kept.begin(client.box.terms.device, client.box.token, now_us())
        try:
            client.connection.send(MESSAGE.pack(GRANT, 0, 0))
        except OSError:  # gone, or it never reads
            return self._drop(client)
        return None

    def _end(self, number: int) -> bool:
        client = self._clients.get(number)
        if client is None:  # gone, or without a connection: we do not know its process
            return number not in self._inside.values()
        peer = client.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, _, _ = _PEER.unpack(peer)
        if pid <= 0:  # of a pid namespace that we do not see
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            return False
        self._counts["ended"] += 1
        return True

    # --- containers, devices and descriptors ---

    def _scan(self) -> None:
        changes = self._found.look()
        if not self._recalled:
            self._recalled = True
            self._recall()
        for token in changes.gone:
            if box := self._boxes.pop(token, None):
                self._leave(box)
            self._forget(token)
        for found in changes.new:
            self._serve(found)

    def _leave(self, box: _Box) -> None:
        self._close(box.listener.fileno())
        for number in list(box.clients):
            self._feed(self._drop(self._clients[number]))
        if box.inside is not None:
            self._inside = {device: number for device, number in self._inside.items() if number != box.inside}
            self._feed(core.Left(box.inside))
        self._feed(core.Gone(box.terms.container))

    def _serve(self, found: Found) -> None:
        box = self._boxes[found.token] = _Box(found.token, found.terms, found.listener)
        self._watch(box.listener, box)
        self._resume(box)

    # --- what outlives this process ---

    def _recall(self) -> None:
        for token, owed in self._kept.owed(self._found.tokens):
            self._owing[token] = owed.container
            self._feed(owed)

    def _resume(self, box: _Box) -> None:
        """It may have been let in by a former gate, and be on the device still."""
        device = box.terms.device
        last = self._kept.last(device)
        if last is None or last.token != box.token:
            return
        number = next(self._numbers)
        self._feed(core.Joined(number, box.terms))
        if device in self._used and device not in self._inside:
            self._inside[device] = box.inside = number
            self._feed(core.Inside(number, last.since_us))
        else:
            self._feed(core.Left(number))

    def _keep(self, owed: core.Owed) -> None:
        for box in self._boxes.values():
            if box.terms.container == owed.container:
                self._owing[box.token] = owed.container
                self._kept.keep(box.token, owed)

    def _forget(self, token: str) -> None:
        if container := self._owing.pop(token, None):
            self._kept.forget(token)
            self._feed(core.Gone(container))

    def _open_lock(self, device: str) -> int:
        path = self._locks / f"{sha256(device.encode()).hexdigest()}.lock"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _look_at(self, device: str) -> core.Event | None:
        """Whether nobody is on the device; if somebody is, it is looked at again soon."""
        lock = self._open_lock(device)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._used.add(device)
            return None
        finally:
            os.close(lock)
        self._used.discard(device)
        return core.Opened(device)

    def _watch(self, connection: socket.socket, owner: _Box | _Client) -> None:
        self._by_descriptor[connection.fileno()] = owner
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _drop(self, client: _Client) -> core.Left:
        """Close its connection; it has left once that is fed to the core."""
        if self._clients.pop(client.number, None):
            client.box.clients.discard(client.number)
            self._close(client.connection.fileno())
        return core.Left(client.number)

    def _close(self, descriptor: int) -> None:
        match self._by_descriptor.pop(descriptor):
            case _Box() as box:
                box.listener.close()
            case _Client() as client:
                client.connection.close()

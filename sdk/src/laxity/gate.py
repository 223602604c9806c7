"""One thread's way to the gate of its device: it waits for its turn and gives it back; who is next, the gate says.

What is said, byte by byte, and what happens without a gate stands in docs/gate.md.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
import weakref
from typing import Protocol

SOCKET = "gate.sock"
VERSION = 1
ASK, RELEASE = 1, 2
WELCOME, GRANT = 1, 2
MESSAGE = struct.Struct("<BBxxxxxxQ")

DEFAULT_PATIENCE_US = 10_000_000
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


class GateError(RuntimeError):
    """The gate of the device is not there, and LAXITY_GATE_LOST does not say that tasks run without it."""


class Holder(Protocol):
    """A task that has, or shares, the turn of the thread that began it."""

    turn: Turn | None


class Turn:
    """The turn of one thread. Tasks that it begins while it has one share it: they wait for nobody.

    `take` is called by that thread alone, `give` by any.
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._socket: socket.socket | None = None
        self._lock = -1
        self._tasks = 0
        self._waiting = False
        self._lost_s: float | None = None
        _turns.add(self)

    def take(self, task: Holder, directory: str, deadline_us: int) -> bool:
        """Wait until it is this thread's turn; False if the gate has been away for too long.

        GateError where the gate speaks another version, and for a signal handler that begins a task during the wait.
        """
        with self._guard:
            if self._waiting:
                raise GateError("a signal handler began a task while its thread waits for its turn")
            task.turn = self
            self._tasks += 1
            if self._tasks > 1:
                return True
        try:
            self._waiting = True
            return self._wait(directory, time.monotonic() + deadline_us / 1e6)
        except BaseException:
            self._drop()
            self.give(task)
            raise
        finally:
            self._waiting = False

    def give(self, task: Holder) -> None:
        """The task is done; the first call counts, and the last task gives the turn back."""
        with self._guard:
            if task.turn is not self:
                return
            task.turn = None
            self._tasks -= 1
            if self._tasks or self._socket is None:
                return
            try:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
                self._socket.send(MESSAGE.pack(RELEASE, 0, 0))
            except OSError:  # there is no gate any more that could hear of it
                self._drop()

    def forget(self) -> None:
        """In a forked child: the connection is its parent's, and stays locked."""
        self._guard = threading.RLock()
        self._tasks, self._waiting = 0, False
        self._drop()

    def _wait(self, directory: str, due_s: float) -> bool:
        pause_s = _SHORTEST_PAUSE_S
        while True:
            try:
                self._ask(directory, due_s)
            except OSError:
                self._drop()
            else:
                self._lost_s = None
                return True
            now_s = time.monotonic()
            self._lost_s = now_s if self._lost_s is None else self._lost_s
            if now_s - self._lost_s >= _patience_us() / 1e6:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, directory: str, due_s: float) -> None:
        """OSError where there is no gate, or it goes away while we wait."""
        connection = self._socket or self._connect(directory)
        left_us = max(0, int((due_s - time.monotonic()) * 1e6))
        connection.send(MESSAGE.pack(ASK, 0, left_us))
        if connection.recv(MESSAGE.size) != MESSAGE.pack(GRANT, 0, 0):
            raise ConnectionResetError("the gate went away")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # free but for the last steps of a holder that is being killed

    def _connect(self, directory: str) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = made
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            made.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # a socket's path is short
        finally:
            os.close(folder)
        said, locks, _, _ = socket.recv_fds(made, MESSAGE.size, 1, socket.MSG_CMSG_CLOEXEC)
        if not locks:
            raise ConnectionResetError("the gate went away")
        self._lock = locks[0]
        if said != MESSAGE.pack(WELCOME, VERSION, 0):
            raise GateError(f"gate: found version {said[1]}, allowed: {VERSION}")
        return made

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    __del__ = _drop


def enter(task: Holder, directory: str, deadline_us: int) -> bool:
    """Wait for this thread's turn. Without a gate GateError, or False if LAXITY_GATE_LOST=run."""
    turn: Turn | None = getattr(_local, "turn", None)
    if turn is None:
        turn = _local.turn = Turn()
    if turn.take(task, directory, deadline_us):
        return True
    if os.environ.get("LAXITY_GATE_LOST") == "run":
        return False
    turn.give(task)
    patience_us = _patience_us()
    raise GateError(f"no gate for {patience_us} us in LAXITY_RING_DIR={directory}; LAXITY_GATE_LOST=run does without")


def _patience_us() -> int:
    text = os.environ.get("LAXITY_GATE_PATIENCE_US", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else DEFAULT_PATIENCE_US


_local = threading.local()
_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


def _forget() -> None:
    for turn in list(_turns):
        turn.forget()


os.register_at_fork(after_in_child=_forget)

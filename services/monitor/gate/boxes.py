"""Finds the containers that use the gate by their ring folders, and makes a socket in each; serves none."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from services.monitor.gate.core import Terms
from services.monitor.gate.wire import SOCKET
from services.monitor.links import is_box, real

_MOST_BYTES: Final = 1 << 18
_LONGEST_US: Final = 1 << 50
_SETTLED_NS: Final = 100_000_000
"""Far more than one tick of the clock that stamps folders: two changes within a tick leave one stamp."""
_BACKLOG: Final = 64
_TRIES: Final = 100
"""Looks at labels that make no sense: a remote engine unpacks them while we read."""
_SOON: Final = 250
_SELDOM: Final = 50
"""After so many looks a folder that has no labels is looked into once in so many: it is hardly a container of ours."""


@dataclass(frozen=True, slots=True)
class Found:
    """A container to be served: the name of its folder, what it declared, and its socket, which listens."""

    token: str
    terms: Terms
    listener: socket.socket


class Changes(NamedTuple):
    new: list[Found]
    gone: list[str]


@dataclass(slots=True)
class _Unlabelled:
    """A folder without labels that make sense: since which look, and how many more may find nonsense."""

    since: int
    tries: int = _TRIES


class Boxes:
    """The folders of a ring root. Their owners are not trusted: links are not followed, and every value is checked."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._settled_ns: int | None = None
        self._known: set[str] = set()
        self._unlabelled: dict[str, _Unlabelled] = {}
        self._looks = 0

    @property
    def tokens(self) -> Set[str]:
        """Folders that were there at the last look, whether they are to be served or not."""
        return self._known

    def look(self) -> Changes:
        """What changed since the last look; one stat while nothing does. OSError where the root cannot be read."""
        changes = Changes([], [])
        self._looks += 1
        tokens = self._tokens()
        if tokens is not None:
            changes.gone.extend(self._known - tokens)
            self._unlabelled |= {token: _Unlabelled(self._looks) for token in tokens - self._known}
            self._unlabelled = {token: waiting for token, waiting in self._unlabelled.items() if token in tokens}
            self._known = tokens
        for number, token in enumerate(sorted(self._unlabelled)):
            soon = self._looks - self._unlabelled[token].since < _SOON
            if soon or (self._looks + number) % _SELDOM == 0:  # not all at one look: somebody may wait for the gate
                self._try(token, changes)
        return changes

    def _try(self, token: str, changes: Changes) -> None:
        """Its labels may be still to come, or half written; whatever else is wrong with a folder stays with it."""
        try:
            self._open(token, changes)
        except FileNotFoundError:
            return
        except (ValueError, TypeError, KeyError, AttributeError):  # the monitor counts labels that cannot be read
            self._unlabelled[token].tries -= 1
            if self._unlabelled[token].tries:
                return
        except OSError:
            pass
        del self._unlabelled[token]

    def _tokens(self) -> set[str] | None:
        """None while they are as before."""
        changed_ns = self._root.stat().st_mtime_ns
        if changed_ns == self._settled_ns:
            return None
        with os.scandir(self._root) as entries:
            tokens = {e.name for e in entries if not e.name.startswith(".") and is_box(Path(e.path))}
        settled = time.time_ns() - changed_ns > _SETTLED_NS
        self._settled_ns = changed_ns if settled else None
        return tokens

    def _open(self, token: str, changes: Changes) -> None:
        path = real(self._root / token) or self._root / token
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if terms := terms_of(_labels(folder)):
                changes.new.append(Found(token, terms, _listen(folder)))
        finally:
            os.close(folder)


def terms_of(labels: dict[str, Any]) -> Terms | None:
    """What a container declared; None where it does not use a gate. ValueError, TypeError or KeyError: no labels.

    Who takes several devices takes them whole, so that nobody else waits there: the gate of the first is enough.
    """
    held = labels["reservation"]
    timing = held.get("realtime") or {}
    if timing.get("gate") is not True or timing.get("runtime_us") is None or not held["devices"]:
        return None
    host_us = _number(timing.get("host_us", 0), 0)
    deadline_us = _number(timing["deadline_us"], 1)
    period_us = _number(timing.get("period_us") or deadline_us, 1)
    return Terms(
        container=str(labels["container"]),
        device=str(held["devices"][0]),
        runtime_us=_number(timing["runtime_us"], 1),
        period_us=max(1, period_us - host_us),
        deadline_us=max(1, deadline_us - host_us),
        best_effort=timing.get("kind") == "soft",
    )


def _number(found: object, least: int) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= _LONGEST_US:
        raise ValueError(f"a time in microseconds: found {found!r}")
    return found


def _labels(folder: int) -> dict[str, Any]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open("container.json", flags, dir_fd=folder)
    try:
        found: dict[str, Any] = json.loads(os.read(descriptor, _MOST_BYTES))
    finally:
        os.close(descriptor)
    return found


def _listen(folder: int) -> socket.socket:
    """Through /proc, since a socket's path is short. Any user may connect, and no path is chmod-ed, which a link could
    lead astray: the one thread of this process has no umask for a moment."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET, dir_fd=folder)  # of a predecessor
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    umask = os.umask(0)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{SOCKET}")
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(umask)
    return listener

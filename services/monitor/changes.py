"""Which folders may have changed, told by the kernel (inotify) in one call for all; what is in them is read elsewhere.

A hint and no more: a file system that others write to from elsewhere tells nothing, and an instance or a watch may be
refused (fs.inotify.max_user_instances, max_user_watches). Who needs certainty looks for itself now and then.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import termios
from collections.abc import Iterator
from typing import Final

_libc: Final = ctypes.CDLL(None, use_errno=True)
_EVENT: Final = struct.Struct("iIII")
_ATTRIB, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x4, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_OVERFLOW, _IGNORED = 0x4000, 0x8000
_ONLYDIR, _DONT_FOLLOW = 0x01000000, 0x02000000
_WANTED: Final = (
    _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF | _ONLYDIR | _DONT_FOLLOW
)
_READ_BYTES: Final = 65_536
_MOST_READS: Final = 16
_NOTHING: Final = bytes(4)


class Changes:
    """Of the folders that it was given."""

    def __init__(self) -> None:
        self._descriptor: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._paths: dict[int, str] = {}
        self._watched: set[str] = set()

    def watches(self, path: str) -> bool:
        """Whether changes of the folder are told from now on; asked again, it tries again."""
        if path not in self._watched and self._descriptor >= 0:
            watch: int = _libc.inotify_add_watch(self._descriptor, os.fsencode(path), _WANTED)
            if watch >= 0:
                self._paths[watch] = path
                self._watched.add(path)
        return path in self._watched

    def take(self) -> set[str] | None:
        """Those that may have changed since the last call; None: all of them. One that is gone is not watched then."""
        changed: set[str] = set()
        overflown = False
        for raw in self._read():
            at = 0
            while at < len(raw):
                watch, kinds, _, length = _EVENT.unpack_from(raw, at)
                at += _EVENT.size + length
                overflown |= bool(kinds & _OVERFLOW)
                if (path := self._paths.get(watch)) is not None:
                    changed.add(path)
                if kinds & (_IGNORED | _MOVE_SELF):
                    self._forget(watch)
        return None if overflown else changed

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._watched.clear()
        self._paths.clear()

    def _read(self) -> Iterator[bytes]:
        """Not for ever: what a container does in its folder must not hold up the others. The rest comes next time."""
        for _ in range(_MOST_READS if self._descriptor >= 0 else 0):
            # to be refused a read costs twice as much as to ask
            if fcntl.ioctl(self._descriptor, termios.FIONREAD, _NOTHING) == _NOTHING:
                return
            yield os.read(self._descriptor, _READ_BYTES)

    def _forget(self, watch: int) -> None:
        """Of a folder that was removed or renamed: another one may be there by now."""
        if (path := self._paths.pop(watch, None)) is not None:
            self._watched.discard(path)
            _libc.inotify_rm_watch(self._descriptor, watch)

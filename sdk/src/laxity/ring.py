"""One ring file: its header, its making and its lock; how records come into it is `laxity.records`.

The format is described byte by byte in docs/ring-format.md.
"""

import fcntl
import mmap
import os
import struct
from pathlib import Path
from time import monotonic_ns

from laxity.records import HEADER_SIZE, RECORD_SIZE, Writer

MAGIC = b"LAXRING\0"
VERSION = 1
NAME_SIZE = 22
BEGIN, END = 1, 2
OK, FAILED = 0, 1

MIN_RECORDS, DEFAULT_RECORDS, MAX_RECORDS = 16, 4096, 1 << 20

_HEADER = struct.Struct("@8sIIII16s16sIIQQ")


def boot_id() -> bytes:
    """The 16 bytes that name this boot of the machine; OSError where /proc is missing."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(text.strip().replace("-", ""))


def start_ticks() -> int:
    """When this process started, in clock ticks since boot (field 22 of /proc/self/stat)."""
    after_command = Path("/proc/self/stat").read_bytes().rpartition(b")")[2]
    return int(after_command.split()[19])


def words_of(name: bytes) -> tuple[bytes, bytes, bytes]:
    """Kind, status and name as they stand in a task's begin, in its end, and in its end without a result."""
    padded = name.ljust(NAME_SIZE, b"\0")
    return bytes((BEGIN, OK)) + padded, bytes((END, OK)) + padded, bytes((END, FAILED)) + padded


class Ring(Writer):
    """The one ring of this process, locked while the process lives."""

    __slots__ = ("_descriptor", "map", "path")

    def __init__(self, directory: str, records: int = DEFAULT_RECORDS) -> None:
        """Create the file, complete before it has its name; OSError if the directory does not let us."""
        ring_id = os.urandom(16)
        self.path = Path(directory, f"ring-{ring_id.hex()}.ring")
        temporary = Path(directory, f".new-{ring_id.hex()}")
        self._descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self.map = _prepare(self._descriptor, ring_id, records)
            temporary.rename(self.path)
        except BaseException:
            os.close(self._descriptor)
            temporary.unlink()
            raise
        self.attach(self.map)

    def close(self) -> None:
        """Let go of the file without touching it: its lock stays with the process that made it."""
        self.detach()
        self.map.close()
        os.close(self._descriptor)


def _prepare(descriptor: int, ring_id: bytes, records: int) -> mmap.mmap:
    os.fchmod(descriptor, 0o644)  # the monitor may be another user, whatever our umask says
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    size = HEADER_SIZE + records * RECORD_SIZE
    os.posix_fallocate(descriptor, 0, size)  # a full disk is an error here, not a SIGBUS at some later record
    mapped = mmap.mmap(descriptor, size)
    started = start_ticks()
    fields = (VERSION, HEADER_SIZE, RECORD_SIZE, records, ring_id, boot_id(), os.getpid(), 0, started)
    _HEADER.pack_into(mapped, 0, MAGIC, *fields, monotonic_ns())
    return mapped

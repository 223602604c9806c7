"""One ring file: its layout, its making and its lock; what is written into it, and when, is `laxity.tasks`.

The format is described byte by byte in docs/ring-format.md.
"""

import fcntl
import itertools
import mmap
import os
import struct
import threading
from pathlib import Path
from time import monotonic_ns

MAGIC = b"LAXRING\0"
VERSION = 1
HEADER_SIZE = 4096
RECORD_SIZE = 64
HEAD_OFFSET = 128
NAME_SIZE = 22
BEGIN, END = 1, 2
OK, FAILED = 0, 1

MIN_RECORDS, DEFAULT_RECORDS, MAX_RECORDS = 16, 4096, 1 << 20

# Native layout ("@"): on a little-endian machine it equals the documented one, and it is twice as fast.
_HEADER = struct.Struct("@8sIIII16s16sIIQQ")
pack_record = struct.Struct("@QQQQ24sQ").pack_into  # kind, status and name as one, made once for each name: `words_of`


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


class Ring:
    """The one ring of this process, locked while the process lives.

    Whoever writes a record holds the lock (`acquire`, `release`) while it takes `next(places)`, the sequence and the
    offset of the next record, fills that in, and stores the sequence in `head[0]`: one aligned store of 8 bytes, as
    `pack_into` would first write zeros. The lock is re-entrant because a signal handler or a finalizer may write a
    record while its own thread is writing one; `written` is what such a one has stored, so that the head never goes
    back.
    """

    __slots__ = ("_descriptor", "acquire", "closed", "head", "map", "path", "places", "release", "written")

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
        self.head = memoryview(self.map)[HEAD_OFFSET : HEAD_OFFSET + 8].cast("Q")
        self.written = 0
        slots = range(HEADER_SIZE, len(self.map), RECORD_SIZE)
        self.places = zip(itertools.count(1), itertools.chain.from_iterable(itertools.repeat(slots)))
        lock = threading.RLock()
        self.acquire, self.release = lock.acquire, lock.release
        self.closed = False

    def close(self) -> None:
        """Let go of the file without touching it: its lock stays with the process that made it."""
        self.closed = True
        self.head.release()
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

"""The writer of one ring file: its layout and how a record gets into it; not when, which is `laxity.tasks`.

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
ALREADY_OPEN = "this laxity.task is already open: make one for each with statement"

MIN_RECORDS, DEFAULT_RECORDS, MAX_RECORDS = 16, 4096, 1 << 20

# Native layout ("@"): on a little-endian machine it equals the documented one, and it is twice as fast.
_HEADER = struct.Struct("@8sIIII16s16sIIQQ")
_pack_record = struct.Struct("@QQQQBB22sQ").pack_into


def boot_id() -> bytes:
    """The 16 bytes that name this boot of the machine; OSError where /proc is missing."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(text.strip().replace("-", ""))


def start_ticks() -> int:
    """When this process started, in clock ticks since boot (field 22 of /proc/self/stat)."""
    after_command = Path("/proc/self/stat").read_bytes().rpartition(b")")[2]
    return int(after_command.split()[19])


class Mark:
    """What a ring needs of a task: `name` in UTF-8, `deadline_us`, and the sequence of its begin, 0 unless open."""

    __slots__ = ("deadline_us", "name", "seq")

    name: bytes
    deadline_us: int
    seq: int


class Ring:
    """The one ring of this process, locked while the process lives.

    Begins and ends may be written from any thread. The lock is re-entrant because a signal handler or a
    finalizer may write a record while its own thread is writing one; the head then never goes back.
    It is taken inside the `try` (a signal may raise as soon as it is held) and by bound methods, which
    cost half of a `with`.
    """

    __slots__ = ("_acquire", "_descriptor", "_head", "_map", "_mask", "_release", "_sequence", "closed", "path")

    def __init__(self, directory: str, records: int = DEFAULT_RECORDS) -> None:
        """Create the file, complete before it has its name; OSError if the directory does not let us."""
        ring_id = os.urandom(16)
        self.path = Path(directory, f"ring-{ring_id.hex()}.ring")
        temporary = Path(directory, f".new-{ring_id.hex()}")
        self._descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self._map = _prepare(self._descriptor, ring_id, records)
            temporary.rename(self.path)
        except BaseException:
            os.close(self._descriptor)
            temporary.unlink()
            raise
        self._head = memoryview(self._map)[HEAD_OFFSET : HEAD_OFFSET + 8].cast("Q")
        self._mask = records - 1
        self._sequence = itertools.count(1)
        lock = threading.RLock()
        self._acquire, self._release = lock.acquire, lock.release
        self.closed = False

    def begin(self, mark: Mark) -> None:
        """Write a begin, stamped as late as possible; RuntimeError if the mark is open."""
        try:
            self._acquire()
            if mark.seq:
                raise RuntimeError(ALREADY_OPEN)
            seq = next(self._sequence)
            at = HEADER_SIZE + ((seq - 1) & self._mask) * RECORD_SIZE
            _pack_record(self._map, at, seq, monotonic_ns(), seq, mark.deadline_us, BEGIN, OK, mark.name, seq)
            if seq > self._head[0]:  # noqa: PLR1730 - max() costs a call on the hot path
                self._head[0] = seq  # one aligned store of 8 bytes; pack_into would first write zeros
            mark.seq = seq
        finally:
            try:  # noqa: SIM105 - suppress() costs a call on the hot path
                self._release()
            except RuntimeError:
                pass  # a signal raised while we waited for the lock: it is not ours

    def end(self, mark: Mark, status: int) -> None:
        """Write the end of an open mark, stamped before anything is waited for; nothing if it is not open."""
        if self.closed:
            return
        stamp_ns = monotonic_ns()
        try:
            self._acquire()
            begun, mark.seq = mark.seq, 0
            if begun:
                seq = next(self._sequence)
                at = HEADER_SIZE + ((seq - 1) & self._mask) * RECORD_SIZE
                _pack_record(self._map, at, seq, stamp_ns, begun, mark.deadline_us, END, status, mark.name, seq)
                if seq > self._head[0]:  # noqa: PLR1730 - as above
                    self._head[0] = seq
        finally:
            try:  # noqa: SIM105 - suppress() costs a call on the hot path
                self._release()
            except RuntimeError:
                pass  # a signal raised while we waited for the lock: it is not ours

    def close(self) -> None:
        """Let go of the file without touching it: its lock stays with the process that made it."""
        self.closed = True
        self._head.release()
        self._map.close()
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

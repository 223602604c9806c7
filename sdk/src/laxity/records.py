"""How a record comes into a ring: in Python, or by `_fast.c` where that is compiled; when and why is `laxity.tasks`.

Both have the same two classes and write the same bytes, those of docs/ring-format.md. LAXITY_PURE=1 takes Python's.
"""

import contextlib
import itertools
import mmap
import os
import struct
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Self, TypeVar

HEADER_SIZE = 4096
RECORD_SIZE = 64
HEAD_OFFSET = 128

# Native layout ("@"): on a little-endian machine it equals the documented one, and it is twice as fast.
pack_record = struct.Struct("@QQQQ24sQ").pack_into  # kind, status and name as one, made once for each name

_ALREADY_OPEN = "this laxity.task is already open: make one for each with statement"

Words = tuple[bytes, bytes, bytes]
TaskVerb = TypeVar("TaskVerb", bound=Callable[..., Any])
BeginVerb = TypeVar("BeginVerb", bound=Callable[..., Any])


class Writer:
    """Where the next record goes.

    Whoever writes one holds the lock (`acquire`, `release`) while it takes `next(places)`, the sequence and the
    offset of the next record, fills that in, and stores the sequence in `head[0]`: one aligned store of 8 bytes, as
    `pack_into` would first write zeros. The lock is re-entrant because a signal handler or a finalizer may write a
    record while its own thread is writing one; `written` is what such a one has stored, so that the head never goes
    back.
    """

    __slots__ = ("acquire", "closed", "head", "into", "places", "release", "written")

    def attach(self, mapped: mmap.mmap) -> None:
        """Write into this ring, which has no record yet."""
        self.into = mapped
        self.head = memoryview(mapped)[HEAD_OFFSET : HEAD_OFFSET + 8].cast("Q")
        self.written = 0
        slots = range(HEADER_SIZE, len(mapped), RECORD_SIZE)
        self.places = zip(itertools.count(1), itertools.chain.from_iterable(itertools.repeat(slots)))
        lock = threading.RLock()
        self.acquire, self.release = lock.acquire, lock.release
        self.closed = False

    def detach(self) -> None:
        """Write nothing more; the tasks that are open have no end."""
        self.closed = True
        self.head.release()


class Mark:
    """What writes a task's begin and its end.

    All that is done for a record stands in `__enter__` and `__exit__` at full length, since every call would be felt.
    The lock is taken inside the `try`, as a signal may raise as soon as it is held, and by local names, which cost half
    of a `with`.
    """

    __slots__ = ("deadline_us", "ring", "seq", "words")

    deadline_us: int
    ring: Writer | None
    seq: int
    words: Words

    def _process_ring(self) -> Writer | None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Write a begin, stamped as late as possible."""
        ring = self.ring
        if ring is None or ring.closed:  # made before there was a ring, or before a fork
            if self.seq:
                raise RuntimeError(_ALREADY_OPEN)
            ring = self.ring = self._process_ring()
            if ring is None:
                self.seq = 1
                return self
        acquire, release = ring.acquire, ring.release
        try:
            acquire()
            if self.seq:
                raise RuntimeError(_ALREADY_OPEN)
            seq, at = next(ring.places)
            pack_record(ring.into, at, seq, monotonic_ns(), seq, self.deadline_us, self.words[0], seq)
            if seq > ring.written:
                ring.written = ring.head[0] = seq
            self.seq = seq
        finally:
            try:  # noqa: SIM105 - suppress() costs a call on the hot path
                release()
            except RuntimeError:
                pass  # a signal raised while we waited for the lock: it is not ours
        return self

    def __exit__(self, failed: object, error: object = None, trace: object = None) -> None:
        """Write the end of an open task, stamped before anything is waited for; nothing if it is not open."""
        stamp_ns = monotonic_ns()
        ring = self.ring
        if ring is None or ring.closed:
            self.seq = 0
            return
        acquire, release = ring.acquire, ring.release
        try:
            acquire()
            begun = self.seq
            if begun:
                self.seq = 0
                seq, at = next(ring.places)
                pack_record(ring.into, at, seq, stamp_ns, begun, self.deadline_us, self.words[2 if failed else 1], seq)
                if seq > ring.written:
                    ring.written = ring.head[0] = seq
        finally:
            try:  # noqa: SIM105 - as above
                release()
            except RuntimeError:
                pass

    def end(self, *, failed: bool = False) -> None:
        """End the task now, `failed` if it gave no result.

        May be called from any thread and any number of times; the first counts. In a forked child nothing
        is written: the task is its parent's.
        """
        Mark.__exit__(self, failed)


def know(kind: type[Mark] | None, ring: Writer | None, deadline_us: int) -> None:
    """What the usual task is, where it is written, and its deadline if it names none (0: there is none).

    `kind` None: nothing is known, Python makes each task.
    """


def quick(names: dict[str, Words], task: TaskVerb, begin: BeginVerb) -> tuple[TaskVerb, BeginVerb]:  # noqa: ARG001
    """The verbs that make usual tasks with `names` themselves and call these for all others."""
    return task, begin


COMPILED = False
if not TYPE_CHECKING and os.environ.get("LAXITY_PURE") != "1":
    with contextlib.suppress(ImportError):
        from laxity._fast import COMPILED, Mark, Writer, know, quick  # noqa: F401 - the same, compiled

"""Reads the task rings of this node's containers and finds them on disk; what their records mean is the core's part.

The format is docs/ring-format.md, the writers are the SDK. Rings belong to containers that nobody trusts: a ring is
read with pread and never mapped (a file that its owner truncates would kill a reader that maps it), every record is
checked, and whatever is wrong with one file stays with that file.

RingError
├── RingCorruptError      not a ring, or no longer one
├── RingVersionError      a ring of a format that this reader does not know
└── RingForeignBootError  written before this machine was started: its clock is not ours
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Self

from services.monitor.changes import Changes
from services.monitor.links import is_box
from services.monitor.listing import Listing
from services.monitor.open_tasks import Fields
from shared.errors import FieldError, LaxityError
from shared.messages.base import MAX_BODY_BYTES
from shared.messages.ledger import ContainerLabels

MAGIC: Final = b"LAXRING\0"
VERSION: Final = 1
HEADER_SIZE: Final = 4096
HEAD_OFFSET: Final = 128
MIN_CAPACITY, MAX_CAPACITY = 16, 1 << 20
MAX_DEADLINE_US: Final = 86_400_000_000
NEVER_US: Final = 1 << 62
ENDED: Final = "ended"
"""Name of the file that a backend puts beside the rings of a container that is gone for good."""
MAX_RINGS_PER_CONTAINER: Final = 1024
"""One per process; a container that makes more has the rest counted, so that it cannot use up our descriptors."""

BEGIN, END = 1, 2

HEADER: Final = struct.Struct("<8sIIII16s16sIIQQ")
RECORD: Final = struct.Struct("<QQQQBB22sQ")
"""Sequence, stamp in ns, task, deadline in us, kind, status, name, sequence once more."""

_LOOK_AT_ALL = 20
"""Scans until every folder is looked at again, whether or not it is said to have changed."""
_MANY_NAMES = 4096
_LARGEST_SEQ = 1 << 62  # 146 years of a record each nanosecond: more is not a head
_LAST_STAMP_NS = (1 << 63) - 1
_RING_NAME_LENGTH = len("ring-") + 32 + len(".ring")


class RingError(LaxityError):
    """A ring cannot be read; `reason` is the name under which it is counted."""

    reason = "ring"


class RingCorruptError(RingError):
    """Not a ring, or no longer one."""

    reason = "corrupt"


class RingVersionError(RingError):
    """A ring of a format that this reader does not know."""

    reason = "version"


class RingForeignBootError(RingError):
    """Written before this machine was started: its clock is not ours."""

    reason = "foreign_boot"


class RingRead(NamedTuple):
    """What one read of one ring took: `rows` in the order of `seq`, gaps only where records were lost.

    `task` of a row is unique within the ring, and is the sequence of the task's begin. `failed` are the sequences of
    ends of tasks that raised. `lost` counts the records that were overwritten, or were not whole, before they could be
    taken. `head` is the last sequence that the writer had written; `taken` the one up to which everything was yielded
    or counted, so `taken == head` means that nothing is left. `head - taken` records may wait for the next read, when
    one of them was not yet visible.
    """

    rows: tuple[Fields, ...]
    failed: tuple[int, ...]
    lost: int
    head: int
    taken: int
    shortest_us: int = MAX_DEADLINE_US
    """The shortest deadline of these rows."""
    due_us: int = NEVER_US
    """When the first of their tasks is past its deadline, ended or not."""

    def then(self, later: RingRead) -> RingRead:
        """Both as one."""
        return RingRead(
            self.rows + later.rows,
            self.failed + later.failed,
            self.lost + later.lost,
            later.head,
            later.taken,
            min(self.shortest_us, later.shortest_us),
            min(self.due_us, later.due_us),
        )


class RingReader:
    """Reads one ring, each record once and in order. Made by `RingReader.open`."""

    def __init__(self, path: Path, descriptor: int, header: RingHeader, container: str) -> None:
        self.path = path
        self.header = header
        self.container = container
        self.labels: ContainerLabels | None = None
        self._descriptor = descriptor
        self._capacity = header.capacity
        self._taken = 0
        self._nothing: RingRead | None = None
        self._quiet = bytes(8)  # the head, as it stands in the file, while there is nothing to take
        self._texts = _Texts()
        self._doubted = 0  # heads up to here were seen with a record that was not whole

    @classmethod
    def open(cls, path: Path, container: str = "", boot: bytes | None = None) -> Self:
        """Check the header and take no record yet; `boot` is the present boot id unless given.

        Raises RingCorruptError, RingVersionError, RingForeignBootError, and OSError where the file cannot be opened.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            header = _read_header(descriptor, path.name, boot_id() if boot is None else boot)
            return cls(path, descriptor, header, container or path.parent.name)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def ring(self) -> str:
        """The ring id in hex."""
        return self.header.ring_id.hex()

    def read(self) -> RingRead:
        """Take everything up to the head of now; RingCorruptError if the file is no ring any more.

        To take the last records of a dead writer ask `writer_gone` first: what it wrote before is then all there is.
        """
        raw = self._pread(8, HEAD_OFFSET)
        if raw == self._quiet:
            self._nothing = self._nothing or RingRead((), (), 0, self._taken, self._taken)
            return self._nothing
        head, first = int.from_bytes(raw, "little"), self._taken + 1
        last_safe = self._taken + self._capacity - 1  # with a later head record `first` may be under the pen
        if first <= head <= last_safe:
            records = self._copy(first, head)
            again = self._pread(8, HEAD_OFFSET)
            if again == raw or head <= int.from_bytes(again, "little") <= last_safe:
                return self._take(records, first, head)
        else:
            head = self._sample_head()
            first = max(first, self._oldest_safe(head))
            records = self._copy(first, head)
        later = self._sample_head()
        head = min(head, later)
        kept = min(max(first, self._oldest_safe(later)), head + 1)
        return self._take(records[(kept - first) * RECORD.size : (head + 1 - first) * RECORD.size], kept, head)

    def writer_gone(self) -> bool:
        """Whether no process holds the ring's lock: its writer has ended, however it ended."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Give the descriptor back; harmless when repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _oldest_safe(self, head: int) -> int:
        """The oldest record that cannot be under the writer's pen: it may be writing record head + 1 by now."""
        return head + 2 - self._capacity

    def _sample_head(self) -> int:
        """The smaller of two readings, so that one torn between its bytes is never believed when it is too high."""
        earlier, later = self._head(), self._head()
        if max(earlier, later) < self._taken:
            raise RingCorruptError(f"{self.path}: its head went back from {self._taken} to {later}")
        head = max(min(earlier, later), self._taken)
        if head > _LARGEST_SEQ:
            raise RingCorruptError(f"{self.path}: head is {head}, at most {_LARGEST_SEQ}")
        return head

    def _head(self) -> int:
        return int.from_bytes(self._pread(8, HEAD_OFFSET), "little")

    def _copy(self, first: int, head: int) -> bytes:
        count, start = head + 1 - first, (first - 1) % self._capacity
        if (over := start + count - self._capacity) <= 0:
            return self._pread(count * RECORD.size, HEADER_SIZE + start * RECORD.size)
        until_end = self._pread((count - over) * RECORD.size, HEADER_SIZE + start * RECORD.size)
        return until_end + self._pread(over * RECORD.size, HEADER_SIZE)

    def _pread(self, size: int, offset: int) -> bytes:
        found = os.pread(self._descriptor, size, offset) if size else b""
        if len(found) != size:
            raise RingCorruptError(f"{self.path}: needs {size} bytes at {offset}, found {len(found)}")
        return found

    def _take(self, records: bytes, kept: int, head: int) -> RingRead:
        """The records from sequence `kept` to `head`, up to the first one that is not whole.

        On a machine that reorders stores a record may become visible after the head that counts it; it gets one more
        read. What is still not whole then is lost.
        """
        rows: list[Fields] = []
        failed: list[int] = []
        shortest_us, due_us = MAX_DEADLINE_US, NEVER_US
        lost, taken, texts = kept - self._taken - 1, head, self._texts
        seq = kept - 1
        for written, stamp_ns, task, deadline_us, kind, status, name, again in RECORD.iter_unpack(records):
            seq += 1
            if (
                written == seq == again
                and (task == seq if kind == BEGIN else kind == END and 1 <= task < seq)
                and 1 <= deadline_us <= MAX_DEADLINE_US
                and stamp_ns <= _LAST_STAMP_NS
            ):
                stamp_us = stamp_ns // 1000
                rows.append((kind, seq, task, task, stamp_us, deadline_us, texts[name]))
                if deadline_us < shortest_us:  # noqa: PLR1730 - min() costs a call for each record
                    shortest_us = deadline_us
                if stamp_us + deadline_us < due_us:  # noqa: PLR1730
                    due_us = stamp_us + deadline_us
                if status and kind == END:
                    failed.append(seq)
            elif seq > self._doubted:
                self._doubted, taken = head, seq - 1
                break
            else:
                lost += 1
        self._taken, self._quiet = taken, taken.to_bytes(8, "little")
        self._nothing = None
        return RingRead(tuple(rows), tuple(failed), lost, head, taken, shortest_us, due_us)


def waiting(readers: Iterable[RingReader]) -> bool:
    """Whether `read` of one of them has something to yield or to raise, by one short look at each file."""
    try:
        for reader in readers:
            if os.pread(reader._descriptor, 8, HEAD_OFFSET) != reader._quiet:  # noqa: SLF001 - no call for each ring
                return True
    except OSError:
        return True
    return False


class RingHeader(NamedTuple):
    """What a ring says about itself; pid and start_ticks are those of the writer's own pid namespace."""

    capacity: int
    ring_id: bytes
    boot: bytes
    pid: int
    start_ticks: int
    created_ns: int


def boot_id() -> bytes:
    """The 16 bytes that name this boot of the machine."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(text.strip().replace("-", ""))


def _read_header(descriptor: int, name: str, boot: bytes) -> RingHeader:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size < HEADER_SIZE:
        raise RingCorruptError(f"{name}: not a file of at least {HEADER_SIZE} bytes")
    fields = HEADER.unpack(os.pread(descriptor, HEADER.size, 0))
    magic, version, header_size, record_size, capacity, ring_id, written_boot, pid, _, ticks, created_ns = fields
    if magic != MAGIC:
        raise RingCorruptError(f"{name}: does not begin with {MAGIC!r}")
    if version != VERSION:
        raise RingVersionError(f"{name}: version {version}, this reader knows {VERSION}")
    if written_boot != boot:
        raise RingForeignBootError(f"{name}: written in boot {written_boot.hex()}, this is {boot.hex()}")
    if (header_size, record_size) != (HEADER_SIZE, RECORD.size):
        raise RingCorruptError(f"{name}: header of {header_size} and records of {record_size} bytes")
    if capacity.bit_count() != 1 or not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
        raise RingCorruptError(f"{name}: capacity {capacity}, a power of two from {MIN_CAPACITY} to {MAX_CAPACITY}")
    if name != f"ring-{ring_id.hex()}.ring" or status.st_size != HEADER_SIZE + capacity * RECORD.size:
        raise RingCorruptError(f"{name}: its name or its size of {status.st_size} is not what its header says")
    return RingHeader(capacity, ring_id, written_boot, pid, ticks, created_ns)


class _Texts(dict[bytes, str]):
    """Names decoded once; what is not UTF-8 is shown as such."""

    def __missing__(self, raw: bytes) -> str:
        if len(self) >= _MANY_NAMES:
            self.clear()
        self[raw] = text = raw.rstrip(b"\0").decode("utf-8", "replace")
        return text


class Scan(NamedTuple):
    """What changed: readers opened now, and readers whose file is gone (still readable; close them after the rest)."""

    new: list[RingReader]
    gone: list[RingReader]


class RingDirectory:
    """All rings of a node: root/<container token>/ring-<id>.ring, beside a container.json with the container's labels.

    A backend puts a file `ended` there when the container is gone for good; then the folder goes with its last ring.
    Without labels that can be read a container has the name of its directory. `counts` says by reason how many rings
    were refused (corrupt, version, foreign_boot, too_many), how many files could not be opened at a scan (os_error),
    and how many containers were without labels (labels_absent, labels_malformed).
    """

    def __init__(self, root: Path, boot: bytes | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._boot = boot_id() if boot is None else boot
        self._changes = Changes()
        self._hints: set[str] | None = None
        """Folders that may have changed since the last scan; None: all of them."""
        self._settled = False
        """Whether a change of any of them will be such a hint."""
        self._scans = 0
        self._listing = Listing(root)
        self._containers: dict[str, _Container] = {}

    @property
    def readers(self) -> list[RingReader]:
        """All open rings, those of one container together."""
        return [reader for container in self._containers.values() for reader in container.readers.values()]

    def scan(self) -> Scan:
        """Find new and vanished rings; one call for all while nothing changes. Raises nothing for a bad file."""
        found = Scan([], [])
        self._hints = self._changes.take()
        if self._scans % _LOOK_AT_ALL == 0:
            self._hints = None
        self._scans += 1
        if self._settled and self._hints == set():
            return found
        self._find_containers(found)
        for container in self._containers.values():
            names = self._names(container.listing)
            if names is None:
                continue
            self._label(container)
            for name in container.readers.keys() - names:
                found.gone.append(container.readers.pop(name))
            container.refused &= names
            found.new.extend(self._open_new(container, names))
            if ENDED in names and not container.readers:
                self._remove_folder(container)
        listings = [self._listing, *(container.listing for container in self._containers.values())]
        self._settled = all(listing.told_of for listing in listings)
        return found

    def _remove_folder(self, container: _Container) -> None:
        """Its backend says that nothing writes there any more, and every ring that could be read was read."""
        shutil.rmtree(container.listing.path, ignore_errors=True)

    def remove(self, reader: RingReader) -> None:
        """Delete a ring that was read to its end and whose writer is gone, and close it."""
        with contextlib.suppress(FileNotFoundError):
            reader.path.unlink()
        self._drop(reader)

    def refuse(self, reader: RingReader, error: RingError) -> None:
        """Close a ring whose read raised `error`; it is counted and not opened again."""
        self._drop(reader)
        self.counts[error.reason] += 1
        if container := self._containers.get(reader.path.parent.name):
            container.refused.add(reader.path.name)

    def _drop(self, reader: RingReader) -> None:
        reader.close()
        if container := self._containers.get(reader.path.parent.name):
            container.readers.pop(reader.path.name, None)

    def close(self) -> None:
        """Close every reader and leave the files."""
        for reader in self.readers:
            reader.close()
        self._containers.clear()
        self._changes.close()

    def _names(self, listing: Listing) -> set[str] | None:
        """None where they are as before."""
        if self._hints is not None and listing.told_of and listing.name not in self._hints:
            return None
        listing.watched = self._changes.watches(listing.name)
        try:
            return listing.changed()
        except OSError:
            self.counts["os_error"] += 1
            return None

    def _find_containers(self, found: Scan) -> None:
        tokens = self._names(self._listing)
        if tokens is None:
            return
        for token in self._containers.keys() - tokens:
            found.gone.extend(self._containers.pop(token).readers.values())
        for token in sorted(tokens - self._containers.keys()):
            path = self._listing.path / token
            if not token.startswith(".") and is_box(path):
                self._containers[token] = _Container(Listing(path))

    def _open_new(self, container: _Container, names: set[str]) -> Iterator[RingReader]:
        for name in sorted(names - container.readers.keys() - container.refused):
            if not (name.startswith("ring-") and name.endswith(".ring") and len(name) == _RING_NAME_LENGTH):
                continue
            if len(container.readers) >= MAX_RINGS_PER_CONTAINER:
                self.counts["too_many"] += 1
                return
            try:
                reader = RingReader.open(container.listing.path / name, container.name, self._boot)
            except RingError as error:
                container.refused.add(name)
                self.counts[error.reason] += 1
            except OSError as error:
                self.counts["os_error"] += 1
                container.set_aside(name, error)
            else:
                reader.labels = container.labels
                container.readers[name] = reader
                yield reader

    def _label(self, container: _Container) -> None:
        """Read the labels until they were read once; what is wrong with them is counted once."""
        if container.labels is not None:
            return
        problem = ""
        try:
            container.labels = _read_labels(container.listing.path / "container.json")
        except OSError:
            problem = "labels_absent"
        except FieldError:
            problem = "labels_malformed"
        if problem and problem != container.problem:
            self.counts[problem] += 1
        container.problem = problem
        for reader in container.readers.values():
            reader.container, reader.labels = container.name, container.labels


@dataclass(slots=True)
class _Container:
    listing: Listing
    labels: ContainerLabels | None = None
    problem: str = ""
    readers: dict[str, RingReader] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.labels.container if self.labels else self.listing.path.name

    def set_aside(self, name: str, error: OSError) -> None:
        """A link is refused for good, anything else (no descriptor left, no permission yet) is tried again."""
        if error.errno == errno.ELOOP:
            self.refused.add(name)
        else:
            self.listing.settled_ns = None


def _read_labels(path: Path) -> ContainerLabels:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return ContainerLabels.from_json(os.read(descriptor, MAX_BODY_BYTES + 1))
    finally:
        os.close(descriptor)

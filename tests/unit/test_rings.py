"""The monitor's reader of rings and of the directory that they lie in."""

import fcntl
import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import laxity
from laxity.records import HEAD_OFFSET, HEADER_SIZE
from laxity.ring import Ring, start_ticks
from laxity.tasks import Task
from services.monitor.rings import (
    RingCorruptError,
    RingDirectory,
    RingForeignBootError,
    RingReader,
    RingVersionError,
)
from shared.messages.ledger import ContainerLabels, Reservation
from tests.ring_columns import column


def begin(into: Ring) -> Task:
    """Begin a task in a ring that is not this process's own."""
    task = laxity.task("infer", deadline_us=1000)
    task.ring = into
    return task.__enter__()


def write(into: Ring, tasks: int) -> None:
    for _ in range(tasks):
        begin(into).end()


@pytest.fixture
def container(tmp_path: Path) -> Path:
    path = tmp_path / "rings" / "box"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def writer(container: Path) -> Iterator[Ring]:
    made = Ring(str(container), 16)
    yield made
    if not made.closed:
        made.close()


@pytest.fixture
def reader(writer: Ring) -> Iterator[RingReader]:
    opened = RingReader.open(writer.path)
    yield opened
    opened.close()


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# ---------------------------------------------------------------------------------------------- one ring


def test_each_record_is_taken_once(writer: Ring, reader: RingReader) -> None:
    write(writer, 2)
    assert [1, 2, 3, 4] == column(reader.read(), "seq")
    assert [] == column(reader.read(), "seq")
    write(writer, 1)
    read = reader.read()
    assert ([5, 6], 0, 6, 6) == (column(read, "seq"), read.lost, read.head, read.taken)


def test_what_was_overwritten_unread_is_counted_as_lost(writer: Ring, reader: RingReader) -> None:
    write(writer, 10)
    read = reader.read()
    assert 5 == read.lost  # 20 records in 16 slots, one of which the writer may be writing
    assert list(range(6, 21)) == column(read, "seq")


def test_nothing_is_lost_while_a_slot_is_free(writer: Ring, reader: RingReader) -> None:
    write(writer, 7)
    begin(writer)
    read = reader.read()
    assert (0, list(range(1, 16))) == (read.lost, column(read, "seq"))


def test_the_record_under_the_pen_is_not_believed(writer: Ring, reader: RingReader) -> None:
    """The writer has begun to overwrite the oldest slot and has not said so yet."""
    write(writer, 8)
    patch(writer.path, HEADER_SIZE + 16, b"\xff" * 8)
    read = reader.read()
    assert (1, list(range(2, 17))) == (read.lost, column(read, "seq"))


def test_a_record_that_comes_under_the_pen_while_it_is_copied_is_not_believed(writer: Ring) -> None:
    class Overtaken(RingReader):
        def _copy(self, first: int, head: int) -> bytes:
            write(writer, 3)
            patch(writer.path, HEADER_SIZE + 16, struct.pack("<QQ", 1, 99))  # record 17 begins to take the place of 1
            return super()._copy(first, head)

    write(writer, 5)
    reader = Overtaken.open(writer.path)
    read = reader.read()
    assert (1, list(range(2, 11))) == (read.lost, column(read, "seq"))
    reader.close()


def test_a_record_that_is_not_visible_yet_is_taken_at_the_next_read(writer: Ring, reader: RingReader) -> None:
    write(writer, 3)
    at = HEADER_SIZE + 3 * 64
    record = writer.path.read_bytes()[at : at + 64]
    patch(writer.path, at, bytes(64))
    first = reader.read()
    patch(writer.path, at, record)
    second = reader.read()
    assert ([1, 2, 3], 0, [4, 5, 6], 0) == (column(first, "seq"), first.lost, column(second, "seq"), second.lost)


def test_a_record_that_stays_broken_is_lost_and_the_rest_goes_on(writer: Ring, reader: RingReader) -> None:
    write(writer, 3)
    patch(writer.path, HEADER_SIZE + 3 * 64, bytes(64))
    assert [1, 2, 3] == column(reader.read(), "seq")
    read = reader.read()
    assert ([5, 6], 1, 6) == (column(read, "seq"), read.lost, read.taken)


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (16, b"\xff" * 8),  # a stamp after the end of time
        (8 + 16, struct.pack("<Q", 0)),  # a deadline of nothing
        (8 + 16, struct.pack("<Q", 86_400_000_001)),
        (32, b"\x07"),  # neither begin nor end
        (16, struct.pack("<Q", 99)),  # a begin of another task
    ],
)
def test_a_record_that_makes_no_sense_is_lost(writer: Ring, reader: RingReader, offset: int, data: bytes) -> None:
    write(writer, 1)
    patch(writer.path, HEADER_SIZE + offset, data)
    assert [[], [2]] == [column(reader.read(), "seq") for _ in range(2)]
    assert 2 == reader.read().taken


def test_a_head_that_goes_back_is_corrupt(writer: Ring, reader: RingReader) -> None:
    write(writer, 3)
    reader.read()
    patch(writer.path, HEAD_OFFSET, struct.pack("<Q", 2))
    with pytest.raises(RingCorruptError, match="went back from 6 to 2"):
        reader.read()


def test_a_head_beyond_all_time_is_corrupt(writer: Ring, reader: RingReader) -> None:
    patch(writer.path, HEAD_OFFSET, b"\xff" * 8)
    with pytest.raises(RingCorruptError, match="head is"):
        reader.read()


def test_a_truncated_file_is_corrupt_and_kills_nobody(writer: Ring, reader: RingReader) -> None:
    write(writer, 3)
    os.truncate(writer.path, HEADER_SIZE)
    with pytest.raises(RingCorruptError, match="found 0"):
        reader.read()
    os.truncate(writer.path, 0)
    with pytest.raises(RingCorruptError, match="found 0"):
        reader.read()
    os.truncate(writer.path, HEADER_SIZE + 16 * 64)


def test_the_writer_is_gone_when_its_lock_is(writer: Ring, reader: RingReader) -> None:
    assert not reader.writer_gone()
    writer.close()
    assert reader.writer_gone()


def test_asking_for_the_writer_keeps_no_lock(writer: Ring, reader: RingReader) -> None:
    writer.close()
    assert reader.writer_gone()
    with writer.path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_ring_of_another_boot_is_closed_unread(writer: Ring) -> None:
    with pytest.raises(RingForeignBootError):
        RingReader.open(writer.path, boot=bytes(16))


def test_a_ring_of_another_version_is_named_so(writer: Ring) -> None:
    patch(writer.path, 8, struct.pack("<I", 2))
    with pytest.raises(RingVersionError, match="version 2, this reader knows 1"):
        RingReader.open(writer.path)


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (0, b"NOTARING"),
        (12, struct.pack("<I", 64)),
        (16, struct.pack("<I", 32)),
        (20, struct.pack("<I", 17)),
        (20, struct.pack("<I", 32)),
        (20, struct.pack("<I", 0)),
        (24, b"\0" * 16),
    ],
)
def test_a_wrong_header_is_corrupt(writer: Ring, offset: int, data: bytes) -> None:
    patch(writer.path, offset, data)
    with pytest.raises(RingCorruptError):
        RingReader.open(writer.path)


def test_what_is_no_file_is_not_waited_for(container: Path) -> None:
    path = container / f"ring-{'0' * 32}.ring"
    os.mkfifo(path)
    with pytest.raises(RingCorruptError, match="not a file"):
        RingReader.open(path)


def test_the_header_says_who_writes(reader: RingReader, writer: Ring) -> None:
    assert (16, os.getpid()) == (reader.header.capacity, reader.header.pid)
    assert f"ring-{reader.ring}.ring" == writer.path.name
    assert reader.header.start_ticks == start_ticks()


# ------------------------------------------------------------------------------------------ the directory


LABELS = ContainerLabels(
    container="detector-0-1",
    ledger_id="l1",
    node="node-1",
    reservation=Reservation(
        request_id="detector",
        replica=0,
        generation=1,
        devices=("core-0",),
        share_micro=1_000_000,
        device_memory_mib=0,
        cpu_milli=100,
        memory_mib=64,
    ),
)


def test_a_missing_root_has_no_rings(tmp_path: Path) -> None:
    assert ([], []) == RingDirectory(tmp_path / "later").scan()


def test_a_new_ring_is_found_once_with_the_labels_of_its_container(container: Path, writer: Ring) -> None:
    (container / "container.json").write_bytes(LABELS.to_json())
    directory = RingDirectory(container.parent)
    (found,) = directory.scan().new
    assert ("detector-0-1", LABELS) == (found.container, found.labels)
    assert ([], []) == directory.scan()
    assert Counter() == directory.counts
    directory.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "labels_absent"),
        (b"", "labels_malformed"),
        (b"{", "labels_malformed"),
        (b"[]", "labels_malformed"),
        (b'{"container": 3}', "labels_malformed"),
        (b"[" * 200_000, "labels_malformed"),
        (b" " * 300_000, "labels_malformed"),
    ],
)
def test_without_labels_a_container_has_the_name_of_its_directory(
    container: Path, writer: Ring, body: bytes | None, reason: str
) -> None:
    if body is not None:
        (container / "container.json").write_bytes(body)
    directory = RingDirectory(container.parent)
    (found,) = directory.scan().new
    directory.scan()
    assert ("box", None) == (found.container, found.labels)
    assert Counter({reason: 1}) == directory.counts
    directory.close()


def test_labels_that_come_later_are_taken_then(container: Path, writer: Ring) -> None:
    directory = RingDirectory(container.parent)
    (found,) = directory.scan().new
    (container / "container.json").write_bytes(LABELS.to_json())
    directory.scan()
    assert "detector-0-1" == found.container
    directory.close()


def test_one_bad_file_leaves_the_others_alone(container: Path, writer: Ring) -> None:
    (container / f"ring-{'0' * 32}.ring").write_bytes(b"x" * 10_000)
    (container / f"ring-{'1' * 32}.ring").symlink_to(writer.path)
    (container / f"ring-{'2' * 32}.ring").mkdir()
    (container / ".new-3").write_bytes(b"")
    (container.parent / "a file").write_bytes(b"")
    (container.parent / "link").symlink_to(container)
    directory = RingDirectory(container.parent)
    assert [writer.path] == [found.path for found in directory.scan().new]
    assert Counter(corrupt=2, os_error=1, labels_absent=1) == directory.counts
    directory.scan()
    assert Counter(corrupt=2, os_error=1, labels_absent=1) == directory.counts
    directory.close()


def test_rings_of_another_boot_are_counted_and_not_opened(container: Path, writer: Ring) -> None:
    directory = RingDirectory(container.parent, boot=bytes(16))
    assert ([], []) == directory.scan()
    assert 1 == directory.counts["foreign_boot"]


def test_a_deleted_ring_is_gone_and_can_still_be_read(container: Path, writer: Ring) -> None:
    directory = RingDirectory(container.parent)
    directory.scan()
    write(writer, 1)
    writer.path.unlink()
    (gone,) = directory.scan().gone
    assert ([1, 2], []) == (column(gone.read(), "seq"), directory.readers)
    gone.close()


def test_a_deleted_container_takes_its_rings_along(container: Path, writer: Ring) -> None:
    directory = RingDirectory(container.parent)
    (found,) = directory.scan().new
    writer.path.unlink()
    container.rmdir()
    assert [found] == directory.scan().gone
    assert ([], []) == directory.scan()
    found.close()


def test_a_removed_ring_is_deleted_and_not_reported_gone(container: Path, writer: Ring) -> None:
    directory = RingDirectory(container.parent)
    (found,) = directory.scan().new
    writer.close()
    directory.remove(found)
    directory.remove(found)
    assert ([], [], False) == (*directory.scan(), writer.path.exists())


def test_a_refused_ring_is_counted_and_not_opened_again(container: Path, writer: Ring) -> None:
    directory = RingDirectory(container.parent)
    (found,) = directory.scan().new
    directory.refuse(found, RingCorruptError("its head went back"))
    Ring(str(container), 16).close()
    assert 1 == len(directory.scan().new)
    assert 1 == directory.counts["corrupt"]
    directory.close()


def test_a_directory_that_is_long_unchanged_is_not_listed_again(container: Path, writer: Ring) -> None:
    for path in (container, container.parent):
        os.utime(path, ns=(1, 1))
    directory = RingDirectory(container.parent)
    assert 1 == len(directory.scan().new)
    second = Ring(str(container), 16)
    os.utime(container, ns=(1, 1))
    assert [] == directory.scan().new  # it was told that nothing changed
    os.utime(container, ns=(2, 2))
    assert [second.path] == [found.path for found in directory.scan().new]
    directory.close()
    second.close()


def test_a_folder_that_nobody_tells_of_is_looked_at_now_and_then(container: Path, writer: Ring) -> None:
    """A file system that others write to from elsewhere: the kernel watches, and says nothing."""
    directory = RingDirectory(container.parent)
    for path in (container, container.parent):
        os.utime(path, ns=(1, 1))
    directory.scan()
    directory.scan()
    directory._changes.take()
    second = Ring(str(container), 16)
    directory._changes.take()
    found = [len(directory.scan().new) for _ in range(20)]
    assert (0, 1) == (found[0], sum(found))
    directory.close()
    second.close()


def test_where_nothing_can_be_watched_each_scan_looks_at_each_folder(container: Path, writer: Ring) -> None:
    directory = RingDirectory(container.parent)
    directory._changes.close()
    for path in (container, container.parent):
        os.utime(path, ns=(1, 1))
    directory.scan()
    second = Ring(str(container), 16)
    assert [second.path] == [found.path for found in directory.scan().new]
    directory.close()
    second.close()


def test_the_folder_of_a_container_that_is_gone_goes_with_its_last_ring(tmp_path: Path) -> None:
    folder = tmp_path / "c1"
    folder.mkdir()
    (folder / "container.json").write_text("{}")
    rings = RingDirectory(tmp_path)
    rings.scan()
    assert folder.exists()
    (folder / "ended").touch()
    rings.scan()
    assert not folder.exists()

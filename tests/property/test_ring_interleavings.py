"""However a writer and a reader interleave, and whatever a ring holds: each record once, in order, or counted lost."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import laxity
from laxity.ring import BEGIN, END, HEADER_SIZE, RECORD_SIZE, Ring
from laxity.tasks import Task
from services.monitor.rings import RingError, RingReader
from tests.ring_columns import named

CAPACITY = 16
Row = tuple[int, int, int, str, int]  # seq, kind, begin_seq, name, deadline_us


class Writer:
    """Writes begins and ends in an order given by numbers, and remembers them."""

    def __init__(self, directory: str) -> None:
        self.ring = Ring(directory, CAPACITY)
        self.open: list[Task] = []
        self.rows: list[Row] = []

    def write(self, choice: int) -> None:
        seq = len(self.rows) + 1
        if self.open and choice % 2:
            task = self.open.pop(choice % len(self.open))
            self.rows.append((seq, END, task.seq, f"task-{task.deadline_us - 1}", task.deadline_us))
            task.end()
            return
        task = laxity.task(f"task-{choice}", deadline_us=choice + 1)
        task.ring = self.ring
        self.open.append(task.__enter__())
        self.rows.append((seq, BEGIN, seq, f"task-{choice}", choice + 1))


class InterruptedReader(RingReader):
    """Lets the writer go on between any two looks at the file."""

    writer: Writer
    interruptions: Iterator[list[int]]

    def _pread(self, size: int, offset: int) -> bytes:
        for choice in next(self.interruptions, ()):
            self.writer.write(choice)
        return super()._pread(size, offset)


class Collected:
    def __init__(self, reader: RingReader) -> None:
        self.reader = reader
        self.rows: list[Row] = []
        self.lost = 0

    def read(self) -> None:
        read = self.reader.read()
        self.rows.extend((row.seq, row.kind, row.begin_seq, row.name, row.deadline_us) for row in named(read))
        self.lost += read.lost
        assert read.taken == len(self.rows) + self.lost
        assert read.taken <= read.head


@pytest.fixture(scope="module")
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as path:
        yield path


bursts = st.lists(st.integers(0, 99), max_size=2 * CAPACITY)


@given(st.lists(st.one_of(bursts, st.none()), max_size=40))
def test_records_between_reads_are_taken_once_in_order_or_lost(directory: str, steps: list[list[int] | None]) -> None:
    writer = Writer(directory)
    collected = Collected(RingReader.open(writer.ring.path))
    for step in (*steps, None):
        if step is None:
            waiting = len(writer.rows) - len(collected.rows) - collected.lost
            lost = collected.lost
            collected.read()
            assert max(waiting - (CAPACITY - 1), 0) == collected.lost - lost
        for choice in step or ():
            writer.write(choice)
    collected.read()
    assert len(writer.rows) == len(collected.rows) + collected.lost
    assert list(collected.rows) == [writer.rows[row[0] - 1] for row in collected.rows]
    assert sorted({row[0] for row in collected.rows}) == [row[0] for row in collected.rows]
    collected.reader.close()
    writer.ring.path.unlink()
    writer.ring.close()


@given(st.lists(bursts, max_size=60))
def test_records_within_a_read_are_taken_once_in_order_or_lost(directory: str, interruptions: list[list[int]]) -> None:
    writer = Writer(directory)
    reader = InterruptedReader.open(writer.ring.path)
    reader.writer, reader.interruptions = writer, iter(interruptions)
    collected = Collected(reader)
    for _ in interruptions:
        collected.read()
    collected.read()
    assert len(writer.rows) == len(collected.rows) + collected.lost
    assert list(collected.rows) == [writer.rows[row[0] - 1] for row in collected.rows]
    assert sorted({row[0] for row in collected.rows}) == [row[0] for row in collected.rows]
    reader.close()
    writer.ring.path.unlink()
    writer.ring.close()


@given(st.integers(0, 3 * CAPACITY), st.integers(0, RECORD_SIZE), st.binary(min_size=RECORD_SIZE, max_size=RECORD_SIZE))
def test_a_half_written_record_is_never_yielded(directory: str, written: int, cut: int, half: bytes) -> None:
    """The writer was killed, or is just now, while it writes the record after the head."""
    writer = Writer(directory)
    for choice in range(written):
        writer.write(choice)
    with writer.ring.path.open("r+b") as file:
        file.seek(HEADER_SIZE + written % CAPACITY * RECORD_SIZE)
        file.write(half[:cut])
    collected = Collected(RingReader.open(writer.ring.path))
    collected.read()
    assert writer.rows[collected.lost :] == collected.rows
    assert max(written - (CAPACITY - 1), 0) == collected.lost
    collected.reader.close()
    writer.ring.path.unlink()
    writer.ring.close()


def _file() -> bytes:
    with tempfile.TemporaryDirectory() as path:
        writer = Writer(path)
        for choice in range(CAPACITY + 5):
            writer.write(choice)
        writer.ring.close()
        return writer.ring.path.read_bytes()


GOOD = _file()
GOOD_NAME = f"ring-{GOOD[24:40].hex()}.ring"
INTERESTING = st.one_of(st.integers(0, 136), st.integers(HEADER_SIZE, len(GOOD) - 1), st.integers(0, len(GOOD) - 1))
DAMAGE = st.lists(st.tuples(INTERESTING, st.binary(min_size=1, max_size=16)), max_size=6)


def damaged(damage: list[tuple[int, bytes]], size: int) -> bytes:
    data = bytearray(GOOD)
    for offset, new in damage:
        data[offset : offset + len(new)] = new
    return bytes(data[:size])


@given(DAMAGE, DAMAGE, st.one_of(st.just(len(GOOD)), st.integers(0, len(GOOD))))
def test_damage_anywhere_is_an_error_of_ours_or_a_loss(
    directory: str, before: list[tuple[int, bytes]], after: list[tuple[int, bytes]], size: int
) -> None:
    path = Path(directory, GOOD_NAME)
    path.write_bytes(damaged(before, len(GOOD)))
    try:
        reader = RingReader.open(path)
    except RingError:
        return
    try:
        collected = Collected(reader)
        collected.read()
        path.write_bytes(damaged(after, size))
        for _ in range(3):
            collected.read()
        seqs = [row[0] for row in collected.rows]
        assert sorted(set(seqs)) == seqs
    except RingError:
        pass
    finally:
        reader.close()
        os.truncate(path, 0)

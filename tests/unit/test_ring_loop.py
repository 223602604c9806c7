"""What the loop over the rings tells the core of each, and when it looks at it again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import laxity
from laxity.ring import Ring
from laxity.tasks import Task
from services.monitor.core import RingsRead, Wake
from services.monitor.ring_loop import RingLoop
from services.monitor.settings import MonitorSettings
from shared.testing.manual_clock import ManualClock
from tests.monitor_folders import TIMING, labels_of
from tests.ring_columns import named

DEADLINE_US = 50_000


class Looked(RingLoop):
    """Driven step by step, by the clock of its readings."""

    def __init__(self, root: Path) -> None:
        super().__init__(MonitorSettings(node="n1", ring_root=root, batch_us=40_000), "start", 0)
        self.shell = SimpleNamespace(clock=ManualClock())

    def scan(self, clock_us: int) -> None:
        self._scan(clock_us)

    def wanted(self, clock_us: int) -> bool:
        return self._wanted(clock_us)

    def take(self, clock_us: int, wake_us: int = 1 << 60, **due_us: int) -> RingsRead:
        """One reading, and what the core answers to it."""
        read = self._take(clock_us, self.shell)
        self._wake = Wake(wake_us, due_us)
        return read

    def look_us(self) -> int:
        """When the only ring is looked at next."""
        (look_us,) = self._look_us.values()
        return look_us


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Ring]:
    (tmp_path / "box").mkdir()
    made = Ring(str(tmp_path / "box"), 8192)
    yield made
    if not made.closed:
        made.close()


@pytest.fixture
def loop(tmp_path: Path, writer: Ring) -> Looked:
    """It has told of the ring already."""
    made = Looked(tmp_path)
    made.scan(0)
    assert [()] == [read.rows for read in made.take(0).reads]
    return made


def begin(ring: Ring, deadline_us: int = DEADLINE_US) -> Task:
    task = laxity.task("infer", deadline_us=deadline_us)
    task.ring = ring
    return task.__enter__()


def write(ring: Ring, deadline_us: int = DEADLINE_US) -> None:
    begin(ring, deadline_us).end()


def ring_id(ring: Ring) -> str:
    return ring.path.stem.removeprefix("ring-")


def begun_task(ring: Ring, deadline_us: int = DEADLINE_US) -> int:
    """Begins a task, and says when it is due."""
    begin(ring, deadline_us)
    return int.from_bytes(ring.map[4096 + 8 : 4096 + 16], "little") // 1000 + deadline_us


def test_new_rings_are_looked_for_a_little_too_early_rather_than_twice(loop: Looked, writer: Ring) -> None:
    second = Ring(str(writer.path.parent))
    loop.scan(37_499)
    assert [ring_id(writer)] == list(loop._rings)
    loop.scan(37_500)
    assert [ring_id(writer), ring_id(second)] == list(loop._rings)
    second.close()


def test_a_ring_without_news_is_told_of_once(loop: Looked) -> None:
    assert () == loop.take(1).reads


def test_what_is_new_is_told_once(loop: Looked, writer: Ring) -> None:
    write(writer)
    assert [[1, 2]] == [[row.seq for row in named(read)] for read in loop.take(1).reads]
    assert () == loop.take(2).reads


def test_a_ring_is_looked_at_when_its_patience_is_at_an_end(loop: Looked, writer: Ring) -> None:
    write(writer)
    loop.take(10_000)
    write(writer)
    assert [False, True] == [loop.wanted(10_000 + 39_999), loop.wanted(10_000 + 40_000)]


def test_a_ring_of_which_nothing_is_known_is_looked_at_at_each_poll(loop: Looked, writer: Ring) -> None:
    write(writer)
    assert [False, True] == [loop.wanted(4_999), loop.wanted(5_000)]


def test_a_deadline_that_the_container_declared_is_known_before_its_first_task(tmp_path: Path) -> None:
    folder = labels_of(tmp_path, "box", realtime=TIMING.model_copy(update={"deadline_us": 30_000}))
    writer, loop = Ring(str(folder), 8192), Looked(tmp_path)
    loop.scan(0)
    loop.take(0)
    assert 25_000 == loop.look_us()
    writer.close()


def test_a_ring_that_was_quiet_for_a_second_is_looked_at_less_often(loop: Looked, writer: Ring) -> None:
    write(writer, 60_000)
    loop.take(0)
    loop.take(1_000_000)
    write(writer)
    assert [False, True] == [loop.wanted(1_049_999), loop.wanted(1_050_000)]


def test_a_ring_with_an_open_task_is_not_quiet(loop: Looked, writer: Ring) -> None:
    write(writer, 60_000)
    loop.take(0, **{ring_id(writer): 60_000_000})
    loop.take(1_000_000)
    write(writer)
    assert [False, True] == [loop.wanted(1_039_999), loop.wanted(1_040_000)]


def test_the_core_is_obeyed_however_patient_the_rings_are(loop: Looked) -> None:
    loop.take(0, wake_us=1_000)
    assert [False, True] == [loop.wanted(999), loop.wanted(1_000)]


@pytest.mark.parametrize(
    ("shortest_us", "capacity", "expected_us", "quiet_us"),
    [
        (1_000_000, 8192, 40_000, 50_000),
        (60_000, 8192, 40_000, 50_000),
        (50_000, 8192, 40_000, 45_000),
        (25_000, 8192, 20_000, 20_000),
        (12_000, 8192, 7_000, 7_000),
        (1, 8192, 5_000, 5_000),
        (1_000_000, 1024, 12_800, 12_800),
        (1_000_000, 16, 5_000, 5_000),
    ],
)
def test_patience_ends_well_before_a_deadline_and_before_a_small_ring_is_full(
    tmp_path: Path, shortest_us: int, capacity: int, expected_us: int, quiet_us: int
) -> None:
    (tmp_path / "box").mkdir()
    writer, loop = Ring(str(tmp_path / "box"), capacity), Looked(tmp_path)
    loop.scan(0)
    write(writer, 2_000_000)
    write(writer, shortest_us)
    loop.take(0)
    assert expected_us == loop.look_us()
    loop.take(1_000_000)
    assert 1_000_000 + quiet_us == loop.look_us()
    writer.close()


def test_a_task_of_a_process_that_is_gone_is_not_judged_as_if_it_ran(loop: Looked, writer: Ring) -> None:
    """It is asked in the reading in which the task would be overdue, and not only at the next scan."""
    due_us = begun_task(writer)
    loop.take(0, **{ring_id(writer): due_us})
    writer.close()
    assert () == loop.take(due_us).reads
    loop._wake = Wake(1 << 60, {ring_id(writer): due_us})
    assert [True] == [read.writer_gone for read in loop.take(due_us + 1).reads]


def test_nor_is_one_that_began_and_was_due_since_the_last_reading(loop: Looked, writer: Ring) -> None:
    due_us = begun_task(writer, 1)
    writer.close()
    assert [(1, True)] == [(len(read.rows), read.writer_gone) for read in loop.take(due_us + 1).reads]


def test_the_end_of_a_process_without_an_open_task_is_noticed_later(loop: Looked, writer: Ring) -> None:
    writer.close()
    loop.scan(100_000)
    assert not loop.wanted(100_000)
    loop.scan(600_000)
    assert loop.wanted(600_000)
    assert [True] == [read.writer_gone for read in loop.take(600_000).reads]


def test_a_ring_that_is_none_any_more_is_read_at_once_and_refused(loop: Looked, writer: Ring, tmp_path: Path) -> None:
    loop.shell.log = SimpleNamespace(warning=lambda *_, **__: None)
    with writer.path.open("r+b") as file:
        file.truncate(100)
    assert loop.wanted(5_000)
    assert (ring_id(writer),) == loop.take(5_000).vanished
    writer.detach()  # its map has no file behind it any more


@pytest.mark.parametrize(
    ("look_us", "wake_us", "rings"),
    [(40_000, 39_999, True), (40_000, 40_000, False), (0, 60_000_000, True)],
)
def test_an_answer_wakes_the_thread_where_it_would_sleep_too_long(
    loop: Looked, look_us: int, wake_us: int, rings: bool
) -> None:
    """The last of them: the core took longer than the rings are patient, and a reading has waited for it."""
    loop._reading, loop._scan_us, loop._look_us = True, 50_000, {40_000: look_us}
    loop._sleep(0, SimpleNamespace(now_us=lambda: 1_000_000))
    asyncio.run(loop.wake(Wake(wake_us)))
    assert rings != loop._bell.locked()

"""The SDK as an application sees it: what it takes, what it refuses, what it writes into its ring."""

import asyncio
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import laxity
from laxity import records, ring, tasks
from services.monitor import rings
from services.monitor.rings import RingRead, RingReader
from tests.ring_columns import column, named


@pytest.fixture
def ring_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LAXITY_RING_DIR", str(tmp_path))
    tasks._forget()
    yield tmp_path
    tasks._forget()


@pytest.fixture
def no_ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LAXITY_RING_DIR", raising=False)
    tasks._forget()
    yield
    tasks._forget()


def taken(directory: Path) -> RingRead:
    (path,) = directory.glob("ring-*.ring")
    reader = RingReader.open(path)
    try:
        read = reader.read()
    finally:
        reader.close()
    assert (0, read.head) == (read.lost, read.taken)  # or one of them was no record
    return read


def rows(directory: Path) -> list[tuple[str, int, int, bool]]:
    """(name, kind, sequence of the begin, failed) of every record."""
    read = taken(directory)
    return [(row.name, row.kind, row.begin_seq, row.seq in read.failed) for row in named(read)]


def test_sdk_and_monitor_agree_on_the_format() -> None:
    assert rings.HEADER.size == ring._HEADER.size
    assert rings.RECORD.size == ring.RECORD_SIZE
    written = records.pack_record.__self__.format.lstrip("@")
    assert rings.RECORD.format.lstrip("<") == written.replace("24s", f"BB{ring.NAME_SIZE}s")
    assert (rings.MAGIC, rings.VERSION, rings.HEADER_SIZE, rings.HEAD_OFFSET, rings.BEGIN, rings.END) == (
        ring.MAGIC,
        ring.VERSION,
        ring.HEADER_SIZE,
        records.HEAD_OFFSET,
        ring.BEGIN,
        ring.END,
    )
    assert (rings.MIN_CAPACITY, rings.MAX_CAPACITY, rings.MAX_DEADLINE_US) == (
        ring.MIN_RECORDS,
        ring.MAX_RECORDS,
        laxity.MAX_DEADLINE_US,
    )


def test_a_with_block_writes_its_begin_and_its_end(ring_directory: Path) -> None:
    with laxity.task("infer", deadline_us=50_000):
        pass
    read = taken(ring_directory)
    assert ["infer", "infer"] == column(read, "name")
    assert [1, 2] == column(read, "seq")
    assert [1, 2] == column(read, "kind")
    assert [1, 1] == column(read, "begin_seq")
    assert [50_000, 50_000] == column(read, "deadline_us")
    assert named(read)[0].stamp_us <= named(read)[1].stamp_us


def test_an_exception_marks_the_task_as_failed_and_passes_unchanged(ring_directory: Path) -> None:
    with pytest.raises(ZeroDivisionError), laxity.task("infer", deadline_us=1):
        _ = 1 / 0
    assert [("infer", 1, 1, False), ("infer", 2, 1, True)] == rows(ring_directory)


def test_tasks_may_nest_and_overlap(ring_directory: Path) -> None:
    with laxity.task("outer", deadline_us=10):
        first = laxity.begin("first", deadline_us=10)
        second = laxity.begin("second", deadline_us=10)
        first.end()
    second.end(failed=True)
    expected = [
        ("outer", 1, 1, False),
        ("first", 1, 2, False),
        ("second", 1, 3, False),
        ("first", 2, 2, False),
        ("outer", 2, 1, False),
        ("second", 2, 3, True),
    ]
    assert expected == rows(ring_directory)


def test_an_end_counts_once_whoever_calls_it(ring_directory: Path) -> None:
    begun = laxity.begin("infer", deadline_us=10)
    threads = [threading.Thread(target=begun.end) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begun.end()
    assert [("infer", 1, 1, False), ("infer", 2, 1, False)] == rows(ring_directory)


def test_an_end_inside_the_with_block_is_the_end(ring_directory: Path) -> None:
    with laxity.task("infer", deadline_us=10) as begun:
        begun.end(failed=True)
    assert [("infer", 1, 1, False), ("infer", 2, 1, True)] == rows(ring_directory)


def test_a_decorated_function_is_one_task_per_call_also_when_it_calls_itself(ring_directory: Path) -> None:
    @laxity.task("count", deadline_us=10)
    def count(down: int) -> int:
        """Count down."""
        return count(down - 1) + 1 if down else 0

    assert 2 == count(2)
    assert ("count", "Count down.") == (count.__name__, count.__doc__)
    assert [1, 2, 3, 3, 2, 1] == [begin for _, _, begin, _ in rows(ring_directory)]


async def test_a_decorated_coroutine_is_one_task_from_its_start_to_its_result(ring_directory: Path) -> None:
    gate = asyncio.Event()

    @laxity.task("wait", deadline_us=10)
    async def wait(number: int) -> int:
        await gate.wait()
        return number

    waiting = [asyncio.create_task(wait(number)) for number in range(2)]
    await asyncio.sleep(0)
    assert [1, 1] == [kind for _, kind, _, _ in rows(ring_directory)]
    gate.set()
    assert [0, 1] == await asyncio.gather(*waiting)
    assert [1, 1, 2, 2] == [kind for _, kind, _, _ in rows(ring_directory)]


async def test_a_cancelled_coroutine_is_a_failed_task(ring_directory: Path) -> None:
    @laxity.task("wait", deadline_us=10)
    async def wait() -> None:
        await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [("wait", 1, 1, False), ("wait", 2, 1, True)] == rows(ring_directory)


def test_a_generator_is_not_decorated() -> None:
    with pytest.raises(TypeError, match="cannot decorate the generator"):

        @laxity.task("stream", deadline_us=10)
        def stream() -> Iterator[int]:
            yield 1


def test_one_object_is_not_open_twice(ring_directory: Path) -> None:
    scope = laxity.task("infer", deadline_us=10)
    with scope, pytest.raises(RuntimeError, match="already open"), scope:
        pass
    with scope:
        pass
    assert [1, 2, 1, 2] == [kind for _, kind, _, _ in rows(ring_directory)]


def test_one_object_is_not_open_twice_without_a_ring_either(no_ring: None) -> None:
    scope = laxity.task("infer", deadline_us=10)
    with scope, pytest.raises(RuntimeError, match="already open"), scope:
        pass


def test_a_long_name_is_cut_at_a_character(ring_directory: Path) -> None:
    with laxity.task("x" + "ä" * 20, deadline_us=10):
        pass
    assert "x" + "ä" * 10 == rows(ring_directory)[0][0]


@pytest.mark.parametrize("found", [0, -1, 86_400_000_001, 1.5, "50", True, 10**30])
@pytest.mark.parametrize("directory", ["ring_directory", "no_ring"])
def test_a_deadline_that_is_none_is_refused_with_field_found_and_allowed(
    request: pytest.FixtureRequest, directory: str, found: object
) -> None:
    request.getfixturevalue(directory)
    with pytest.raises(ValueError, match=r"deadline_us: found .*, allowed: an int from 1 to 86400000000") as refused:
        laxity.task("infer", deadline_us=found)  # type: ignore[arg-type]
    assert repr(found) in str(refused.value)


@pytest.mark.parametrize("deadline_us", [1, 86_400_000_000])
def test_the_smallest_and_the_largest_deadline_are_taken(ring_directory: Path, deadline_us: int) -> None:
    laxity.begin("infer", deadline_us=deadline_us)
    assert [deadline_us] == column(taken(ring_directory), "deadline_us")


@pytest.mark.parametrize("found", ["", None, 3, print, ["infer"]])
def test_a_name_that_is_none_is_refused(no_ring: None, found: object) -> None:
    with pytest.raises(ValueError, match=r"name: found .*, allowed: a string that is not empty"):
        laxity.begin(found, deadline_us=10)  # type: ignore[arg-type]


def test_a_missing_deadline_comes_from_the_environment(ring_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAXITY_DEADLINE_US", "1234")
    with laxity.task("infer"):
        pass
    assert [1234, 1234] == column(taken(ring_directory), "deadline_us")


def test_a_missing_deadline_without_a_default_is_refused(no_ring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAXITY_DEADLINE_US", raising=False)
    with pytest.raises(ValueError, match="deadline_us: found None and no LAXITY_DEADLINE_US, allowed: "):
        laxity.begin("infer")


@pytest.mark.parametrize("text", ["0", "-5", "50ms", "1e3", "²", "9" * 5000])
def test_a_default_that_is_no_deadline_is_refused(no_ring: None, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LAXITY_DEADLINE_US", text)
    with pytest.raises(ValueError, match=r"LAXITY_DEADLINE_US: found .*, allowed: "):
        laxity.begin("infer")


def test_without_a_directory_nothing_is_enabled_and_everything_works(no_ring: None) -> None:
    with laxity.task("infer", deadline_us=10):
        laxity.begin("other", deadline_us=10).end()
    assert laxity.task("infer", deadline_us=10)(len)([1]) == 1
    assert not laxity.enabled()


def test_an_empty_directory_name_means_no_ring(no_ring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAXITY_RING_DIR", "")
    assert not laxity.enabled()


def test_a_directory_that_cannot_be_written_is_said_once_and_the_work_goes_on(
    tmp_path: Path, no_ring: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAXITY_RING_DIR", str(tmp_path / "missing"))
    for _ in range(3):
        with laxity.task("infer", deadline_us=10):
            pass
    said = capfd.readouterr().err
    assert 1 == said.count("laxity: no ring in LAXITY_RING_DIR=")
    assert not laxity.enabled()


def test_a_ring_that_could_not_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"."):
        ring.Ring(str(tmp_path), 1 << 50)  # larger than any file can be
    assert [] == list(tmp_path.iterdir())


def test_the_ring_has_as_many_records_as_asked_for(ring_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAXITY_RING_RECORDS", "32")
    assert laxity.enabled()
    (path,) = ring_directory.iterdir()
    assert 4096 + 32 * 64 == path.stat().st_size


@pytest.mark.parametrize("text", ["100", "8", "2097152", "many", "-16", "1" * 5000])
def test_a_wrong_number_of_records_is_said_and_the_usual_one_taken(
    ring_directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setenv("LAXITY_RING_RECORDS", text)
    assert laxity.enabled()
    assert "LAXITY_RING_RECORDS: found" in capfd.readouterr().err
    (path,) = ring_directory.iterdir()
    assert 4096 + 4096 * 64 == path.stat().st_size


def test_the_ring_can_be_read_by_another_user_whatever_the_umask(ring_directory: Path) -> None:
    assert laxity.enabled()
    (path,) = ring_directory.iterdir()
    assert 0o644 == path.stat().st_mode & 0o777


@pytest.mark.parametrize(
    "text, asked, waits",
    [
        ("", None, False),
        ("", True, True),
        ("0", True, False),
        ("1", None, True),
        ("1", False, False),
    ],
)
def test_a_task_waits_for_its_turn_if_it_or_the_environment_says_so(
    ring_directory: Path, monkeypatch: pytest.MonkeyPatch, text: str, asked: bool | None, waits: bool
) -> None:
    monkeypatch.setenv("LAXITY_GATE", text)
    for _ in range(2):
        assert waits is isinstance(laxity.task("infer", deadline_us=10, gate=asked), tasks.GatedTask)


def test_without_a_directory_nothing_waits(no_ring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAXITY_GATE", "1")
    with laxity.task("infer", deadline_us=10, gate=True):
        pass


def test_a_gate_that_is_none_is_refused(ring_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="gate: found 1, allowed: True, False or None"):
        laxity.task("infer", deadline_us=10, gate=1)  # type: ignore[arg-type]
    monkeypatch.setenv("LAXITY_GATE", "yes")
    with pytest.raises(ValueError, match="LAXITY_GATE: found 'yes', allowed: 0 or 1"):
        laxity.task("infer", deadline_us=10)


def test_a_task_that_finds_no_gate_has_failed(ring_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAXITY_GATE_PATIENCE_US", "0")
    for _ in range(2):
        with pytest.raises(laxity.GateError, match="no gate for 0 us"):
            laxity.begin("infer", deadline_us=10, gate=True)
    expected = [("infer", 1, 1, False), ("infer", 2, 1, True), ("infer", 1, 3, False), ("infer", 2, 3, True)]
    assert expected == rows(ring_directory)


def test_a_task_that_was_open_at_a_fork_is_not_open_in_the_child(ring_directory: Path) -> None:
    scope = laxity.task("infer", deadline_us=10)
    with scope:
        tasks._forget()  # as the child's side of a fork does
    with scope:
        pass
    written = sorted(column(RingReader.open(path).read(), "kind") for path in ring_directory.glob("ring-*.ring"))
    assert [[1], [1, 2]] == written


@pytest.mark.skipif(laxity.COMPILED, reason="compiled, no other code runs within a write")
def test_a_write_from_within_a_write_keeps_every_record(tmp_path: Path) -> None:
    """As a signal handler or a finalizer does it: in the same thread, while the lock is held."""
    written = ring.Ring(str(tmp_path), 16)
    inner, outer = (laxity.task(name, deadline_us=10) for name in ("inner", "outer"))
    inner.ring = outer.ring = written

    class Places:
        def __init__(self) -> None:
            self.left, self.entered = written.places, False

        def __next__(self) -> tuple[int, int]:
            place = next(self.left)
            if not self.entered:
                self.entered = True
                inner.__enter__()
            return place

    written.places = Places()  # type: ignore[assignment]
    with outer:
        assert 2 == written.head[0]  # not back to 1
        inner.end()
    expected = [("outer", 1, 1, False), ("inner", 1, 2, False), ("inner", 2, 2, False), ("outer", 2, 1, False)]
    assert expected == rows(tmp_path)
    written.close()


@pytest.mark.parametrize("wrong", [("infer", 10), (), ("infer", "infer")])
def test_a_task_is_named_by_its_first_word_and_the_rest_by_theirs(no_ring: None, wrong: tuple[object, ...]) -> None:
    for verb in (laxity.task, laxity.begin):
        with pytest.raises(TypeError):
            verb(*wrong)  # type: ignore[arg-type]
    assert ["name", "deadline_us", "gate"] == list(inspect.signature(laxity.task).parameters)


def test_words_that_come_in_any_way_are_the_same_words(ring_directory: Path) -> None:
    """Those that are not the usual ones, also once the usual ones are known."""

    class Name(str):
        __slots__ = ()

    for _ in range(3):
        laxity.begin("infer", deadline_us=10).end()
    laxity.begin(Name("infer"), **{"deadline" + "_us": 11}, gate=False)
    laxity.begin(name="infer", deadline_us=12, gate=None)
    laxity.begin("other", deadline_us=13)
    assert [10] * 6 + [11, 12, 13] == column(taken(ring_directory), "deadline_us")
    assert ["infer"] * 8 + ["other"] == column(taken(ring_directory), "name")


def test_a_task_without_a_deadline_takes_the_environments_each_time(
    ring_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAXITY_DEADLINE_US", "1234")
    for _ in range(4):
        laxity.begin("infer")
        laxity.begin("infer", deadline_us=None)
        laxity.begin("infer", deadline_us=7)
    assert [1234, 1234, 7] * 4 == column(taken(ring_directory), "deadline_us")


def test_only_what_fits_is_written_and_only_into_a_ring(tmp_path: Path) -> None:
    if not laxity.COMPILED:
        pytest.skip("Python finds it out when it writes")
    task = laxity.task("infer", deadline_us=10)
    for wrong in (tmp_path, bytearray(8192)):
        with pytest.raises(TypeError, match="ring: allowed: a Ring or None"):
            task.ring = wrong  # type: ignore[assignment]
    writer = records.Writer()
    for size in (0, 4096, 4096 + 3 * 64):
        with pytest.raises(ValueError, match="map: allowed: a header and a power of two of records"):
            writer.attach(bytearray(size))  # type: ignore[arg-type]
    writer.attach(bytearray(4096 + 16 * 64))  # type: ignore[arg-type]
    task.ring = writer
    assert 1 == task.__enter__().seq
    writer.detach()
    task.end()
    assert (0, 1) == (task.seq, writer.written)
    writer.attach(bytearray(4096 + 16 * 64))  # type: ignore[arg-type]
    for words in (None, (), (b"",) * 3, ("x" * 24,) * 3):
        task.words = words  # type: ignore[assignment]
        with pytest.raises(TypeError, match="words: allowed: three times 24 bytes"):
            task.__enter__()
    assert (0, 0) == (task.seq, writer.written)

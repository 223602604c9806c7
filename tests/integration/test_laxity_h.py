"""`laxity.h` beside the Python SDK: the same bytes, clean under sanitizers, and what a sudden death costs."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import laxity
from laxity import records, ring, tasks
from laxity.records import HEADER_SIZE, RECORD_SIZE
from services.monitor.rings import BEGIN, END, RingDirectory, RingRead
from tests.ring_columns import column, named

HEADER = Path(laxity.__file__).with_name("laxity.h")
SOURCE = Path(__file__).parents[1] / "laxity_h" / "marks.c"
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror", "-O2")
LANGUAGES = {"c99": ("gcc", "-std=gnu99"), "c11": ("gcc", "-std=gnu11"), "c++": ("g++", "-x", "c++", "-std=gnu++11")}

Build = Callable[..., Path]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The program as compiled with these options; skips where the compiler is missing."""
    folder, built = tmp_path_factory.mktemp("laxity_h"), dict[tuple[str, ...], Path]()

    def make(language: str = "c99", *options: str) -> Path:
        compiler, *standard = LANGUAGES[language]
        if shutil.which(compiler) is None:
            pytest.skip(f"there is no {compiler}")
        key = (language, *options)
        if key not in built:
            program = folder / f"marks-{len(built)}"
            command = [compiler, *standard, *STRICT, *options, f"-I{HEADER.parent}", str(SOURCE)]
            command += ["-o", str(program), "-pthread"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode and any(option.startswith("-fsanitize") for option in options):
                pytest.skip(f"no sanitizer here: {done.stderr[:200]}")
            assert 0 == done.returncode, done.stderr
            built[key] = program
        return built[key]

    return make


@pytest.mark.parametrize("standard", ["c++11", "c++14", "c++17", "c++20"])
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_it_is_cpp_without_a_warning_also_without_extensions(compiler: str, standard: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    command = [compiler, "-x", "c++", f"-std={standard}", *STRICT, "-fsyntax-only", f"-I{HEADER.parent}", str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)


@pytest.fixture
def box(tmp_path: Path) -> Path:
    path = tmp_path / "rings" / "box"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def directory(box: Path) -> Iterator[RingDirectory]:
    opened = RingDirectory(box.parent)
    yield opened
    opened.close()


def run(program: Path, box: Path | None, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"LAXITY_RING_DIR": str(box)} | env if box else env
    return subprocess.run([program, *words], env=environment, capture_output=True, text=True, timeout=60, check=False)


def taken(directory: RingDirectory) -> list[RingRead]:
    return [reader.read() for reader in directory.scan().new]


# ------------------------------------------------------------------------------------------ the same bytes


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_header_and_the_python_sdk_write_the_same_bytes(
    language: str, build: Build, box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Golden: one clock, and all but ids, pid and start time; with a ring so small that it is overwritten."""
    env = {"LAXITY_RING_RECORDS": "16", "LAXITY_DEADLINE_US": "70000"}
    assert "" == run(build(language, "-DFIXED_CLOCK"), box, "golden", **env).stderr
    other = tmp_path / "other"
    other.mkdir()
    for name, value in (env | {"LAXITY_RING_DIR": str(other)}).items():
        monkeypatch.setenv(name, value)
    clock_ns = itertools.count(1007, 7)
    for module in (ring, records):
        monkeypatch.setattr(module, "monotonic_ns", lambda: next(clock_ns))
    tasks._forget()
    try:
        golden()
    finally:
        monkeypatch.delenv("LAXITY_RING_DIR")
        tasks._forget()
    (ours,), (theirs,) = list(box.glob("*.ring")), list(other.glob("*.ring"))
    one, two = ours.read_bytes(), theirs.read_bytes()
    if laxity.COMPILED:  # its clock is the machine's
        one, two = without_stamps(one), without_stamps(two)
    assert HEADER_SIZE + 16 * RECORD_SIZE == len(one) == len(two)
    assert one[HEADER_SIZE:].hex(" ", RECORD_SIZE) == two[HEADER_SIZE:].hex(" ", RECORD_SIZE)
    assert without_ids(one) == without_ids(two)
    assert bytes.fromhex(ours.stem.removeprefix("ring-")) == one[24:40]
    assert two[40:56] == one[40:56]  # the boot
    assert 0o644 == ours.stat().st_mode & 0o777


def without_stamps(file: bytes) -> bytes:
    slots = [file[at : at + RECORD_SIZE] for at in range(HEADER_SIZE, len(file), RECORD_SIZE)]
    return file[:HEADER_SIZE] + b"".join(slot[:8] + bytes(8) + slot[16:] for slot in slots)


def golden() -> None:
    """As `golden` in marks.c."""
    outer = laxity.begin("outer", deadline_us=50_000)
    inner = laxity.begin("innér that is far too loéng")
    inner.end()
    outer.end(failed=True)
    outer.end()
    for index in range(12):
        laxity.begin("again", deadline_us=50_000).end(failed=index % 3 == 2)


def without_ids(header: bytes) -> bytes:
    """But for ring and boot id, pid, start time, and the clock at its making; what is reserved for readers too."""
    return header[:24] + header[64 + 16 : 192] + header[256:HEADER_SIZE]


# --------------------------------------------------------------------------------------- as it is used


def test_threads_mark_tasks_at_once_and_each_is_read_once(build: Build, box: Path, directory: RingDirectory) -> None:
    assert 0 == run(build(), box, "threads", "1000", LAXITY_RING_RECORDS="8192").returncode
    (read,) = taken(directory)
    assert (list(range(1, 8001)), 0) == (column(read, "seq"), read.lost)
    assert {BEGIN: 4000, END: 4000} == Counter(column(read, "kind"))
    begun = {row.seq for row in named(read) if row.kind == BEGIN}
    assert begun == {row.begin_seq for row in named(read) if row.kind == END}


@pytest.mark.parametrize("language", ["c99", "c++"])
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize("word", ["threads", "fork", "wrong"])
def test_it_is_clean_under_sanitizers(language: str, sanitizer: str, word: str, build: Build, box: Path) -> None:
    program = build(language, f"-fsanitize={sanitizer}", "-g", "-fno-sanitize-recover=all")
    done = run(program, box, word, "500", LAXITY_RING_RECORDS="64")
    assert 0 == done.returncode, done.stderr
    assert "ERROR" not in done.stderr
    assert "WARNING" not in done.stderr


def test_a_forked_child_writes_a_ring_of_its_own_and_leaves_its_parents_tasks_alone(
    build: Build, box: Path, directory: RingDirectory
) -> None:
    assert 0 == run(build(), box, "fork").returncode
    reads = sorted(taken(directory), key=lambda read: len(read.rows))
    assert [2, 6] == [len(read.rows) for read in reads]
    assert [(), (6,)] == [read.failed for read in reads]


def test_what_cannot_be_recorded_is_said_once_and_the_rest_goes_on(
    build: Build, box: Path, directory: RingDirectory
) -> None:
    done = run(build(), box, "wrong")
    assert 1 == done.stderr.count("laxity: ")
    assert "allowed: a name that is not empty, and 1 to 86400000000" in done.stderr
    (read,) = taken(directory)
    assert 2 == len(read.rows)


def test_without_a_ring_directory_nothing_is_done_and_nothing_is_said(build: Build, box: Path) -> None:
    assert (3, "") == ((done := run(build(), None, "enabled")).returncode, done.stderr)
    assert (0, "") == ((done := run(build(), None, "threads")).returncode, done.stderr)
    assert [] == list(box.iterdir())


def test_a_directory_that_cannot_be_written_is_said_and_nothing_breaks(build: Build, box: Path) -> None:
    done = run(build(), box / "missing", "threads")
    assert 0 == done.returncode
    assert 1 == done.stderr.count("laxity: no ring in LAXITY_RING_DIR=")


@pytest.mark.parametrize("records", ["17", "8", "nonsense", "2097152"])
def test_a_capacity_that_is_none_is_said_and_the_usual_one_used(records: str, build: Build, box: Path) -> None:
    done = run(build(), box, "enabled", LAXITY_RING_RECORDS=records)
    assert f"LAXITY_RING_RECORDS: found '{records}'" in done.stderr
    (made,) = box.glob("*.ring")
    assert HEADER_SIZE + 4096 * RECORD_SIZE == made.stat().st_size


# ------------------------------------------------------------------------------------------- sudden deaths


def test_a_writer_that_is_killed_costs_at_most_the_record_that_it_was_writing(
    build: Build, box: Path, directory: RingDirectory
) -> None:
    """Killed at random moments: all that head counts is whole, and nothing after it is read."""
    program, chance = build(), random.Random(7)
    for _ in range(25):
        with subprocess.Popen([program, "endless"], env={"LAXITY_RING_DIR": str(box)}) as process:
            while not list(box.glob("*.ring")):
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.01))
            process.send_signal(signal.SIGKILL)
        (reader,) = directory.scan().new
        assert reader.writer_gone()
        (head,) = struct.unpack_from("<Q", reader.path.read_bytes(), 128)
        read = reader.read()
        assert head == read.head
        assert min(head, 4095) - 1 <= len(read.rows)
        assert list(range(head - len(read.rows) + 1, head + 1)) == column(read, "seq")
        assert head == len(read.rows) + read.lost
        reader.path.unlink()
        directory.scan()

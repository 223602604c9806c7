"""Real processes write rings, with threads, forks and sudden deaths; the monitor's reader takes them."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.monitor.rings import BEGIN, END, RingDirectory, RingRead, RingReader
from tests.ring_columns import column, named

SDK = Path(__file__).parents[2] / "sdk" / "src"
PATIENCE_S = 20.0

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RingDirectory]:
    (tmp_path / "box").mkdir(exist_ok=True)
    opened = RingDirectory(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a Python program that uses the SDK; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "box").mkdir(exist_ok=True)

    def run(program: str, **env: str) -> subprocess.Popen[str]:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SDK), "LAXITY_RING_DIR": str(tmp_path / "box")}
        environment["LAXITY_PURE"] = os.environ.get("LAXITY_PURE", "")
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with process:
            process.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.002)


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (0, "") == (process.returncode, errors)
    return output


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def assert_ended_once_each(read: RingRead) -> None:
    begins = [row.seq for row in named(read) if row.kind == BEGIN]
    ends = [row.begin_seq for row in named(read) if row.kind == END]
    assert begins == sorted(ends)
    assert (0, read.head) == (read.lost, read.taken)


def test_threads_share_a_ring_and_each_task_ends_once(start: Start, directory: RingDirectory, tmp_path: Path) -> None:
    program = """
import threading, laxity
def work(number):
    for _ in range(500):
        with laxity.task(f"thread-{number}", deadline_us=1000):
            pass
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("done", flush=True)
input()
"""
    process = start(program)
    assert "done" == line(process)
    (reader,) = directory.scan().new
    assert not reader.writer_gone()
    read = reader.read()
    assert 4000 == len(read.rows)
    assert_ended_once_each(read)
    assert {f"thread-{number}": 1000 for number in range(4)} == Counter(column(read, "name"))
    tell(process)
    finish(process)
    assert reader.writer_gone()
    directory.remove(reader)
    assert [] == list((tmp_path / "box").iterdir())


def test_a_forked_child_has_its_own_ring_and_leaves_its_parents_alone(start: Start, directory: RingDirectory) -> None:
    program = """
import os, laxity
inherited = laxity.begin("parent", deadline_us=1000)
print(os.getpid(), flush=True)
child = os.fork()
if child == 0:
    inherited.end()
    with laxity.task("child", deadline_us=1000):
        pass
    print(os.getpid(), flush=True)
    input()
"""
    process = start(program)
    parent, child = int(line(process)), int(line(process))
    rings = {reader.header.pid: reader for reader in directory.scan().new}
    assert {parent, child} == rings.keys()
    until(rings[parent].writer_gone)
    assert not rings[child].writer_gone()
    assert [("parent", BEGIN)] == pairs(rings[parent].read())
    assert [("child", BEGIN), ("child", END)] == pairs(rings[child].read())
    tell(process)
    finish(process)
    until(rings[child].writer_gone)


def pairs(read: RingRead) -> list[tuple[str, int]]:
    return [(row.name, row.kind) for row in named(read)]


def test_a_fork_while_other_threads_write_leaves_no_lock_behind(start: Start, directory: RingDirectory) -> None:
    program = """
import os, threading, warnings, laxity
warnings.simplefilter("ignore", DeprecationWarning)  # of 3.12: that fork and threads do not go together is the point
stop = threading.Event()
def work():
    while not stop.is_set():
        with laxity.task("busy", deadline_us=1000):
            pass
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
for _ in range(20):
    if (child := os.fork()) == 0:
        with laxity.task("child", deadline_us=1000):
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
[thread.join() for thread in threads]
"""
    finish(start(program))
    readers = directory.scan().new
    assert 21 == len(readers)
    assert all(reader.writer_gone() for reader in readers)
    assert 20 == sum(pairs(reader.read()) == [("child", BEGIN)] for reader in readers)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_each_process_of_a_pool_has_its_own_ring(
    start: Start, directory: RingDirectory, tmp_path: Path, method: str
) -> None:
    program = """
import multiprocessing, sys, laxity
def work(number):
    with laxity.task("infer", deadline_us=1000):
        return number
if __name__ == "__main__":
    with laxity.task("lead", deadline_us=1000):
        workers = [multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(n,)) for n in range(2)]
        [worker.start() for worker in workers]
        [worker.join() for worker in workers]
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    finish(start(f"import subprocess, sys; subprocess.run([sys.executable, {str(script)!r}, {method!r}], check=True)"))
    readers = directory.scan().new
    expected = [[("infer", BEGIN), ("infer", END)]] * 2 + [[("lead", BEGIN), ("lead", END)]]
    assert expected == sorted(pairs(reader.read()) for reader in readers)
    assert 3 == len({reader.header.pid for reader in readers})


def test_an_exec_ends_the_ring_of_the_program_before(start: Start, directory: RingDirectory) -> None:
    program = """
import os, sys, laxity
laxity.begin("before", deadline_us=1000)
os.execv(sys.executable, [sys.executable, "-c", '''
import laxity
laxity.begin("after", deadline_us=1000)
print("ready", flush=True)
input()
'''])
"""
    process = start(program)
    assert "ready" == line(process)
    gone = {named(reader.read())[0].name: reader.writer_gone() for reader in directory.scan().new}
    assert {"before": True, "after": False} == gone
    tell(process)
    finish(process)


def test_a_writer_killed_in_the_middle_leaves_every_record_that_it_counted(
    start: Start, directory: RingDirectory
) -> None:
    program = """
import threading, time, laxity
def work():
    while True:
        for _ in range(20):
            with laxity.task("busy", deadline_us=1000):
                pass
        time.sleep(0.001)  # or it comes around before a busy machine has read it
print("ready", flush=True)
[threading.Thread(target=work).start() for _ in range(3)]
"""
    for _ in range(5):
        process = start(program, LAXITY_RING_RECORDS="1048576")
        assert "ready" == line(process)
        until(lambda: len(directory.scan().new) == 1)
        (reader,) = directory.readers
        taken = reader.read()
        until(lambda before=taken, reader=reader: len(reader.read().rows) > 0 and before.head >= 0)  # type: ignore[misc]
        os.kill(process.pid, signal.SIGKILL)
        until(reader.writer_gone)
        last = reader.read()
        assert (0, last.head) == (last.lost, last.taken)
        directory.remove(reader)


def test_a_slow_reader_of_a_fast_writer_takes_or_counts_every_record(start: Start, directory: RingDirectory) -> None:
    program = """
import laxity
for number in range(30_000):
    with laxity.task(f"task-{number % 7}", deadline_us=1 + number % 7):
        pass
"""
    process = start(program, LAXITY_RING_RECORDS="64")
    until(lambda: bool(directory.scan().new))
    (reader,) = directory.readers
    reads: list[RingRead] = []
    while process.poll() is None:
        reads.append(reader.read())
    finish(process)
    reads.append(reader.read())
    seqs = [seq for read in reads for seq in column(read, "seq")]
    assert sorted(set(seqs)) == seqs
    assert 60_000 == len(seqs) + sum(read.lost for read in reads)
    assert 0 < sum(read.lost for read in reads)
    for read in reads:
        assert [int(row.name.removeprefix("task-")) + 1 for row in named(read)] == column(read, "deadline_us")


HANDLER = """
import signal, laxity
handled = worked = 0
def handler(*_):
    global handled
    handled += 1
    with laxity.task("handler", deadline_us=1000):
        pass
    if handled < 300:
        signal.setitimer(signal.ITIMER_REAL, 0.0001)
signal.signal(signal.SIGALRM, handler)
"""
ALARMED = """
signal.setitimer(signal.ITIMER_REAL, 0.0001)
while handled < 300:
    with laxity.task("main", deadline_us=1000):
        worked += 1
print(2 * (handled + worked))
"""


def test_signal_handlers_that_mark_tasks_block_nothing_and_lose_nothing(start: Start, directory: RingDirectory) -> None:
    written = int(finish(start(HANDLER + "laxity.enabled()" + ALARMED, LAXITY_RING_RECORDS="262144")))
    (reader,) = directory.scan().new
    read = reader.read()
    assert written == len(read.rows)
    assert_ended_once_each(read)


def test_a_signal_handler_that_comes_while_the_ring_is_made_blocks_nothing(
    start: Start, directory: RingDirectory
) -> None:
    written = int(finish(start(HANDLER + ALARMED, LAXITY_RING_RECORDS="1048576")))
    (reader,) = directory.scan().new
    read = reader.read()
    assert written >= len(read.rows) > 0
    assert_ended_once_each(read)


def test_a_directory_that_cannot_be_written_does_not_harm_the_program(start: Start, tmp_path: Path) -> None:
    program = """
import laxity
for _ in range(3):
    with laxity.task("infer", deadline_us=1000):
        print("works")
"""
    process = start(program, LAXITY_RING_DIR=str(tmp_path / "missing"))
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (0, "works\n" * 3, 1) == (process.returncode, output, len(errors.splitlines()))


def test_a_reader_can_be_opened_by_the_path_alone(start: Start, tmp_path: Path) -> None:
    finish(start("import laxity; laxity.begin('infer', deadline_us=1000)"))
    (path,) = (tmp_path / "box").iterdir()
    reader = RingReader.open(path)
    assert ("box", ["infer"], True) == (reader.container, column(reader.read(), "name"), reader.writer_gone())
    reader.close()

"""Real processes at a real gate: whose turn it is, that two never are on the device, and that a kill -9 frees it.

Nothing here asserts how long anything takes; `make bench-gate` measures that.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.monitor.gate.core import Arbiter
from services.monitor.gate.server import Server
from shared.messages import Kind, Realtime
from tests.monitor_folders import labels_of

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
LONG_US = 60_000_000
TURN = """
import laxity, sys, time
with laxity.task("turn", deadline_us=int(sys.argv[1])):
    print("in", time.monotonic_ns(), flush=True)
    sys.stdin.readline()
    print("out", time.monotonic_ns(), flush=True)
"""

Start = Callable[..., subprocess.Popen[str]]


class Served:
    """A gate in a thread of this process, so that tests see who waits. Its devices are free again when it stops."""

    def __init__(self, root: Path, *, end: bool = True) -> None:
        self.arbiter = Arbiter(1_000, end_overruns=end)
        self.said: list[dict[str, Any]] = []
        self._server = Server(root, self.arbiter, self.said.append)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._server.step()
        self._server.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def waiting(self) -> list[str]:
        """The containers that wait for the device, in the order of their turns."""
        return [line.split()[1] for line in self.arbiter.story("GPU-0") if " waits, " in line]

    def overruns(self) -> list[dict[str, Any]]:
        return [told["overran"] for told in self.said if "overran" in told]


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    return tmp_path / "rings"


@pytest.fixture
def gate(rings: Path) -> Iterator[Served]:
    rings.mkdir()
    served = Served(rings)
    yield served
    served.stop()


@pytest.fixture
def start(rings: Path) -> Iterator[Start]:
    """Start a program in a container that is made for it; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(name: str, program: str = TURN, *args: object, **more: Any) -> subprocess.Popen[str]:
        if not (rings / name).exists():
            contain(rings, name, **{key: more.pop(key) for key in ("runtime_us", "kind") if key in more})
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "sdk" / "src")}
        environment["LAXITY_PURE"] = os.environ.get("LAXITY_PURE", "")
        environment |= {"LAXITY_RING_DIR": str(rings / name), "LAXITY_GATE": "1", "LAXITY_DEADLINE_US": "1000", **more}
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", program, *map(str, args)]
        process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        with process:
            process.kill()


@contextmanager
def gate_process(rings: Path) -> Iterator[subprocess.Popen[str]]:
    """A gate as a monitor starts it; killed at the end, as a monitor does with one that is stopped."""
    command = [sys.executable, "-m", "services.monitor.gate", "--margin-us", "1000", "--monitor", str(os.getpid())]
    command += ["--ring-root", str(rings)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(gate: subprocess.Popen[str], word: str) -> dict[str, Any]:
    """The next line that tells this."""
    assert gate.stdout is not None
    for line in gate.stdout:
        told: dict[str, Any] = json.loads(line)
        if word in told:
            return told
    raise AssertionError(f"the gate ended without a word of {word}")


def contain(rings: Path, name: str, runtime_us: int = LONG_US, kind: Kind = Kind.HARD) -> Path:
    timing = Realtime(deadline_us=1_000, period_us=LONG_US, runtime_us=runtime_us, kind=kind, gate=True)
    return labels_of(rings, name, realtime=timing, device="GPU-0")


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.002)


def heard(process: subprocess.Popen[str], word: str) -> int:
    """The stamp behind the word that comes next."""
    assert process.stdout is not None
    said = process.stdout.readline().split()
    assert [word] == said[:1]
    return int(said[1])


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_turns_go_by_deadline_and_one_at_a_time(gate: Served, start: Start) -> None:
    first = start("first", TURN, 1_000)
    turns = [(heard(first, "in"), 0)]
    others = {name: start(name, TURN, deadline) for name, deadline in (("late", 30 * LONG_US), ("soon", 9 * LONG_US))}
    until(lambda: ["soon", "late"] == gate.waiting())
    for process, following in ((first, others["soon"]), (others["soon"], others["late"])):
        go_on(process)
        turns[-1] = (turns[-1][0], heard(process, "out"))
        turns.append((heard(following, "in"), 0))
    assert all(out_ns <= in_ns for (_, out_ns), (in_ns, _) in itertools.pairwise(turns))


def test_the_turns_of_three_containers_never_overlap(gate: Served, start: Start) -> None:
    program = """
import laxity, time
for _ in range(200):
    with laxity.task("turn"):
        began_ns = time.monotonic_ns()
        while time.monotonic_ns() < began_ns + 100_000: pass
        ended_ns = time.monotonic_ns()
    print(began_ns, ended_ns)
"""
    processes = [start(name, program) for name in "abc"]
    turns = sorted(
        tuple(map(int, line.split())) for p in processes for line in p.communicate(timeout=PATIENCE_S)[0].splitlines()
    )
    assert 600 == len(turns)
    assert [] == [(before, after) for before, after in itertools.pairwise(turns) if after[0] < before[1]]


def test_a_killed_holder_frees_the_device(gate: Served, start: Start) -> None:
    holder, waiting = start("holder", TURN, 1), None
    heard(holder, "in")
    waiting = start("waiting", TURN, 1)
    until(lambda: ["waiting"] == gate.waiting())
    holder.kill()
    heard(waiting, "in")


def test_a_killed_waiter_is_no_more_let_in(gate: Served, start: Start) -> None:
    holder = start("holder", TURN, 1)
    heard(holder, "in")
    killed, patient = start("killed", TURN, 2 * LONG_US), start("patient", TURN, 9 * LONG_US)
    until(lambda: ["killed", "patient"] == gate.waiting())
    killed.kill()
    until(lambda: ["patient"] == gate.waiting())
    go_on(holder)
    heard(patient, "in")


def test_a_killed_holder_frees_the_device_although_its_forked_child_lives(gate: Served, start: Start) -> None:
    program = """
import laxity, os, sys, time
with laxity.task("turn"):
    if os.fork() == 0:
        print("in", time.monotonic_ns(), flush=True)
        time.sleep(600)
    sys.stdin.readline()
"""
    holder = start("holder", program)
    heard(holder, "in")
    waiting = start("waiting", TURN, 1)
    until(lambda: ["waiting"] == gate.waiting())
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    holder.kill()
    try:
        heard(waiting, "in")
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)


def test_who_stays_too_long_is_ended_where_the_node_says_so(gate: Served, start: Start) -> None:
    culprit = start("culprit", TURN, 1, runtime_us=100_000)
    heard(culprit, "in")
    other = start("other", TURN, 1)
    heard(other, "in")
    assert -signal.SIGKILL == culprit.wait(PATIENCE_S)
    seen, over = gate.overruns()
    assert [("culprit", False), ("culprit", True)] == [(told["culprit"], told["over"]) for told in (seen, over)]


def test_a_device_whose_holder_stays_too_long_is_told_and_nobody_is_let_in_beside_it(rings: Path, start: Start) -> None:
    rings.mkdir()
    gate = Served(rings, end=False)
    try:
        culprit = start("culprit", TURN, 1, runtime_us=100_000)
        heard(culprit, "in")
        other = start("other", TURN, 1)
        until(lambda: gate.overruns() and ["other"] == gate.waiting())
        (standing,) = [told["standing"] for told in gate.said if "standing" in told]
        assert ("culprit", False) == (standing["culprit"], standing["gated"])
        go_on(culprit)
        assert heard(culprit, "out") <= heard(other, "in")
        until(lambda: len(gate.overruns()) == 2)
        assert ("other",) == gate.overruns()[1]["touched"]
    finally:
        gate.stop()


def test_a_thread_waits_for_the_other_threads_of_its_process(gate: Served, start: Start) -> None:
    program = """
import laxity, threading, time
turns = []
def work():
    for _ in range(50):
        with laxity.task("turn"):
            began_ns = time.monotonic_ns()
            time.sleep(0.0002)
            turns.append((began_ns, time.monotonic_ns()))
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
turns.sort()
print("overlaps", sum(after[0] < before[1] for before, after in zip(turns, turns[1:])))
print("turns", len(turns))
"""
    process = start("threads", program)
    assert (0, 150) == (heard(process, "overlaps"), heard(process, "turns"))


def test_tasks_within_a_task_share_its_turn_and_the_last_end_gives_it_back(gate: Served, start: Start) -> None:
    program = """
import laxity, sys, threading, time
outer = laxity.begin("outer")
with laxity.task("inner"):
    print("in", time.monotonic_ns(), flush=True)
    outer.end()
    sys.stdin.readline()
    print("out", time.monotonic_ns(), flush=True)
sys.stdin.readline()
"""
    sharing = start("sharing", program)
    heard(sharing, "in")
    other = start("other", TURN, 1)
    until(lambda: ["other"] == gate.waiting())
    go_on(sharing)
    assert heard(sharing, "out") <= heard(other, "in")


def test_nobody_is_let_in_beside_a_holder_of_before_a_restart_of_the_gate(rings: Path, start: Start) -> None:
    rings.mkdir()
    before = Served(rings)
    holder = start("holder", TURN, 1)
    heard(holder, "in")
    waiting = start("waiting", TURN, 1)
    until(lambda: ["waiting"] == before.waiting())
    before.stop()
    after = Served(rings)
    try:
        until(lambda: ["waiting"] == after.waiting())
        go_on(holder)
        assert heard(holder, "out") <= heard(waiting, "in")
    finally:
        after.stop()


def test_a_gate_that_is_killed_leaves_to_the_next_who_overran_and_how_long_it_has_to_wait(
    rings: Path, start: Start
) -> None:
    rings.mkdir()
    with gate_process(rings) as killed:
        culprit = start("culprit", f"for _ in range(2):{TURN.replace(chr(10), chr(10) + ' ')}", 1, runtime_us=100_000)
        heard(culprit, "in")
        line_of(killed, "standing")
        go_on(culprit)
        heard(culprit, "out")
        line_of(killed, "overran")
        killed.kill()
    gate = Served(rings, end=False)
    try:
        until(lambda: ["culprit"] == gate.waiting())
        overran, standing, beat = gate.said[:3]
        assert ("culprit", False) == (overran["overran"]["culprit"], standing["standing"]["gated"])
        assert "beat" in beat
        other = start("other", TURN, 1)
        heard(other, "in")
        assert ["culprit"] == gate.waiting()
        culprit.kill()
        shutil.rmtree(rings / "culprit")
        until(lambda: [True] == [told["standing"]["gated"] for told in gate.said[3:] if "standing" in told])
        assert [] == list((rings / ".gate" / "owed").iterdir())
    finally:
        gate.stop()


def test_a_holder_that_stays_too_long_is_named_although_the_gate_that_let_it_in_was_killed(
    rings: Path, start: Start
) -> None:
    rings.mkdir()
    with gate_process(rings) as killed:
        holder = start("holder", TURN, 1, runtime_us=1_000_000)
        heard(holder, "in")
        killed.kill()
    gate = Served(rings, end=False)
    try:
        other = start("other", TURN, 1)
        until(lambda: [("holder", False)] == [(told["culprit"], told["over"]) for told in gate.overruns()])
        assert ["other"] == gate.waiting()
        go_on(holder)
        heard(other, "in")
        assert [False, True] == [told["over"] for told in gate.overruns()]
    finally:
        gate.stop()


@pytest.mark.parametrize("killed", [signal.SIGKILL, signal.SIGSTOP])
def test_waiting_tasks_do_not_hang_without_a_gate(rings: Path, start: Start, killed: signal.Signals) -> None:
    """Nor does a task that has its turn: it ends, and the next one finds no gate."""
    rings.mkdir()
    with gate_process(rings) as process:
        holder = start("holder", TURN, 1)
        heard(holder, "in")
        waiting = start("waiting", TURN, 1, LAXITY_GATE_PATIENCE_US="100000")
        process.send_signal(killed)
    assert "laxity.gate.GateError: no gate for 100000 us" in waiting.communicate(timeout=PATIENCE_S)[1]
    go_on(holder)
    holder.communicate(timeout=PATIENCE_S)
    assert 0 == holder.returncode


def test_tasks_run_without_a_gate_only_if_told_so(rings: Path, start: Start) -> None:
    rings.mkdir()
    program = "import laxity\nfor _ in range(3):\n  with laxity.task('turn'): print('ran')"
    told = start("told", program, LAXITY_GATE_PATIENCE_US="20000", LAXITY_GATE_LOST="run")
    assert ("ran\n" * 3, "laxity: no gate; tasks run without it, as LAXITY_GATE_LOST=run says\n") == told.communicate()
    untold = start("untold", program, LAXITY_GATE_PATIENCE_US="20000")
    output, errors = untold.communicate()
    assert ("", 1) == (output, untold.returncode)
    assert "GateError" in errors


def test_a_container_of_no_gate_has_no_socket(gate: Served, rings: Path) -> None:
    plain, gated = labels_of(rings, "plain"), contain(rings, "gated")
    until((gated / "gate.sock").exists)
    assert not (plain / "gate.sock").exists()

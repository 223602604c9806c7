"""Whether the gate enforces: one core stands for a device, three containers whose set holds only in the gate's order.

Without the gate the kernel shares the core between them and the first one's deadlines are missed; with it none is,
unless the machine gave the core to somebody else. That is told apart by the trace: containers, gate and a process that
fills what they leave are alone on the core, so what passed beyond their processor time was taken by others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

import laxity
from bench import report as form
from bench.core_time import OURS, filler, join, meet, ours
from shared.admission import RtTask, Sharing, Verdict, admit
from shared.messages import Regime

DEVICE: Final = "the core"
IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108  # the folders made there are ours alone
"""As a node has its rings below /run: on a disk it takes the gate half a millisecond to keep an overrun."""
MARGIN_US: Final = 3_000
"""For hand-overs: on two hardware threads of one core 99.9 % of those to a process in Python take less (decision 110).
"""
WORK_RATIO: Final = 0.9
"""Part of the declared runtime that a task computes, in processor time; the rest is for what a turn has around that:
the SDK, the socket, the stamps of the trace. With 0.97 some ran over what they had declared."""
SETTLE_NS: Final = 1_000_000_000
STAMPS: Final = struct.Struct("<QQ")
SHOWN: Final = 10
MOST_OF_BARE: Final = 4


def declared(name: str, deadline_us: int) -> RtTask:
    return RtTask(name, runtime_us=20_000, period_us=80_000, deadline_us=deadline_us, gate=True)


SET: Final = (declared("tight", 50_000), declared("middle", 80_000), declared("loose", 80_000))
"""Released together: in turn the first is done after at most two runtimes, shared alike after up to three."""


# ----------------------------------------------------------------------------------- in the containers


def work(task: RtTask, core: int, began_ns: int, count: int) -> list[tuple[int, ...]]:
    """``count`` tasks, released together with those of the others from ``began_ns`` on; a Span for each.

    What came too late is not made up for: two releases are never closer than a period. It runs where it was started
    where ``core`` is below 0.
    """
    if core >= 0:
        os.sched_setaffinity(0, {core})
    folder = Path(os.environ[OURS])
    with laxity.task(task.name, deadline_us=task.deadline_us):
        pass  # the first one makes the ring and finds the gate
    join(folder, [os.getpid()], len(SET) + 1)
    taken_ns = ours(folder).taken_ns
    spans, period_ns = list[tuple[int, ...]](), task.period_us * 1_000
    due_ns = began_ns + max(0, time.monotonic_ns() + SETTLE_NS // 2 - began_ns) // period_ns * period_ns
    for _ in range(count):
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
        owed_ns, begin_ns = held_against_ns(), time.monotonic_ns()
        begin_taken_ns = taken_ns(begin_ns)
        with laxity.task(task.name, deadline_us=task.deadline_us):
            in_ns = time.monotonic_ns()
            in_taken_ns, cpu_ns = taken_ns(in_ns), time.thread_time_ns()
            until_ns = cpu_ns + int(task.runtime_us * WORK_RATIO * 1_000)
            while time.thread_time_ns() < until_ns:
                pass
            out_ns = time.monotonic_ns()
            out_taken_ns = taken_ns(out_ns)
        spans.append((begin_ns, in_ns, out_ns, begin_taken_ns, in_taken_ns, out_taken_ns, *owed_ns))
        due_ns = began_ns - (began_ns - begin_ns - period_ns) // period_ns * period_ns
    meet(folder, len(SET), "done", os.getpid())
    return spans


def held_against_ns() -> tuple[int, int]:
    """Until when the gate lets this container wait for its last overrun, and how long that turn was; as it keeps it."""
    ring = Path(os.environ["LAXITY_RING_DIR"])
    try:
        owed = json.loads((ring.parent / ".gate" / "owed" / ring.name).read_bytes())
    except OSError:
        return 0, 0
    return owed["until_us"] * 1_000, owed["held_us"] * 1_000


# ------------------------------------------------------------------------------------------ the trace


@dataclass(frozen=True)
class Span:
    """One task: begun, let in, out of its turn, and what others had taken of the core by then, counted from no
    particular moment.

    ``until_ns``: as the gate said, it was not to be let in before, since the turn before had lasted ``held_ns``.
    """

    task: RtTask
    begin_ns: int
    in_ns: int
    out_ns: int
    begin_taken_ns: int
    in_taken_ns: int
    out_taken_ns: int
    until_ns: int = 0
    held_ns: int = 0

    @property
    def late_ns(self) -> int:
        return self.out_ns - self.begin_ns - self.task.deadline_us * 1_000

    @property
    def taken_ns(self) -> int:
        """What others took of its turn."""
        return self.out_taken_ns - self.in_taken_ns


class Trace:
    """All tasks of a run, in the order of their turns."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: span.in_ns)
        stamps = [((s.begin_ns, s.begin_taken_ns), (s.in_ns, s.in_taken_ns), (s.out_ns, s.out_taken_ns)) for s in spans]
        self._stamps = sorted(stamp for three in stamps for stamp in three)
        self._ready_ns = list(self._ready())

    def misses(self) -> list[Span]:
        return [span for span in self.spans if span.late_ns > 0]

    def unexplained(self) -> list[int]:
        """Places of the misses that would be, had nobody else had the core since the device was last idle."""
        late = [span.late_ns - self._ready_ns[place] + span.begin_ns for place, span in enumerate(self.spans)]
        return [place for place, late_ns in enumerate(late) if late_ns > max(0, self.taken_ns(place))]

    def taken_ns(self, place: int) -> int:
        """What others took of the core up to the end of this turn since nobody had a task that could begin.

        Whoever waits when a task begins may wait because of what was taken before.
        """
        since_ns = self._ready_ns[place]
        for before in range(place - 1, -1, -1):
            if self.spans[before].out_ns <= since_ns:
                break
            since_ns = min(since_ns, self._ready_ns[before])
        return self.spans[place].out_taken_ns - self._taken_by_ns(since_ns)

    def _taken_by_ns(self, at_ns: int) -> int:
        """By the next stamp of anybody: rather more than less."""
        return self._stamps[bisect_left(self._stamps, (at_ns, -(1 << 62)))][1]

    def _ready(self) -> Iterator[int]:
        """When each task could begin: at once, unless its container waited for an overrun that others caused."""
        last: dict[str, int] = {}
        for place, span in enumerate(self.spans):
            before = last.get(span.task.name)
            waits = before is not None and self._was_made_to_overrun(before, span.held_ns)
            yield max(span.begin_ns, span.until_ns) if waits else span.begin_ns
            last[span.task.name] = place

    def _was_made_to_overrun(self, place: int, held_ns: int) -> bool:
        """Whether what others took of a turn, and of the ways into it and out of it, is why it lasted too long."""
        span = self.spans[place]
        since_ns = max(span.begin_ns, self.spans[place - 1].out_ns if place else 0)
        after = self.spans[place + 1] if place + 1 < len(self.spans) else span
        ways_ns = span.in_taken_ns - self._taken_by_ns(since_ns) + max(0, after.in_taken_ns - span.out_taken_ns)
        most_ns = max(0, held_ns - (span.out_ns - span.in_ns))
        return held_ns - (span.task.runtime_us + MARGIN_US) * 1_000 <= span.taken_ns + min(ways_ns, most_ns)

    def handovers_us(self) -> list[float]:
        """From the end of a turn to the begin of the next one, where somebody waited for it who was not held back."""
        pairs = zip(self.spans, self.spans[1:], strict=False)
        return sorted((b.in_ns - a.out_ns) / 1_000 for a, b in pairs if max(b.begin_ns, b.until_ns) < a.out_ns)

    def overlaps(self) -> int:
        return sum(after.in_ns < before.out_ns for before, after in pairwise(self.spans))


# ------------------------------------------------------------------------------------------ the runs


@contextmanager
def gate(root: Path, core: int) -> Iterator[int]:
    """The node's gate, as its monitor starts it, but on the device's own core; its process id."""
    command = [sys.executable, "-m", "services.monitor.gate", "--ring-root", str(root)]
    command += ["--margin-us", str(MARGIN_US), "--monitor", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.sched_setaffinity(process.pid, {core})
        try:
            yield process.pid
        finally:
            process.kill()


def contain(root: Path, task: RtTask) -> Path:
    timing = {"deadline_us": task.deadline_us, "period_us": task.period_us, "runtime_us": task.runtime_us}
    labels = {"container": task.name, "reservation": {"devices": [DEVICE], "realtime": {**timing, "gate": True}}}
    folder = root / task.name
    folder.mkdir()
    (folder / "container.json").write_text(json.dumps(labels))
    return folder


def run(root: Path, core: int, count: int, others: Sequence[int], *, gated: bool) -> Trace:
    """Each container's ``count`` tasks, all released at the same times; ``others`` are ours on that core too."""
    began_ns = time.monotonic_ns() + SETTLE_NS
    started = []
    folder = Path(tempfile.mkdtemp(dir=root, prefix="."))
    for index, task in enumerate(SET):
        environment = os.environ | {"LAXITY_RING_DIR": str(root / task.name), "LAXITY_GATE": str(int(gated))}
        environment[OURS] = str(folder)
        command = [sys.executable, "-m", "bench.gate", "--worker", *map(str, (index, core, began_ns, count))]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    join(folder, others, len(SET) + 1)
    printed = [process.communicate()[0] for process in started]
    return Trace([Span(task, *row) for task, text in zip(SET, printed, strict=True) for row in json.loads(text)])


def together(traces: Sequence[Trace]) -> Trace:
    """One after another; each counts what others took from its own beginning."""
    spans = []
    for trace in traces:
        zero_ns = min(span.begin_taken_ns for span in trace.spans)
        taken = [(s.begin_taken_ns - zero_ns, s.in_taken_ns - zero_ns, s.out_taken_ns - zero_ns) for s in trace.spans]
        spans += [
            replace(span, begin_taken_ns=begin, in_taken_ns=into, out_taken_ns=out)
            for span, (begin, into, out) in zip(trace.spans, taken, strict=True)
        ]
    return Trace(spans)


def verdict(regime: Regime, slice_us: int) -> Verdict:
    """What admission says of the set."""
    *residents, last = reversed(SET)
    sharing = Sharing(regime, slice_us, 5, MARGIN_US if regime is Regime.GATED else 0)
    return admit(sharing, residents, last)


def bare_us(core: int, turns: int = 500) -> list[float]:
    """The same way without a gate: two processes compute on the core in turn, a third passes on who is done.

    They compute as long as the tasks do: what each needs of the caches is as cold.
    """
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    children = []
    for _, end in pairs:
        if not (child := os.fork()):
            pass_on(end, core)
        children.append(child)
    ours, took, message = [ours for ours, _ in pairs], [], STAMPS.pack(time.monotonic_ns(), 0)
    for turn in range(turns):
        ours[turn % 2].send(message)
        message = ours[turn % 2].recv(STAMPS.size)
        took.append(STAMPS.unpack(message)[1] / 1_000)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return sorted(took[1:])


def pass_on(end: socket.socket, core: int) -> NoReturn:
    """Compute whenever told to, and say when that was done and how long the way here took."""
    os.sched_setaffinity(0, {core})
    while True:
        done_ns, _ = STAMPS.unpack(end.recv(STAMPS.size))
        took_ns, until_ns = time.monotonic_ns() - done_ns, time.thread_time_ns() + SET[0].runtime_us * 1_000
        while time.thread_time_ns() < until_ns:
            pass
        end.send(STAMPS.pack(time.monotonic_ns(), took_ns))


def quantile(ordered: Sequence[float], ratio: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * ratio))], 1) if ordered else 0.0


# ------------------------------------------------------------------------------------------- the report


def report(free: Trace, gated: Trace, bare: Sequence[float], slice_us: int) -> dict[str, Any]:
    """In the form of all benches."""
    misses, unexplained = len(gated.misses()), len(gated.unexplained())
    handovers = gated.handovers_us()
    figures = {
        "tasks_without": len(free.spans),
        "misses_without": len(free.misses()),
        "tasks_gated": len(gated.spans),
        "misses_gated": unexplained,
        "misses_gated_of_the_host": misses - unexplained,
        "overlaps_gated": gated.overlaps(),
        "handovers": len(handovers),
        **_quantiles("handover", handovers),
        **_quantiles("bare", bare),
        "taken_of_a_turn_p99_us": quantile(sorted(span.taken_ns / 1_000 for span in gated.spans), 0.99),
    }
    ratio = round(figures["handover_p50_us"] / (figures["bare_p50_us"] or 1), 2)
    return form.found(
        "gate",
        figures,
        {"handover_over_bare": ratio},
        {
            "the set is admitted with the gate": verdict(Regime.GATED, slice_us).admitted,
            "the set is refused without it": not verdict(Regime.TIME_SLICED, slice_us).admitted,
            "without the gate deadlines are missed": bool(free.misses()),
            "with it none is, but for those of the host": unexplained == 0,
            "never two at once": gated.overlaps() == 0,
            f"a hand-over takes at most {MOST_OF_BARE} times the bare way (median)": ratio <= MOST_OF_BARE,
        },
        "Real: the gate's process, three containers' processes on one core that stands for a device, SDK and "
        "socket. A miss is the host's where it would not be, had nobody else had the core since the device was idle: "
        "what passed, less the processor time of containers, gate and a process of idle priority that takes what they "
        "leave; or where its container waited because such a loss had made it overrun. Admission without the gate: "
        "time-sliced.",
    )


def _quantiles(name: str, ordered: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}_p{text}_us": quantile(ordered, ratio) for text, ratio in (("50", 0.5), ("99", 0.99), ("99_9", 0.999))
    }


def show(told: dict[str, Any], gated: Trace) -> None:
    late = [place for place, span in enumerate(gated.spans) if span.late_ns > 0]
    for place in [*gated.unexplained(), *late][:SHOWN]:
        span, taken_us = gated.spans[place], gated.taken_ns(place) // 1_000
        print(f"  missed: {span.task.name} by {span.late_ns // 1_000} us; others took {taken_us} us since it was idle")
    form.show(told, figures=True)
    form.keep(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_002, help="in all, with the gate; a tenth without it")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--slice-us", type=int, default=3_000, help="of the kernel, for admission without the gate")
    parser.add_argument("--spans", type=Path, default=Path("/dev/stdout"), help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=4, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        index, core, began_ns, count = args.worker
        spans = json.dumps(work(SET[index], core, began_ns, count))
        args.spans.write_text(spans)
        return
    free, gated = [], []
    each = max(1, args.tasks // len(SET) // 2)
    with (
        tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as name,
        gate(Path(name), args.core) as arbiter,
        filler(args.core) as fills,
    ):
        for task in SET:
            contain(Path(name), task)
        others = [arbiter, fills]
        for _ in range(2):
            free.append(run(Path(name), args.core, max(1, each // 10), others, gated=False))
            gated.append(run(Path(name), args.core, each, others, gated=True))
    told = report(together(free), together(gated), bare_us(args.core), args.slice_us)
    show(told, together(gated))


if __name__ == "__main__":
    main()

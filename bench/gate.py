"""Whether the gate enforces: one core stands for a device, three containers whose set holds only in the gate's order.

Without the gate the kernel shares the core between them and the first one's deadlines are missed; with it none is,
unless the machine gave the core to somebody else. That is told apart by the trace: during a turn a container only
computes, so what passed beyond its own processor time was taken by others; between turns the kernel says how long who
was to run had no processor.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

import laxity
from bench import report as form
from shared.admission import RtTask, Sharing, Verdict, admit
from shared.messages import Regime

DEVICE: Final = "the core"
MARGIN_US: Final = 500
WORK_RATIO: Final = 0.97
"""Part of the declared runtime that a task computes, in processor time; the rest is for the loop around it."""
SETTLE_NS: Final = 1_000_000_000
UNSEEN_NS: Final = 100_000
"""Of a turn, as the gate sees it, before the container knows of it and after it has let go."""
STAMPS: Final = struct.Struct("<QQ")
SHOWN: Final = 10
MOST_OF_BARE: Final = 4


def declared(name: str, deadline_us: int) -> RtTask:
    return RtTask(name, runtime_us=4_000, period_us=16_000, deadline_us=deadline_us, gate=True)


SET: Final = (declared("tight", 10_000), declared("middle", 16_000), declared("loose", 16_000))
"""Released together: in turn the first is done after at most two runtimes, shared alike after up to three."""


# ----------------------------------------------------------------------------------- in the containers


def work(task: RtTask, core: int, began_ns: int, count: int) -> list[tuple[int, ...]]:
    """``count`` tasks, released together with those of the others from ``began_ns`` on; a Span for each.

    What came too late is not made up for: two releases are never closer than a period. It runs where it was started
    where ``core`` is below 0.
    """
    if core >= 0:
        os.sched_setaffinity(0, {core})
    with laxity.task(task.name, deadline_us=task.deadline_us):
        pass  # the first one makes the ring and finds the gate
    spans, period_ns = list[tuple[int, ...]](), task.period_us * 1_000
    due_ns = began_ns + max(0, time.monotonic_ns() + SETTLE_NS // 2 - began_ns) // period_ns * period_ns
    for _ in range(count):
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
        begin_ns, delay_ns = time.monotonic_ns(), run_delay_ns()
        with laxity.task(task.name, deadline_us=task.deadline_us):
            in_ns, in_delay_ns, cpu_ns = time.monotonic_ns(), run_delay_ns(), time.thread_time_ns()
            until_ns = cpu_ns + int(task.runtime_us * WORK_RATIO * 1_000)
            while time.thread_time_ns() < until_ns:
                pass
            used_ns, out_delay_ns, out_ns = time.thread_time_ns() - cpu_ns, run_delay_ns(), time.monotonic_ns()
        spans.append((begin_ns, in_ns, out_ns, used_ns, in_delay_ns - delay_ns, run_delay_ns() - out_delay_ns))
        due_ns = began_ns - (began_ns - begin_ns - period_ns) // period_ns * period_ns
    return spans


def run_delay_ns() -> int:
    """How long this process was ready to run and had no processor, so far."""
    return int(Path("/proc/self/schedstat").read_bytes().split()[1])


# ------------------------------------------------------------------------------------------ the trace


@dataclass(frozen=True)
class Span:
    """One task: begun, let in, out of its turn. ``used_ns``: its own processor time on the device.

    ``before_ns`` and ``after_ns``: how long it was ready to run and had no processor, until it was in and when it gave
    its turn back.
    """

    task: RtTask
    begin_ns: int
    in_ns: int
    out_ns: int
    used_ns: int
    before_ns: int
    after_ns: int

    @property
    def late_ns(self) -> int:
        return self.out_ns - self.begin_ns - self.task.deadline_us * 1_000

    @property
    def stolen_ns(self) -> int:
        """What others took of the core during its turn."""
        return self.out_ns - self.in_ns - self.used_ns


NOBODY: Final = Span(SET[0], 0, 0, 0, 0, 0, 0)


class Trace:
    """All tasks of a run, in the order of their turns."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: span.in_ns)
        self._barred = set(_barred(self.spans))

    def misses(self) -> list[Span]:
        return [span for span in self.spans if span.late_ns > 0]

    def unexplained(self) -> list[int]:
        """Places of the misses that would be, had nobody else had the core since the device was last idle."""
        missed = [(place, span) for place, span in enumerate(self.spans) if span.late_ns > 0]
        return [place for place, span in missed if span.late_ns > self.taken_ns(place) and span not in self._barred]

    def taken_ns(self, place: int) -> int:
        """What others took of the core up to the end of this turn since nobody had begun a task: of turns, and between.

        Whoever waits when a task begins may wait because of what was taken before.
        """
        taken_ns, since_ns = 0, self.spans[place].begin_ns
        for turn, before in pairwise([*self.spans[place::-1], NOBODY]):
            since_ns = min(since_ns, turn.begin_ns)
            between_ns = turn.in_ns - max(before.out_ns, turn.begin_ns)
            taken_ns += turn.stolen_ns + max(0, min(turn.before_ns + before.after_ns, between_ns))
            if before.out_ns <= since_ns:
                break
        return taken_ns

    def handovers_us(self) -> list[float]:
        """From the end of a turn to the begin of the next one, where somebody waited for it who was not held back."""
        pairs = [(a, b) for a, b in pairwise(self.spans) if b.begin_ns < a.out_ns and b not in self._barred]
        return sorted((b.in_ns - a.out_ns) / 1_000 for a, b in pairs)

    def overlaps(self) -> int:
        return sum(after.in_ns < before.out_ns for before, after in pairwise(self.spans))


def _barred(spans: Sequence[Span]) -> Iterator[Span]:
    """Those that had to wait since a task of their container had overrun by what others took; counted as in the core.

    A turn is the gate's from the moment at which it was free to give: the way into it counts.
    """
    next_ns, until_ns, free_ns = Counter[str](), Counter[str](), 0
    for span in spans:
        name, task = span.task.name, span.task
        if until_ns[name] > span.begin_ns:
            yield span
        arrival_ns, given_ns = max(span.begin_ns, next_ns[name]), max(span.begin_ns, free_ns, until_ns[name])
        free_ns = span.out_ns + span.after_ns
        held_ns, limit_ns = free_ns - given_ns, (task.runtime_us + MARGIN_US) * 1_000
        next_ns[name] = arrival_ns + task.period_us * 1_000
        if span.used_ns <= limit_ns < held_ns + UNSEEN_NS:
            until_ns[name] = arrival_ns + held_ns * task.period_us // task.runtime_us
            next_ns[name] = max(next_ns[name], until_ns[name])


def together(traces: Sequence[Trace]) -> Trace:
    return Trace([span for trace in traces for span in trace.spans])


# ------------------------------------------------------------------------------------------ the runs


@contextmanager
def gate(root: Path) -> Iterator[None]:
    """The node's gate, as its monitor starts it."""
    command = [sys.executable, "-m", "services.monitor.gate", "--ring-root", str(root)]
    command += ["--margin-us", str(MARGIN_US), "--monitor", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def contain(root: Path, task: RtTask) -> Path:
    timing = {"deadline_us": task.deadline_us, "period_us": task.period_us, "runtime_us": task.runtime_us}
    labels = {"container": task.name, "reservation": {"devices": [DEVICE], "realtime": {**timing, "gate": True}}}
    folder = root / task.name
    folder.mkdir()
    (folder / "container.json").write_text(json.dumps(labels))
    return folder


def run(root: Path, core: int, count: int, *, gated: bool) -> Trace:
    """Each container's ``count`` tasks, all released at the same times."""
    began_ns = time.monotonic_ns() + SETTLE_NS
    started = []
    for index, task in enumerate(SET):
        environment = os.environ | {"LAXITY_RING_DIR": str(root / task.name), "LAXITY_GATE": str(int(gated))}
        command = [sys.executable, "-m", "bench.gate", "--worker", *map(str, (index, core, began_ns, count))]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate()[0] for process in started]
    return Trace([Span(task, *row) for task, text in zip(SET, printed, strict=True) for row in json.loads(text)])


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
        "stolen_p99_us": quantile(sorted(span.stolen_ns / 1_000 for span in gated.spans), 0.99),
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
        "during turns (wall clock less processor time) and between them (ready, and not running: schedstat); or where "
        "its container waited because such a loss had made it overrun. Admission without the gate: time-sliced.",
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
    with tempfile.TemporaryDirectory() as name, gate(Path(name)):
        for task in SET:
            contain(Path(name), task)
        for _ in range(2):
            free.append(run(Path(name), args.core, max(1, each // 10), gated=False))
            gated.append(run(Path(name), args.core, each, gated=True))
    told = report(together(free), together(gated), bare_us(args.core), args.slice_us)
    show(told, together(gated))


if __name__ == "__main__":
    main()

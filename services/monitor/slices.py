"""Measures how this machine's scheduler shares one core: slice L and switch cost theta of THEORY.md, section 1."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Final, NamedTuple

_PAUSE_US: Final = 20
"""A shorter pause of a spinning loop is not worth a mark; the timer's interrupt alone takes about that."""
_LONGEST_SWITCH_US: Final = 1_000
"""A longer pause between the two was a third process's turn."""
_LEAST_TURNS: Final = 6
_SETTLE_NS: Final = 150_000_000  # both are up and spinning by then

_SPIN: Final = """
import os, sys, time
core, began_ns, length_ns, pause_ns = (int(argument) for argument in sys.argv[1:])
os.sched_setaffinity(0, {core})
now = time.monotonic_ns
while now() < began_ns: pass
last = now()
marks = [last]
while last < began_ns + length_ns:
    at = now()
    if at - last > pause_ns:
        marks += (last, at)
    last = at
marks.append(last)
print(*marks)
"""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Of one core, in microseconds; None where it could not be measured."""

    slice_us: int | None
    switch_us: int | None


UNKNOWN: Final = Sharing(None, None)


class Run(NamedTuple):
    """One process had the core from ``began_ns`` to ``ended_ns``."""

    began_ns: int
    ended_ns: int
    process: int


def measure(core: int, length_us: int = 300_000, tries: int = 3) -> Sharing:
    """Let two processes spin on ``core`` for ``length_us`` and see who ran when. Blocks for half a second per try.

    Tried again where others were on the core most of the time. UNKNOWN where the processes cannot be started, are not
    let onto the core, or did not take turns.
    """
    for _ in range(tries):
        if (found := _measure_once(core, length_us)) != UNKNOWN:
            return found
    return UNKNOWN


def _measure_once(core: int, length_us: int) -> Sharing:
    arguments = (core, time.monotonic_ns() + _SETTLE_NS, length_us * 1_000, _PAUSE_US * 1_000)
    command = [sys.executable, "-I", "-S", "-c", _SPIN, *map(str, arguments)]
    spinning: list[subprocess.Popen[str]] = []
    try:
        spinning.append(_start(command))
        spinning.append(_start(command))
        printed = [process.communicate(timeout=length_us / 1_000_000 + 5)[0] for process in spinning]
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    finally:
        for process in spinning:
            process.kill()
            process.communicate()
    return judge([run for index, text in enumerate(printed) for run in _runs(text, index)])


def judge(runs: Sequence[Run]) -> Sharing:
    """L and theta from who ran when.

    L is the 0.95 quantile of the turns: from one process getting the core to its losing it to the other. theta is the
    median of what passes from the last step of one to the first of the other, where no third process was in between:
    the time lost by a switch, without what the caches cost afterwards.
    """
    turns, switches = [], []
    ordered = sorted(runs)
    if not ordered:
        return UNKNOWN
    began_ns = ordered[0].began_ns
    for before, after in pairwise(ordered):
        if before.process == after.process:
            continue
        turns.append((before.ended_ns - began_ns) // 1_000)
        switches.append((after.began_ns - before.ended_ns) // 1_000)
        began_ns = after.began_ns
    switches = [switch_us for switch_us in switches if 0 <= switch_us <= _LONGEST_SWITCH_US]
    if len(turns) < _LEAST_TURNS or len(switches) < _LEAST_TURNS:
        return UNKNOWN
    return Sharing(max(1, round(quantiles(turns, n=20, method="inclusive")[-1])), max(1, round(median(switches))))


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
    )


def _runs(printed: str, process: int) -> list[Run]:
    marks = [int(mark) for mark in printed.split()]
    return [Run(began, ended, process) for began, ended in zip(marks[::2], marks[1::2], strict=False)]

"""What `make bench-gate` calls the host's: never what the gate itself was slow in."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from bench.core_time import filler
from bench.gate import SET, Span, Trace, contain, gate, run

TIGHT, MIDDLE, _ = SET
TENTH = TIGHT.deadline_us * 100
"""Of its deadline, in nanoseconds: two fifths of a turn."""


def span(begin: float, into: float, out: float, taken: tuple[float, float, float], **more: int) -> Span:
    """In tenths of its deadline."""
    stamps = [int(at * TENTH) for at in (begin, into, out, *taken)]
    return Span(TIGHT, *stamps, **more)


def test_a_miss_is_the_hosts_if_others_took_as_much_as_it_was_late() -> None:
    assert [] == Trace([span(0, 1, 12, (0, 0, 2))]).unexplained()
    assert [0] == Trace([span(0, 1, 12, (0, 0, 1.9))]).unexplained()


def test_what_others_took_of_the_turns_before_counts_and_what_they_took_before_it_was_idle_does_not() -> None:
    before = Span(MIDDLE, 0, 0, 8 * TENTH, 0, 0, 4 * TENTH)
    assert [] == Trace([before, span(2, 8, 15, (1, 4, 4))]).unexplained()
    assert [1] == Trace([before, span(9, 13, 22, (4, 4, 4))]).unexplained()


def test_a_gate_that_sleeps_or_computes_between_two_turns_is_not_the_host() -> None:
    before = Span(MIDDLE, 0, 0, 4 * TENTH, 0, 0, 0)
    assert [1] == Trace([before, span(0, 12, 16, (0, 0, 0))]).unexplained()


def test_a_wait_for_an_overrun_is_explained_only_where_others_caused_that() -> None:
    """The same wait after the same turn: once others took the time, once the gate was slow to hear that it was over."""
    held = {"until_ns": 32 * TENTH, "held_ns": 8 * TENTH}
    after = span(16, 32, 36, (4, 4, 4), **held)
    assert [] == Trace([span(0, 0, 8, (0, 0, 4)), after]).unexplained()
    assert [1] == Trace([span(0, 0, 4, (0, 0, 0)), span(16, 32, 36, (0, 0, 0), **held)]).unexplained()


def test_a_gate_that_is_stopped_for_a_while_makes_misses_that_are_not_explained(tmp_path: Path) -> None:
    core, done = max(os.sched_getaffinity(0)), threading.Event()

    def stop_now_and_then(pid: int) -> None:
        while not done.wait(0.1):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)

    with gate(tmp_path, core) as pid, filler(core) as fills:
        for task in SET:
            contain(tmp_path, task)
        faulty = threading.Thread(target=stop_now_and_then, args=[pid])
        faulty.start()
        try:
            trace = run(tmp_path, core, 20, [pid, fills], gated=True)
        finally:
            done.set()
            faulty.join()
    assert 3 * 20 == len(trace.spans)
    assert 0 == trace.overlaps()
    assert [] != trace.unexplained()

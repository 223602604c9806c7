"""What others took of a core: the time that passed less the processor time of ours.

Ours are all processes that the experiment has on that core, and a filler, which runs whenever none of them wants to.
So what is missing was taken by other processes or by the host of this machine, and not by us: a gate that sleeps
leaves its time to the filler, one that computes uses it. All of ours have to be on that core alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

OURS: Final = "LAXITY_BENCH_OURS"
"""A folder in which a file of each of ours is named as its process."""

MEET_S: Final = 120.0


class CoreTime:
    """Reads the clocks of processes that are all alive."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._clocks = [~pid << 3 | 2 for pid in pids]  # as clock_getcpuclockid(3) makes them

    def taken_ns(self, now_ns: int) -> int:
        """Up to ``now_ns``, counted from no particular moment: the difference of two readings is what was taken."""
        return now_ns - sum(map(time.clock_gettime_ns, self._clocks))


def join(folder: Path, pids: Iterable[int], count: int) -> None:
    """These are ours too; returns once as many calls were made, each with others: now all are known."""
    pids = list(pids)
    for pid in pids:
        (folder / str(pid)).touch()
    meet(folder, count, "joined", pids[0])


def ours(folder: Path) -> CoreTime:
    """Of all who have joined."""
    return CoreTime(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def meet(folder: Path, count: int, where: str, pid: int) -> None:
    """Wait for as many others: who is gone would be missing in what the rest reads."""
    (folder / f"{pid}.{where}").touch()
    until_s = time.monotonic() + MEET_S
    while len(list(folder.glob(f"*.{where}"))) < count:
        if time.monotonic() > until_s:
            raise TimeoutError(f"fewer than {count} have {where}")
        time.sleep(0.01)


@contextmanager
def filler(core: int) -> Iterator[int]:
    """The process that takes what nobody else wants; its id."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    with subprocess.Popen([sys.executable, "-c", f"{code}\nprint(flush=True)\nwhile True: pass"], stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()

"""The gate's process: started by the monitor, which hears a line of JSON for each thing that is told."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from services.monitor.gate.core import Arbiter
from services.monitor.gate.server import Server


class Voice:
    """Says lines on stdout and never waits for who reads them: what does not fit into the pipe is said later."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left = b""
        os.set_blocking(descriptor, False)

    def say(self, told: dict[str, Any]) -> None:
        """BrokenPipeError once nobody listens."""
        if not self._left or "beat" not in told:
            self._left += json.dumps(told).encode() + b"\n"
        with contextlib.suppress(BlockingIOError):
            self._left = self._left[os.write(self._descriptor, self._left) :]


def _die_with(monitor: int) -> None:
    """Nobody would say that devices have lost their gate. 1 is PR_SET_PDEATHSIG."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != monitor:  # it was gone before we had asked for that
        sys.exit()


def _hurry() -> None:
    """Every hand-over waits for this process: before all others, if the machine lets us, else as any."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    """Serves until the monitor ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ring-root", type=Path, required=True)
    parser.add_argument("--margin-us", type=int, required=True)
    parser.add_argument("--end-overruns", action="store_true")
    parser.add_argument("--monitor", type=int, required=True, help="process id")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the monitor, which ends us
    _die_with(args.monitor)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    server = Server(args.ring_root, Arbiter(args.margin_us, end_overruns=args.end_overruns), Voice(1).say)
    _hurry()
    gc.freeze()
    with contextlib.suppress(BrokenPipeError):
        server.run()


if __name__ == "__main__":
    main()

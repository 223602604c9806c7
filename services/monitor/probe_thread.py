"""Runs a probe in a thread of its own, so that one that hangs stops nothing else; what it saw the core judges."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from services.monitor.core import Probed, ProbeFailed
from services.monitor.probes.base import Probe
from services.monitor.shell import Shell
from shared.log import Logger


class ProbeThread:
    """One thread for ever: one that hangs in a driver cannot be ended, and a second one would hang as well.

    It is a daemon, so that it does not keep the process from ending either.
    """

    def __init__(self, probe: Probe, period_us: int, deadline_us: int) -> None:
        self._probe = probe
        self._period_us = period_us
        self._deadline_us = deadline_us
        self._cycle = 0
        self._began_s: float | None = None
        self._stop = threading.Event()

    async def run(self, shell: Shell) -> None:
        """Post how each cycle ended, and ProbeFailed("hung") once for a cycle that outlasts its deadline."""
        loop = asyncio.get_running_loop()

        def post(event: object) -> None:
            if not self._stop.is_set():
                loop.call_soon_threadsafe(shell.post, event)

        threading.Thread(target=self._cycles, args=(post, shell.log), name="probe", daemon=True).start()
        told = 0
        try:
            while True:
                await shell.clock.sleep_us(min(self._period_us, self._deadline_us))
                if self._hangs() and told != self._cycle:
                    told = self._cycle
                    shell.log.warning("probe hangs", cycle=self._cycle)
                    shell.post(ProbeFailed("hung"))
        finally:
            self._stop.set()

    def _hangs(self) -> bool:
        began_s = self._began_s
        return began_s is not None and (time.monotonic() - began_s) * 1_000_000 > self._deadline_us

    def _cycles(self, post: Callable[[object], None], log: Logger) -> None:
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            self._cycle += 1
            self._began_s = time.monotonic()
            post(self._read(log))
            self._began_s = None
            due_s = max(due_s + self._period_us / 1_000_000, time.monotonic())

    def _read(self, log: Logger) -> Probed | ProbeFailed:
        try:
            return Probed(self._probe.read())
        except Exception as error:  # noqa: BLE001 - a probe wraps drivers, which raise whatever they like
            log.warning("probe failed", error=repr(error))
            return ProbeFailed("error")

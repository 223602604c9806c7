"""Waiting until something happens: a call, the end of a process, or the end of a time; decides nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from services.placer.backends.procs import Process
from shared.clock import Clock


class Wake:
    """``call`` ends the present wait of the one who waits, or else the next one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._called = asyncio.Event()

    def call(self) -> None:
        self._called.set()

    async def wait(self, at_most_us: int) -> None:
        """Return when called, or after that many microseconds."""
        both = [asyncio.ensure_future(self._called.wait()), asyncio.ensure_future(self._clock.sleep_us(at_most_us))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        self._called.clear()


class Ends:
    """Calls ``call`` when a process that it follows ends, told by the kernel: the running loop watches a descriptor."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._files: dict[Process, int] = {}

    def follow(self, processes: set[Process]) -> bool:
        """Follow these and no others; False where this system cannot tell of some, so that one has to look again."""
        for process in self._files.keys() - processes:
            self._leave(process)
        told = [self._join(process) for process in processes - self._files.keys()]
        return all(told)

    def close(self) -> None:
        for process in list(self._files):
            self._leave(process)

    def _join(self, process: Process) -> bool:
        try:
            file = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._call()
            return True
        except OSError:  # not known to this kernel, or too many files are open
            return False
        if not process.alive():  # it ended before, and the id may be another's by now
            os.close(file)
            self._call()
            return True
        self._files[process] = file
        asyncio.get_running_loop().add_reader(file, self._ended, process)
        return True

    def _ended(self, process: Process) -> None:
        self._leave(process)
        self._call()

    def _leave(self, process: Process) -> None:
        file = self._files.pop(process)
        asyncio.get_running_loop().remove_reader(file)
        os.close(file)

"""Keeps the gate's process: starts it, hears what it says, and replaces it when it dies or hangs; judges nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from services.monitor.core import GateSaid
from services.monitor.shell import Shell

HUNG_US: Final = 2_500_000
"""Without a beat, of which there are two a second."""
PAUSE_US: Final = 200_000
"""Before it is started again."""


class GateProcess:
    """One gate for the node. ``begin`` before the service says anything, so that a restart is not told as a loss."""

    def __init__(self, ring_root: Path, margin_us: int, *, end_overruns: bool) -> None:
        self._command = [sys.executable, "-m", "services.monitor.gate", "--ring-root", str(ring_root)]
        self._command += ["--margin-us", str(margin_us), "--monitor", str(os.getpid())]
        self._command += ["--end-overruns"] if end_overruns else []
        self._process: asyncio.subprocess.Process | None = None

    async def begin(self) -> list[dict[str, Any] | None]:
        """Start it; what it says up to its first beat, so what it knows of before. None at the end: it is not up."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        said: list[dict[str, Any] | None] = []
        while (told := await self._line()) is not None:
            said.append(told)
            if "beat" in told:
                return said
        await self._end()
        return [*said, None]

    async def run(self, shell: Shell) -> None:
        """Post everything that it says from now on, and GateSaid(None) when there is none; for ever."""
        try:
            while True:
                if self._process is None:
                    for said in await self.begin():
                        shell.post(GateSaid(said, shell.clock.wall_us()))
                while self._process is not None and (told := await self._line()) is not None:
                    shell.post(GateSaid(told, shell.clock.wall_us()))
                await self._end()
                shell.log.error("the gate is gone; it is started again")
                shell.post(GateSaid(None, shell.clock.wall_us()))
                await shell.clock.sleep_us(PAUSE_US)
        finally:
            await self._end()

    async def _line(self) -> dict[str, Any] | None:
        """None if it ended, or says nothing any more."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), HUNG_US / 1_000_000)
            told: dict[str, Any] = json.loads(line)
        except (TimeoutError, ValueError):
            return None
        return told

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

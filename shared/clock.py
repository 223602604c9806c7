"""The clock that shells hold: three methods; cores get the time as an argument and never see it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Time for one shell: ``now_us`` is monotonic, ``wall_us`` is UTC since 1970."""

    def now_us(self) -> int: ...

    def wall_us(self) -> int: ...

    async def sleep_us(self, duration_us: int) -> None: ...


class SystemClock:
    """The machine's own clocks.

    CLOCK_MONOTONIC, because the SDK stamps tasks with it: verdicts compare like with like. It stands still while the
    machine is suspended, so a node that was suspended is re-baselined and not declared lost (case T5).
    """

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    async def sleep_us(self, duration_us: int) -> None:
        await asyncio.sleep(max(0, duration_us) / 1_000_000)

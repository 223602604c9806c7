"""A clock that moves only when a test says so."""

from __future__ import annotations

import asyncio
import heapq
import itertools

START_WALL_US = 1_700_000_000_000_000


class ManualClock:
    """A Clock: ``advance`` moves it and wakes who slept until then, in order."""

    def __init__(self, now_us: int = 0, wall_us: int = START_WALL_US) -> None:
        self._now_us = now_us
        self._offset_us = wall_us - now_us
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_us(self) -> int:
        return self._now_us

    def wall_us(self) -> int:
        return self._now_us + self._offset_us

    async def sleep_us(self, duration_us: int) -> None:
        if duration_us <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_us + duration_us, next(self._order), woken))
        await woken

    @property
    def sleeping(self) -> int:
        """How many sleep now."""
        return sum(not woken.done() for _, _, woken in self._sleepers)

    def suspend(self, for_us: int) -> None:
        """Time passes and nobody is woken on the way, as when a process stands still; ``advance(0)`` wakes it."""
        self._now_us += for_us

    async def advance(self, by_us: int) -> None:
        """Move on; who wakes on the way may sleep again within it. Yields to the loop after each."""
        until_us = self._now_us + by_us
        while self._sleepers and self._sleepers[0][0] <= until_us:
            at_us, _, woken = heapq.heappop(self._sleepers)
            if woken.done():
                continue
            self._now_us = max(self._now_us, at_us)
            woken.set_result(None)
            await _settle()
        self._now_us = until_us
        await _settle()


async def _settle() -> None:
    """Let what is ready run: a woken task needs a few turns to reach its next sleep."""
    for _ in range(5):
        await asyncio.sleep(0)

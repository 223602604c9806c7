"""The stages of an orderly end and their limits; a test adds them up against the supervisor's hard kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Iterator

SECOND_US = 1_000_000

INTAKE_US = 1 * SECOND_US
"""Take no more; what has arrived reaches the core."""
SLOW_US = 3 * SECOND_US
"""Slow effects under way end, and the core hears how."""
OUTBOX_US = 2 * SECOND_US
"""Events reach the stream; what does not is published again from ledger or checkpoint after the next start."""
CLOSE_US = 1 * SECOND_US
"""The connection."""
STAGES_US = (INTAKE_US, SLOW_US, OUTBOX_US, CLOSE_US)

MOST_US = 8 * SECOND_US
"""All stages together stay below it."""
GIVE_UP_US = 9 * SECOND_US
"""When the process ends itself, whatever is stuck."""
HARD_KILL_US = 10 * SECOND_US
"""When a supervisor (Docker's default, ours) kills."""


async def within(limit_us: int, work: Awaitable[object]) -> bool:
    """Wait for ``work``, but not longer; says whether it was done."""
    try:
        async with asyncio.timeout(limit_us / 1_000_000):
            await work
    except TimeoutError:
        return False
    return True


@contextlib.contextmanager
def on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Sets ``stop`` at SIGTERM and SIGINT, and ends the process where that does not end it."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        if not stop.is_set():
            # a slow effect stuck in a thread would keep the process: the last limit is ours, not the supervisor's
            loop.call_later(GIVE_UP_US / 1_000_000, os._exit, 1)
        stop.set()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

"""The stages of an orderly end and their limits; a test adds them up against the supervisor's hard kill."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

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

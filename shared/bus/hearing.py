"""What a subscription hears: handled where it is read or, where that must wait, by a task, one message at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from shared.bus.msg import Msg

MOST_BYTES = 64 * 1024 * 1024
"""What may wait where the number of messages is limited."""

Handler = Callable[[Msg], Awaitable[None]]
AtOnce = Callable[[Msg], bool]
"""Whether it has handled a message, without a wait. What it raises is met again by the handler."""


class Hearing:
    """A task runs while something waits, so what is handled at once costs none. ``limit``: messages that may wait, 0
    for any number; of one more ``dropped`` is told the subject.
    """

    def __init__(self, handler: Handler, at_once: AtOnce, limit: int, dropped: Callable[[str], None]) -> None:
        self._handler = handler
        self._at_once = at_once
        self._limit = limit
        self._dropped = dropped
        self._waiting = deque[Msg]()
        self._bytes = 0
        self._working: asyncio.Task[None] | None = None

    def heard(self, msg: Msg) -> None:
        """Never raises: it is called between two messages of the connection."""
        if self._working is None:
            try:
                handled = self._at_once(msg)
            except Exception:  # noqa: BLE001  # the handler meets it again, and there it is counted and told
                handled = False
            if handled:
                return
            self._working = asyncio.create_task(self._work())
        elif self._limit and (len(self._waiting) >= self._limit or self._bytes >= MOST_BYTES):
            self._dropped(msg.subject)
            return
        self._waiting.append(msg)
        self._bytes += len(msg.body)

    async def _work(self) -> None:
        try:
            while self._waiting:
                msg = self._waiting.popleft()
                self._bytes -= len(msg.body)
                await self._handler(msg)
        finally:
            self._working = None

    async def handled(self) -> None:
        """Returns when nothing waits any more."""
        if self._working is not None:
            await asyncio.wait([self._working])

    def forget(self) -> None:
        """What waits is not handled any more."""
        self._waiting.clear()
        if self._working is not None:
            self._working.cancel()

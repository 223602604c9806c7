"""The one queue between everything that happens to a service and its core."""

from __future__ import annotations

import asyncio
from collections import deque

LIMIT = 20_000
"""Messages from the bus wait beyond it, so that the server holds back; a service's own events never wait."""


class Inbox:
    """First in, first out. ``put`` waits while it is full, ``post`` never does."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._events: deque[object] = deque()
        self._something = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def __len__(self) -> int:
        return len(self._events)

    def post(self, event: object) -> None:
        self._events.append(event)
        self._something.set()
        if len(self._events) >= self._limit:
            self._room.clear()

    @property
    def has_room(self) -> bool:
        return self._room.is_set()

    def offer(self, event: object) -> bool:
        """Put it in if there is room; says whether it is in."""
        if has_room := self.has_room:
            self.post(event)
        return has_room

    async def put(self, event: object) -> None:
        while not self._room.is_set():
            await self._room.wait()
        self.post(event)

    async def get(self) -> object:
        while not self._events:
            self._something.clear()
            await self._something.wait()
        event = self._events.popleft()
        if len(self._events) < self._limit:
            self._room.set()
        return event

"""Session after session with a consumer, for ever: over restarts of the server and a consumer that was deleted."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import NoReturn

from shared.bus.jetstream import RETRY_FIRST_S, RETRY_MOST_S, STREAM_NOT_FOUND, ApiError, JetStream
from shared.errors import BusError
from shared.log import logger

Told = Callable[[str, str], None]
"""Told why a session ended: (stream, reason)."""
Mend = Callable[[], Awaitable[None]]
"""Makes the streams again when one is not there."""


class Endless(ABC):
    """What following, watching and pulling have alike; what one session does is theirs to say."""

    def __init__(self, js: JetStream, stream: str, told: Told, mend: Mend) -> None:
        self._js = js
        self._stream = stream
        self._told = told
        self._mend = mend
        self._log = logger(part=type(self).__name__.lower(), stream=stream)

    @abstractmethod
    async def once(self) -> str:
        """One session until something is wrong with it; returns what. Raises BusError."""

    async def run(self) -> NoReturn:
        wait_s = RETRY_FIRST_S
        while True:
            await self._js.connection.wait_up()
            try:
                why = await self.once()
                wait_s = RETRY_FIRST_S
            except ApiError as error:
                why = str(error)
                if error.code == STREAM_NOT_FOUND:
                    await self._mend()
            except BusError as error:
                why = str(error)
            self._log.warning("consumer made anew", why=why)
            self._told(self._stream, why)
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_MOST_S, wait_s * 2)

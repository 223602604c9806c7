"""Whether what the server was asked to deliver still comes; what is delivered and what follows is not known here."""

from __future__ import annotations

import asyncio
from typing import Self

HEARTBEAT_S = 1
"""How often the server says that it has nothing to say."""
SILENCE_S = 3.5 * HEARTBEAT_S
"""Without a word for this long whoever delivers counts as gone."""


class Pulse:
    """One delivery under way: told of every word and of its end, it tells the end, and finds silence by itself."""

    def __init__(self) -> None:
        self._words = 0
        self._busy = False
        self._end: asyncio.Future[str]
        self.begin()

    def begin(self) -> None:
        """Another delivery begins."""
        self._end = asyncio.get_running_loop().create_future()

    def word(self) -> None:
        """Something came."""
        self._words += 1

    def handling(self) -> Self:
        """While a message is handled nothing else can be heard, and that is no silence: ``with pulse.handling()``."""
        return self

    def __enter__(self) -> None:
        self._busy = True

    def __exit__(self, *_: object) -> None:
        self._busy = False
        self._words += 1

    def end(self, why: str) -> None:
        """It is over; the first reason counts."""
        if not self._end.done():
            self._end.set_result(why)

    @property
    def ended(self) -> bool:
        return self._end.done()

    async def until_end(self, lost: asyncio.Future[None]) -> str:
        """Why it ended; also when the link is ``lost``, or nothing was heard for too long."""
        while True:
            words = self._words
            await asyncio.wait((self._end, lost), timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                return self._end.result()
            if lost.done():
                return "connection lost"
            if words == self._words and not self._busy:
                return "silence"

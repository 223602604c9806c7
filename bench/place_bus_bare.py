"""A responder that does a placer's messages and nothing else, for ``bench.place_bus``: the most that one could reach.

Nothing is decided, checked, or started. Each request is written to its record's key and to one of its node, in a group
commit of all that wait; it is answered once that is written, written once more as started with the next commit, and
three events of it are stored. It gets no stored copy of a request, and does not watch the ledger.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from functools import partial

from shared.bus import Bus, Msg
from shared.bus.bus import event_headers
from shared.effects import CommitOutcome, Write

MOST = 64
"""Requests of one commit, as of a placer."""
BARE_NODES = 200


class Bare:
    """One commit in flight, the rest gathers."""

    def __init__(self, bus: Bus, bucket: str, size: int, answer: bytes) -> None:
        self._bus, self._bucket, self._body, self._answer = bus, bucket, b"x" * size, answer
        self._asked: list[tuple[str, str]] = []
        """Request id and where the answer goes."""
        self._placed: list[str] = []
        self._wake = asyncio.Event()
        self._revisions: dict[str, int] = {}
        self._nodes = itertools.cycle(f"node.bare-{number}" for number in range(BARE_NODES))

    async def heard(self, message: Msg) -> None:
        """A request."""
        self._asked.append((json.loads(message.body)["request_id"], message.reply))
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            asked, self._asked = self._asked[:MOST], self._asked[MOST:]
            placed, self._placed = self._placed[:MOST], self._placed[MOST:]
            nodes = [next(self._nodes) for _ in asked]
            await self._commit([*nodes, *(f"request.{name}" for name in (*(name for name, _ in asked), *placed))])
            for _, reply in asked:
                await self._bus.publish(reply, self._answer)
            self._bus.connection.push()
            for name, _ in asked:
                await self._tell(name, "accepted")
                await self._tell(name, "placed")
            for name in placed:
                await self._tell(name, "started")
            self._placed += [name for name, _ in asked]
            if not (self._asked or self._placed):
                self._wake.clear()

    async def _commit(self, keys: list[str]) -> None:
        writes = [Write(key, self._body, self._revisions.get(key, 0)) for key in dict.fromkeys(keys)]
        done = await self._bus.commit(self._bucket, writes)
        if done.outcome != CommitOutcome.WRITTEN:
            raise RuntimeError(f"not written: {done}")
        self._revisions |= done.revisions

    async def _tell(self, name: str, state: str) -> None:
        headers = event_headers(f"{name}/{state}", "place", "/bench", time.time_ns() // 1000)
        await self._bus.send(f"rt.events.place.{name}", self._answer, headers, partial(_stored, name))


def _stored(name: str, end: object) -> None:
    if isinstance(end, Exception):
        raise RuntimeError(f"an event of {name} is not stored: {end}")

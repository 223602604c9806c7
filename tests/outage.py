"""Outside clients that keep placing requests while parts of the cluster fail, and what must hold of them afterwards."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats.errors
from nats.aio.client import Client

from tests.outside import Json, ask, events, until

ACCEPTED = {"placed", "started", "queued", "held"}
AT_MOST_ONCE = {"accepted", "placed", "queued", "started"}


class Asker:
    """One client that places a request after another: each again, with its id, until it is answered."""

    def __init__(self, client: Client, name: str, body: Json) -> None:
        self.client, self.name, self.body = client, name, body
        self.accepted: list[str] = []
        self.refused: list[Json] = []
        self.answered_s = [time.monotonic()]
        self._answered, self._left = asyncio.Event(), 0

    async def run(self) -> None:
        for number in itertools.count():
            request_id = f"{self.name}-{number}"
            answer = await self._answer(self.body | {"request_id": request_id})
            self.answered_s.append(time.monotonic())
            self._left -= 1
            if self._left <= 0:
                self._answered.set()
            if answer["outcome"] in ACCEPTED:
                self.accepted.append(request_id)
            else:
                self.refused.append(answer)
            await asyncio.sleep(0.05)

    async def _answer(self, body: Json) -> Json:
        while True:
            try:
                return await ask(self.client, "rt.place", body, 1.0)
            except (TimeoutError, nats.errors.Error):
                await asyncio.sleep(0.05)

    @property
    def longest_pause_s(self) -> float:
        """Between two answers, one after another."""
        return max((b - a for a, b in itertools.pairwise(self.answered_s)), default=0.0)

    async def goes_on(self) -> None:
        """Answered from now on: three times, since the first may have been on its way."""
        self._left = 3
        self._answered.clear()
        await self._answered.wait()


@asynccontextmanager
async def asking(clients: list[Client], body: Json) -> AsyncIterator[list[Asker]]:
    """Each client asks for itself while the block runs."""
    askers = [Asker(client, f"asker{number}", body) for number, client in enumerate(clients)]
    tasks = [asyncio.create_task(asker.run()) for asker in askers]
    try:
        yield askers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_go_on(askers: list[Asker], limit_s: float) -> None:
    """Each is answered again; raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        await asyncio.gather(*(asker.goes_on() for asker in askers))


async def steps(client: Client) -> dict[str, list[str]]:
    """The states of each request as the stream of events has them; a repeat with the same id counts once."""
    found: dict[str, list[str]] = {}
    for body in dict(await events(client, "rt.events.place.>")).values():
        found.setdefault(body["request_id"], []).append(body["state"])
    return found


async def nothing_lost_and_nothing_twice(client: Client, askers: list[Asker], limit_s: float) -> None:
    """Each accepted request has its events in the end, each step once. ``client`` may read the stream."""
    refused = [answer for asker in askers for answer in asker.refused]
    assert not refused, refused
    accepted = [request_id for asker in askers for request_id in asker.accepted]

    async def all_told() -> dict[str, list[str]] | None:
        told = await steps(client)
        return told if all("placed" in told.get(request_id, ()) for request_id in accepted) else None

    told = await until(all_told, "the events of all that was accepted", limit_s)
    twice = {r: states for r, states in told.items() if any(states.count(state) > 1 for state in AT_MOST_ONCE)}
    assert {} == twice

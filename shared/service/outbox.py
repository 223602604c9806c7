"""Events on their way to the stream: in order and one in flight per subject, until the server has them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

from shared.bus import ApiError, Bus, Stored
from shared.effects import Publish
from shared.errors import BusError, OutcomeUnknownError, TooLargeError
from shared.log import logger

IN_FLIGHT = 256
"""Subjects written at once."""
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 2.0
_CONFLICTS = frozenset({10071, 10164})
_KEPT_CHAINS = 10_000
"""Subjects whose last sequence is remembered; of others it is read again."""


@dataclass(frozen=True, slots=True)
class _Item:
    event: Publish
    body: bytes
    at_us: int


class Outbox:
    """Nothing in it is dropped but what the server refuses for good (too large), which is counted and logged."""

    def __init__(self, bus: Bus, group: asyncio.TaskGroup, source: str, counters: Counter[str]) -> None:
        self._bus = bus
        self._group = group
        self._source = source
        self._counters = counters
        self._log = logger(part="outbox")
        self._queues: dict[str, deque[_Item]] = {}
        self._limit = asyncio.Semaphore(IN_FLIGHT)
        self._chains: dict[str, int] = {}
        self._working: set[asyncio.Task[None]] = set()
        self._size = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return self._size

    def add(self, event: Publish, at_us: int) -> None:
        """Take an event over; ``at_us`` is the wall clock of its ``ce-time``."""
        item = _Item(event, event.body.to_json(), at_us)
        self._size += 1
        self._empty.clear()
        queue = self._queues.get(event.subject)
        if queue is not None:
            queue.append(item)
            return
        self._queues[event.subject] = deque([item])
        task = self._group.create_task(self._work_off(event.subject))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def stored(self) -> None:
        """Returns when everything that is in it now was stored or refused."""
        if self._working:
            await asyncio.wait(self._working)

    async def emptied(self) -> None:
        await self._empty.wait()

    async def _work_off(self, subject: str) -> None:
        queue = self._queues[subject]
        while queue:
            async with self._limit:
                await self._deliver(queue[0])
            queue.popleft()
            self._size -= 1
        del self._queues[subject]
        if not self._size:
            self._empty.set()

    async def _deliver(self, item: _Item) -> None:
        """Again and again with the same id; the stream keeps one (case B14)."""
        wait_s = RETRY_FIRST_S
        while True:
            try:
                await self._once(item)
                self._counters["events"] += 1
                return
            except TooLargeError as error:
                self._refused(item, error)
                return
            except ApiError as error:
                if error.status == 400 and error.code not in _CONFLICTS:
                    self._refused(item, error)
                    return
                why = str(error)
            except BusError as error:
                why = str(error)
            self._counters["event_retries"] += 1
            self._log.info("event not stored yet", subject=item.event.subject, id=item.event.event_id, why=why)
            await self._bus.connection.wait_up()
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_MOST_S, wait_s * 2)

    def _refused(self, item: _Item, error: Exception) -> None:
        self._counters["events_refused"] += 1
        self._log.error("event refused", subject=item.event.subject, id=item.event.event_id, error=str(error))

    async def _once(self, item: _Item) -> None:
        if not item.event.chained:
            await self._store(item, None)
            return
        subject = item.event.subject
        if subject not in self._chains and await self._read_chain(item):
            return
        try:
            stored = await self._store(item, self._chains[subject])
        except OutcomeUnknownError:
            self._chains.pop(subject, None)  # it may be there: look before the next try
            raise
        except ApiError as error:
            if error.code not in _CONFLICTS:
                raise
            if await self._read_chain(item):
                return
            stored = await self._store(item, self._chains[subject])
        self._remember(subject, stored.seq)

    async def _read_chain(self, item: _Item) -> bool:
        """Learn the last sequence of the subject; True when this event is what stands there."""
        last = await self._bus.last_event(item.event.subject)
        self._remember(item.event.subject, last.seq if last else 0)
        return last is not None and last.headers.get("Nats-Msg-Id") == item.event.event_id

    def _remember(self, subject: str, seq: int) -> None:
        self._chains.pop(subject, None)
        self._chains[subject] = seq
        if len(self._chains) > _KEPT_CHAINS:
            del self._chains[next(iter(self._chains))]

    async def _store(self, item: _Item, expected_last: int | None) -> Stored:
        event = item.event
        return await self._bus.publish_event(
            event.subject,
            item.body,
            event.event_id,
            event.event_type,
            self._source,
            expected_last,
            item.at_us,
        )

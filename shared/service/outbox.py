"""Events on their way to the stream: in order and one in flight per subject, until the server has them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from functools import partial
from typing import NamedTuple, NoReturn

from shared.bus import ApiError, Bus, Stored, event_headers
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
_LOOKS = 4
"""Within the time that an answer may take: how often it is looked for those that took longer."""


class _Item(NamedTuple):
    event: Publish
    body: bytes
    at_us: int
    round: int


class _Line:
    """The events of one subject, the first of them under way."""

    __slots__ = ("events", "subject", "token", "wait_s")

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.events: deque[_Item] = deque()
        self.token = ""
        self.wait_s = RETRY_FIRST_S


class Outbox:
    """Nothing in it is dropped but what the server refuses for good (too large), which is counted and logged.

    One task sends; what the server answers is taken in where it is read. Neither costs a task for each event.
    """

    def __init__(self, bus: Bus, group: asyncio.TaskGroup, source: str, counters: Counter[str]) -> None:
        self._bus = bus
        self._group = group
        self._source = source
        self._counters = counters
        self._log = logger(part="outbox")
        self._loop = asyncio.get_running_loop()
        self._lines: dict[str, _Line] = {}
        self._ready: deque[_Line] = deque()
        self._asked_s: dict[_Line, float] = {}
        """When each line that waits for an answer has asked, in this order."""
        self._chains: dict[str, int] = {}
        self._something = asyncio.Event()
        self._ended = False
        self._size = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._round = 0
        """Counts who waited in `stored`."""
        self._left: Counter[int] = Counter()
        """By round: events that came in it and are not stored yet."""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        group.create_task(self._send_all())
        group.create_task(self._look_for_late())

    def __len__(self) -> int:
        return self._size

    def add(self, event: Publish, at_us: int) -> None:
        """Take an event over; ``at_us`` is the wall clock of its ``ce-time``."""
        item = _Item(event, event.body.to_json(), at_us, self._round)
        self._size += 1
        self._left[self._round] += 1
        self._empty.clear()
        line = self._lines.get(event.subject)
        if line is None:
            line = self._lines[event.subject] = _Line(event.subject)
            self._queue(line)
        line.events.append(item)

    async def stored(self) -> None:
        """Returns when everything that is in it now was stored or refused."""
        if self._left:
            ended = self._waiting[self._round] = self._loop.create_future()
            self._round += 1
            await ended

    async def emptied(self) -> None:
        await self._empty.wait()

    # --- sending ---

    def _queue(self, line: _Line) -> None:
        self._ready.append(line)
        self._something.set()

    async def _send_all(self) -> NoReturn:
        try:
            while True:
                await self._something.wait()
                self._something.clear()
                while self._ready and len(self._asked_s) < IN_FLIGHT:
                    await self._send(self._ready.popleft())
                self._bus.connection.push()
        finally:
            self._ended = True

    async def _send(self, line: _Line) -> None:
        """Again and again with the same id; the stream keeps one (case B14)."""
        item = line.events[0]
        event, expected_last = item.event, None
        if event.chained and (expected_last := self._chains.get(line.subject)) is None:
            self._group.create_task(self._look(line))
            return
        if not self._bus.connection.is_up:
            await self._bus.connection.wait_up()
        self._asked_s[line] = self._loop.time()
        try:
            headers = event_headers(event.event_id, event.event_type, self._source, item.at_us, expected_last)
            line.token = await self._bus.send(event.subject, item.body, headers, partial(self._answered, line))
        except BusError as error:
            self._answered(line, error)

    async def _look_for_late(self) -> NoReturn:
        """What was not answered in time may be there or not."""
        limit_s = self._bus.settings.ack_timeout_us / 1_000_000
        while True:
            await asyncio.sleep(limit_s / _LOOKS)
            now_s = self._loop.time()
            for line in [line for line, asked_s in self._asked_s.items() if now_s - asked_s >= limit_s]:
                self._bus.connection.forget(line.token)
                self._answered(line, OutcomeUnknownError(f"no answer on {line.subject} within {limit_s:g} s"))

    # --- what became of it ---

    def _answered(self, line: _Line, end: Stored | BusError) -> None:
        if self._ended or self._asked_s.pop(line, None) is None:
            return
        if self._ready:
            self._something.set()
        if isinstance(end, Stored):
            if line.events[0].event.chained:
                self._remember(line.subject, end.seq)
            self._stored(line)
        elif isinstance(end, TooLargeError) or (
            isinstance(end, ApiError) and end.status == 400 and end.code not in _CONFLICTS
        ):
            self._refused(line, end)
        else:
            self._chains.pop(line.subject, None)  # it may be there: look before the next try
            self._again(line, str(end))

    def _stored(self, line: _Line) -> None:
        self._counters["events"] += 1
        self._done(line)

    def _refused(self, line: _Line, error: Exception) -> None:
        event = line.events[0].event
        self._counters["events_refused"] += 1
        self._log.error("event refused", subject=event.subject, id=event.event_id, error=str(error))
        self._done(line)

    def _done(self, line: _Line) -> None:
        """With its first event."""
        item = line.events.popleft()
        self._size -= 1
        self._left[item.round] -= 1
        if not self._left[item.round]:
            del self._left[item.round]
            self._tell_waiting()
        if line.events:
            line.wait_s = RETRY_FIRST_S
            self._queue(line)
        else:
            del self._lines[line.subject]
        if not self._size:
            self._empty.set()

    def _tell_waiting(self) -> None:
        first = min(self._left, default=self._round + 1)
        for at in [at for at in self._waiting if at < first]:
            if not (ended := self._waiting.pop(at)).done():
                ended.set_result(None)

    def _again(self, line: _Line, why: str) -> None:
        event = line.events[0].event
        self._counters["event_retries"] += 1
        self._log.info("event not stored yet", subject=event.subject, id=event.event_id, why=why)
        self._group.create_task(self._rest(line))

    async def _rest(self, line: _Line) -> None:
        await self._bus.connection.wait_up()
        await asyncio.sleep(line.wait_s)
        line.wait_s = min(RETRY_MOST_S, line.wait_s * 2)
        self._queue(line)

    # --- chains ---

    async def _look(self, line: _Line) -> None:
        """Learn the last sequence of the subject; this event may be what stands there."""
        try:
            last = await self._bus.last_event(line.subject)
        except BusError as error:
            self._again(line, str(error))
            return
        self._remember(line.subject, last.seq if last else 0)
        if last is not None and last.headers.get("Nats-Msg-Id") == line.events[0].event.event_id:
            self._stored(line)
        else:
            self._queue(line)

    def _remember(self, subject: str, seq: int) -> None:
        self._chains.pop(subject, None)
        self._chains[subject] = seq
        if len(self._chains) > _KEPT_CHAINS:
            del self._chains[next(iter(self._chains))]

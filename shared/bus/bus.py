"""The bus as services and the command see it: names under a prefix, events, buckets, work; no service lives here."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, Self

from shared.bus.atomic import Commits, value_of
from shared.bus.connection import Connection, Listener, Listening
from shared.bus.credentials import credentials
from shared.bus.endless import Told
from shared.bus.follow import Follow, StoredAtOnce, StoredHandler, Watch
from shared.bus.hearing import AtOnce, Handler
from shared.bus.jetstream import JetStream, Stored, StoredMsg
from shared.bus.msg import NOBODY, Headers, Msg, NoResponders
from shared.bus.pull import Acks, Pull
from shared.bus.snapshot import backup, restore
from shared.clock import Clock, SystemClock
from shared.effects import CommitDone, KeyChanged, WatchEvent, Write
from shared.errors import BusError, OutcomeUnknownError
from shared.settings import ServiceSettings
from shared.streams import bucket_stream, named, wanted
from shared.subjects import EVENTS_STREAM, Subjects


class Bus:
    """One connection and what can be done with it. Names of buckets and streams are those of shared.subjects."""

    def __init__(self, settings: ServiceSettings, connection: Connection, clock: Clock, told: Told | None) -> None:
        self.settings = settings
        self.connection = connection
        self.subjects = Subjects(settings.prefix)
        self._clock = clock
        self._js = JetStream(connection, settings.ack_timeout_us)
        self._commits = Commits(self._js)
        self._acks = Acks(self._js)
        self._told = told or _ignore

    @classmethod
    async def connect(
        cls,
        settings: ServiceSettings,
        name: str = "laxity",
        *,
        listener: Listener | None = None,
        told: Told | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Connect to the server of ``settings``, trying until it succeeds: scope it with asyncio.timeout.

        Raises FieldError where a seed, certificate or key cannot be used.
        """
        clock = clock or SystemClock()
        connection = Connection(listener, clock)
        await connection.open(settings.nats_url, name, settings.ping_interval_us, credentials(settings))
        return cls(settings, connection, clock, told)

    async def close(self) -> None:
        await self.connection.close()

    async def ensure_streams(self) -> None:
        """Make or mend every stream and bucket; never shrinks one; harmless when several do it at once."""
        await self._js.ensure(wanted(self.settings))

    # --- core NATS: may be lost ---

    async def subscribe(
        self, subject: str, handler: Handler, queue: str = "", at_once: AtOnce = lambda _: False
    ) -> Listening:
        """Hear a full subject, one message at a time; returns once the server knows of it.

        While the link is down it returns at once: the server hears of it with the reconnect. ``at_once`` is asked
        first, where nothing waits: whether it has handled the message.
        """
        listening = await self.connection.subscribe(subject, handler, queue, at_once=at_once)
        if self.connection.is_up:
            with contextlib.suppress(OutcomeUnknownError):
                await self.connection.round_trip()
        return listening

    async def publish(self, subject: str, body: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        await self.connection.publish(subject, body, reply, headers)

    async def request(
        self, subject: str, body: bytes, timeout_us: int, headers: dict[str, str] | None = None
    ) -> Msg | NoResponders:
        """The first answer; raises OutcomeUnknownError on a time-out or a lost link, TooLargeError."""
        return await self.connection.request(subject, body, timeout_us, headers)

    async def request_all(self, subject: str, body: bytes = b"", wait_us: int = 500_000) -> list[Msg]:
        """All answers within ``wait_us`` (``$SRV.PING``); [] at once when nobody listens."""
        answers: list[Msg] = []
        nobody = asyncio.Event()

        async def on_answer(msg: Msg) -> None:
            if msg.status == NOBODY:
                nobody.set()
            else:
                answers.append(msg)

        inbox = self.connection.new_inbox()
        listening = await self.connection.subscribe(inbox, on_answer)
        try:
            await self.publish(subject, body, reply=inbox)
            async with asyncio.timeout(wait_us / 1_000_000):
                await nobody.wait()
        except TimeoutError:
            pass
        finally:
            await listening.stop()
        return answers

    # --- events: may not be lost ---

    async def publish_event(
        self,
        subject: str,
        body: bytes,
        event_id: str,
        event_type: str,
        source: str,
        expected_last: int | None = None,
        at_us: int | None = None,
    ) -> Stored:
        """Store an event under its id; a repeat within two minutes is stored once and answered with its sequence.

        Raises NoStreamError, OutcomeUnknownError (repeat it with the same id, case B14), ApiError, TooLargeError.
        """
        at_us = self._clock.wall_us() if at_us is None else at_us
        headers = event_headers(event_id, event_type, source, at_us, expected_last)
        return await self._js.store(subject, body, headers)

    async def send(
        self, subject: str, body: bytes, headers: Mapping[str, str], then: Callable[[Stored | BusError], None]
    ) -> str:
        """Store something without a wait, while the link is up: ``then`` is told how it ended, whenever that is, unless
        the connection is told to forget what this returns. Raises TooLargeError, BusError.
        """
        return await self._js.send(subject, body, headers, then)

    async def last_event(self, subject: str) -> StoredMsg | None:
        """The last event of a full subject."""
        return await self._js.last(named(EVENTS_STREAM, self.settings.prefix), subject)

    async def history(self, stream: str, subject: str, start_seq: int = 1) -> list[StoredMsg]:
        """All that a stream holds on a full subject from ``start_seq`` on, in order; raises BusError."""
        return await self._js.history(named(stream, self.settings.prefix), subject, start_seq)

    async def follow(self, stream: str, subject: str, start_seq: int, handler: StoredHandler) -> NoReturn:
        """Deliver a stream in order from ``start_seq`` (0: only what is new) until cancelled; nothing ends it else."""
        name = named(stream, self.settings.prefix)
        await Follow(self._js, name, subject, start_seq, handler, self._told, self.ensure_streams).run()

    async def last_seq(self, stream: str) -> int:
        """Sequence of the newest message that a stream has had; raises BusError."""
        info = await self._js.info(named(stream, self.settings.prefix))
        return int(info["state"]["last_seq"])

    async def pull(
        self, stream: str, durable: str, handler: StoredHandler, at_once: StoredAtOnce = lambda _: False
    ) -> NoReturn:
        """Work off a stream together with all who name the same ``durable``, until cancelled; ``at_once`` as above."""
        name = named(stream, self.settings.prefix)
        await Pull(self._js, name, durable, handler, self._told, self.ensure_streams, at_once).run()

    def ack_token(self, message: StoredMsg) -> int:
        """The number under which ``ack`` knows a message of ``pull``."""
        return self._acks.token(message.reply)

    async def ack(self, token: int, delay_us: int | None = None) -> None:
        await self._acks.ack(token, delay_us)

    # --- buckets ---

    async def commit(
        self, bucket: str, writes: Sequence[Write], number: int = 0, failed: BusError | None = None
    ) -> CommitDone:
        """All writes or none; every end is a value of CommitDone. ``failed``: how ``begin_commit`` has ended."""
        return await self._commits.commit(named(bucket, self.settings.prefix), bucket, writes, number, failed)

    async def begin_commit(
        self, bucket: str, writes: Sequence[Write], number: int, then: Callable[[CommitDone | BusError], None]
    ) -> None:
        """The same without a wait, while the link is up: ``then`` is told how it ended, or with what error ``commit``
        is to go on.
        """
        await self._commits.begin(named(bucket, self.settings.prefix), writes, number, then)

    async def get(self, bucket: str, key: str) -> tuple[bytes, int] | None:
        """Value and revision of a key as the leader has them; None when absent or deleted."""
        name = named(bucket, self.settings.prefix)
        found = await self._js.last(bucket_stream(bucket, self.settings.prefix), f"$KV.{name}.{key}")
        if found is None or (value := value_of(found)) is None:
            return None
        return value, found.seq

    async def read(self, bucket: str, keys: Sequence[str]) -> tuple[KeyChanged, ...]:
        """The keys as the leader has them; waits for the server as long as it takes."""
        return await self._commits.read(named(bucket, self.settings.prefix), bucket, keys)

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        """Write a key whatever it holds; its new revision."""
        name = named(bucket, self.settings.prefix)
        return (await self._js.store(f"$KV.{name}.{key}", value, {})).seq

    async def watch(
        self,
        bucket: str,
        handler: Callable[[WatchEvent], Awaitable[None]],
        keys: str = ">",
        at_once: Callable[[KeyChanged], bool] = lambda _: False,
    ) -> NoReturn:
        """Every key, WatchReplayed, then every change, until cancelled; all again after a gap. Of some ``keys`` alone
        where they are said, with the wildcards of subjects. ``at_once`` is asked first: whether it has taken the change
        without a wait."""
        name = named(bucket, self.settings.prefix)
        await Watch(self._js, name, bucket, handler, self._told, self.ensure_streams, keys, at_once=at_once).run()

    async def backup(self, bucket: str, write: Callable[[bytes], object]) -> dict[str, Any]:
        """The whole bucket with its revisions, in chunks to ``write``; returns what ``restore`` needs beside them."""
        return await backup(self._js, bucket_stream(bucket, self.settings.prefix), write)

    async def restore(self, bucket: str, made: dict[str, Any], chunks: Iterable[bytes], *, replace: bool) -> None:
        """Make the bucket of a backup; ApiError where it is there already, unless it is to be replaced."""
        stream = bucket_stream(bucket, self.settings.prefix)
        if replace:
            await self._js.delete(stream)
        await restore(self._js, stream, made, chunks)


def event_headers(event_id: str, event_type: str, source: str, at_us: int, expected_last: int | None = None) -> Headers:
    """What an event is stored with: CloudEvents' attributes, and what the server goes by.

    A line's end in a name becomes a space, as the client would make it.
    """
    if not f"{event_id}{event_type}{source}".isprintable():
        event_id, event_type, source = (each.translate(_ENDS) for each in (event_id, event_type, source))
    lines = (
        f"Nats-Msg-Id: {event_id}\r\nce-id: {event_id}\r\nce-type: {event_type}\r\nce-source: {source}\r\n"
        f"ce-time: {rfc3339(at_us)}\r\nce-specversion: 1.0\r\n"
    )
    if expected_last is not None:
        lines += f"Nats-Expected-Last-Subject-Sequence: {expected_last}\r\n"
    return Headers.of(lines)


_ENDS = str.maketrans("\r\n", "  ")


def rfc3339(at_us: int) -> str:
    """A wall-clock time as CloudEvents wants it: UTC with microseconds."""
    return f"{_to_the_second(at_us // 1_000_000)}.{at_us % 1_000_000:06}Z"


@lru_cache(maxsize=64)
def _to_the_second(at_s: int) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).replace(tzinfo=None).isoformat(timespec="seconds")


def _ignore(stream: str, why: str) -> None:
    del stream, why

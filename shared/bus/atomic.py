"""Writes to a key-value bucket that happen together or not at all, each against an expected revision."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence

from shared.bus.jetstream import ApiError, JetStream, Stored, StoredMsg, without_error
from shared.bus.msg import Headers, Msg, ends
from shared.effects import CommitDone, CommitOutcome, KeyChanged, Write
from shared.errors import BusError, NoStreamError, OutcomeUnknownError, TooLargeError
from shared.log import logger

MOST_KEYS = 1000
"""The server's limit on one atomic batch."""
CONFLICTS = frozenset({10071, 10164})
"""A key had another revision; which one is not said."""
ABANDONED = 10176
"""The server knows no such batch, or not all of it: it was too slow for it, or it has restarted meanwhile."""
NO_LEADER = 10008
"""Said during an election, which may take longer than all our tries: what was asked is planned again after it."""
NOT_NOW = frozenset({429, 503})
"""Status: too many batches are open (10210), no leader (10008), no room or no store (10023, 10077)."""
RETRIES = 8
RETRY_FIRST_S = 0.02
RETRY_MOST_S = 1.0
"""Eight waits make about 3.5 s: an abandoned batch of another process frees its place after 10 s at most."""
READERS = 64
"""Reads of keys in flight at once after a conflict."""

OPERATION = "KV-Operation"
MARKER = "Nats-Marker-Reason"
"""Set by the server on a marker that it places itself, when a key's time has run out."""
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_OF = "Nats-Expected-Last-Subject-Sequence-Subject"
"""The subject whose last message is meant, where it is not the one that is written."""


def value_of(msg: StoredMsg) -> bytes | None:
    """The value of a key; None for a marker that says it was deleted, which has no body: headers are seldom read."""
    if msg.body:
        return msg.body
    return None if msg.headers.get(OPERATION) in {"DEL", "PURGE"} or MARKER in msg.headers else msg.body


class Commits:
    """Commits to buckets of one JetStream; ``bucket`` below is the real name, ``shown`` the one cores know."""

    def __init__(self, jetstream: JetStream) -> None:
        self._js = jetstream
        self._log = logger(part="commit")
        self._batches = itertools.count(1)
        self._nonce = os.urandom(8).hex()

    async def begin(
        self, bucket: str, writes: Sequence[Write], number: int, then: Callable[[CommitDone | BusError], None]
    ) -> None:
        """The first try of ``commit`` on a link that is up, without a task of its own: ``then`` is told where the
        answer is read, and must not wait. With an error ``commit`` goes on from there.
        """

        def ended(end: Stored | BusError) -> None:
            then(end if isinstance(end, BusError) else _written(writes, end, number))

        if why := _never(writes):
            ended(BusError(why))
            return
        try:
            await self._send(bucket, writes, ended)
        except BusError as error:
            ended(error)

    async def commit(
        self, bucket: str, shown: str, writes: Sequence[Write], number: int, failed: BusError | None = None
    ) -> CommitDone:
        """Write all or nothing. Every end is a value; an unknown outcome waits for the server to read the keys.

        ``failed``: how ``begin`` has ended.
        """
        if why := _never(writes):
            return CommitDone(number, CommitOutcome.REFUSED, detail=why)
        try:
            stored = await self._with_retries(bucket, writes, failed)
        except (ApiError, TooLargeError) as error:
            return await self._refused(bucket, shown, writes, number, error)
        except BusError as error:
            current = await self.read(bucket, shown, _keys(writes))
            return CommitDone(number, CommitOutcome.UNKNOWN, current=current, detail=str(error))
        return _written(writes, stored, number)

    async def _refused(
        self, bucket: str, shown: str, writes: Sequence[Write], number: int, error: ApiError | TooLargeError
    ) -> CommitDone:
        if isinstance(error, TooLargeError) or end_of(error) == CommitOutcome.REFUSED:
            return CommitDone(number, CommitOutcome.REFUSED, detail=str(error))
        current = await self.read(bucket, shown, _keys(writes))
        return CommitDone(number, CommitOutcome.CONFLICT, current=current, detail=str(error))

    async def _with_retries(self, bucket: str, writes: Sequence[Write], failed: BusError | None) -> Stored:
        """What the server could not take just now and certainly did not write is tried again."""
        wait_s = RETRY_FIRST_S
        for left in reversed(range(RETRIES + 1)):
            try:
                if failed is None:
                    return await self._once(bucket, writes)
                first, failed = failed, None
                raise first
            except NoStreamError:  # said at once: no leader yet, or the server is starting
                if not left:
                    raise
            except ApiError as error:
                if not left or not may_pass(error):
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_MOST_S, wait_s * 2)
        raise AssertionError("the last try returns or raises")

    async def _once(self, bucket: str, writes: Sequence[Write]) -> Stored:
        await self._js.connection.wait_up()
        answer: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        await self._send(bucket, writes, ends(answer))
        return await answer

    async def _send(self, bucket: str, writes: Sequence[Write], ended: Callable[[Stored | BusError], None]) -> None:
        """``ended`` is told once: by the answer, by the loss of the link, or when there was none for too long."""
        connection, prefix = self._js.connection, f"$KV.{bucket}."
        lines = [_lines(write, prefix) for write in writes]
        tokens, begun = list[str](), list[Msg | BusError]()
        if len(lines) > 1:
            batch = f"Nats-Batch-Id: {self._nonce}-{next(self._batches)}\r\nNats-Batch-Sequence: "
            lines = [f"{each}{batch}{place}\r\n" for place, each in enumerate(lines, 1)]
            lines[-1] += "Nats-Batch-Commit: 1\r\n"
        messages = [
            (f"{prefix}{write.key}", write.value or b"", Headers.of(each))
            for write, each in zip(writes, lines, strict=True)
        ]

        def answered(end: Stored | BusError) -> None:
            limit.cancel()
            for token in tokens:
                connection.forget(token)
            ended(_why(messages[0][0], begun, end) if isinstance(end, ApiError) else end)

        def late() -> None:
            answered(OutcomeUnknownError(f"no answer on {messages[-1][0]} within {self._js.timeout_us} us"))

        limit = asyncio.get_running_loop().call_later(self._js.timeout_us / 1_000_000, late)
        try:
            for subject, body, headers in messages[:1] if len(messages) > 1 else ():
                tokens.append(await connection.ask_then(subject, body, begun.append, headers))
            for subject, body, headers in messages[1:-1]:
                await connection.publish(subject, body, headers=headers)
            tokens.append(await self._js.send(*messages[-1], answered))
        except BaseException:
            limit.cancel()
            for token in tokens:
                connection.forget(token)
            raise
        connection.push()

    async def read(self, bucket: str, shown: str, keys: Sequence[str]) -> tuple[KeyChanged, ...]:
        """The keys as they are now; waits for the server as long as it takes, the caller's task is its bound. Read all
        anew where the link was lost meanwhile: a server that comes back may have less, and give revisions again.
        """
        connection, limit = self._js.connection, asyncio.Semaphore(READERS)

        async def one(key: str) -> KeyChanged:
            async with limit:
                return await self._read_one(bucket, shown, key)

        while True:
            await connection.wait_up()
            lost = connection.lost
            found = tuple(await asyncio.gather(*(one(key) for key in keys)))
            if not lost.done():
                return found

    async def _read_one(self, bucket: str, shown: str, key: str) -> KeyChanged:
        wait_s = RETRY_FIRST_S
        while True:
            try:
                found = await self._js.last(f"KV_{bucket}", f"$KV.{bucket}.{key}")
            except BusError as error:
                self._log.warning("key not read", key=key, error=str(error))
                await asyncio.sleep(wait_s)
                wait_s = min(RETRY_MOST_S, wait_s * 2)
            else:
                return KeyChanged(shown, key, value_of(found), found.seq) if found else KeyChanged(shown, key, None, 0)


def may_pass(error: ApiError) -> bool:
    """Whether the server only could not take it just now; what it answers with an error it has not written."""
    return error.code == ABANDONED or error.status in NOT_NOW


def end_of(error: ApiError) -> CommitOutcome:
    """How a commit ends that no further try can help: it is planned again, or never will be taken."""
    again = error.code in CONFLICTS | {ABANDONED, NO_LEADER}
    return CommitOutcome.CONFLICT if again else CommitOutcome.REFUSED


def _keys(writes: Sequence[Write]) -> list[str]:
    """What a commit depends on."""
    return [key for write in writes for key in (write.key, write.fence) if key]


def _never(writes: Sequence[Write]) -> str:
    """Why these cannot be one commit; empty where they can."""
    if not 0 < len(writes) <= MOST_KEYS:
        return f"{len(writes)} keys, allowed: 1 to {MOST_KEYS}"
    if len(writes) > 1 and (fenced := [write.key for write in writes if write.fence]):
        return f"{fenced[0]} has a fence among {len(writes)} keys, allowed: where it is the only one"
    return ""


def _lines(write: Write, prefix: str) -> str:
    """Of the headers of a write; ``prefix``: of the subjects of keys."""
    lines = f"{_EXPECTED}: {write.expected}\r\n"
    if write.fence is not None:
        lines += f"{_EXPECTED_OF}: {prefix}{write.fence}\r\n"
    if write.value is None:
        lines += f"{OPERATION}: DEL\r\n"
    if write.ttl_s is not None:
        lines += f"Nats-TTL: {write.ttl_s}s\r\n"
    return lines


def _written(writes: Sequence[Write], last: Stored, number: int) -> CommitDone:
    first = last.seq - len(writes) + 1
    return CommitDone(number, CommitOutcome.WRITTEN, {write.key: first + at for at, write in enumerate(writes)})


def _why(subject: str, begun: Sequence[Msg | BusError], end: ApiError) -> ApiError:
    """A batch that the server did not open at all is "abandoned" at its end; why, it said at its beginning."""
    try:
        for said in begun:
            if not isinstance(said, BusError) and said.body:
                without_error(subject, said)
    except ApiError as error:
        return error
    return end

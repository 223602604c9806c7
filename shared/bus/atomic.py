"""Writes to a key-value bucket that happen together or not at all, each against an expected revision."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence

from shared.bus.jetstream import ApiError, JetStream, Stored, StoredMsg, without_error
from shared.bus.msg import Msg
from shared.effects import CommitDone, CommitOutcome, KeyChanged, Write
from shared.errors import BusError, NoStreamError, TooLargeError
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
    """The value of a key; None for a marker that says it was deleted."""
    return None if msg.headers.get(OPERATION) in {"DEL", "PURGE"} or MARKER in msg.headers else msg.body


class Commits:
    """Commits to buckets of one JetStream; ``bucket`` below is the real name, ``shown`` the one cores know."""

    def __init__(self, jetstream: JetStream) -> None:
        self._js = jetstream
        self._log = logger(part="commit")
        self._batches = itertools.count(1)
        self._nonce = os.urandom(8).hex()

    async def commit(self, bucket: str, shown: str, writes: Sequence[Write], number: int) -> CommitDone:
        """Write all or nothing. Every end is a value; an unknown outcome waits for the server to read the keys."""
        if not 0 < len(writes) <= MOST_KEYS:
            return CommitDone(number, CommitOutcome.REFUSED, detail=f"{len(writes)} keys, allowed: 1 to {MOST_KEYS}")
        if len(writes) > 1 and (fenced := [write.key for write in writes if write.fence]):
            detail = f"{fenced[0]} has a fence among {len(writes)} keys, allowed: where it is the only one"
            return CommitDone(number, CommitOutcome.REFUSED, detail=detail)
        try:
            stored = await self._with_retries(bucket, writes)
        except (ApiError, TooLargeError) as error:
            return await self._refused(bucket, shown, writes, number, error)
        except BusError as error:
            current = await self.read(bucket, shown, _keys(writes))
            return CommitDone(number, CommitOutcome.UNKNOWN, current=current, detail=str(error))
        first = stored.seq - len(writes) + 1
        revisions = {write.key: first + index for index, write in enumerate(writes)}
        return CommitDone(number, CommitOutcome.WRITTEN, revisions)

    async def _refused(
        self, bucket: str, shown: str, writes: Sequence[Write], number: int, error: ApiError | TooLargeError
    ) -> CommitDone:
        if isinstance(error, TooLargeError) or end_of(error) == CommitOutcome.REFUSED:
            return CommitDone(number, CommitOutcome.REFUSED, detail=str(error))
        current = await self.read(bucket, shown, _keys(writes))
        return CommitDone(number, CommitOutcome.CONFLICT, current=current, detail=str(error))

    async def _with_retries(self, bucket: str, writes: Sequence[Write]) -> Stored:
        """What the server could not take just now and certainly did not write is tried again."""
        wait_s = RETRY_FIRST_S
        for left in reversed(range(RETRIES + 1)):
            try:
                return await self._once(bucket, writes)
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
        prefix = f"$KV.{bucket}."
        if len(writes) == 1:
            (write,) = writes
            headers = headers_of(write) | ({_EXPECTED_OF: prefix + write.fence} if write.fence else {})
            return await self._js.store(prefix + write.key, write.value or b"", headers)
        return await self._batch(prefix, writes)

    async def _batch(self, prefix: str, writes: Sequence[Write]) -> Stored:
        connection = self._js.connection
        await connection.wait_up()
        batch = f"{self._nonce}-{next(self._batches)}"
        first, *between, last = [
            (f"{prefix}{write.key}", write.value or b"", headers_of(write) | _in_batch(batch, place))
            for place, write in enumerate(writes, 1)
        ]
        begun = await connection.ask(*first)
        try:
            for subject, body, headers in between:
                await connection.publish(subject, body, headers=headers)
            subject, body, headers = last
            return await self._js.store(subject, body, headers | {"Nats-Batch-Commit": "1"})
        except ApiError:
            # a batch that the server did not open at all is "abandoned" at its end; why, it said at its beginning
            if _answered(begun) and begun.result().body:
                without_error(first[0], begun.result())
            raise
        finally:
            _answered(begun)
            begun.cancel()

    async def read(self, bucket: str, shown: str, keys: Sequence[str]) -> tuple[KeyChanged, ...]:
        """The keys as they are now; waits for the server as long as it takes, the caller's task is its bound."""
        limit = asyncio.Semaphore(READERS)

        async def one(key: str) -> KeyChanged:
            async with limit:
                return await self._read_one(bucket, shown, key)

        return tuple(await asyncio.gather(*(one(key) for key in keys)))

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


def headers_of(write: Write) -> dict[str, str]:
    headers = {_EXPECTED: str(write.expected)}
    if write.value is None:
        headers[OPERATION] = "DEL"
    if write.ttl_s is not None:
        headers["Nats-TTL"] = f"{write.ttl_s}s"
    return headers


def _answered(asked: asyncio.Future[Msg]) -> bool:
    """True when there is an answer; a failure counts as seen, so that nobody warns about it."""
    return asked.done() and not asked.cancelled() and asked.exception() is None


def _in_batch(batch: str, place: int) -> dict[str, str]:
    return {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(place)}

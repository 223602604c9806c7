"""A stream as one file and back, by the server's own snapshots; the same two files as `nats stream backup` makes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from shared.bus.jetstream import JetStream, without_error
from shared.bus.msg import Msg, NoResponders
from shared.errors import BusError, OutcomeUnknownError

CHUNK_BYTES = 128 * 1024


async def backup(js: JetStream, stream: str, write: Callable[[bytes], object]) -> dict[str, Any]:
    """Hand the stream's snapshot to ``write``, in chunks; returns its ``config`` and ``state``, which restoring needs.

    Raises ApiError, BusError where the snapshot breaks off, OutcomeUnknownError where the server says nothing more.
    """
    chunks: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = js.connection.new_inbox()
    listening = await js.connection.subscribe(inbox, chunks.put, limit=0)
    try:
        asked = {"deliver_subject": inbox, "no_consumers": True, "chunk_size": CHUNK_BYTES, "jsck": True}
        made = await js.call(f"STREAM.SNAPSHOT.{stream}", asked)
        while chunk := await _next(chunks, stream, js.timeout_us):
            write(chunk.body)
            if chunk.reply:
                await js.connection.publish(chunk.reply, b"", hold=False)
    finally:
        await listening.stop()
    return {"config": made["config"], "state": made["state"]}


async def _next(chunks: asyncio.Queue[Msg], stream: str, timeout_us: int) -> Msg | None:
    """None at the end."""
    try:
        async with asyncio.timeout(timeout_us / 1_000_000):
            chunk = await chunks.get()
    except TimeoutError:
        raise OutcomeUnknownError(f"snapshot of {stream} stands still for {timeout_us} us") from None
    if chunk.body:
        return chunk
    if chunk.status not in {"", "204"}:
        raise BusError(f"snapshot of {stream} broke off: {chunk.status} {chunk.description}")
    return None


async def restore(js: JetStream, stream: str, made: dict[str, Any], chunks: Iterable[bytes]) -> None:
    """Make a stream that is not there of what ``backup`` gave; raises as it does, ApiError where the stream exists."""
    begun = await js.call(f"STREAM.RESTORE.{stream}", made)
    for chunk in chunks:
        await _send(js, begun["deliver_subject"], chunk)
    await _send(js, begun["deliver_subject"], b"")


async def _send(js: JetStream, subject: str, chunk: bytes) -> None:
    """The server's answer; to all but the last chunk it says nothing unless the restore has failed."""
    answer = await js.connection.request(subject, chunk, js.timeout_us)
    if isinstance(answer, NoResponders):
        raise BusError("the server has ended the restore")
    if answer.body:
        without_error("restore", answer)

"""Addresses of this machine behind which lie others: one in the network namespace of an engine, a slow one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

CLONE_NEWNET = 0x40000000
CHUNK = 65_536


def _enter(pid: int) -> None:
    """Of the calling thread alone."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(namespace)


@asynccontextmanager
async def relayed(pid: int, port: int) -> AsyncIterator[int]:
    """A port of 127.0.0.1 that leads to ``port`` of 127.0.0.1 in the namespace of ``pid``; bytes pass as they are."""
    inside = ThreadPoolExecutor(1, initializer=_enter, initargs=(pid,))

    async def reach() -> socket.socket:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(inside, socket.create_connection, ("127.0.0.1", port))

    try:
        async with _leading(reach, 0.0) as ours:
            yield ours
    finally:
        inside.shutdown()


@asynccontextmanager
async def slowly(port: int, mib_per_s: float) -> AsyncIterator[int]:
    """A port of 127.0.0.1 that leads to ``port``, and back not faster than that."""

    async def reach() -> socket.socket:
        return socket.create_connection(("127.0.0.1", port))

    async with _leading(reach, CHUNK / (mib_per_s * (1 << 20))) as ours:
        yield ours


@asynccontextmanager
async def _leading(reach: Callable[[], Awaitable[socket.socket]], pause_s: float) -> AsyncIterator[int]:
    """`pause_s`: after each chunk on the way back."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(sock=await reach())
        try:
            await asyncio.gather(_copy(reader, ours, 0.0), _copy(theirs, writer, pause_s))
        finally:
            ours.close()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, pause_s: float) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
            await asyncio.sleep(pause_s)
        sink.write_eof()

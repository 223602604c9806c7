"""An address of this machine behind which lies one that only the network namespace of an engine has."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

CLONE_NEWNET = 0x40000000


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

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        far = await loop.run_in_executor(inside, socket.create_connection, ("127.0.0.1", port))
        theirs, ours = await asyncio.open_connection(sock=far)
        try:
            await asyncio.gather(_copy(reader, ours), _copy(theirs, writer))
        finally:
            ours.close()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()
        inside.shutdown()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
        sink.write_eof()

"""What stands between placers and an engine, and can cut, refuse or silence what they say; serves tests only."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


class Proxy:
    """Counts connections, and does to them what networks do."""

    def __init__(self, engine: Path) -> None:
        self.open = 0
        self.streams = 0
        """How often events were asked for."""
        self.silent = False
        """Connections that are made meanwhile are accepted and never hear anything."""
        self.refuses = False
        """Connections that are made meanwhile are closed at once."""
        self._engine = engine
        self._writers: set[asyncio.StreamWriter] = set()
        self._deaf: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        self.open += 1
        pair = {writer}
        self._writers |= pair
        try:
            theirs, ours = await asyncio.open_unix_connection(str(self._engine))
            pair.add(ours)
            self._writers |= pair
            self._deaf |= pair if self.silent else set()
            await asyncio.gather(self._copy(reader, ours, count=True), self._copy(theirs, writer))
        except OSError:  # no engine
            writer.transport.abort()
        finally:
            self._writers -= pair
            self._deaf -= pair
            self.open -= 1

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, count: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                self.streams += count and b"/events?" in data
                if sink not in self._deaf:
                    sink.write(data)
                    await sink.drain()
        with contextlib.suppress(OSError):
            sink.close()

    def cut(self) -> None:
        """Close all that are open."""
        for writer in list(self._writers):
            writer.transport.abort()

    def hush(self) -> None:
        """All that are open stay so, and say nothing any more: half open, as a firewall leaves them."""
        self._deaf |= self._writers


class ProxyThread:
    """A Proxy with a loop of its own, for tests whose loop is not always there."""

    def __init__(self, engine: Path, path: Path) -> None:
        self.proxy = Proxy(engine)
        self.url = f"unix://{path}"
        self._path = path
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self.proxy.cut)

    def hush(self) -> None:
        self._loop.call_soon_threadsafe(self.proxy.hush)

    def __enter__(self) -> Self:
        self._thread.start()
        opening = asyncio.start_unix_server(self.proxy.serve, str(self._path))
        self._server = asyncio.run_coroutine_threadsafe(opening, self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        self.proxy.cut()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

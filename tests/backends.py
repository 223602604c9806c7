"""What tests of any backend share: hearing what it sees; no tests live here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.placer.backends.base import Backend, Seen


@asynccontextmanager
async def watched(backend: Backend) -> AsyncIterator[list[Seen]]:
    """What the backend's watch posts while the block runs; a watch that ends by itself fails the test."""
    posts: list[Seen] = []
    task = asyncio.create_task(backend.watch(posts.append))
    try:
        yield posts
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

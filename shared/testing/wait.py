"""Waiting in tests for what will be true, without a fixed sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01


async def until(what: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Return once ``what()`` is true; raises AssertionError when it is not within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        await asyncio.sleep(POLL_S)


async def eventually(ask: Callable[[], Awaitable[T | None]], timeout_s: float = 15.0) -> T:
    """The first result of ``ask()`` that is not None."""
    deadline = time.monotonic() + timeout_s
    while (found := await ask()) is None:
        assert time.monotonic() < deadline, f"nothing within {timeout_s} s"
        await asyncio.sleep(POLL_S)
    return found

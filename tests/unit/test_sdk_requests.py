"""Requests as tasks: the ASGI middleware, driven as a server drives it, and the streams whose work ends later."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import laxity.asgi
import laxity.stream
from laxity.asgi import DeadlineMiddleware
from shared.testing.wait import until
from tests.ring_columns import column, named
from tests.unit import test_sdk
from tests.unit.test_sdk import rows, taken

BEGIN, END = 1, 2


ring_directory = test_sdk.ring_directory


def made(directory: Path) -> list[Path]:
    return list(directory.glob("*.ring"))


# ------------------------------------------------------------------------------------------------- ASGI


async def answer(_scope: Any, _receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await send({"type": "http.response.body", "body": b"b"})


async def broken(_scope: Any, _receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
    await send({"type": "http.response.start", "status": 503, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def raises(_scope: Any, _receive: Any, _send: Any) -> None:
    raise LookupError


async def ask(app: DeadlineMiddleware, *headers: tuple[bytes, bytes], kind: str = "http") -> list[Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": kind, "path": "/infer", "headers": list(headers)}, receive, send)
    return sent


async def test_a_request_has_the_deadline_that_its_header_names_and_else_the_default(ring_directory: Path) -> None:
    app = DeadlineMiddleware(answer, default_us=70_000)
    assert 3 == len(await ask(app, (b"X-Deadline-Ms", b"12.5")))
    await ask(app)
    read = taken(ring_directory)
    assert [12_500, 12_500, 70_000, 70_000] == column(read, "deadline_us")
    assert [BEGIN, END, BEGIN, END] == column(read, "kind")
    assert () == read.failed


@pytest.mark.parametrize("value", [b"soon", b"-5", b"0", b"1e3", b"99999999", b""])
async def test_a_header_that_is_no_time_is_counted_and_the_default_holds(value: bytes, ring_directory: Path) -> None:
    app = DeadlineMiddleware(answer, default_us=70_000)
    await ask(app, (b"x-deadline-ms", value))
    assert (1, [70_000, 70_000]) == (app.wrong_headers, column(taken(ring_directory), "deadline_us"))


async def test_without_a_deadline_a_request_is_no_task_and_so_is_what_is_not_http(ring_directory: Path) -> None:
    assert 3 == len(await ask(DeadlineMiddleware(answer)))
    await ask(DeadlineMiddleware(answer, default_us=1), kind="websocket")
    assert [] == made(ring_directory)


@pytest.mark.parametrize("app", [broken, raises])
async def test_a_request_that_gave_no_result_has_failed(app: Any, ring_directory: Path) -> None:
    try:
        await ask(DeadlineMiddleware(app, default_us=5_000, name=lambda scope: scope["path"]))
    except LookupError:
        assert app is raises
    assert [("/infer", BEGIN, 1, False), ("/infer", END, 1, True)] == rows(ring_directory)


def test_a_default_that_is_no_deadline_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="deadline_us: found 0"):
        DeadlineMiddleware(answer, default_us=0)


# ---------------------------------------------------------------------------------------------- streams


class Event:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None

    def synchronize(self) -> None:
        assert self.done.wait(10)
        if self.error:
            raise self.error


class Stream:
    """A stream without a GPU: its work is done when the test says so."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


async def test_the_end_is_stamped_when_the_stream_is_done_and_not_when_the_launch_returns(ring_directory: Path) -> None:
    stream = Stream()
    for name in ("first", "second"):
        with laxity.stream.task(name, deadline_us=50_000, stream=stream):
            pass
    assert [BEGIN, BEGIN] == [kind for _, kind, _, _ in rows(ring_directory)]
    launched_us = named(taken(ring_directory))[-1].stamp_us
    stream.events[0].done.set()
    await until(lambda: len(rows(ring_directory)) == 3)
    assert ("first", END, 1, False) == rows(ring_directory)[2]
    assert named(taken(ring_directory))[-1].stamp_us >= launched_us
    stream.events[1].error = RuntimeError("the device is lost")
    stream.events[1].done.set()
    await until(lambda: len(rows(ring_directory)) == 4)
    assert ("second", END, 2, True) == rows(ring_directory)[3]


async def test_streams_do_not_wait_for_each_other(ring_directory: Path) -> None:
    slow, quick = Stream(), Stream()
    for name, stream in (("slow", slow), ("quick", quick)):
        with laxity.stream.task(name, deadline_us=50_000, stream=stream):
            pass
    quick.events[0].done.set()
    await until(lambda: len(rows(ring_directory)) == 3)
    assert "quick" == rows(ring_directory)[2][0]
    slow.events[0].done.set()
    await until(lambda: len(rows(ring_directory)) == 4)


def test_a_body_that_raises_has_failed_at_once_and_nothing_is_waited_for(ring_directory: Path) -> None:
    stream = Stream()
    with pytest.raises(LookupError), laxity.stream.task("infer", deadline_us=50_000, stream=stream):
        raise LookupError
    assert ([], ("infer", END, 1, True)) == (stream.events, rows(ring_directory)[-1])

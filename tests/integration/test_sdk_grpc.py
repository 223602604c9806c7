"""Calls of real gRPC servers as tasks, with the deadlines of their callers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.ring_columns import column
from tests.unit import test_sdk
from tests.unit.test_sdk import rows, taken

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
from laxity.grpc import AsyncDeadlines, Deadlines  # noqa: E402

BEGIN, END = 1, 2


ring_directory = test_sdk.ring_directory


def handlers(echo: Any, count: Any, fail: Any) -> Any:
    methods = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Count": grpc.unary_stream_rpc_method_handler(count),
        "Fail": grpc.unary_unary_rpc_method_handler(fail),
    }
    return grpc.method_handlers_generic_handler("test.Model", methods)


@pytest.fixture
def channel() -> Iterator[Any]:
    def echo(request: bytes, _: Any) -> bytes:
        return request

    def count(_: bytes, __: Any) -> Iterator[bytes]:
        yield from (b"1", b"2", b"3")

    def fail(_: bytes, context: Any) -> bytes:
        context.abort(grpc.StatusCode.INTERNAL, "no")
        raise AssertionError("abort raises")

    server = grpc.server(ThreadPoolExecutor(2), interceptors=[Deadlines(default_us=70_000)])
    server.add_generic_rpc_handlers((handlers(echo, count, fail),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as made:
        yield made
    server.stop(None).wait(10)


def told(directory: Path, count: int) -> list[tuple[str, int, bool]]:
    """So many records, once they are there: the last one may be written after the answer."""
    until_s = time.monotonic() + 10
    while not list(directory.glob("*.ring")) or len(rows(directory)) < count:
        assert time.monotonic() < until_s, "it was not written"
        time.sleep(0.01)
    return [(name, kind, failed) for name, kind, _, failed in rows(directory)]


@pytest.mark.parametrize(("timeout", "least", "most"), [(2, 1, 2_000_000), (None, 70_000, 70_000)])
def test_a_call_has_the_deadline_that_its_caller_leaves_and_else_the_default(
    timeout: float | None, least: int, most: int, channel: Any, ring_directory: Path
) -> None:
    assert b"x" == channel.unary_unary("/test.Model/Echo")(b"x", timeout=timeout)
    assert [("Echo", BEGIN, False), ("Echo", END, False)] == told(ring_directory, 2)
    assert least <= min(column(taken(ring_directory), "deadline_us")) <= most


def test_a_stream_ends_with_its_last_message(channel: Any, ring_directory: Path) -> None:
    assert [b"1", b"2", b"3"] == list(channel.unary_stream("/test.Model/Count")(b""))
    assert [("Count", BEGIN, False), ("Count", END, False)] == told(ring_directory, 2)


def test_a_call_that_aborts_has_failed(channel: Any, ring_directory: Path) -> None:
    with pytest.raises(grpc.RpcError):
        channel.unary_unary("/test.Model/Fail")(b"")
    assert [("Fail", BEGIN, False), ("Fail", END, True)] == told(ring_directory, 2)


def test_a_method_that_is_not_there_is_no_task(channel: Any, ring_directory: Path) -> None:
    with pytest.raises(grpc.RpcError):
        channel.unary_unary("/test.Model/Missing")(b"")
    assert [] == list(ring_directory.glob("*.ring"))


async def test_an_asynchronous_server_does_the_same(ring_directory: Path) -> None:
    async def echo(request: bytes, _: Any) -> bytes:
        return request

    async def count(_: bytes, __: Any) -> AsyncIterator[bytes]:
        for message in (b"1", b"2"):
            yield message

    async def fail(_: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.INTERNAL, "no")
        raise AssertionError("abort raises")

    server = grpc.aio.server(interceptors=[AsyncDeadlines(default_us=70_000)])
    server.add_generic_rpc_handlers((handlers(echo, count, fail),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert b"x" == await channel.unary_unary("/test.Model/Echo")(b"x", timeout=2)
        assert [b"1", b"2"] == [message async for message in channel.unary_stream("/test.Model/Count")(b"")]
        with pytest.raises(grpc.RpcError):
            await channel.unary_unary("/test.Model/Fail")(b"")
    await server.stop(None)
    seen = told(ring_directory, 6)
    assert [False, False, True] == [failed for _, kind, failed in seen if kind == END]
    assert ["Echo", "Count", "Fail"] == [name for name, kind, _ in seen if kind == BEGIN]

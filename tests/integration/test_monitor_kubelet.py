"""The monitor asks a real gRPC server that speaks the kubelet's pod-resources API, and one that does not."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.monitor.given import KubeletSaid
from services.monitor.kubelet import LIST, Kubelet
from services.monitor.pod_resources import Holding
from tests.wire import pod_resources

Answer = Callable[[bytes, Any], bytes]


@pytest.fixture
async def folder() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lx-") as short:  # a socket's path may have 107 bytes only
        yield Path(short)


async def serving(folder: Path, answer: Answer) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    method = grpc.unary_unary_rpc_method_handler(answer)
    service, name = LIST.strip("/").split("/")
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: method})])
    server.add_insecure_port(f"unix://{folder}/kubelet.sock")
    await server.start()
    return server


async def looked(folder: Path) -> KubeletSaid:
    return await Kubelet(folder / "kubelet.sock", 1).look()


async def test_what_pods_hold_is_read(folder: Path) -> None:
    server = await serving(folder, lambda _, __: pod_resources(("shop", "train", "nvidia.com/gpu", ("GPU-1",))))

    assert KubeletSaid((Holding("GPU-1", "nvidia.com/gpu", "shop/train"),)) == await looked(folder)
    assert KubeletSaid((Holding("GPU-1", "nvidia.com/gpu", "shop/train"),)) == await looked(folder)
    await server.stop(None)


async def test_an_empty_answer_is_an_answer(folder: Path) -> None:
    server = await serving(folder, lambda _, __: b"")

    assert KubeletSaid(()) == await looked(folder)
    await server.stop(None)


async def test_an_answer_beyond_what_http2_sends_unasked_comes_whole(folder: Path) -> None:
    many = tuple(f"GPU-{number:036}" for number in range(30_000))
    server = await serving(folder, lambda _, __: pod_resources(("shop", "train", "nvidia.com/gpu", many)))

    said = await looked(folder)

    assert said.holdings is not None
    assert list(many) == [each.id for each in said.holdings]
    await server.stop(None)


async def test_a_refusal_says_why(folder: Path) -> None:
    def refuse(_: bytes, context: Any) -> bytes:
        context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
        context.set_details("rejected by rate limit")
        return b""

    server = await serving(folder, refuse)

    assert KubeletSaid(None, "status 8 of gRPC: rejected by rate limit") == await looked(folder)
    await server.stop(None)


async def test_another_service_is_refused_by_name(folder: Path) -> None:
    server = grpc.aio.server()
    server.add_insecure_port(f"unix://{folder}/kubelet.sock")
    await server.start()

    said = await looked(folder)

    assert said.holdings is None
    assert "status 12 of gRPC" in said.failed
    await server.stop(None)


async def test_no_socket_is_no_answer(folder: Path) -> None:
    said = await looked(folder)

    assert said.holdings is None
    assert "No such file" in said.failed


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 64])
async def test_who_speaks_something_else_is_no_kubelet(folder: Path, words: bytes) -> None:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        writer.close()

    server = await asyncio.start_unix_server(speak, folder / "kubelet.sock")
    async with server:
        said = await looked(folder)

    assert said.holdings is None
    assert said.failed


async def test_who_says_nothing_is_not_waited_for(folder: Path) -> None:
    ended = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_unix_server(hear, folder / "kubelet.sock")
    async with server:
        said = await Kubelet(folder / "kubelet.sock", 1, 200_000).look()
        await ended.wait()

    assert (None, "no answer within 200000 us") == (said.holdings, said.failed)

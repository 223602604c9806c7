"""Asks the kubelet of this node who has which device: one call of gRPC on its socket now and then, by HTTP/2.

The one file that knows h2. gRPC over HTTP/2: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error

from services.monitor.given import KubeletSaid
from services.monitor.pod_resources import Holding, holdings
from services.monitor.shell import Shell
from shared.errors import FieldError, LaxityError, clip

LIST: Final = "/v1.PodResourcesLister/List"
ANSWER_US: Final = 5_000_000
MOST_BYTES: Final = 1 << 24
_PREFIX: Final = 5
"""Bytes before a message: whether it is compressed, and its length."""


class KubeletError(LaxityError):
    """The kubelet did not answer, or not what it was asked."""


class Kubelet:
    """``socket`` is that of its pod-resources API."""

    def __init__(self, socket: Path, period_us: int, answer_us: int = ANSWER_US) -> None:
        self._socket, self._period_us, self._answer_us = socket, period_us, answer_us

    async def run(self, shell: Shell) -> NoReturn:
        """Posts a KubeletSaid a period, also when it does not answer."""
        failed = ""
        while True:
            said = await self.look()
            if said.failed != failed:
                shell.log.info("the kubelet's answer", socket=str(self._socket), failed=said.failed or None)
                failed = said.failed
            shell.post(said)
            await shell.clock.sleep_us(self._period_us)

    async def look(self) -> KubeletSaid:
        """Never raises."""
        try:
            return KubeletSaid(await self._list())
        except (KubeletError, FieldError, OSError, H2Error) as error:
            return KubeletSaid(None, clip(str(error) or type(error).__name__))

    async def _list(self) -> tuple[Holding, ...]:
        try:
            async with asyncio.timeout(self._answer_us / 1e6):
                return holdings(await _called(self._socket, LIST))
        except TimeoutError:
            raise KubeletError(f"no answer within {self._answer_us} us") from None


@dataclass
class _Answer:
    body: bytearray = field(default_factory=bytearray)
    headers: dict[str, str] = field(default_factory=dict)
    ended: bool = False

    def take(self, event: object) -> int:
        """How many bytes may be sent for those that came."""
        match event:
            case ResponseReceived() | TrailersReceived():
                self.headers |= {str(name): str(value) for name, value in event.headers or ()}
            case DataReceived():
                self.body += event.data or b""
                if len(self.body) > MOST_BYTES:
                    raise KubeletError(f"an answer of more than {MOST_BYTES} bytes")
                return event.flow_controlled_length or 0
            case StreamEnded():
                self.ended = True
            case StreamReset() | ConnectionTerminated():
                raise KubeletError(f"it broke off with HTTP/2's error {event.error_code}")
        return 0

    def message(self) -> bytes:
        """Raises KubeletError where gRPC says that it failed."""
        if (status := self.headers.get("grpc-status")) != "0":
            said = self.headers.get("grpc-message", "")
            raise KubeletError(f"status {status or self.headers.get(':status')} of gRPC: {said}")
        size = int.from_bytes(self.body[1:_PREFIX], "big")
        if len(self.body) != _PREFIX + size or self.body[0]:
            raise KubeletError(f"{len(self.body)} bytes that are no single uncompressed message")
        return bytes(self.body[_PREFIX:])


async def _called(socket: Path, method: str) -> bytes:
    """The answer to an empty message; a connection of its own, which a kubelet that was restarted needs anyway."""
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        link, answer = H2Connection(H2Configuration(header_encoding="utf-8")), _Answer()
        link.initiate_connection()
        asked = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost"}
        link.send_headers(1, [*asked.items(), ("te", "trailers"), ("content-type", "application/grpc")])
        link.send_data(1, bytes(_PREFIX), end_stream=True)
        while not answer.ended:
            writer.write(link.data_to_send())
            if not (data := await reader.read(1 << 16)):
                raise KubeletError("it closed the connection")
            for event in link.receive_data(data):
                if taken := answer.take(event):
                    link.acknowledge_received_data(taken, 1)
        return answer.message()
    finally:
        writer.close()

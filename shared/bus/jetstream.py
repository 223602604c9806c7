"""JetStream in its own words, JSON over requests: streams, stored publishes and reads; no consumer lives here."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic_core import from_json

from shared.bus.connection import Connection
from shared.bus.msg import NOBODY, Msg, NoResponders
from shared.errors import BusError, NoStreamError, OutcomeUnknownError, RefusedError
from shared.log import logger
from shared.streams import StreamSpec

STREAM_NOT_FOUND = 10059
STREAM_NAME_IN_USE = 10058
NO_MESSAGE_FOUND = 10037
CONSUMER_NOT_FOUND = 10014

BATCH = 256
"""Messages of a stream's history asked for at once."""
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0

_GROWING = frozenset({"max_age", "max_bytes", "num_replicas", "duplicate_window"})
"""Limits of a stream that exists: raised, never lowered."""
_FIXED = frozenset({"storage", "retention", "name"})
"""What cannot be changed on a stream that exists; it stays as it was made."""


class ApiError(BusError):
    """The server answered with an error; ``code`` is JetStream's own (10071 …), ``status`` like HTTP's."""

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        self.code = int(error.get("err_code", 0))
        self.status = int(error.get("code", 0))
        super().__init__(f"{what}: {error.get('description', 'no description')} ({self.code})")


class Stored(NamedTuple):
    """That a message was stored, at which sequence; ``duplicate``: the same Nats-Msg-Id was there already."""

    seq: int
    duplicate: bool = False


class StoredMsg(NamedTuple):
    """A message of a stream; ``delivered`` counts its deliveries (work only), ``pending`` what is still to come."""

    subject: str
    body: bytes
    seq: int
    headers: Mapping[str, str] = MappingProxyType({})
    at_us: int = 0
    delivered: int = 1
    pending: int = 0
    reply: str = ""


class JetStream:
    """Calls on one connection."""

    def __init__(self, connection: Connection, timeout_us: int) -> None:
        self.connection = connection
        self.timeout_us = timeout_us
        self._log = logger(part="jetstream")
        self._direct: set[str] = set()
        """Streams whose leader our user may not ask."""

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One API request; raises ApiError, BusError without JetStream, OutcomeUnknownError on a time-out."""
        payload = json.dumps(body).encode() if body is not None else b""
        answer = await self.connection.request(f"$JS.API.{path}", payload, self.timeout_us)
        if isinstance(answer, NoResponders):
            raise BusError(f"{path}: JetStream does not answer on this server")
        return without_error(path, answer)

    async def store(self, subject: str, body: bytes, headers: Mapping[str, str]) -> Stored:
        """Publish and wait until it is stored; raises as ``call`` does, and NoStreamError (case B5)."""
        answer = await self.connection.request(subject, body, self.timeout_us, headers)
        return _stored(subject, answer)

    async def send(
        self, subject: str, body: bytes, headers: Mapping[str, str], then: Callable[[Stored | BusError], None]
    ) -> str:
        """As ``store``, but ``then`` is told how it ended, without a limit of time: see ``Connection.ask_then``."""

        def answered(found: Msg | BusError) -> None:
            try:
                end = found if isinstance(found, BusError) else _stored(subject, found)
            except BusError as error:
                end = error
            then(end)

        return await self.connection.ask_then(subject, body, answered, headers)

    async def last(self, stream: str, subject: str) -> StoredMsg | None:
        """The last message of a subject, read from the stream's leader (never from a replica that lags behind).

        A user that may read its own subject alone gets it from whichever replica answers.
        """
        if stream in self._direct:
            return await self._last_direct(stream, subject)
        try:
            found = await self.call(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
        except ApiError as error:
            if error.code == NO_MESSAGE_FOUND:
                return None
            raise
        except RefusedError:
            self._direct.add(stream)
            return await self._last_direct(stream, subject)
        message = found["message"]
        headers = parse_headers(base64.b64decode(message.get("hdrs", "")))
        return StoredMsg(message["subject"], base64.b64decode(message.get("data", "")), message["seq"], headers)

    async def _last_direct(self, stream: str, subject: str) -> StoredMsg | None:
        path = f"DIRECT.GET.{stream}.{subject}"
        answer = await self.connection.request(f"$JS.API.{path}", b"", self.timeout_us)
        if isinstance(answer, NoResponders):
            raise BusError(f"{path}: no such stream, or it is not read directly")
        return None if answer.status == "404" else of_direct(answer)

    async def history(self, stream: str, subject: str, start_seq: int = 1) -> list[StoredMsg]:
        """All that a stream holds on a subject from ``start_seq`` on, without a consumer; raises BusError."""
        found: list[StoredMsg] = []
        ended: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        async def take(msg: Msg) -> None:
            if not msg.status:
                found.append(of_direct(msg))
            elif not ended.done():
                ended.set_result(msg)

        inbox = self.connection.new_inbox()
        listening = await self.connection.subscribe(inbox, take, limit=0)
        try:
            while True:
                seq = found[-1].seq + 1 if found else max(1, start_seq)
                query = json.dumps({"seq": seq, "next_by_subj": subject, "batch": BATCH}).encode()
                await self.connection.publish(f"$JS.API.DIRECT.GET.{stream}", query, reply=inbox, hold=False)
                async with asyncio.timeout(self.timeout_us / 1_000_000):
                    if not _left(await ended):
                        return found
                ended = asyncio.get_running_loop().create_future()
        except TimeoutError:
            raise OutcomeUnknownError(f"history of {stream} not read within {self.timeout_us} us") from None
        finally:
            await listening.stop()

    async def info(self, stream: str) -> dict[str, Any]:
        return await self.call(f"STREAM.INFO.{stream}")

    async def delete(self, stream: str) -> None:
        """Delete a stream; harmless where there is none."""
        try:
            await self.call(f"STREAM.DELETE.{stream}")
        except ApiError as error:
            if error.code != STREAM_NOT_FOUND:
                raise

    async def subjects(self, stream: str, wanted: str = ">") -> set[str]:
        """Every subject of which the stream holds a message, of those that ``wanted`` with its wildcards names."""
        found: set[str] = set()
        while True:
            info = await self.call(f"STREAM.INFO.{stream}", {"subjects_filter": wanted, "offset": len(found)})
            page = info["state"].get("subjects") or {}
            found |= page.keys()
            if not page or len(found) >= int(info.get("total", 0)):
                return found

    async def ensure(self, specs: Iterable[StreamSpec]) -> None:
        """Make or mend each stream; tries until the server lets it, since JetStream may still be starting."""
        for spec in specs:
            wait_s = RETRY_FIRST_S
            while True:
                try:
                    await self._ensure_one(spec)
                    break
                except ApiError as error:
                    if error.status != 503:
                        raise
                    self._log.warning("stream not ready", stream=spec.name, error=str(error))
                except (OutcomeUnknownError, BusError) as error:
                    self._log.warning("stream not ready", stream=spec.name, error=str(error))
                await asyncio.sleep(wait_s)
                wait_s = min(RETRY_MOST_S, wait_s * 2)

    async def _ensure_one(self, spec: StreamSpec) -> None:
        try:
            found = await self.info(spec.name)
        except RefusedError:
            return  # not ours to look at: who only publishes or asks finds the stream there, or tries again
        except ApiError as error:
            if error.code != STREAM_NOT_FOUND:
                raise
            found = await self._create(spec)
        config = found["config"]
        if config["subjects"] != spec.config["subjects"]:
            raise ForeignStreamError(f"{spec.name}: holds {config['subjects']}, needed {spec.config['subjects']}")
        if changes := missing(spec.config, config):
            await self._update(spec, config | changes)

    async def _update(self, spec: StreamSpec, config: Mapping[str, Any]) -> None:
        try:
            await self.call(f"STREAM.UPDATE.{spec.name}", config)
        except RefusedError as error:  # another service's work: one that makes no streams takes them as they are
            self._log.info("stream kept as it is", stream=spec.name, error=str(error))

    async def _create(self, spec: StreamSpec) -> dict[str, Any]:
        try:
            return await self.call(f"STREAM.CREATE.{spec.name}", spec.config)
        except ApiError as error:
            if error.code != STREAM_NAME_IN_USE:
                raise
            return await self.info(spec.name)  # another process was faster, with other limits


class ForeignStreamError(ApiError):
    """A stream of that name holds other subjects: it is not ours to change."""

    def __init__(self, text: str) -> None:
        super().__init__(text, {"description": "not our stream", "err_code": STREAM_NAME_IN_USE, "code": 400})


def _stored(subject: str, answer: Msg | NoResponders) -> Stored:
    if isinstance(answer, NoResponders) or answer.status == NOBODY:
        raise NoStreamError(f"no stream takes {subject}")
    found = without_error(subject, answer)
    return Stored(found["seq"], found.get("duplicate", False))


def without_error(what: str, answer: Msg) -> dict[str, Any]:
    """The server's answer; raises ApiError when it says that it could not."""
    found: dict[str, Any] = from_json(answer.body)
    if error := found.get("error"):
        raise ApiError(what, error)
    return found


def missing(want: Mapping[str, Any], have: Mapping[str, Any]) -> dict[str, Any]:
    """What an existing stream needs changed: limits only grow, what cannot change stays."""
    changes = {}
    for key, value in want.items():
        present = have.get(key)
        if key in _FIXED or present == value:
            continue
        if key in _GROWING:
            # 0 and -1 mean without limit: nothing is larger
            if present in (0, -1, None) and key in ("max_age", "max_bytes"):
                continue
            if present is not None and present >= value:
                continue
        changes[key] = value
    return changes


def of_direct(msg: Msg) -> StoredMsg:
    """A stored message as the server answers it directly: what it was stored with stands in headers."""
    return StoredMsg(msg.headers["Nats-Subject"], msg.body, int(msg.headers["Nats-Sequence"]), msg.headers)


def _left(end: Msg) -> int:
    """How many messages are left after a batch; 404 (nothing there) and 503 (no such stream) leave none."""
    if end.status not in {"204", "404", "503"}:
        raise BusError(f"{end.status} {end.description}")
    return int(end.headers.get("Nats-Num-Pending", 0)) if end.status == "204" else 0


def parse_headers(block: bytes) -> dict[str, str]:
    """The headers of a stored message from their wire form."""
    lines = block.decode("utf-8", "replace").split("\r\n")[1:]
    return {name.strip(): value.strip() for name, found, value in (line.partition(":") for line in lines) if found}

"""The command's side of the bus: finding the server, asking services, reading streams; no command lives here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

from cli.output import CommandError, Exit
from shared.bus import Bus, Msg, NoResponders, StoredMsg
from shared.clock import SystemClock
from shared.effects import KeyChanged, WatchEvent, WatchReplayed
from shared.errors import BusError, OutcomeUnknownError
from shared.messages import Message
from shared.settings import ServiceSettings
from shared.streams import bucket_stream, named
from shared.subjects import Subjects

CONNECT_US = 3_000_000
ANSWER_US = 5_000_000
PING_US = 400_000
"""How long answers to $SRV.PING are waited for: every instance answers, and their number is not known."""
DEFAULT_URL = "nats://127.0.0.1:4222"

M = TypeVar("M", bound=Message)


def default_state_dir() -> Path:
    """Where ``laxity up`` keeps its state unless told otherwise."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "laxity"


def find_url(given: str | None) -> str:
    """The server to ask: the one given, the environment's, that of a running ``laxity up``, or the usual port."""
    return given or os.environ.get("LAXITY_NATS_URL") or _running_url(default_state_dir()) or DEFAULT_URL


def _running_url(state_dir: Path) -> str | None:
    """The address in the ready file, if the server that it names still lives."""
    try:
        ready = json.loads((state_dir / "ready.json").read_bytes())
        os.kill(ready["services"]["nats-server"][0], 0)
        return str(ready["nats_url"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


class Client:
    """One connection of the command."""

    def __init__(self, bus: Bus, url: str) -> None:
        self.bus = bus
        self.url = url
        self.clock = SystemClock()

    @property
    def subjects(self) -> Subjects:
        return self.bus.subjects

    async def ask(self, subject: str, body: Message, model: type[M], timeout_us: int = ANSWER_US) -> M:
        """The answer of a service; CommandError where nobody listens or answers."""
        answer = await self.request(subject, body.to_json(), timeout_us)
        if answer is None:
            raise CommandError(f"no service answers on {subject} at {self.url}", Exit.NO_ANSWER)
        if not answer.body:
            raise CommandError(answer.headers.get("Nats-Service-Error", f"empty answer on {subject}"), Exit.USAGE)
        return model.trusted(answer.body)

    async def request(self, subject: str, body: bytes, timeout_us: int) -> Msg | None:
        """The answer, None where nobody listens; CommandError after the time-out."""
        try:
            answer = await self.bus.request(subject, body, timeout_us)
        except OutcomeUnknownError as error:
            raise CommandError(f"{error} ({self.url})", Exit.NO_ANSWER) from None
        return None if isinstance(answer, NoResponders) else answer

    async def services(self, name: str = "", verb: str = "PING") -> list[dict[str, Any]]:
        """What each instance answers to $SRV.<verb>, all services or those of one name."""
        subject = f"$SRV.{verb}.{name}" if name else f"$SRV.{verb}"
        return [json.loads(answer.body) for answer in await self.bus.request_all(subject, wait_us=PING_US)]

    async def listens(self, name: str) -> bool:
        """Whether any instance of a service is there; said at once when none is."""
        try:
            answer = await self.bus.request(f"$SRV.PING.{name}", b"", PING_US)
        except OutcomeUnknownError:
            return True  # it is subscribed and too busy to answer: it will
        return not isinstance(answer, NoResponders)

    async def stream_info(self, stream: str, subject: str = "") -> dict[str, Any] | None:
        """What the server says of a stream of ours; None where it does not exist."""
        query = json.dumps({"subjects_filter": subject}).encode() if subject else b""
        answer = await self.request(f"$JS.API.STREAM.INFO.{self._named(stream)}", query, ANSWER_US)
        if answer is None:
            raise CommandError(f"the server at {self.url} has no JetStream", Exit.NO_ANSWER)
        found: dict[str, Any] = json.loads(answer.body)
        return None if "error" in found else found

    async def read_stream(self, stream: str, subject: str, since_seq: int = 1) -> list[StoredMsg]:
        """All that a stream holds on a full subject, in order."""
        return await self.bus.history(stream, subject, since_seq)

    async def read_bucket(self, bucket: str) -> dict[str, tuple[bytes, int]]:
        """Every key of a bucket with its revision."""
        if await self.stream_info(bucket_stream(bucket, self.subjects.prefix)) is None:
            return {}
        values: dict[str, tuple[bytes, int]] = {}
        done = asyncio.Event()

        async def take(event: WatchEvent) -> None:
            if isinstance(event, WatchReplayed):
                done.set()
            elif isinstance(event, KeyChanged) and event.value is not None:
                values[event.key] = (event.value, event.revision)

        watching = asyncio.create_task(self.bus.watch(bucket, take))
        try:
            async with asyncio.timeout(ANSWER_US / 1_000_000):
                await done.wait()
        finally:
            await _ended(watching)
        return values

    async def read_key(self, bucket: str, key: str, model: type[M]) -> M | None:
        """One key as the server has it now; None where it or the bucket is absent."""
        try:
            found = await self.bus.get(bucket, key)
        except BusError:
            return None
        return model.trusted(found[0]) if found else None

    def _named(self, stream: str) -> str:
        return named(stream, self.subjects.prefix)


async def _ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.asynccontextmanager
async def connected(url: str, prefix: str = "rt") -> AsyncIterator[Client]:
    """A client of the server at ``url``; CommandError where there is none."""
    settings = ServiceSettings().model_copy(update={"nats_url": url, "prefix": prefix})
    try:
        async with asyncio.timeout(CONNECT_US / 1_000_000):
            bus = await Bus.connect(settings, "laxity-command")
    except TimeoutError:
        raise CommandError(f"no NATS server answers at {url}", Exit.NO_ANSWER) from None
    try:
        yield Client(bus, url)
    finally:
        await bus.close()


def of(args: Namespace) -> contextlib.AbstractAsyncContextManager[Client]:
    """The client that a command line asks for."""
    return connected(find_url(args.nats_url), args.prefix)

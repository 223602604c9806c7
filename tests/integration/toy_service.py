"""A toy service for the tests of the runtime: it echoes, publishes, commits, and remembers what it heard."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from shared.bus import Bus, Msg
from shared.effects import (
    Ack,
    Commit,
    Draining,
    Emit,
    Publish,
    Received,
    Reply,
    Tick,
    Write,
)
from shared.errors import FieldError
from shared.messages import Message
from shared.service import Every, Listen, Runtime, Service
from shared.settings import ServiceSettings
from shared.subjects import EVENTS_STREAM, LEDGER, PLACE_STREAM
from shared.testing.manual_clock import ManualClock
from shared.testing.wait import until

SECOND_US = 1_000_000


class Say(Message):
    text: str
    number: int = 0


class Answer(Message):
    by: str
    text: str
    error: str | None = None


def fault(found: FieldError, request_id: str | None) -> Answer:
    return Answer(by=request_id or "nobody", text="", error=str(found))


@dataclass(frozen=True)
class Slowly:
    """A slow effect of the toy's own."""

    text: str


@dataclass(frozen=True)
class SlowlyDone:
    text: str


@dataclass
class Toy:
    """Echoes requests, publishes what it is told to, remembers everything."""

    name: str = "toy"
    events: list[object] = field(default_factory=list)
    last_seq: int = 0

    def handle(self, event: object, now_us: int) -> list[object]:
        self.events.append(event)
        if isinstance(event, Received):
            return self._received(event)
        if isinstance(event, Tick):
            return [Emit("rt.metrics.toy", Say(text=event.name))]
        if isinstance(event, Draining):
            return [Publish("rt.events.last", Say(text="last"), f"{self.name}/last", "toy.last")]
        return []

    def _received(self, event: Received) -> list[object]:
        message = event.message
        assert isinstance(message, Say)
        if event.ack:
            return [Ack(event.ack)]
        if event.seq:
            self.last_seq = event.seq
            return []
        if event.subject == "rt.raise":
            raise RuntimeError("a bug")
        effects: list[object] = [Reply(event.reply, Answer(by=self.name, text=message.text), _error_of(message))]
        if message.text.startswith("publish"):
            effects += self._publishes(message)
        if message.text == "slow":
            effects.append(Slowly(message.text))
        if message.text == "commit":
            effects.append(Commit(message.number, LEDGER, (Write("toy", b"1", 0), Write(f"n{message.number}", b"", 0))))
        return effects

    def _publishes(self, message: Say) -> list[object]:
        subject, chained = f"rt.events.toy.{message.text}", message.text.endswith("chained")
        return [
            Publish(subject, Say(text="x", number=n), f"{self.name}/{message.text}/{n}", "toy.said", chained)
            for n in range(message.number)
        ]

    def check(self) -> None:
        assert self.events

    def story(self, id: str) -> list[str]:  # noqa: A002  # the interface's word
        return [id]

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def numbers(self, subject: str) -> list[int]:
        return [event.message.number for event in self.of(Received) if event.subject == subject]


def _error_of(message: Say) -> tuple[int, str] | None:
    return (409, "not so\nfast") if message.text == "error" else None


def _next(core: Toy) -> int:
    return core.last_seq + 1


ECHO = Listen("echo", "request", Say, queue="toys", fault=fault)
SERVICE = Service(
    name="toy",
    about="echoes",
    listens=(
        ECHO,
        Listen("raise", "request", Say, queue="toys"),
        Listen("metrics.*", "core", Say),
        Listen("events.toy.>", "stream", Say, stream=EVENTS_STREAM, start=_next),
        Listen("place", "work", Say, stream=PLACE_STREAM, durable="toy"),
        Listen(LEDGER, "watch"),
    ),
    every=(Every("beat", SECOND_US),),
)


class Running:
    """A service in this loop, until told to stop."""

    def __init__(self, settings: ServiceSettings, core: Toy, clock: ManualClock | None, **options: Any) -> None:
        self.core = core
        self.clock = clock or ManualClock()
        self.stop = asyncio.Event()
        tasks = options.pop("tasks", ())
        service = options.pop("service", SERVICE)
        slow, outside = options.pop("slow", {}), options.pop("outside", ())
        self.runtime = Runtime(service, core, settings, slow, self.clock, outside)
        self.task = asyncio.create_task(self.runtime.serve(self.stop, tasks))

    async def ready(self) -> "Running":
        waiting = asyncio.create_task(self.runtime.ready.wait())
        await asyncio.wait({waiting, self.task}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            waiting.cancel()
            await self.task
        assert self.runtime.ready.is_set()
        return self

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 15)


@asynccontextmanager
async def toys(settings: ServiceSettings, count: int = 1, **options: Any) -> AsyncIterator[list[Running]]:
    running = [
        Running(settings.model_copy(update={"instance": f"toy-{n}"}), Toy(f"toy-{n}"), None, **options)
        for n in range(count)
    ]
    try:
        for toy in running:
            await toy.ready()
        yield running
    finally:
        for toy in running:
            if not toy.task.done():
                await toy.end()


async def ask(bus: Bus, subject: str, **fields: object) -> Msg:
    answer = await bus.request(subject, json.dumps(fields).encode(), 10 * SECOND_US)
    assert isinstance(answer, Msg), f"nobody answers on {subject}"
    return answer


async def answers_to(client: Any, subject: str, body: bytes, wait_s: float = 0.3) -> list[Any]:
    """Everything that comes back to one request of a plain client."""
    found: list[Any] = []

    async def hear(msg: Any) -> None:
        found.append(msg)

    inbox = client.new_inbox()
    await client.subscribe(inbox, cb=hear)
    await client.publish(subject, body, reply=inbox)
    await until(lambda: bool(found))
    await asyncio.sleep(wait_s)
    return found

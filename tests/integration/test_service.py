"""A toy service on the real runtime and a real server: requests, discovery, restarts, effects, shutdown."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import pytest

from shared.bus import Bus, Msg
from shared.effects import (
    Ack,
    Commit,
    CommitDone,
    CommitOutcome,
    Disconnected,
    Draining,
    Emit,
    KeyChanged,
    Publish,
    Received,
    Reconnected,
    Reply,
    Tick,
    WatchReplayed,
    Write,
)
from shared.errors import FieldError
from shared.messages import Message
from shared.service import Every, Listen, Runtime, Service
from shared.settings import ServiceSettings
from shared.subjects import EVENTS_STREAM, LEDGER, PLACE_STREAM
from shared.testing.manual_clock import ManualClock
from shared.testing.nats_server import NatsServer
from shared.testing.wait import eventually, until

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
        self.runtime = Runtime(service, core, settings, options.pop("slow", {}), self.clock)
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


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Any]:
    """A plain client that knows nothing of ours."""
    client = await nats.connect(nats_url)
    yield client
    await client.close()


# --- requests ---


@pytest.mark.parametrize("count", [1, 3])
async def test_a_request_gets_exactly_one_reply(settings: ServiceSettings, client: Any, count: int) -> None:
    async with toys(settings, count):
        answers = [(await answers_to(client, "rt.echo", b'{"text": "hello"}', 0.05)) for _ in range(8)]
    assert ["hello"] * 8 == [json.loads(answer.data)["text"] for (answer,) in answers]


@pytest.mark.parametrize(
    ("body", "code", "field", "named"),
    [
        (b"", "400", "(body)", "nobody"),
        (b"{", "400", "(body)", "nobody"),
        (b'{"text": NaN}', "400", "text", "nobody"),
        (b'{"text": 1, "request_id": "r-1"}', "400", "text", "r-1"),
        (b'{"text": 1, "request_id": "\\ud800"}', "400", "(body)", "nobody"),
        (b'{"text": 1, "request_id": {}}', "400", "text", "nobody"),
        (b'{"text": "' + b"x" * (256 * 1024) + b'"}', "413", "(body)", "nobody"),
        (b"[" * 100_000, "400", "(body)", "nobody"),
    ],
    ids=["empty", "cut", "NaN", "wrong type", "no text", "wrong id", "too large", "deep"],
)
async def test_a_malformed_request_is_answered_with_the_field_and_counted(
    settings: ServiceSettings, bus: Bus, body: bytes, code: str, field: str, named: str
) -> None:
    async with toys(settings) as (toy,):
        answer = await bus.request("rt.echo", body, 5 * SECOND_US)
        assert isinstance(answer, Msg)
        assert code == answer.headers["Nats-Service-Error-Code"]
        assert answer.headers["Nats-Service-Error"].startswith(field)
        found = json.loads(answer.body)
        assert (named, True) == (found["by"], found["error"].startswith(field))
        assert 1 == toy.runtime.counters["malformed.echo"]
        assert b"fine" in (await ask(bus, "rt.echo", text="fine")).body
        (stats,) = await bus.request_all("$SRV.STATS.toy")
    (echo,) = [e for e in json.loads(stats.body)["endpoints"] if e["subject"] == "rt.echo"]
    assert (2, 1) == (echo["num_requests"], echo["num_errors"])
    assert echo["last_error"].startswith(field)


async def test_an_error_of_the_core_is_in_the_headers_of_the_convention(settings: ServiceSettings, bus: Bus) -> None:
    async with toys(settings):
        answer = await ask(bus, "rt.echo", text="error")
    assert ("409", "not so fast") == (
        answer.headers["Nats-Service-Error-Code"],
        answer.headers["Nats-Service-Error"],
    )


@pytest.mark.parametrize("reply", ["rt.place", "$JS.API.INFO", "rt.events.place.x", "$SRV.PING"])
async def test_a_reply_subject_that_could_forge_a_message_is_not_answered(
    settings: ServiceSettings, client: Any, reply: str
) -> None:
    heard: list[Any] = []

    async def hear(msg: Any) -> None:
        heard.append(msg)

    async with toys(settings) as (toy,):
        await client.subscribe(reply, cb=hear)
        await client.flush()
        await client.publish("rt.echo", b'{"text": "x"}', reply=reply)
        await until(lambda: len(toy.core.of(Received)) == 1)
        await answers_to(client, "rt.echo", b'{"text": "after"}', 0.05)
        assert ([], 1) == (heard, toy.runtime.counters["reply_refused"])


async def test_a_plain_publish_is_handled_and_answered_nowhere(settings: ServiceSettings, client: Any) -> None:
    async with toys(settings) as (toy,):
        await client.publish("rt.echo", b'{"text": "plain"}')
        await client.publish("rt.echo", b"malformed")
        await until(lambda: toy.runtime.counters["malformed.echo"] == 1)
        await until(lambda: len(toy.core.of(Received)) == 1)
        (event,) = toy.core.of(Received)
    assert ("", b'{"text": "plain"}', Say(text="plain")) == (event.reply, event.raw, event.message)


# --- discovery ---


async def test_B20_every_instance_answers_discovery(settings: ServiceSettings, bus: Bus) -> None:
    async with toys(settings, 3) as running:
        for subject in ("$SRV.PING", "$SRV.PING.toy"):
            pings = [json.loads(msg.body) for msg in await bus.request_all(subject)]
            assert {toy.runtime.discovery.id for toy in running} == {ping["id"] for ping in pings}
            assert {"io.nats.micro.v1.ping_response"} == {ping["type"] for ping in pings}
        (info,) = await bus.request_all(f"$SRV.INFO.toy.{running[0].runtime.discovery.id}")
        (stats,) = await bus.request_all(f"$SRV.STATS.toy.{running[0].runtime.discovery.id}")
    endpoints = json.loads(info.body)["endpoints"]
    assert [("rt.echo", "toys"), ("rt.raise", "toys")] == [(e["subject"], e["queue_group"]) for e in endpoints]
    data = json.loads(stats.body)["data"]
    assert ("ready", "ok", 0) == (data["state"], data["health"], data["outbox"])
    assert {"counters", "inbox"} < data.keys()


async def test_without_an_instance_discovery_says_so_at_once(settings: ServiceSettings, bus: Bus) -> None:
    async with toys(settings):
        assert 1 == len(await bus.request_all("$SRV.PING.toy"))
    assert [] == await bus.request_all("$SRV.PING.toy", wait_us=10 * SECOND_US)


# --- order of the start ---


async def test_the_core_hears_watches_before_streams_and_streams_before_requests(
    settings: ServiceSettings, bus: Bus
) -> None:
    await bus.commit(LEDGER, [Write("a", b"1", 0)])
    await bus.publish_event("rt.events.toy.x", b'{"text": "x"}', "1", "t", "/s")
    async with toys(settings) as (toy,):
        await ask(bus, "rt.echo", text="hello")
        await until(lambda: len(toy.core.of(Received)) == 2)
        kinds = [type(event) for event in toy.core.events]
    assert [KeyChanged, WatchReplayed] == kinds[:2]
    assert {"rt.events.toy.x", "rt.echo"} == {event.subject for event in toy.core.of(Received)}


async def test_a_stream_starts_where_the_core_says(settings: ServiceSettings, bus: Bus) -> None:
    for number in range(3):
        body = json.dumps({"text": "x", "number": number}).encode()
        await bus.publish_event("rt.events.toy.x", body, f"{number}", "t", "/s")
    toy = Running(settings, Toy(last_seq=2), None)
    await toy.ready()
    await until(lambda: toy.core.numbers("rt.events.toy.x") == [2])
    await toy.end()


async def test_malformed_messages_that_nobody_waits_for_are_skipped_and_counted(
    settings: ServiceSettings, bus: Bus
) -> None:
    async with toys(settings) as (toy,):
        await bus.publish("rt.metrics.a", b"{")
        await bus.publish_event("rt.events.toy.x", b"{", "1", "t", "/s")
        await bus.publish("rt.place", b"{")
        await bus.publish_event("rt.events.toy.x", b'{"text": "x", "number": 5}', "2", "t", "/s")
        await until(lambda: toy.core.numbers("rt.events.toy.x") == [5])
        await until(lambda: toy.runtime.counters["malformed.place"] == 1)
        counters = toy.runtime.counters
        assert (1, 1) == (counters["malformed.metrics.*"], counters["malformed.events.toy.>"])


# --- effects ---


async def test_work_is_handed_to_the_core_with_a_token_and_acknowledged(settings: ServiceSettings, bus: Bus) -> None:
    async with toys(settings) as (toy,):
        await bus.publish("rt.place", b'{"text": "work"}')
        await until(lambda: len(toy.core.of(Received)) == 1)
        (event,) = toy.core.of(Received)
        assert (True, 1, False) == (event.ack > 0, event.seq, event.redelivered)
        assert event.stored_us > 0

        async def acknowledged() -> bool | None:
            info = await bus._js.call(f"CONSUMER.INFO.{PLACE_STREAM}.toy")
            return info["ack_floor"]["stream_seq"] == 1 or None

        await eventually(acknowledged)


async def test_a_timer_ticks_in_its_period_and_emits_metrics(settings: ServiceSettings, bus: Bus) -> None:
    heard: list[bytes] = []

    async def hear(msg: Msg) -> None:
        heard.append(msg.body)

    await bus.subscribe("rt.metrics.>", hear)
    async with toys(settings) as (toy,):
        await until(lambda: toy.clock.sleeping == 1)
        for _ in range(3):
            await toy.clock.advance(SECOND_US)
            await until(lambda: toy.clock.sleeping == 1)
        await until(lambda: len(heard) == 3)
        ticks = toy.core.of(Tick)
    assert [1, 2, 3] == [(tick.wall_us - 1_700_000_000 * SECOND_US) // SECOND_US for tick in ticks]


async def test_ticks_missed_while_the_process_stood_still_are_not_made_up_for(settings: ServiceSettings) -> None:
    async with toys(settings) as (toy,):
        await until(lambda: toy.clock.sleeping == 1)
        toy.clock.suspend(100 * SECOND_US)
        await toy.clock.advance(0)
        await until(lambda: toy.clock.sleeping == 1 and bool(toy.core.of(Tick)))
        assert len(toy.core.of(Tick)) <= 2


async def test_a_slow_effect_ends_in_an_event_while_the_core_goes_on(settings: ServiceSettings, bus: Bus) -> None:
    go_on = asyncio.Event()

    async def slowly(effect: Slowly) -> SlowlyDone:
        await go_on.wait()
        return SlowlyDone(effect.text)

    async with toys(settings, slow={Slowly: slowly}) as (toy,):
        await ask(bus, "rt.echo", text="slow")
        await ask(bus, "rt.echo", text="meanwhile")
        assert [] == toy.core.of(SlowlyDone)
        go_on.set()
        await until(lambda: toy.core.of(SlowlyDone) == [SlowlyDone("slow")])


async def test_a_commit_ends_in_an_event_with_its_number(settings: ServiceSettings, bus: Bus) -> None:
    async with toys(settings) as (toy,):
        await ask(bus, "rt.echo", text="commit", number=5)
        await until(lambda: len(toy.core.of(CommitDone)) == 1)
        await ask(bus, "rt.echo", text="commit", number=6)
        await until(lambda: len(toy.core.of(CommitDone)) == 2)
        written, conflict = toy.core.of(CommitDone)
        await until(lambda: KeyChanged(LEDGER, "toy", b"1", 1) in toy.core.events)
    assert CommitDone(5, CommitOutcome.WRITTEN, {"toy": 1, "n5": 2}) == written
    assert (6, CommitOutcome.CONFLICT) == (conflict.commit, conflict.outcome)
    assert (KeyChanged(LEDGER, "toy", b"1", 1), KeyChanged(LEDGER, "n6", None, 0)) == conflict.current


@pytest.mark.parametrize("text", ["publish", "publish-chained"])
@pytest.mark.parametrize("kill", [True, False], ids=["kill -9", "SIGTERM"])
async def test_events_are_in_order_and_not_lost_over_a_restart(
    settings: ServiceSettings, bus: Bus, nats_server: NatsServer, text: str, kill: bool
) -> None:
    async with toys(settings) as (toy,):
        await ask(bus, "rt.echo", text=text, number=300)
        await until(lambda: len(toy.core.numbers(f"rt.events.toy.{text}")) > 20)
        nats_server.restart(kill)
        await until(lambda: len(toy.core.numbers(f"rt.events.toy.{text}")) >= 300)
    assert list(range(300)) == toy.core.numbers(f"rt.events.toy.{text}")


async def test_a_late_retry_cannot_land_behind_its_successor(settings: ServiceSettings, bus: Bus) -> None:
    """Somebody else of the same subject wrote in between: a chained event learns of it and goes behind it."""
    subject = "rt.events.toy.publish-chained"
    async with toys(settings) as (toy,):
        await ask(bus, "rt.echo", text="publish-chained", number=1)
        await until(lambda: toy.core.numbers(subject) == [0])
        await bus.publish_event(subject, b'{"text": "other", "number": 77}', "other", "t", "/s")
        toy.core.name = "again"
        await ask(bus, "rt.echo", text="publish-chained", number=2)
        await until(lambda: toy.core.numbers(subject) == [0, 77, 0, 1])


async def test_a_chained_event_that_is_there_already_is_not_stored_twice(settings: ServiceSettings, bus: Bus) -> None:
    subject = "rt.events.toy.publish-chained"
    async with toys(settings) as (toy,):
        await ask(bus, "rt.echo", text="publish-chained", number=1)
        await until(lambda: toy.core.numbers(subject) == [0])
    async with toys(settings) as (toy,):  # a new start says what it may have said before
        await ask(bus, "rt.echo", text="publish-chained", number=2)
        await until(lambda: toy.core.numbers(subject) == [0, 1])
        await ask(bus, "rt.echo", text="publish", number=1)
        await until(lambda: toy.core.numbers("rt.events.toy.publish") == [0])
        assert [0, 1] == toy.core.numbers(subject)


# --- faults ---


@pytest.mark.parametrize("kill", [True, False], ids=["kill -9", "SIGTERM"])
async def test_after_a_restart_of_the_server_everything_works_again_and_the_world_is_told(
    settings: ServiceSettings, bus: Bus, nats_server: NatsServer, kill: bool
) -> None:
    async with toys(settings) as (toy,):
        await bus.commit(LEDGER, [Write("a", b"1", 0)])
        await until(lambda: len(toy.core.of(KeyChanged)) == 1)
        nats_server.restart(kill)
        await until(lambda: len(toy.core.of(WatchReplayed)) == 2)
        await until(lambda: bus.connection.counters["reconnects"] == 1)
        (lost,), (back,) = toy.core.of(Disconnected), toy.core.of(Reconnected)
        assert toy.core.events.index(lost) < toy.core.events.index(back)
        await until(lambda: toy.runtime.health == "ok")

        async def answered() -> bool | None:
            return isinstance(await bus.request("rt.echo", b'{"text": "again"}', SECOND_US), Msg) or None

        await eventually(answered)
        await bus.publish("rt.metrics.a", b'{"text": "metric"}')
        await bus.publish("rt.place", b'{"text": "work"}')
        await bus.publish_event("rt.events.toy.x", b'{"text": "x"}', "1", "t", "/s")
        heard = {"rt.metrics.a", "rt.place", "rt.events.toy.x"}
        await until(lambda: heard <= {event.subject for event in toy.core.of(Received)})

        async def told() -> dict[str, Any] | None:
            last = await bus.last_event("rt.events.bus.toy")
            event = json.loads(last.body) if last else {}
            return event if event.get("kind") == "reconnected" else None

        event = await eventually(told)
    assert ("toy", "toy-0", "reconnected") == (event["service"], event["instance"], event["kind"])
    assert event["gap_us"] >= 0


async def test_a_server_that_forgot_everything_gets_its_streams_again(
    settings: ServiceSettings, nats_server: NatsServer
) -> None:
    memory = settings.model_copy(update={"storage": "memory"})
    async with toys(memory) as (toy,):
        nats_server.restart(kill=True)
        await until(lambda: len(toy.core.of(WatchReplayed)) == 2)
        bus = await Bus.connect(memory, "late")

        async def stored() -> bool | None:
            with contextlib.suppress(Exception):
                await bus.publish_event("rt.events.toy.x", b'{"text": "x", "number": 9}', "1", "t", "/s")
                return True
            return None

        await eventually(stored)
        await until(lambda: toy.core.numbers("rt.events.toy.x") == [9])
        await bus.close()


async def test_a_bug_in_the_core_stops_the_service(settings: ServiceSettings, bus: Bus) -> None:
    toy = await Running(settings, Toy(), None).ready()
    await bus.publish("rt.raise", b'{"text": "x"}')
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(toy.task, 10)
    assert raised.group_contains(RuntimeError, match="a bug")
    assert "stopped" == toy.runtime.state


async def test_a_bug_in_a_slow_effect_stops_the_service(settings: ServiceSettings, bus: Bus) -> None:
    async def slowly(effect: Slowly) -> None:
        raise ValueError("another bug")

    toy = await Running(settings, Toy(), None, slow={Slowly: slowly}).ready()
    await bus.publish("rt.echo", b'{"text": "slow"}')
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(toy.task, 10)
    assert raised.group_contains(ValueError, match="another bug")


@pytest.mark.parametrize("how", ["ends", "raises"])
async def test_a_root_task_that_ends_stops_the_service(settings: ServiceSettings, how: str) -> None:
    async def root(runtime: Runtime) -> None:
        runtime.post(SlowlyDone("from a root task"))
        runtime.count("rounds", 2)
        if how == "raises":
            raise ValueError("broken")

    toy = Running(settings, Toy(), None, tasks=(root,))
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await asyncio.wait_for(toy.task, 10)
    assert 2 == toy.runtime.counters["rounds"]


# --- the end ---


async def test_an_orderly_end_answers_what_it_has_says_its_last_and_is_gone(
    settings: ServiceSettings, bus: Bus, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready"
    toy = await Running(settings.model_copy(update={"ready_file": ready_file}), Toy(), None).ready()
    assert "toy" == json.loads(ready_file.read_text())["service"]
    asked = [asyncio.create_task(ask(bus, "rt.echo", text=f"{n}")) for n in range(50)]
    await until(lambda: len(toy.core.of(Received)) > 0)
    await toy.end()
    answered = [task for task in asked if not (await _settled(task))]
    assert len(toy.core.of(Received)) == len(answered)
    last = await bus.last_event("rt.events.last")
    assert last is not None
    assert ("stopped", False) == (toy.runtime.state, ready_file.exists())


async def _settled(task: "asyncio.Task[Msg]") -> BaseException | None:
    await asyncio.wait({task})
    return task.exception()


@pytest.mark.parametrize("server", ["up", "down"])
async def test_an_end_is_bounded_whatever_is_stuck(
    settings: ServiceSettings, bus: Bus, nats_server: NatsServer, server: str
) -> None:
    async def stuck(effect: Slowly) -> None:
        await asyncio.Event().wait()

    toy = await Running(settings, Toy(), None, slow={Slowly: stuck}).ready()
    await ask(bus, "rt.echo", text="slow")
    if server == "down":
        nats_server.kill()
        await until(lambda: not toy.runtime.bus.connection.is_up)
    toy.stop.set()
    await asyncio.wait_for(toy.task, 8)


async def test_an_end_before_the_server_is_there_is_immediate(
    settings: ServiceSettings, nats_server: NatsServer
) -> None:
    nats_server.kill()
    toy = Running(settings, Toy(), None)
    await asyncio.sleep(0)
    toy.stop.set()
    await asyncio.wait_for(toy.task, 3)

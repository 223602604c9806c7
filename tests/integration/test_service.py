"""A toy service on the real runtime and a real server: requests, discovery, the start, effects."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest

from shared.bus import Bus, Msg
from shared.effects import (
    CommitDone,
    CommitOutcome,
    KeyChanged,
    Publish,
    Received,
    Tick,
    WatchBegins,
    WatchReplayed,
    Write,
)
from shared.settings import ServiceSettings
from shared.subjects import EVENTS_STREAM, LEDGER, PLACE_STREAM
from shared.testing.nats_server import NatsServer
from shared.testing.wait import eventually, until
from tests.integration.toy_service import SECOND_US, Running, Say, Slowly, SlowlyDone, Toy, answers_to, ask, toys


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
    assert [WatchBegins, KeyChanged, WatchReplayed] == kinds[:3]
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


async def test_events_are_said_to_be_stored_only_when_the_stream_has_them(
    settings: ServiceSettings, bus: Bus, nats_server: NatsServer
) -> None:
    subjects = [f"rt.events.toy.{number}" for number in range(3)]
    async with toys(settings) as (toy,):
        await toy.runtime.events_stored()
        nats_server.pause()
        for subject in subjects:
            toy.runtime._outbox.add(Publish(subject, Say(text="x"), subject, "toy.said"), 0)
        stored = asyncio.create_task(toy.runtime.events_stored())
        await asyncio.wait([stored], timeout=0.1)
        assert not stored.done()
        nats_server.resume()
        await stored
        assert None not in [await bus.last_event(subject) for subject in subjects]


async def test_an_event_that_is_not_answered_in_time_goes_again_and_is_stored_once(
    settings: ServiceSettings, bus: Bus, nats_server: NatsServer
) -> None:
    async with toys(settings.model_copy(update={"ack_timeout_us": 100_000})) as (toy,):
        nats_server.pause()
        for number in range(2):
            event = Publish("rt.events.toy.late", Say(text="x", number=number), f"late-{number}", "toy.said")
            toy.runtime._outbox.add(event, 0)
        await until(lambda: toy.runtime.counters["event_retries"] > 0)
        nats_server.resume()
        await toy.runtime.events_stored()
        stored = await bus.history(EVENTS_STREAM, "rt.events.toy.late")
    assert [0, 1] == [json.loads(event.body)["number"] for event in stored]


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

"""Streams, following, watching and pulling on a real server, over restarts, gaps and deletions."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest

from shared.bus import ApiError, Bus, StoredMsg
from shared.effects import KeyChanged, WatchBegins, WatchEvent, WatchReplayed, Write
from shared.errors import NoStreamError
from shared.settings import ServiceSettings
from shared.subjects import EVENTS_STREAM, LEDGER, PLACE_STREAM
from shared.testing.nats_server import NatsServer
from shared.testing.wait import eventually, until

RESTARTS = pytest.mark.parametrize("kill", [True, False], ids=["kill -9", "SIGTERM"])


@asynccontextmanager
async def running(coroutine: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def say(bus: Bus, number: int, subject: str = "rt.events.test.a") -> int:
    async def stored() -> int | None:
        try:
            return (await bus.publish_event(subject, b"%d" % number, f"{subject}/{number}", "test", "/test")).seq
        except Exception:  # noqa: BLE001  # the server is being restarted: again with the same id
            return None

    return await eventually(stored)


def collector(into: list[int]) -> Callable[[StoredMsg], Coroutine[Any, Any, None]]:
    async def handle(message: StoredMsg) -> None:
        into.append(int(message.body))

    return handle


# --- streams ---


async def test_streams_made_by_many_at_once_have_the_settings_wanted(bus: Bus, settings: ServiceSettings) -> None:
    others = [await Bus.connect(settings.model_copy(update={"prefix": "x"}), f"{n}") for n in range(4)]
    await asyncio.gather(*(other.ensure_streams() for other in others))
    place = await bus._js.info("X_PLACE")
    assert (["x.place"], True, "old", 3600 * 10**9) == tuple(
        place["config"][name] for name in ("subjects", "no_ack", "discard", "max_age")
    )
    ledger = await bus._js.info("KV_x_ledger")
    assert (1, True, True, True) == tuple(
        ledger["config"][name] for name in ("max_msgs_per_subject", "allow_atomic", "allow_msg_ttl", "allow_direct")
    )
    for other in others:
        await other.close()


async def test_an_existing_stream_grows_to_what_is_wanted_and_is_never_shrunk(
    bus: Bus, settings: ServiceSettings
) -> None:
    for wanted_mib, expected_mib in [(600, 600), (10, 600)]:
        other = await Bus.connect(settings.model_copy(update={"events_max_mib": wanted_mib}), "other")
        await other.ensure_streams()
        await other.close()
        assert expected_mib << 20 == (await bus._js.info(EVENTS_STREAM))["config"]["max_bytes"]


async def test_a_stream_of_that_name_with_other_subjects_is_left_alone(bus: Bus, settings: ServiceSettings) -> None:
    await bus._js.call("STREAM.CREATE.Y_EVENTS", {"name": "Y_EVENTS", "subjects": ["somebody.else"]})
    other = await Bus.connect(settings.model_copy(update={"prefix": "y"}), "other")
    with pytest.raises(ApiError, match=r"somebody\.else"):
        await other.ensure_streams()
    await other.close()
    assert ["somebody.else"] == (await bus._js.info("Y_EVENTS"))["config"]["subjects"]


async def test_B5_a_publish_that_no_stream_takes_says_so_at_once(bus: Bus) -> None:
    with pytest.raises(NoStreamError, match=r"no stream takes other\.subject"):
        await bus.publish_event("other.subject", b"", "1", "t", "/s")


async def test_B14_an_event_repeated_with_its_id_is_stored_once(bus: Bus) -> None:
    first = await bus.publish_event("rt.events.test.a", b"1", "id", "t", "/s")
    second = await bus.publish_event("rt.events.test.a", b"1", "id", "t", "/s")
    assert (first.seq, False, True) == (second.seq, first.duplicate, second.duplicate)


async def test_an_event_has_the_attributes_of_cloudevents(bus: Bus) -> None:
    await bus.publish_event(
        "rt.events.test.a", b"{}", "id", "place.placed", "/rt/placer/1", at_us=1_700_000_000_000_001
    )
    last = await bus.last_event("rt.events.test.a")
    assert last is not None
    assert {
        "Nats-Msg-Id": "id",
        "ce-id": "id",
        "ce-type": "place.placed",
        "ce-source": "/rt/placer/1",
        "ce-time": "2023-11-14T22:13:20.000001Z",
        "ce-specversion": "1.0",
    } == last.headers


async def test_the_last_event_of_a_silent_subject_is_none(bus: Bus) -> None:
    assert await bus.last_event("rt.events.test.nothing") is None


# --- following ---


@RESTARTS
async def test_a_follower_gets_every_event_in_order_over_restarts(
    bus: Bus, nats_server: NatsServer, kill: bool
) -> None:
    seen: list[int] = []
    async with running(bus.follow(EVENTS_STREAM, "rt.events.test.>", 1, collector(seen))):
        for number in range(60):
            if number in (20, 40):
                nats_server.restart(kill)
            await say(bus, number)
        await until(lambda: len(seen) >= 60)
    assert list(range(60)) == seen


async def test_a_follower_starts_where_it_is_told_or_with_what_is_new(bus: Bus) -> None:
    seqs = [await say(bus, number) for number in range(3)]
    late: list[int] = []
    new: list[int] = []
    async with (
        running(bus.follow(EVENTS_STREAM, "rt.events.test.>", seqs[1], collector(late))),
        running(bus.follow(EVENTS_STREAM, "rt.events.test.>", 0, collector(new))),
    ):
        number = 3
        while not new:  # the follower of what is new is there once it hears something
            await say(bus, number)
            await asyncio.sleep(0.02)
            number += 1
        await until(lambda: len(late) == number - 1)
    assert list(range(1, number)) == late
    assert min(new) >= 3


async def test_a_deleted_consumer_is_noticed_by_silence_and_nothing_is_lost(bus: Bus) -> None:
    seen: list[int] = []
    async with running(bus.follow(EVENTS_STREAM, "rt.events.test.>", 1, collector(seen))):
        await say(bus, 0)
        await until(lambda: seen == [0])
        (consumer,) = (await bus._js.call(f"CONSUMER.NAMES.{EVENTS_STREAM}"))["consumers"]
        await bus._js.call(f"CONSUMER.DELETE.{EVENTS_STREAM}.{consumer}")
        await say(bus, 1)
        await until(lambda: seen == [0, 1])


async def test_a_slow_handler_is_not_taken_for_silence_and_holds_the_server_back(bus: Bus) -> None:
    for number in range(5):
        await say(bus, number)
    seen: list[int] = []
    again: list[str] = []
    bus._told = lambda stream, why: again.append(why)
    go_on = asyncio.Event()

    async def slow(message: StoredMsg) -> None:
        seen.append(int(message.body))
        await go_on.wait()

    async with running(bus.follow(EVENTS_STREAM, "rt.events.test.>", 1, slow)):
        await until(lambda: seen == [0])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 4.5)  # longer than the silence that ends a session
        go_on.set()
        await until(lambda: len(seen) == 5)
    assert ([0, 1, 2, 3, 4], []) == (seen, again)


@pytest.mark.parametrize(("ahead", "expected"), [(0, [2, 3]), (1, [3]), (2, [1, 2, 3])])
async def test_a_place_beyond_the_end_is_of_another_stream_and_this_one_is_followed_from_its_beginning(
    bus: Bus, ahead: int, expected: list[int]
) -> None:
    """One place beyond the last message is not: nothing new has come yet."""
    last = [await say(bus, number) for number in (1, 2)][-1]
    seen: list[int] = []

    async def follows() -> object:
        return (await bus._js.call(f"CONSUMER.NAMES.{EVENTS_STREAM}"))["consumers"] or None

    async with running(bus.follow(EVENTS_STREAM, "rt.events.test.>", last + ahead, collector(seen))):
        await eventually(follows)
        await say(bus, 3)
        await until(lambda: 3 in seen)
    assert expected == seen


async def test_a_stream_made_anew_is_followed_from_its_beginning(bus: Bus) -> None:
    seen: list[int] = []
    for number in range(3):
        await say(bus, number)
    async with running(bus.follow(EVENTS_STREAM, "rt.events.test.>", 1, collector(seen))):
        await until(lambda: len(seen) == 3)
        await bus._js.call(f"STREAM.DELETE.{EVENTS_STREAM}")
        await bus.ensure_streams()
        await say(bus, 7)
        await until(lambda: seen[3:] == [7])


async def test_many_events_arrive_all_and_in_order(bus: Bus) -> None:
    async def write(subject: str) -> None:
        for number in range(500):
            await say(bus, number, subject)

    seen: dict[str, list[int]] = {}

    async def handle(message: StoredMsg) -> None:
        seen.setdefault(message.subject, []).append(int(message.body))

    subjects = [f"rt.events.test.{name}" for name in "abcd"]
    async with running(bus.follow(EVENTS_STREAM, "rt.events.test.>", 1, handle)):
        await asyncio.gather(*(write(subject) for subject in subjects))
        await until(lambda: sum(map(len, seen.values())) == 2000)
    assert {subject: list(range(500)) for subject in subjects} == seen


# --- watching ---


class Watched:
    """What a watch told, and the map that follows from it."""

    def __init__(self) -> None:
        self.replays: list[frozenset[str]] = []
        self.keys: dict[str, bytes] = {}
        self.begun = 0

    async def __call__(self, event: WatchEvent) -> None:
        if isinstance(event, WatchBegins):
            self.begun += 1
            return
        assert self.begun, "a watch begins before it says anything"
        if isinstance(event, WatchReplayed):
            self.replays.append(event.keys)
            self.keys = {key: value for key, value in self.keys.items() if key in event.keys}
        elif event.value is None:
            self.keys.pop(event.key, None)
        else:
            self.keys[event.key] = event.value


async def test_a_watch_of_an_empty_bucket_is_replayed_at_once(bus: Bus) -> None:
    watched = Watched()
    async with running(bus.watch(LEDGER, watched)):
        await until(lambda: watched.replays == [frozenset()])


async def test_B9_a_watch_tells_all_keys_then_replayed_then_changes_without_end(bus: Bus) -> None:
    await bus.commit(LEDGER, [Write("a", b"1", 0), Write("b", b"1", 0)])
    await bus.commit(LEDGER, [Write("b", None, 2)])
    watched = Watched()
    async with running(bus.watch(LEDGER, watched)):
        await until(lambda: watched.replays == [frozenset({"a"})])
        await bus.commit(LEDGER, [Write("c", b"1", 0)])
        await bus.commit(LEDGER, [Write("a", None, 1)])
        await until(lambda: watched.keys == {"c": b"1"})
    assert 1 == len(watched.replays)


async def test_a_watch_of_some_keys_is_told_of_no_others(bus: Bus) -> None:
    await bus.commit(LEDGER, [Write("node.a", b"1", 0), Write("request.a", b"1", 0), Write("node.b", b"1", 0)])
    watched = Watched()
    async with running(bus.watch(LEDGER, watched, "node.*")):
        await until(lambda: watched.replays == [frozenset({"node.a", "node.b"})])
        await bus.commit(LEDGER, [Write("request.b", b"1", 0), Write("node.a", b"2", 1)])
        await until(lambda: watched.keys == {"node.a": b"2", "node.b": b"1"})
    assert 1 == len(watched.replays)


async def test_changes_that_are_taken_at_once_stay_in_order_with_those_that_wait(bus: Bus) -> None:
    told, at_once, replayed = list[int](), list[int](), asyncio.Event()

    def take(change: KeyChanged) -> bool:
        if change.revision % 3:
            at_once.append(change.revision)
            told.append(change.revision)
        return change.revision % 3 > 0

    async def handle(event: WatchEvent) -> None:
        if isinstance(event, WatchReplayed):
            replayed.set()
        if not isinstance(event, KeyChanged):
            return
        await asyncio.sleep(0.005)  # others come meanwhile
        told.append(event.revision)

    async with running(bus.watch(LEDGER, handle, at_once=take)):
        await replayed.wait()
        for number in range(40):
            await bus.commit(LEDGER, [Write(f"a{number}", b"1", 0)])
        await bus.commit(LEDGER, [Write("a39", None, 40)])
        await until(lambda: told[-1:] == [41])
    assert list(range(1, 42)) == told
    assert 0 < len(at_once) < 27


@RESTARTS
async def test_B10_a_watch_lives_through_a_restart_and_replays(
    bus: Bus, nats_server: NatsServer, settings: ServiceSettings, kill: bool
) -> None:
    await bus.commit(LEDGER, [Write("a", b"1", 0), Write("b", b"1", 0)])
    watched = Watched()
    async with running(bus.watch(LEDGER, watched)):
        await until(lambda: len(watched.replays) == 1)
        nats_server.restart(kill)
        await until(lambda: len(watched.replays) == 2)
        await bus.commit(LEDGER, [Write("b", None, 2)])
        await until(lambda: watched.keys == {"a": b"1"})
    assert 2 == watched.begun


async def test_a_key_that_ran_out_while_the_link_was_down_is_missing_in_the_replay(
    bus: Bus, nats_server: NatsServer
) -> None:
    await bus.commit(LEDGER, [Write("lease.a", b"1", 0, ttl_s=1), Write("b", b"1", 0)])
    watched = Watched()
    async with running(bus.watch(LEDGER, watched)):
        await until(lambda: len(watched.replays) == 1)

        async def gone() -> bool | None:
            return await bus.get(LEDGER, "lease.a") is None or None

        await eventually(gone)
        nats_server.restart()
        await until(lambda: watched.replays[1:] == [frozenset({"b"})])
    assert {"b": b"1"} == watched.keys


async def test_a_bucket_that_was_lost_is_made_again_and_replayed_as_empty(bus: Bus) -> None:
    await bus.commit(LEDGER, [Write("a", b"1", 0)])
    watched = Watched()
    async with running(bus.watch(LEDGER, watched)):
        await until(lambda: watched.replays == [frozenset({"a"})])
        await bus._js.call(f"STREAM.DELETE.KV_{LEDGER}")
        await until(lambda: watched.replays[1:] == [frozenset()])
    assert {} == watched.keys


async def test_a_large_bucket_is_replayed_whole_while_it_is_written(bus: Bus) -> None:
    for first in range(0, 5000, 1000):
        await bus.commit(LEDGER, [Write(f"k{first + n}", b"x" * 200, 0) for n in range(1000)])
    watched = Watched()

    async def write() -> None:
        for number in range(200):
            await bus.put(LEDGER, f"k{number}", b"new")

    async with running(bus.watch(LEDGER, watched)):
        await asyncio.gather(write(), until(lambda: bool(watched.replays)))
        await until(lambda: sum(value == b"new" for value in watched.keys.values()) == 200)
    assert 5000 == len(watched.keys)
    assert 5000 == len(watched.replays[0])


async def test_a_replay_names_every_key_though_all_are_written_over_and_over(bus: Bus) -> None:
    """The consumer says "nothing pending" a moment too early when a key is written just then."""
    names = frozenset(f"k{number}" for number in range(300))
    await bus.commit(LEDGER, [Write(name, b"x", 0) for name in sorted(names)])
    wrong: list[frozenset[str]] = []

    async def write(start: int) -> None:
        for number in range(start, 10**9, 7):
            await bus.put(LEDGER, f"k{number * 31 % 300}", b"y")

    async with running(write(0)), running(write(1)), running(write(2)), running(write(3)):
        for _ in range(40):
            watched = Watched()
            async with running(bus.watch(LEDGER, watched)):
                await until(lambda: bool(watched.replays))  # noqa: B023  # called in this round alone
            wrong += [names ^ keys for keys in watched.replays if keys != names]
    assert [] == wrong


# --- pulling ---


class Worker:
    """Takes messages of RT_PLACE and acknowledges those that it is told to."""

    def __init__(self, bus: Bus, *, ack: bool = True) -> None:
        self._bus = bus
        self._ack = ack
        self.seen: list[int] = []
        self.messages: list[StoredMsg] = []
        self.tokens: list[int] = []

    async def __call__(self, message: StoredMsg) -> None:
        self.messages.append(message)
        self.seen.append(json.loads(message.body)["number"])
        self.tokens.append(self._bus.ack_token(message))
        if self._ack:
            await self._bus.ack(self.tokens[-1])

    def run(self) -> Coroutine[Any, Any, Any]:
        return self._bus.pull(PLACE_STREAM, "placer", self)


async def request(bus: Bus, number: int) -> None:
    await bus.publish("rt.place", json.dumps({"number": number}).encode(), headers={"Mark": str(number)})


async def test_a_stored_request_has_no_reply_and_says_when_and_how_often(bus: Bus) -> None:
    await request(bus, 1)
    worker = Worker(bus)
    async with running(worker.run()):
        await until(lambda: worker.seen == [1])
    (message,) = worker.messages
    assert ("rt.place", 1, 1, "1") == (message.subject, message.seq, message.delivered, message.headers["Mark"])
    assert message.at_us > 1_700_000_000_000_000


async def test_two_workers_share_the_messages_and_each_goes_to_one(bus: Bus, settings: ServiceSettings) -> None:
    other = await Bus.connect(settings, "other")
    workers = [Worker(bus), Worker(other)]
    async with running(workers[0].run()), running(workers[1].run()):
        for number in range(600):
            await request(bus, number)
        await until(lambda: sum(len(worker.seen) for worker in workers) == 600)
    assert list(range(600)) == sorted(workers[0].seen + workers[1].seen)
    await other.close()


@RESTARTS
async def test_pulling_goes_on_after_a_restart(bus: Bus, nats_server: NatsServer, kill: bool) -> None:
    worker = Worker(bus)
    async with running(worker.run()):
        await request(bus, 0)
        await until(lambda: worker.seen == [0])
        nats_server.restart(kill)
        await until(lambda: bus.connection.counters["reconnects"] == 1)
        await request(bus, 1)
        await until(lambda: 1 in worker.seen)


async def test_pulling_goes_on_after_its_consumer_was_deleted(bus: Bus) -> None:
    worker = Worker(bus)
    async with running(worker.run()):
        await request(bus, 0)
        await until(lambda: worker.seen == [0])
        await bus._js.call(f"CONSUMER.DELETE.{PLACE_STREAM}.placer")
        await request(bus, 1)
        await until(lambda: worker.seen[-1] == 1)


async def test_a_message_put_off_comes_again_and_says_so(bus: Bus) -> None:
    worker = Worker(bus, ack=False)
    async with running(worker.run()):
        await request(bus, 0)
        await until(lambda: len(worker.tokens) == 1)
        await bus.ack(worker.tokens[0], delay_us=50_000)
        await until(lambda: len(worker.tokens) == 2)
        await bus.ack(worker.tokens[1])
    assert [1, 2] == [message.delivered for message in worker.messages]


async def test_B19_an_acknowledgement_that_was_used_is_ignored(bus: Bus) -> None:
    worker = Worker(bus)
    async with running(worker.run()):
        await request(bus, 0)
        await until(lambda: len(worker.tokens) == 1)
        await bus.ack(worker.tokens[0], delay_us=1)  # after its acknowledgement: must not bring it back
        await request(bus, 1)
        await until(lambda: 1 in worker.seen)
    assert [0, 1] == worker.seen


async def test_the_copy_of_a_request_never_answers_the_requester(bus: Bus, nats_url: str) -> None:
    client = await nats.connect(nats_url)
    with pytest.raises(nats.errors.NoRespondersError):
        await client.request("rt.elsewhere", b"{}", timeout=5)
    with pytest.raises(nats.errors.TimeoutError):
        await client.request("rt.place", b"{}", timeout=0.3)  # stored, and nobody decides it
    await client.close()
    assert 1 == (await bus._js.info(PLACE_STREAM))["state"]["messages"]

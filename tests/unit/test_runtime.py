"""What of the runtime needs no server: shutdown stages, the inbox, settings, what a stream may change."""

import asyncio
from typing import Any

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from shared.bus import rfc3339
from shared.bus.jetstream import missing, parse_headers
from shared.effects import Effect
from shared.service import Runtime, Service, shutdown
from shared.service.inbox import Inbox
from shared.service.intake import request_id_of
from shared.settings import ServiceSettings
from shared.streams import bucket_stream, named, wanted
from shared.testing.manual_clock import ManualClock


def test_the_stages_of_an_end_fit_the_hard_kill() -> None:
    assert sum(shutdown.STAGES_US) <= shutdown.MOST_US < shutdown.GIVE_UP_US < shutdown.HARD_KILL_US


async def test_a_full_inbox_holds_the_bus_back_and_never_the_service_itself() -> None:
    inbox = Inbox(limit=2)
    await inbox.put("a")
    inbox.post("b")
    inbox.post("c")
    waiting = asyncio.create_task(inbox.put("d"))
    await asyncio.sleep(0)
    assert not waiting.done()
    taken = [await inbox.get() for _ in range(2)]
    await waiting
    assert ["a", "b", "c", "d"] == taken + [await inbox.get() for _ in range(2)]


async def test_an_empty_inbox_waits_for_the_next_event() -> None:
    inbox = Inbox()
    taking = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.post("a")
    assert "a" == await taking


class Busy:
    """A core that needs a millisecond for each event."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.taken = clock, 0

    def handle(self, event: object, now_us: int) -> list[Effect]:
        del event, now_us
        self.clock.suspend(1_000)
        self.taken += 1
        return []

    def check(self) -> None: ...

    def story(self, id: str) -> list[str]:  # noqa: A002
        return [id]


async def test_a_core_that_is_behind_lets_what_it_said_go_out_meanwhile() -> None:
    clock = ManualClock()
    core = Busy(clock)
    runtime = Runtime(Service("toy", "busy"), core, ServiceSettings(), {}, clock)
    for number in range(9):
        runtime.post(number)
    feeding, seen = asyncio.create_task(runtime._feed()), list[int]()
    while core.taken < 9:
        await asyncio.sleep(0)
        seen.append(core.taken)
    feeding.cancel()
    assert [3, 5, 7, 9] == seen


@pytest.mark.parametrize(
    ("want", "have", "expected"),
    [
        ({"max_age": 60}, {"max_age": 30}, {"max_age": 60}),
        ({"max_age": 60}, {"max_age": 90}, {}),
        ({"max_age": 60}, {"max_age": 0}, {}),
        ({"max_bytes": 60}, {"max_bytes": -1}, {}),
        ({"num_replicas": 3}, {"num_replicas": 1}, {"num_replicas": 3}),
        ({"num_replicas": 1}, {"num_replicas": 3}, {}),
        ({"storage": "memory"}, {"storage": "file"}, {}),
        ({"no_ack": True}, {}, {"no_ack": True}),
        ({"allow_atomic": True}, {"allow_atomic": True}, {}),
    ],
)
def test_a_stream_that_exists_is_mended_and_never_shrunk(
    want: dict[str, Any], have: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert expected == missing(want, have)


@pytest.mark.parametrize(
    ("name", "prefix", "expected"),
    [
        ("RT_EVENTS", "rt", "RT_EVENTS"),
        ("RT_EVENTS", "lab-1", "LAB-1_EVENTS"),
        ("rt_ledger", "rt", "rt_ledger"),
        ("rt_ledger", "lab-1", "lab-1_ledger"),
        ("OTHER", "lab-1", "OTHER"),
    ],
)
def test_names_of_streams_and_buckets_follow_the_prefix(name: str, prefix: str, expected: str) -> None:
    assert expected == named(name, prefix)


def test_every_stream_of_a_cluster_stands_under_its_prefix() -> None:
    specs = {spec.name: spec.config["subjects"] for spec in wanted(ServiceSettings(prefix="x"))}
    assert {
        "X_EVENTS": ["x.events.>"],
        "X_PLACE": ["x.place"],
        bucket_stream("rt_ledger", "x"): ["$KV.x_ledger.>"],
        bucket_stream("rt_nodes", "x"): ["$KV.x_nodes.>"],
        bucket_stream("rt_deadlines", "x"): ["$KV.x_deadlines.>"],
        bucket_stream("rt_learned", "x"): ["$KV.x_learned.>"],
    } == specs


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"request_id": "a"}', "a"),
        (b'{"request_id": ""}', None),
        (b'{"request_id": 5}', None),
        (b'["request_id"]', None),
        (b"{", None),
        (b"\xff", None),
        (b'{"request_id": "\\ud800"}', None),
        (b'{"request_id": "' + b"x" * 254 + b'"}', None),
        (b"[" * 100_000, None),
        (b'{"n": ' + b"9" * 5000 + b', "request_id": "a"}', None),
    ],
)
def test_the_request_id_of_a_malformed_body_is_read_where_it_can_be(body: bytes, expected: str | None) -> None:
    assert expected == request_id_of(body)


def test_headers_of_a_stored_message_are_read_from_their_wire_form() -> None:
    assert {"KV-Operation": "DEL", "a": "b: c"} == parse_headers(b"NATS/1.0\r\nKV-Operation: DEL\r\na: b: c\r\n\r\n")
    assert {} == parse_headers(b"")


def test_a_time_of_an_event_is_utc_with_microseconds() -> None:
    assert "2023-11-14T22:13:20.000001Z" == rfc3339(1_700_000_000_000_001)


class OwnSettings(ServiceSettings):
    """As a service derives its own."""

    model_config = SettingsConfigDict(env_prefix="LAXITY_TOY_")
    beat_us: int = Field(default=5)


def test_a_service_reads_the_common_settings_and_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAXITY_NATS_URL", "nats://elsewhere:1")
    monkeypatch.setenv("LAXITY_TOY_BEAT_US", "7")
    monkeypatch.setenv("LAXITY_PREFIX", "x")
    settings = OwnSettings()
    assert ("nats://elsewhere:1", 7, "x") == (settings.nats_url, settings.beat_us, settings.prefix)


def test_an_instance_is_named_after_host_and_process_unless_told() -> None:
    assert ServiceSettings().instance.rpartition("-")[2].isdigit()
    assert "a" == ServiceSettings(instance="a").instance


async def test_a_manual_clock_wakes_sleepers_in_order_and_only_when_moved() -> None:
    clock, woken = ManualClock(), []

    async def sleep(for_us: int) -> None:
        await clock.sleep_us(for_us)
        woken.append((for_us, clock.now_us()))

    tasks = [asyncio.create_task(sleep(for_us)) for for_us in (30, 10, 20)]
    await asyncio.sleep(0)
    assert (3, []) == (clock.sleeping, woken)
    await clock.advance(25)
    assert [(10, 10), (20, 20)] == woken
    await clock.advance(5)
    assert [(10, 10), (20, 20), (30, 30)] == woken
    await asyncio.gather(*tasks)

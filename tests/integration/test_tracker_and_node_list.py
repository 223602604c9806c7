"""Tracker and node-list as processes on a real server: verdicts survive kills, one writer at a time."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from services.deadline_tracker.shares import partition_of
from shared.messages import TaskEventKind
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess
from tests.outside import events, until, value
from tests.unit.test_tracker_core import batch, row

BEGIN, END, OVERDUE, *_ = TaskEventKind


async def say(client: Client, *rows: tuple[int, ...]) -> None:
    await client.jetstream().publish("rt.events.task.n1", batch(rows).to_json())


async def test_verdicts_of_a_killed_tracker_are_neither_lost_nor_doubled(
    nats_server: NatsServer, tmp_path: Path, outside: Client
) -> None:
    tracker = ServiceProcess("services.deadline_tracker", tmp_path, nats_server.url)
    with tracker:
        for n in range(0, 30, 3):
            await say(
                outside,
                row(BEGIN, n + 1),
                row(OVERDUE, n + 1),
                row(END, n + 2, n + 1, stamp_us=60_000),
                row(BEGIN, n + 3),
            )
            if n in (9, 18):
                tracker.kill()
                tracker.start()

        async def judged() -> Any:
            state = await value(outside, "rt_deadlines", "node.n1")
            record = state["containers"][0] if state else {"missed": 0, "lost": 0, "open": 0}
            return record["missed"] + record["lost"] + record["open"] >= 20 and record

        record = await until(judged, "all twenty tasks in the checkpoint")
        await until(
            lambda: _equals(lambda: missed(outside), [f"n1/r0/{n + 1}/missed" for n in range(0, 30, 3)]), "all said"
        )
        assert (record["met"], record["missed"]) == (0, 10)
        assert tracker.stop() == 0


async def missed(client: Client) -> list[str]:
    stored = await events(client, "rt.events.deadline.>")
    return [event_id for event_id, body in stored if body["kind"] == "missed"]


async def holder_of(client: Client, node: str) -> str:
    """Who follows a node; "" while nobody does."""
    layout = await value(client, "rt_deadlines", "lease.deadline-tracker")
    if not layout:
        return ""
    number = partition_of(node, layout["partitions"])
    found = await value(client, "rt_deadlines", f"lease.deadline-tracker-{number}")
    return found["holder"] if found and found["ttl_us"] else ""


async def holders(client: Client) -> Counter[str]:
    """How many partitions each tracker holds."""
    leases = [await value(client, "rt_deadlines", f"lease.deadline-tracker-{number}") for number in range(8)]
    return Counter(lease["holder"] for lease in leases if lease and lease["ttl_us"])


async def shares(client: Client) -> list[int]:
    return sorted((await holders(client)).values())


async def test_trackers_share_the_partitions_and_one_that_joins_or_leaves_changes_the_shares(
    nats_server: NatsServer, tmp_path: Path, outside: Client
) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    trackers = [ServiceProcess("services.deadline_tracker", folder, nats_server.url) for folder in folders]
    with trackers[0]:
        await until(lambda: _equals(lambda: shares(outside), [8]), "one holds all")
        with trackers[1]:
            await until(lambda: _equals(lambda: shares(outside), [4, 4]), "two hold half of them each")
            with trackers[2]:
                await until(lambda: _equals(lambda: shares(outside), [2, 3, 3]), "three hold a third of them each")
                assert trackers[2].stop() == 0
                asked_s = time.monotonic()
                await until(lambda: _equals(lambda: shares(outside), [4, 4]), "two again")
                print(f"two again {time.monotonic() - asked_s:.1f} s after the third was asked to stop")


async def test_another_tracker_goes_on_where_the_killed_one_stopped_and_says_each_verdict_once(
    nats_server: NatsServer, tmp_path: Path, outside: Client
) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first = ServiceProcess("services.deadline_tracker", tmp_path / "a", nats_server.url)
    second = ServiceProcess("services.deadline_tracker", tmp_path / "b", nats_server.url)

    with first, second:
        await until(lambda: _equals(lambda: shares(outside), [4, 4]), "both hold their share")
        was = await holder_of(outside, "n1")
        active, other = (first, second) if f"-{first.pid}-" in was else (second, first)
        for n in range(1, 21):
            if n == 10:
                active.kill()
                killed_s = time.monotonic()
            await say(outside, row(BEGIN, n), row(OVERDUE, n))

        async def all_said() -> bool:
            return len(await missed(outside)) >= 20

        await until(all_said, "the verdicts of both halves", 15)
        print(f"all verdicts {time.monotonic() - killed_s:.1f} s after the active tracker was killed")
        assert f"-{other.pid}-" in await holder_of(outside, "n1")
        assert [f"n1/r0/{n}/missed" for n in range(1, 21)] == await missed(outside)
        assert other.stop() == 0


async def test_an_outside_client_is_told_of_a_miss_without_any_set_up(
    nats_server: NatsServer, tmp_path: Path, outside: Client
) -> None:
    heard: asyncio.Queue[Any] = asyncio.Queue()
    with ServiceProcess("services.deadline_tracker", tmp_path, nats_server.url):
        await outside.subscribe("rt.events.>", cb=heard.put)
        await say(outside, row(BEGIN, 1), row(OVERDUE, 1))
        bodies = [json.loads((await asyncio.wait_for(heard.get(), 10)).data) for _ in range(3)]
    assert [body.get("kind") for body in bodies if "container" in body] == ["at_risk", "missed"]


def heartbeat(node: str, counter: int) -> bytes:
    device = {"index": 0, "model": "H200", "regime": "gated", "healthy": True, "memory_mib": 1000}
    unknown = {"utilisation_ratio": {"value": None, "reason": "first_sample"}, "memory_used_mib": {"value": 1.0}}
    body = {
        "node": node, "start_id": "s", "counter": counter, "at_us": 0, "mono_us": 0, "period_us": 1_000_000,
        "devices": [{"uuid": "g0", **device, **unknown}, {"uuid": "g1", **device, **unknown}],
        "cpu_milli": 1000, "memory_mib": 1000,
    }  # fmt: skip
    return json.dumps(body).encode()


async def test_the_list_follows_a_warning_and_a_standby_takes_over_from_a_killed_writer(
    nats_server: NatsServer, tmp_path: Path, outside: Client
) -> None:
    counter = itertools.count(1)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first = ServiceProcess("services.node_list", tmp_path / "a", nats_server.url)
    second = ServiceProcess("services.node_list", tmp_path / "b", nats_server.url)

    async def listed() -> Any:
        await outside.publish("rt.metrics.n1", heartbeat("n1", next(counter)))
        reply = json.loads((await outside.request("rt.nodes", b"{}", timeout=5)).data)
        return [(d["uuid"], d["standing"]) for d in reply["devices"]]

    async def lease() -> Any:
        found = await value(outside, "rt_nodes", "lease.node-list")
        return found and found["holder"]

    with first, second:
        ready = [("g0", "guaranteed"), ("g1", "guaranteed")]
        await until(lambda: _equals(listed, ready), "both devices guaranteed")
        holder = await lease()
        writer, standby = (first, second) if f"-{first.pid}-" in holder else (second, first)
        writer.kill()

        async def taken_over() -> Any:
            await listed()
            return await lease() != holder

        await until(taken_over, "the standby holds the lease", 10)
        assert standby.stop() == 0


async def _equals(listed: Callable[[], Awaitable[Any]], expected: Any) -> bool:
    return await listed() == expected


async def test_a_node_list_query_that_is_no_json_is_answered_with_field_found_and_allowed(
    nats_server: NatsServer, tmp_path: Path, outside: Client
) -> None:
    with ServiceProcess("services.node_list", tmp_path, nats_server.url):
        for body in (b"", b"{", b"[]", b'{"limit": 0}', b'{"class": "slow"}', b'{"limit": NaN}'):
            reply = await outside.request("rt.nodes", body, timeout=5)
            answer = json.loads(reply.data)
            assert (answer["outcome"], set(answer["error"])) == ("error", {"field", "found", "allowed"})
            assert (reply.headers or {}).get("Nats-Service-Error-Code") == "400"
        assert json.loads((await outside.request("rt.nodes", b"{}", timeout=5)).data)["devices"] == []

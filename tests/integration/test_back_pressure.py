"""A monitor that cannot get rid of what it sees: metrics go first, rings hold the rest, and what is lost is told."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

import laxity
from laxity.ring import Ring
from laxity.tasks import Task
from services.monitor.ring_loop import MAX_UNSENT
from shared.messages import TaskEventKind
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess
from tests.monitor_folders import labels_of
from tests.outside import Json, events, heartbeat, until

BEGIN, END, OVERDUE, ABORTED, LOST, CLOSED = TaskEventKind
LONG_US = 60_000_000
WRITTEN_UNREAD = 200
"""Tasks marked while nobody reads: more than the small ring holds."""


class Container:
    """One ring, written by this process; `written` records so far."""

    def __init__(self, root: Path, name: str, records: int) -> None:
        self.ring = Ring(str(labels_of(root, name)), records)
        self.id = self.ring.path.stem.removeprefix("ring-")

    @property
    def written(self) -> int:
        return self.ring.written

    def begin(self, deadline_us: int = LONG_US) -> Task:
        task = laxity.task("infer", deadline_us=deadline_us)
        task.ring = self.ring
        return task.__enter__()


@pytest.fixture
def monitor(nats_url: str, tmp_path: Path) -> Iterator[ServiceProcess]:
    settings = {
        "LAXITY_MONITOR_NODE": "n1",
        "LAXITY_MONITOR_RING_ROOT": str(tmp_path / "rings"),
        "LAXITY_MONITOR_PROBE": "fake",
        "LAXITY_MONITOR_FAKE_DEVICES": json.dumps([{"count": 150}]),  # so that what is held of heartbeats is soon full
        "LAXITY_MONITOR_PERIOD_US": "100000",
        "LAXITY_MONITOR_STALE_AFTER_US": "500000",
        "LAXITY_METRICS_PORT": "0",
    }
    with ServiceProcess("services.monitor", tmp_path, nats_url, **settings) as process:
        yield process


async def number(monitor: ServiceProcess, name: str) -> float:
    """Of the monitor's /metrics: the bus cannot tell it now; 0 where it is not there yet."""
    url = re.findall(r"http://127\.0\.0\.1:\d+[/\w]*", monitor.log)[-1]
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())  # noqa: S310
    return next((float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)), 0.0)


async def batches(client: Client) -> list[Json]:
    """Each once."""
    return list(dict(await events(client, "rt.events.task.n1")).values())


def rows_of(told: list[Json], ring: str) -> list[tuple[TaskEventKind, int]]:
    """Kind and sequence of all events of a ring, however often they came, in stream order."""
    return [
        (TaskEventKind(kind), seq)
        for batch in told
        for kind, seq, place in zip(*(batch.get(column, []) for column in ("kind", "seq", "ring")), strict=True)
        if batch["rings"][place]["ring"] == ring
    ]


async def test_a_bus_that_is_away_costs_metrics_first_then_what_the_rings_cannot_hold_and_both_are_told(
    monitor: ServiceProcess, nats_server: NatsServer, outside: Client, tmp_path: Path
) -> None:
    small, large = (Container(tmp_path / "rings", name, records) for name, records in (("small", 64), ("large", 4096)))
    left_open = [each.begin() for each in (small, large)]
    await heartbeat(outside, lambda body: body["counters"]["tasks.begin"] == 2, "both rings are read")
    nats_server.kill()

    async def full() -> bool:
        for _ in range(50):
            await asyncio.sleep(0.006)  # more than a poll: what ends late is published at once, in a batch of its own
            for each in (small, large):
                each.begin(deadline_us=1).end()
        return await number(monitor, "laxity_service_outbox_events") >= MAX_UNSENT

    await until(full, "as many batches wait as may wait", limit_s=60)

    async def dropped() -> bool:
        return await number(monitor, 'laxity_service_counted_total{what="dropped"}') > 0

    await until(dropped, "heartbeats are dropped", limit_s=60)
    for each in (small, large):
        for _ in range(WRITTEN_UNREAD):
            each.begin().end()
    nats_server.start()
    await heartbeat(outside, lambda body: body["counters"].get("tasks.lost_records"), "the loss is counted")
    for task in left_open:
        task.end()
    for each in (small, large):
        each.ring.close()

    async def closed() -> Any:
        told = await batches(outside)
        return told if all((CLOSED, each.written) in rows_of(told, each.id) for each in (small, large)) else None

    told: list[Json] = await until(closed, "both rings are closed", limit_s=60)
    assert list(range(1, len(told) + 1)) == [batch["counter"] for batch in told]
    lost: Counter[str] = Counter()
    for batch in told:
        lost.update(batch.get("lost_records", {}))
    found = {each: [row for row in rows_of(told, each.id) if row[0] in (BEGIN, END)] for each in (small, large)}
    assert [seq for _, seq in found[large]] == list(range(1, large.written + 1))
    assert len({seq for _, seq in found[small]}) == len(found[small]) == small.written - lost[small.id]
    assert {small.id} == set(lost)
    assert [LOST] == [kind for kind, _ in rows_of(told, small.id) if kind == LOST]
    assert LOST not in [kind for kind, _ in rows_of(told, large.id)]

    def agrees(body: Json) -> bool:
        counted = Counter(kind for rows in found.values() for kind, _ in rows)
        mine = (counted[BEGIN], counted[END], lost.total())
        return mine == tuple(body["counters"][f"tasks.{name}"] for name in ("begin", "end", "lost_records"))

    await heartbeat(outside, agrees, "the heartbeat counts each record once")
    (said,) = [body for _, body in await events(outside, "rt.events.bus.monitor") if body["kind"] == "reconnected"]
    assert int(re.findall(r"(\d+) lossy messages dropped", said["detail"])[0]) > 0

"""Trackers come, leave and are killed with their server: what they say equals a recount of the stream, exactly."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client

from shared.messages import TaskBatch
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess
from tests.outside import events, until, value
from tests.property.test_tracker_rows import DEADLINE, GUARANTEE, WINDOW, Monitor, batches, harmed
from tests.row_by_row import RowByRow, heard

NODES = ("n1", "n2", "n4")
"""In different ones of eight partitions."""
SETTINGS = {"LAXITY_TRACKER_GUARANTEE": str(GUARANTEE), "LAXITY_TRACKER_WINDOW": str(WINDOW)}
ACTS = ("begin", "end", "end", "task", "task", "task", "late", "overdue", "aborted", "lost", "gap")


def written(chance: Random, node: str, tasks: int) -> list[TaskBatch]:
    """What a monitor says, with losses, repeats and swaps, in pieces of a few rows."""
    monitor = Monitor()
    for _ in range(tasks):
        took_us = chance.choice([0, 10, DEADLINE, DEADLINE + 1, -1])
        monitor.act(chance.choice(ACTS), chance.randrange(3), chance.randrange(4), took_us)
    harm = [
        (chance.choice(["drop", "repeat", "swap", "nonsense"]), chance.randrange(tasks)) for _ in range(tasks // 20)
    ]
    cuts = {chance.randrange(1, tasks) for _ in range(tasks // 8)}
    again = [chance.randrange(tasks // 8) for _ in range(3)]
    return batches(harmed(monitor.rows, harm), cuts, again, wrong=True, node=node)


async def store(client: Client, batch: TaskBatch, number: int) -> None:
    """As often as it takes: the server may be gone."""
    headers = {"Nats-Msg-Id": f"{batch.node}/{number}", "ce-id": f"{batch.node}/{number}"}

    async def acknowledged() -> bool:
        try:
            answer = await client.request(f"rt.events.task.{batch.node}", batch.to_json(), timeout=1, headers=headers)
        except nats.errors.Error:
            return False
        return "seq" in json.loads(answer.data)

    await until(acknowledged, "the batch is stored")


@pytest.mark.parametrize(
    "tasks,ends", [(200, 6), pytest.param(1_400, 24, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_whoever_is_killed_comes_or_leaves_verdicts_and_counts_equal_a_recount_of_the_stream(
    nats_server: NatsServer, tmp_path: Path, outside: Client, tasks: int, ends: int
) -> None:
    chance = Random(tasks)  # the same each time
    stream = [batch for each in zip(*(written(chance, node, tasks) for node in NODES), strict=False) for batch in each]
    for name in "abc":
        (tmp_path / name).mkdir()
    trackers = [
        ServiceProcess("services.deadline_tracker", tmp_path / name, nats_server.url, **SETTINGS) for name in "abc"
    ]
    with trackers[0], trackers[1], trackers[2]:
        every = len(stream) // ends
        for number, batch in enumerate(stream):
            await store(outside, batch, number)
            if number % every == every // 2:
                await asyncio.to_thread(_end, number // every, nats_server, trackers)
        told = [TaskBatch.trusted(json.dumps(body).encode()) for _, body in await events(outside, "rt.events.task.>")]
        recounts = {node: heard((b for b in told if b.node == node), GUARANTEE, WINDOW) for node in NODES}
        kinds = {event_id.rpartition("/")[2] for recount in recounts.values() for event_id, *_ in recount.told}
        assert {"missed", "at_risk", "recovered"} == kinds
        await until(lambda: _all_counted(outside, recounts), "the checkpoints hold what the stream holds", 60)
        await until(lambda: _all_said(outside, recounts), "all verdicts stand in the stream", 60)


def _end(number: int, server: NatsServer, trackers: list[ServiceProcess]) -> None:
    """Two trackers are killed, a third stops, the server is killed, and so on; all come back."""
    which = number % 4
    if which == 3:
        server.restart(kill=True)
        return
    it = trackers[which].until_ready()  # one that was ended before: it is at work again
    if which == 2:
        assert 0 == it.stop()
    else:
        it.kill()
    it.begin()


async def _all_counted(client: Client, recounts: dict[str, RowByRow]) -> bool:
    for node, recount in recounts.items():
        state = await value(client, "rt_deadlines", f"node.{node}")
        found = {record["container"]: record for record in state["containers"]} if state else {}
        if {name: _counts(record.counts) for name, record in recount.records.items()} != {
            name: _counts(record) for name, record in found.items()
        }:
            return False
    return True


def _counts(record: Any) -> dict[str, int]:
    return {word: record[word] for word in ("met", "missed", "lost", "aborted", "invalid", "late_record")}


async def _all_said(client: Client, recounts: dict[str, RowByRow]) -> bool:
    """Each verdict once, and those of a container in order."""
    said, due = defaultdict[tuple[str, str], list[str]](list), defaultdict[tuple[str, str], list[str]](list)
    for event_id, body in await events(client, "rt.events.deadline.>"):
        said[body["node"], body["container"]].append(event_id)
    for node, recount in recounts.items():
        for event_id, *_ in recount.told:
            of = event_id.split("/")[1]
            due[node, recount.rings[of].container if of in recount.rings else of].append(event_id)
    return said == due

"""`laxity defragment` against placer processes on a real nats-server: who moves, and what the ledger says meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cli.main import main
from services.placer.core.records import moving
from shared.testing.wait import eventually, until
from tests.integration import test_placer as placers
from tests.ledger_watch import Capacity, LedgerWatch

stack = placers.stack
cluster = placers.cluster

NODES = {
    name: Capacity({f"{name}-gpu-{number}": 16_384 for number in range(8)}, 64_000, 65_536) for name in ("n1", "n2")
}


@pytest.fixture
async def watch(cluster: placers.Cluster) -> AsyncIterator[LedgerWatch]:
    """Sees every commit, of which none may promise anything twice."""
    await cluster.add_node("n2", 8)
    watch = LedgerWatch(NODES)
    await watch.follow(cluster.client)
    yield watch
    assert [] == watch.faults
    assert watch.commits > 0


async def fragmented(cluster: placers.Cluster, **body: Any) -> None:
    """A container on each node, and one that waits for all of a node's devices."""
    for request_id in ("c", "d"):
        await cluster.place(request_id=request_id, gpu={"share": 1.0}, strategy="spread", **body)
        await cluster.reach(request_id, "started")
    assert "queued" == (await cluster.place(request_id="wide", gpu={"count": 8}, queue=True))["outcome"]


async def defragment(cluster: placers.Cluster, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, Any]:
    """Exit code and reply of the command, in a thread of its own."""
    arguments = ["defragment", "wide", *more, "-o", "json", "--nats-url", cluster.server.url]
    code = await asyncio.to_thread(main, arguments)
    return code, json.loads(capsys.readouterr().out)


async def test_others_move_and_the_request_that_waited_starts(
    cluster: placers.Cluster, watch: LedgerWatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.placer("p1")
    await fragmented(cluster)
    code, planned = await defragment(cluster, capsys, "--dry-run")
    assert (0, 1, True) == (code, len(planned["moves"]), planned["dry_run"])
    code, reply = await defragment(cluster, capsys)
    assert (0, "queued") == (code, reply["outcome"])
    (move,) = reply["moves"]
    await cluster.reach("wide", "started")

    record = await cluster.record(move["request_id"])
    assert record is not None
    assert [("n2" if move["from_node"] == "n1" else "n1", 2)] == [(r.node, r.generation) for r in record.replicas]
    told = ["accepted", "placed", "started", "moving", "moved"]
    await until(lambda: told == steps(cluster, move["request_id"]))
    await until(lambda: 3 == len(containers(cluster)))
    code, reply = await defragment(cluster, capsys)
    assert (2, "wide, which is started") == (code, reply["error"]["found"])


def steps(cluster: placers.Cluster, request_id: str) -> list[str]:
    """Each step once: who takes over tells them again."""
    return list({event.step: event.state for event in cluster.events if event.request_id == request_id}.values())


def containers(cluster: placers.Cluster) -> list[str]:
    return [name for name in cluster.containers() if name.endswith(".json") and not name.startswith(".")]


async def test_a_move_whose_placer_is_killed_is_finished_by_another(
    cluster: placers.Cluster, watch: LedgerWatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = {name: cluster.placer(name) for name in ("p1", "p2")}
    await fragmented(cluster, env={"FAKE_START_US": "1500000"})
    _, reply = await defragment(cluster, capsys)
    (move,) = reply["moves"]

    async def owner() -> str | None:
        record = await cluster.record(move["request_id"])
        return record.owner if record and moving(record) else None

    name = (await eventually(owner)).rsplit("-", 1)[0]
    processes[name].kill()
    await cluster.reach("wide", "started")
    told = ["accepted", "placed", "started", "moving", "moved"]
    await until(lambda: told == steps(cluster, move["request_id"]))


async def test_where_nobody_can_move_the_answer_says_why_and_the_exit_code_is_1(
    cluster: placers.Cluster, watch: LedgerWatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.placer("p1")
    await fragmented(cluster)
    assert "placed" == (await cluster.place(request_id="e", gpu={"count": 7}))["outcome"]
    code, reply = await defragment(cluster, capsys)
    assert (1, "queued", None) == (code, reply["outcome"], reply.get("moves"))
    assert reply["reasons"]


async def test_by_policy_nobody_needs_to_ask(cluster: placers.Cluster, watch: LedgerWatch) -> None:
    cluster.placer("p1", LAXITY_PLACER_DEFRAGMENT="waiting")
    await fragmented(cluster)
    await cluster.reach("wide", "started")

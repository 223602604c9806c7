"""The operations guide, done by hand on a cluster of single processes: back up and restore, upgrade one by one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from tests.e2e.embedded import call
from tests.e2e.processes import Cluster
from tests.outside import Json, ask, connect, events, states, until, value

pytestmark = pytest.mark.timeout(120)

RUNS = ["accepted", "placed", "started"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two placers, since an upgrade replaces one while the other works."""
    with Cluster(tmp_path, placers=2) as made:
        yield made


@pytest.fixture
async def outside(cluster: Cluster) -> AsyncIterator[Client]:
    client = await connect(cluster.nats.url)
    yield client
    await client.close()


def wanted(request_id: str) -> Json:
    return {"request_id": request_id, "command": ["sleep", "600"], "gpu": {"share": 0.02}, "queue": True}


async def placed(client: Client, request_id: str) -> None:
    """Asked until the cluster knows its nodes, and then until it runs."""

    async def taken() -> bool:
        return (await ask(client, "rt.place", wanted(request_id)))["outcome"] in {"placed", "started"}

    async def runs() -> bool:
        return "started" in await states(client, request_id)

    await until(taken, f"{request_id} is placed")
    await until(runs, f"{request_id} runs")


async def ledger(cluster: Cluster, *arguments: str, code: int = 0) -> Json:
    done = await asyncio.to_thread(call, "-o", "json", "ledger", *arguments, url=cluster.nats.url)
    assert (code, done.stderr if code == 0 else "") == (done.returncode, ""), done.stderr
    found: Json = json.loads(done.stdout) if done.stdout else {"said": done.stderr}
    return found


async def test_a_ledger_is_backed_up_and_restored_and_what_came_after_the_backup_is_counted_until_it_is_forgotten(
    cluster: Cluster, outside: Client, tmp_path: Path
) -> None:
    folder = tmp_path / "backup"
    await placed(outside, "before")
    assert (await ledger(cluster, "backup", str(folder)))["keys"] >= 3
    await placed(outside, "after")
    (kept, lost) = await container(outside, "before"), await container(outside, "after")

    assert "a placer runs" in (await ledger(cluster, "restore", str(folder), code=1))["said"]
    for placer in cluster.placers:
        assert placer.stop() == 0
    assert "already in use" in (await ledger(cluster, "restore", str(folder), code=1))["said"]
    await ledger(cluster, "restore", str(folder), "--replace")
    assert await value(outside, "rt_ledger", "request.after") is None
    assert (tmp_path / "backup.replaced" / "backup.json").exists()
    for placer in cluster.placers:
        placer.start()

    async def rebuilt() -> bool:
        held = (await value(outside, "rt_ledger", "node.fake-0") or {}).get("reservations", [])
        return {"before": None, "after": lost} == {each["request_id"]: each.get("container") for each in held}

    await until(rebuilt, "the reservation of what came after the backup, from its labels")
    alarms = [body["detail"] for _, body in await events(outside, "rt.events.bus.placer")]
    assert any(lost in str(said) for said in alarms), alarms
    assert {kept, lost} == set(cluster.containers())

    assert "unknown" == (await ledger(cluster, "forget", "after"))["outcome"]

    async def gone() -> bool:
        return [kept] == cluster.containers()

    await until(gone, "what was forgotten is removed, and nothing else")
    answer = await ask(outside, "rt.place", wanted("before"))
    assert ("started", True) == (answer["outcome"], answer["duplicate"])


async def container(client: Client, request_id: str) -> Any:
    (placement,) = (await ask(client, "rt.place", wanted(request_id)))["placements"]
    return placement["container"]


async def test_a_folder_that_is_no_whole_backup_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    assert 2 == call("ledger", "restore", str(tmp_path), url=cluster.nats.url).returncode
    (tmp_path / "there").mkdir()
    assert 2 == call("ledger", "backup", str(tmp_path / "there"), url=cluster.nats.url).returncode


async def test_services_are_replaced_one_by_one_while_every_request_is_answered_and_no_container_is_touched(
    cluster: Cluster, outside: Client
) -> None:
    await placed(outside, "first")
    stop, outcomes = asyncio.Event(), list[str]()

    async def keep_asking() -> None:
        while not stop.is_set():
            answer = await ask(outside, "rt.place", wanted(f"during-{len(outcomes)}"), timeout_s=30)
            outcomes.append(answer["outcome"])
            await asyncio.sleep(0.1)  # a pace, nothing is waited for

    asking = asyncio.create_task(keep_asking())
    for service in [*cluster.others, *cluster.placers]:
        assert 0 == await asyncio.to_thread(service.stop)
        await asyncio.to_thread(service.start)
    stop.set()
    await asking

    assert "placed" in outcomes
    assert {"placed", "queued"} >= set(outcomes)  # queued while the monitor of the only node is replaced

    async def all_run() -> bool:
        return len(outcomes) + 1 == len(cluster.containers())

    await until(all_run, "all that were placed run")
    assert await states(outside, "first") in (RUNS, [RUNS[0], "queued", *RUNS[1:]])

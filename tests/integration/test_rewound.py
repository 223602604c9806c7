"""A server that comes back with older buckets, or with none: services go on with what there is, without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.errors import Error
from nats.js.errors import Error as StreamError

from services.deadline_tracker.shares import partition_of
from shared.lists import Follower
from shared.messages import ListDelta, NodesReply, TaskEventKind
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess
from tests.outside import connect, until, value
from tests.unit.test_tracker_core import batch, row

CLASS = "interactive"
BEGIN, _, OVERDUE, *_ = TaskEventKind
JUNK = 400
"""So many revisions are lost: more than services give again while a test lasts."""


class Cluster:
    """A server, services as pairs, heartbeats of one node, and a follower of its list."""

    def __init__(self, server: NatsServer, folder: Path, stack: ExitStack, storage: str) -> None:
        self.server, self._folder, self._stack, self._storage = server, folder, stack, storage
        self.client: Client
        self.follower = Follower(CLASS)
        self.counter = itertools.count(1)
        self.healthy = True
        self.task = itertools.count(1)

    def pair(self, module: str, **env: str) -> list[ServiceProcess]:
        processes = []
        for name in ("a", "b"):
            (folder := self._folder / f"{module}-{name}").mkdir()
            env |= {"LAXITY_STORAGE": self._storage, "LAXITY_INSTANCE": name}
            process = ServiceProcess(module, folder, self.server.url, **env)
            processes.append(self._stack.enter_context(process))
        return processes

    def placers(self) -> list[ServiceProcess]:
        roots = {f"LAXITY_PLACER_{name.upper()}_ROOT": str(self._folder / name) for name in ("state", "ring")}
        return self.pair("services.placer", LAXITY_PLACER_BACKENDS=json.dumps({"*": "fake"}), **roots)

    async def beating(self) -> None:
        while True:
            with contextlib.suppress(Error):
                await self.client.publish("rt.metrics.n1", heartbeat(next(self.counter), self.healthy))
            await asyncio.sleep(0.2)

    async def hear(self, message: Any) -> None:
        self.follower.hear(ListDelta.from_json(message.data))

    async def holder(self, bucket: str, lease: str) -> str:
        found = await self.read(bucket, f"lease.{lease}")
        return str(found["holder"]) if found and found["ttl_us"] else ""

    async def tracker_of(self, node: str) -> str:
        layout = await self.read("rt_deadlines", "lease.deadline-tracker")
        number = partition_of(node, layout["partitions"]) if layout else 0
        return await self.holder("rt_deadlines", f"deadline-tracker-{number}")

    async def read(self, bucket: str, key: str) -> Any:
        try:
            return await value(self.client, bucket, key)
        except (Error, StreamError):
            return None  # no server, or no bucket yet

    async def another(self, ask: Callable[[], Awaitable[str]], but: str) -> str:
        async def look() -> str:
            found = await ask()
            return found if found != but else ""

        return await until(look, f"another than {but}", 60)

    async def junk(self, *buckets: str) -> None:
        """Revisions go up, by keys that are nobody's."""
        for bucket, number in itertools.product(buckets, range(JUNK)):
            await self.client.publish(f"$KV.{bucket}.junk", str(number).encode())
        await self.client.flush()

    async def renewed(self, bucket: str, lease: str) -> None:
        """Its holder writes it at a revision that is lost soon."""
        was = await self.read(bucket, f"lease.{lease}")

        async def look() -> bool:
            return (await self.read(bucket, f"lease.{lease}")) != was

        await until(look, f"{lease} is renewed", 60)

    async def listed(self, *, healthy: bool) -> None:
        """The list that is asked for, and the one that is followed, say what the node says."""
        self.healthy = healthy

        async def look() -> bool:
            for _ in range(20):
                if self.follower.wants is None:
                    break
                answer = await self.client.request("rt.nodes", self.follower.wants.to_json(), timeout=5)
                self.follower.read(NodesReply.from_json(answer.data))
            known = self.follower.devices.get(("n1", "g0"))
            return self.follower.wants is None and known is not None and (known.standing != "excluded") == healthy

        await until(look, f"a list where the device is healthy: {healthy}", 60)

    async def placed(self, request_id: str) -> str:
        body = {"request_id": request_id, "command": ["serve"], "gpu": {"share": 0.1}}

        async def ask() -> str:
            try:
                answer = await self.client.request("rt.place", json.dumps(body).encode(), timeout=5)
            except Error:
                return ""
            return str(json.loads(answer.data).get("outcome", ""))

        return await until(ask, "an answer of a placer", 60)

    async def missed(self) -> None:
        """A task of the node that is late is in a checkpoint."""
        number, before = next(self.task), await self.missed_so_far()
        rows = (row(BEGIN, number), row(OVERDUE, number))
        await self.client.jetstream().publish("rt.events.task.n1", batch(rows).to_json())

        async def look() -> bool:
            return await self.missed_so_far() > before

        await until(look, f"the miss of task {number}", 60)

    async def missed_so_far(self) -> int:
        state = await self.read("rt_deadlines", "node.n1")
        return int(state["containers"][0]["missed"]) if state else 0

    async def started(self, request_id: str) -> bool:
        record = await self.read("rt_ledger", f"request.{request_id}")
        return bool(record) and record["replicas"][0]["state"] == "started"


def heartbeat(counter: int, healthy: bool) -> bytes:
    unknown = {"utilisation_ratio": {"value": None, "reason": "first_sample"}, "memory_used_mib": {"value": 1.0}}
    device = {"uuid": "g0", "index": 0, "model": "H200", "regime": "time_sliced", "memory_mib": 100_000, **unknown}
    device |= {"slice_us": 2000, "switch_us": 100, "healthy": healthy}
    body = {
        "node": "n1", "start_id": "s", "counter": counter, "at_us": 0, "mono_us": 0, "period_us": 1_000_000,
        "devices": [device], "cpu_milli": 8000, "memory_mib": 64_000,
    }  # fmt: skip
    return json.dumps(body).encode()


def of(holder: str, processes: list[ServiceProcess]) -> tuple[ServiceProcess, ServiceProcess]:
    """Who holds it, and who does not."""
    first, second = processes
    return (first, second) if holder.startswith("a-") else (second, first)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@contextlib.asynccontextmanager
async def cluster(tmp_path: Path, stack: ExitStack, storage: str) -> Any:
    server = stack.enter_context(NatsServer(tmp_path / "nats"))
    it = Cluster(server, tmp_path, stack, storage)
    it.client = await connect(server.url)
    await it.client.subscribe(f"rt.events.list.{CLASS}", cb=it.hear)
    beating = asyncio.create_task(it.beating())
    try:
        yield it
    finally:
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating
        await it.client.close()


async def test_a_standby_believes_a_lease_of_a_bucket_that_was_lost_and_made_anew(
    tmp_path: Path, stack: ExitStack
) -> None:
    async with cluster(tmp_path, stack, "memory") as it:
        pair = it.pair("services.node_list")
        await it.listed(healthy=True)
        await it.junk("rt_nodes")
        await it.renewed("rt_nodes", "node-list")
        was = await it.holder("rt_nodes", "node-list")
        active, standby = of(was, pair)
        standby.send_signal(signal.SIGSTOP)
        it.server.restart(kill=True)
        assert was == await until(lambda: it.holder("rt_nodes", "node-list"), "a lease in the new bucket", 60)
        standby.send_signal(signal.SIGCONT)
        await it.listed(healthy=False)
        await it.renewed("rt_nodes", "node-list")

        active.kill()
        await it.another(lambda: it.holder("rt_nodes", "node-list"), was)
        await it.listed(healthy=True)


async def test_all_services_go_on_after_the_store_of_the_server_went_back(tmp_path: Path, stack: ExitStack) -> None:
    async with cluster(tmp_path, stack, "file") as it:
        lists, trackers = it.pair("services.node_list"), it.pair("services.deadline_tracker")
        it.placers()
        await it.listed(healthy=True)
        await it.missed()
        assert await it.placed("a") in {"placed", "started"}
        await until(lambda: it.started("a"), "its start")
        it.server.keep()
        await it.renewed("rt_nodes", "node-list")  # all are back
        await it.junk("rt_nodes", "rt_deadlines", "rt_ledger")
        await it.listed(healthy=False)
        await it.missed()
        for bucket, lease in (("rt_nodes", "node-list"), ("rt_ledger", "leader")):
            await it.renewed(bucket, lease)
        it.server.rewind()

        await it.listed(healthy=True)
        assert await it.placed("b") in {"placed", "started"}
        for ask, processes in (
            (lambda: it.holder("rt_nodes", "node-list"), lists),
            (lambda: it.tracker_of("n1"), trackers),
        ):
            was = await until(ask, "somebody holds it", 60)
            of(was, processes)[0].kill()
            await it.another(ask, was)
        await it.listed(healthy=True)
        assert await it.placed("c") in {"placed", "started"}
        await it.missed()

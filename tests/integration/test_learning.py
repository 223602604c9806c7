"""Response times on a real server: from task events to what the node list has learned, through a restart."""

from __future__ import annotations

import itertools
from pathlib import Path

from nats.aio.client import Client

from shared.messages import Kind, NodeReservations, Realtime, Reservation, TaskEventKind
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess
from tests.integration.test_tracker_and_node_list import heartbeat
from tests.outside import until, value
from tests.unit.test_tracker_core import batch, row

BEGIN, END, *_ = TaskEventKind


class Node:
    """What a monitor would say of n1, where container c0 of request q runs tasks of 10 ms on g0."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.seqs, self.beats = itertools.count(1, 2), itertools.count(1)

    async def hold(self) -> None:
        timing = Realtime(deadline_us=50_000, runtime_us=12_000, kind=Kind.FIRM, gate=True, profile="detector")
        held = Reservation(
            request_id="q",
            replica=0,
            generation=1,
            devices=("g0",),
            share_micro=250_000,
            device_memory_mib=0,
            cpu_milli=0,
            memory_mib=0,
            realtime=timing,
        )
        bucket = await self.client.jetstream().key_value("rt_ledger")
        await bucket.put("node.n1", NodeReservations(node="n1", reservations=(held,)).to_json())

    async def run(self, tasks: int = 10) -> None:
        rows = []
        for _ in range(tasks):
            seq = next(self.seqs)
            rows += [row(BEGIN, seq, stamp_us=seq), row(END, seq + 1, seq, stamp_us=seq + 10_000)]
        body = batch(rows, replica=0, generation=1)
        await self.client.jetstream().publish("rt.events.task.n1", body.to_json())
        await self.client.publish("rt.metrics.n1", heartbeat("n1", next(self.beats)))

    async def learned(self) -> int:
        """How many tasks rt_learned knows of; each question is preceded by some more tasks."""
        await self.run()
        found = await value(self.client, "rt_learned", "profile.detector.H200.gated")
        return sum(sum(times["newer"]) for times in found["times"]) if found else 0


async def test_response_times_are_learned_from_task_events_and_a_restarted_node_list_goes_on(
    nats_server: NatsServer, tmp_path: Path, outside: Client
) -> None:
    (tmp_path / "t").mkdir(), (tmp_path / "n").mkdir()
    tracker = ServiceProcess("services.deadline_tracker", tmp_path / "t", nats_server.url)
    node_list = ServiceProcess("services.node_list", tmp_path / "n", nats_server.url)
    with tracker, node_list:
        node = Node(outside)
        await node.hold()
        first = await until(node.learned, "some tasks are learned")
        assert 0 == node_list.stop()
        node_list.start()

        async def more() -> bool:
            return await node.learned() >= 2 * first

        await until(more, "as many again are learned")
        found = await value(outside, "rt_learned", "profile.detector.H200.gated")
        assert found is not None
        assert [[]] == [times["beside"] for times in found["times"]]
        assert 1 == len(found["times"][0]["bin"])

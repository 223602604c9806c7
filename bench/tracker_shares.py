"""Two deadline-trackers that share the nodes, beside one that has them all: what each spends; part of bench.tracker.

The trackers wait with their shares; then what monitors would write is stored at once. What counts is processor time:
two processes on a busy machine say little by the clock.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Final

import nats
import psutil

from bench.tracker_load import NODES, Node
from services.deadline_tracker.shares import partition_lease, partition_of
from shared.bus import Bus
from shared.messages import Lease, TaskBatch
from shared.settings import ServiceSettings
from shared.subjects import DEADLINES, Subjects
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess

PARTITIONS: Final = 8
TIMEOUT_S: Final = 120


def nodes() -> list[Node]:
    """As many in each partition."""
    chance, found, room = Random(7), list[Node](), Counter(dict.fromkeys(range(PARTITIONS), NODES // PARTITIONS))
    for name in map("node-{}".format, itertools.count()):
        if room[place := partition_of(name, PARTITIONS)]:
            room[place] -= 1
            found.append(Node(name, chance))
        if len(found) == NODES:
            break
    return found


def written(rows: int, events: int) -> tuple[list[TaskBatch], int]:
    """The nodes in turn, a mark of each at the end; and how many events that is."""
    made, counted, all_nodes = list[TaskBatch](), 0, nodes()
    while counted < events:
        made.append(all_nodes[len(made) % NODES].batch(rows))
        counted += len(made[-1].kind)
    return made + [node.mark("last") for node in all_nodes], counted


async def _shared(bus: Bus, trackers: int) -> None:
    """Returns when each has its part of the partitions."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            held = Counter[str]()
            for number in range(PARTITIONS):
                if found := await bus.get(DEADLINES, partition_lease(number)):
                    held[Lease.trusted(found[0]).holder] += 1
            if sorted(held.values()) == [PARTITIONS // trackers] * trackers:
                return
            await asyncio.sleep(0.1)


async def _spent(url: str, trackers: Sequence[ServiceProcess], batches: Sequence[TaskBatch]) -> list[float]:
    """Seconds of processor time of each, from the first batch to the verdict on the last mark."""
    bus, client = await Bus.connect(ServiceSettings(nats_url=url), "bench"), await nats.connect(url)
    await _shared(bus, len(trackers))
    await bus.close()
    done, marks = asyncio.Event(), set[str]()

    async def hear(message: Any) -> None:
        if message.subject.endswith(".last"):
            marks.add(message.subject)
        if len(marks) == NODES:
            done.set()

    await client.subscribe("rt.events.deadline.*.*", cb=hear)
    messages = [(Subjects().task_events(one.node), one.to_json(), {"Nats-Msg-Id": one.batch_id}) for one in batches]
    before = [_cpu_s(tracker) for tracker in trackers]
    for number, (subject, body, headers) in enumerate(messages):
        await client.publish(subject, body, headers=headers)
        if not number % 200:
            await client.flush()
    await asyncio.wait_for(done.wait(), TIMEOUT_S)
    after = [_cpu_s(tracker) for tracker in trackers]
    await client.close()
    return [now - then for now, then in zip(after, before, strict=True)]


def _cpu_s(tracker: ServiceProcess) -> float:
    spent = psutil.Process(tracker.pid).cpu_times()
    return float(spent.user + spent.system)


def spent(trackers: int, rows: int, events: int) -> list[float]:
    """Microseconds of processor time for each event of the whole stream, of each tracker."""
    batches, counted = written(rows, events)
    with (
        tempfile.TemporaryDirectory(prefix="laxity-bench-") as name,
        NatsServer(Path(name) / "nats") as server,
        ExitStack() as stack,
    ):
        folders = [Path(name) / f"tracker-{number}" for number in range(trackers)]
        running = []
        for folder in folders:
            folder.mkdir()
            env = {"LAXITY_CHECK": "false", "LAXITY_LOG_LEVEL": "warning", "LAXITY_INSTANCE": folder.name}
            env["LAXITY_TRACKER_PARTITIONS"] = str(PARTITIONS)
            tracker = ServiceProcess("services.deadline_tracker", folder, server.url, **env)
            running.append(stack.enter_context(tracker))
        return [cpu_s / counted * 1e6 for cpu_s in asyncio.run(_spent(server.url, running, batches))]

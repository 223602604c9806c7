"""How many task events a second one deadline-tracker judges, from NATS to verdict: ``make bench-tracker``.

In turn with subscribers of the plain client that read the same stored messages: one decodes each with ``json.loads``
as any reader must, one only takes them. Server, tracker and subscribers are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import nats
import psutil

from bench.place_bus import jetstream
from bench.report import tell
from bench.tracker_load import MISSES, NODES, RINGS, Node
from bench.tracker_shares import spent
from shared.bus import Bus
from shared.bus.pulse import HEARTBEAT_S
from shared.messages import TaskBatch
from shared.settings import ServiceSettings
from shared.subjects import Subjects
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess

Json = dict[str, Any]

ROUNDS = int(os.environ.get("LAXITY_BENCH_ROUNDS", "3"))
EVENTS = int(os.environ.get("LAXITY_BENCH_EVENTS", "600000"))
"""Of one round, begins and ends together."""
ROWS = (25, 100)
"""In a batch: what a node says in 20 ms at 1,250 and at 5,000 events a second."""
FIRST = 0.1
"""From here on is measured: by then the tracker holds its lease."""
MARK_BYTES = 500
"""A mark is shorter, all else longer."""
TIMEOUT_S = 120
AS_SERVICES = {"ack_policy": "none", "max_deliver": 1, "flow_control": True, "idle_heartbeat": HEARTBEAT_S * 10**9}
AS_SERVICES |= {"mem_storage": True, "num_replicas": 1}
"""How the server hands messages to services of ours, and here to all who read."""
TASKS = "rt.events.task.>"


# --- what monitors would write ---


def written(rows: int) -> Iterator[tuple[TaskBatch, int]]:
    """All batches of a round, the nodes in turn, and how many events lie between the two marks so far."""
    chance = Random(7)  # the same for all who read
    nodes = [Node(f"node-{number}", chance) for number in range(NODES)]
    counted = number = 0
    while counted < EVENTS * (1 + FIRST):
        if counted >= EVENTS * FIRST and not number:
            number = counted
            yield nodes[0].mark("first"), 0
        batch = nodes[counted % NODES].batch(rows)
        counted += len(batch.kind)
        yield batch, counted - number if number else 0
    yield nodes[0].mark("last"), counted - number


async def publish(url: str, rows: int) -> tuple[int, int]:
    """Stores everything; returns the last sequence and the events between the marks."""
    bus = await Bus.connect(ServiceSettings(nats_url=url), "bench")
    await bus.ensure_streams()
    await bus.close()
    client, subjects, count, events, stored = await nats.connect(url), Subjects("rt"), 0, 0, 0
    for count, (batch, events) in enumerate(written(rows), 1):  # noqa: B007  # the last ones are returned
        headers = {"ce-id": batch.batch_id, "Nats-Msg-Id": batch.batch_id}
        subject, body = subjects.task_events(batch.node), batch.to_json()
        if count % 200 and batch.rings[0].container != "last":
            await client.publish(subject, body, headers=headers)
        else:
            stored = json.loads((await client.request(subject, body, timeout=30, headers=headers)).data)["seq"]
    await client.close()
    if stored != count:
        raise RuntimeError(f"{stored} of {count} batches are stored")
    return count, events


# --- those who read ---


async def bare(url: str, last_seq: int, *, decode: bool) -> None:
    """A subscriber of the plain client; prints how long it took between the two marks."""
    client, done, marks = await nats.connect(url), asyncio.Event(), list[tuple[float, float]]()
    decoded = json.loads if decode else len

    async def take(message: Any) -> None:
        if not message.data:  # flow control: answered once everything before it was taken
            await message.respond(b"") if message.reply else None
            return
        decoded(message.data)
        if len(message.data) < MARK_BYTES:
            marks.append((time.perf_counter(), time.process_time()))
        if int(message.reply.split(".")[5]) == last_seq:
            done.set()

    inbox = client.new_inbox()
    await client.subscribe(inbox, cb=take, pending_msgs_limit=0, pending_bytes_limit=0)
    config = {"deliver_subject": inbox, "filter_subject": TASKS, "deliver_policy": "all", **AS_SERVICES}
    await jetstream(client, "CONSUMER.CREATE.RT_EVENTS", {"stream_name": "RT_EVENTS", "config": config})
    await asyncio.wait_for(done.wait(), TIMEOUT_S)
    await client.close()
    (began, cpu_began), (ended, cpu_ended) = marks
    print(json.dumps({"wall_s": ended - began, "cpu_s": cpu_ended - cpu_began}))


async def tracked(url: str, folder: Path) -> Json:
    """A real tracker that finds all batches stored; from its verdict on the first mark to that on the last."""
    client, marks, done = await nats.connect(url), dict[str, tuple[float, float]](), asyncio.Event()
    env = {"LAXITY_CHECK": "false", "LAXITY_LOG_LEVEL": "warning"}
    tracker = ServiceProcess("services.deadline_tracker", folder, url, **env)

    async def hear(message: Any) -> None:
        container = message.subject.rsplit(".", 1)[1]
        if container in {"first", "last"} and container not in marks:
            spent = psutil.Process(tracker.pid).cpu_times()
            marks[container] = (time.perf_counter(), spent.user + spent.system)
        if container == "last":
            done.set()

    await client.subscribe("rt.events.deadline.*.*", cb=hear)
    await client.flush()
    with tracker:
        await asyncio.wait_for(done.wait(), TIMEOUT_S)
    await client.close()
    (began, cpu_began), (ended, cpu_ended) = marks["first"], marks["last"]
    return {"wall_s": ended - began, "cpu_s": cpu_ended - cpu_began}


def subscriber(url: str, role: str, last_seq: int) -> Json:
    command = [sys.executable, "-m", "bench.tracker", role, url, str(last_seq)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, timeout=TIMEOUT_S + 30, check=True).stdout
    found: Json = json.loads(printed)
    return found


# --- the rounds ---


@dataclass
class Measured:
    """Of one size of batch, by who read: each round."""

    per_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of the reader's process, an event."""
    alone_us: list[float] = field(default_factory=list)
    shared_us: list[float] = field(default_factory=list)
    """Of one tracker with all nodes, of the busier one of two: for each event of the stream, as it comes."""

    def note(self, who: str, found: Json, events: int) -> None:
        self.per_s[who].append(events / found["wall_s"])
        self.cpu_us[who].append(found["cpu_s"] / events * 1e6)


def one_round(rows: int, found: Measured) -> None:
    """On a server of its own: what a tracker says is known by its id, and kept from being said twice."""
    with tempfile.TemporaryDirectory(prefix="laxity-bench-") as folder, NatsServer(Path(folder) / "nats") as server:
        last_seq, events = asyncio.run(publish(server.url, rows))
        for who in ("take", "read"):
            found.note(who, subscriber(server.url, who, last_seq), events)
        found.note("tracker", asyncio.run(tracked(server.url, Path(folder))), events)
        for who in ("read", "take"):
            found.note(who, subscriber(server.url, who, last_seq), events)
    for trackers, cpu_us in ((1, found.alone_us), (2, found.shared_us)):
        cpu_us.append(max(spent(trackers, rows, events)))


def report(results: dict[int, Measured]) -> None:
    figures, ratios = dict[str, float](), dict[str, float]()
    for rows, found in results.items():
        for who, rates in found.per_s.items():
            figures[f"{who}_{rows}_rows_events_per_s"] = round(statistics.median(rates))
            figures[f"{who}_{rows}_rows_cpu_us_per_event"] = round(statistics.median(found.cpu_us[who]), 3)
        for who in ("read", "take"):
            rate = statistics.median(found.per_s["tracker"]) / statistics.median(found.per_s[who])
            ratios[f"tracker_over_{who}_{rows}_rows"] = round(rate, 3)
            cpu = statistics.median(found.cpu_us[who]) / statistics.median(found.cpu_us["tracker"])
            ratios[f"tracker_over_{who}_{rows}_rows_by_cpu"] = round(cpu, 3)
        alone_us, shared_us = statistics.median(found.alone_us), statistics.median(found.shared_us)
        figures[f"alone_{rows}_rows_cpu_us_per_event"] = round(alone_us, 3)
        figures[f"busier_of_two_{rows}_rows_cpu_us_per_event"] = round(shared_us, 3)
        ratios[f"two_trackers_over_one_{rows}_rows_by_cpu"] = round(alone_us / shared_us, 3)
    holds = {
        f">= 0.5 of a bare reader, batches of {n} rows": ratios[f"tracker_over_read_{n}_rows"] >= 0.5 for n in ROWS
    }
    notes = (
        f"{ROUNDS} rounds of {EVENTS} events of {NODES} nodes with {RINGS} rings each, {MISSES:.1%} misses, read back "
        "from the stream as fast as each can, with the same flow control. Real: nats-server, tracker with its lease, "
        "checkpoints and verdicts. Simulated: the monitors. read: a subscriber of the plain client that decodes each "
        "message with json.loads and drops it; take: one that does not even decode. by_cpu: the same ratio of CPU "
        "times of the two processes, which a busy machine disturbs less. two_trackers_over_one: how much further two "
        "that share the nodes come than one, by the processor time of the busier one; both read the whole stream."
    )
    tell("tracker", figures, ratios, holds, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", nargs="*", help="a process of the bench itself: take or read, with url and sequence")
    role, *words = parser.parse_args().role or ["all"]
    if role != "all":
        asyncio.run(bare(words[0], int(words[1]), decode=role == "read"))
        return
    results = {rows: Measured() for rows in ROWS}
    for number in range(ROUNDS):
        for rows, found in results.items():
            one_round(rows, found)
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr)
    report(results)


if __name__ == "__main__":
    main()

"""The monitor as a process on a real server, with real rings of real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from services.monitor.probes.fake import DeviceFault, Faults
from shared.messages import TaskEventKind
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess
from tests.monitor_folders import TIMING, labels_of
from tests.outside import Json, events, heartbeat, until

BEGIN, END, OVERDUE, ABORTED, LOST, CLOSED = TaskEventKind
SDK = Path(__file__).parents[2] / "sdk" / "src"
GUARD_US = 1_000


@pytest.fixture
def monitor(nats_url: str, tmp_path: Path) -> Iterator[ServiceProcess]:
    settings = {
        "LAXITY_MONITOR_NODE": "n1",
        "LAXITY_MONITOR_RING_ROOT": str(tmp_path / "rings"),
        "LAXITY_MONITOR_PROBE": "fake",
        "LAXITY_MONITOR_FAKE_CONTROL": str(tmp_path / "faults.json"),
        "LAXITY_MONITOR_PERIOD_US": "100000",
        "LAXITY_MONITOR_STALE_AFTER_US": "500000",
        "LAXITY_MONITOR_PROBE_DEADLINE_US": "300000",
    }
    with ServiceProcess("services.monitor", tmp_path, nats_url, **settings) as process:
        yield process


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a container's process that runs a Python text with `laxity` imported; ends what is left of it."""
    started: list[subprocess.Popen[str]] = []
    folder = labels_of(
        tmp_path / "rings", "c.1", request_id="q1", realtime=TIMING.model_copy(update={"guarantee": 0.8})
    )

    def start(code: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(SDK), "LAXITY_RING_DIR": str(folder)}
        process = subprocess.Popen(
            [sys.executable, "-c", f"import laxity, sys, time\n{code}"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


async def batches(client: Client) -> list[Json]:
    return [body for _, body in await events(client, "rt.events.task.n1")]


async def rows(client: Client) -> list[tuple[TaskEventKind, int]]:
    """Kind and sequence of each event, once, in stream order."""
    told = [
        (TaskEventKind(kind), seq)
        for batch in await batches(client)
        for kind, seq in zip(batch.get("kind", []), batch.get("seq", []), strict=True)
    ]
    return list(dict.fromkeys(told))


async def rows_with(client: Client, wanted: tuple[TaskEventKind, int]) -> list[tuple[TaskEventKind, int]]:
    async def seen() -> Any:
        found = await rows(client)
        return found if wanted in found else None

    found: list[tuple[TaskEventKind, int]] = await until(seen, f"{wanted} in the stream")
    return found


async def test_begins_ends_and_the_end_of_a_process_arrive_in_order(
    monitor: ServiceProcess, outside: Client, container: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    container("for n in range(50):\n  with laxity.task('infer', deadline_us=50_000_000): pass")
    found = await rows_with(outside, (CLOSED, 100))
    expected = [(BEGIN if seq % 2 else END, seq) for seq in range(1, 101)]
    assert [*expected, (CLOSED, 100)] == found
    ring = next(ring for batch in await batches(outside) for ring in batch["rings"])
    assert ("c.1", "q1", 0, 1, 0.8) == tuple(
        ring[k] for k in ("container", "request_id", "replica", "generation", "guarantee")
    )

    async def gone() -> bool:
        return not list((tmp_path / "rings").rglob("*.ring"))

    await until(gone, "the file of the closed ring removed")


async def test_a_task_is_overdue_while_it_still_runs(
    monitor: ServiceProcess, outside: Client, container: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = container("with laxity.task('slow', deadline_us=20_000):\n  sys.stdin.readline()")
    assert [(BEGIN, 1), (OVERDUE, 1)] == await rows_with(outside, (OVERDUE, 1))
    assert process.poll() is None
    process.communicate("go on\n")
    assert [(BEGIN, 1), (OVERDUE, 1), (END, 2)] == (await rows_with(outside, (CLOSED, 2)))[:3]


async def test_overdue_is_noticed_within_a_poll_of_deadline_and_guard(
    monitor: ServiceProcess, outside: Client, container: Callable[[str], subprocess.Popen[str]]
) -> None:
    """The machine may be busy: the best of many counts, and none may come before its time."""
    code = """
laxity.enabled()
sys.stdin.readline()
for n in range(20):
    with laxity.task('slow', deadline_us=20_000):
        time.sleep(0.06)
"""
    process = container(code)
    await heartbeat(outside, lambda body: body["counters"]["rings.open"] == 1, "the ring is read")
    process.communicate("go\n")
    await rows_with(outside, (CLOSED, 40))
    late_us = []
    for batch in await batches(outside):
        columns = zip(*(batch.get(k, []) for k in ("kind", "seq", "stamp_us")), strict=True)
        for kind, seq, stamp_us in columns:
            late_us.append((kind, seq, stamp_us))
    begun = {seq: stamp_us for kind, seq, stamp_us in late_us if kind == BEGIN}
    after = [stamp_us - begun[seq] - 20_000 for kind, seq, stamp_us in late_us if kind == OVERDUE]
    assert 20 == len(after)
    assert min(after) > GUARD_US
    assert min(after) <= GUARD_US + 5_000


async def test_a_killed_process_leaves_aborted_tasks_and_a_closed_ring(
    monitor: ServiceProcess, outside: Client, container: Callable[[str], subprocess.Popen[str]]
) -> None:
    code = """
task = laxity.begin('a', deadline_us=60_000_000)
laxity.begin('b', deadline_us=60_000_000)
task.end()
print(flush=True)
time.sleep(60)
"""
    process = container(code)
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)
    process.send_signal(signal.SIGKILL)
    assert [(BEGIN, 1), (BEGIN, 2), (END, 3), (ABORTED, 2), (CLOSED, 3)] == await rows_with(outside, (CLOSED, 3))


async def test_a_killed_monitor_loses_nothing_and_the_next_one_has_another_id(
    monitor: ServiceProcess, outside: Client, container: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = container("for n in range(300):\n  with laxity.task('infer', deadline_us=60_000_000): time.sleep(0.005)")

    async def spoken(times: int) -> bool:
        return len({batch["start_id"] for batch in await batches(outside)}) == times

    for times, last in ((1, 101), (2, 301)):
        await rows_with(outside, (BEGIN, last))
        await until(lambda times=times: spoken(times), "each monitor has told something before it is killed")
        monitor.kill()
        monitor.start()
    process.communicate()
    await until(lambda: spoken(3), "the last monitor has told something")
    found = await rows_with(outside, (CLOSED, 600))
    assert [(BEGIN if seq % 2 else END, seq) for seq in range(1, 601)] == [row for row in found if row[0] != CLOSED]
    told = await batches(outside)
    assert 3 == len({batch["start_id"] for batch in told})
    for start_id in {batch["start_id"] for batch in told}:
        own = [batch for batch in told if batch["start_id"] == start_id]
        assert list(range(1, len(own) + 1)) == [batch["counter"] for batch in own]
        assert sorted(batch["watermark_us"] for batch in own) == [batch["watermark_us"] for batch in own]


async def test_what_happens_while_the_bus_is_down_comes_after_it(
    monitor: ServiceProcess,
    nats_server: NatsServer,
    outside: Client,
    container: Callable[[str], subprocess.Popen[str]],
) -> None:
    process = container("for n in range(200):\n  with laxity.task('infer', deadline_us=60_000_000): time.sleep(0.005)")
    await rows_with(outside, (BEGIN, 1))
    nats_server.kill()
    await asyncio.to_thread(process.wait)
    nats_server.start()
    found = await rows_with(outside, (CLOSED, 400))
    assert [(BEGIN if seq % 2 else END, seq) for seq in range(1, 401)] == found[:-1]


async def test_M24_a_probe_that_hangs_stops_neither_the_heartbeat_nor_the_rings(
    monitor: ServiceProcess, outside: Client, container: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    await heartbeat(outside, lambda body: body["devices"] and body["devices"][0]["healthy"], "healthy devices")
    (tmp_path / "faults.json").write_text(Faults(hang_ms=3_600_000).model_dump_json())
    body = await heartbeat(outside, lambda body: body["devices"][0]["reason"] == "stale", "stale devices")
    assert [(False, None, "stale")] * 4 == [
        (d["healthy"], d["utilisation_ratio"]["value"], d["utilisation_ratio"]["reason"]) for d in body["devices"]
    ]
    container("with laxity.task('infer', deadline_us=60_000_000): pass")
    await rows_with(outside, (END, 2))
    (tmp_path / "faults.json").unlink()
    await heartbeat(outside, lambda body: all(d["healthy"] for d in body["devices"]), "healthy devices again")


async def test_M21_one_lost_device_is_told_and_the_others_stay(
    monitor: ServiceProcess, outside: Client, tmp_path: Path
) -> None:
    await heartbeat(outside, lambda body: len(body["devices"]) == 4, "four devices")
    (tmp_path / "faults.json").write_text(Faults(devices={2: DeviceFault(lost=True)}).model_dump_json())
    body = await heartbeat(outside, lambda body: body["devices"][2]["reason"] == "lost", "a lost device")
    assert [True, True, False, True] == [device["healthy"] for device in body["devices"]]


async def test_what_is_no_ring_is_counted_and_disturbs_nothing(
    monitor: ServiceProcess, outside: Client, container: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "rings" / "c=2E1"
    (folder / f"ring-{'0' * 32}.ring").write_bytes(b"no ring at all" * 1000)
    container("with laxity.task('infer', deadline_us=60_000_000): pass")
    await rows_with(outside, (CLOSED, 2))
    await heartbeat(outside, lambda body: body["counters"].get("rings.corrupt") == 1, "the refused ring is counted")


async def test_a_monitor_that_is_asked_to_stop_says_so(monitor: ServiceProcess, outside: Client) -> None:
    subscription = await outside.subscribe("rt.metrics.n1")
    await outside.flush()
    assert 0 == await asyncio.to_thread(monitor.stop)
    await outside.flush()
    last = [json.loads(message.data)["draining"] async for message in _waiting(subscription)]
    assert [True] == last[-1:]
    assert True not in last[:-1]


async def _waiting(subscription: Any) -> AsyncIterator[Any]:
    while subscription.pending_msgs:
        yield await subscription.next_msg(timeout=1)

"""A monitor of gated cores on a real server: its gate lets containers in, and what it promises ends with the gate."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from shared.messages import Kind, Realtime
from shared.testing.service_process import ServiceProcess
from shared.testing.wait import until
from tests.monitor_folders import labels_of
from tests.outside import Json, heartbeat

SDK = Path(__file__).parents[2] / "sdk" / "src"
TIMING = Realtime(deadline_us=1_000_000, runtime_us=500_000, kind=Kind.HARD, gate=True)


@pytest.fixture
def monitor(nats_url: str, tmp_path: Path) -> Iterator[ServiceProcess]:
    with start_monitor(nats_url, tmp_path) as process:
        yield process


def start_monitor(nats_url: str, folder: Path) -> ServiceProcess:
    settings = {
        "LAXITY_MONITOR_NODE": "n1",
        "LAXITY_MONITOR_RING_ROOT": str(folder / "rings"),
        "LAXITY_MONITOR_REGIME": "gated",
        "LAXITY_MONITOR_GATE_MARGIN_US": "700",
        "LAXITY_MONITOR_PERIOD_US": "100000",
        "LAXITY_MONITOR_STALE_AFTER_US": "500000",
    }
    return ServiceProcess("services.monitor", folder, nats_url, **settings)


def gate_of(monitor: ServiceProcess) -> int | None:
    """The monitor's child that is the gate."""
    for child in Path(f"/proc/{monitor.pid}/task/{monitor.pid}/children").read_text().split():
        if b"services.monitor.gate" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return None


def promised(body: Json) -> set[tuple[bool, str | None, int]]:
    return {(device["healthy"], device["reason"], device["handover_us"]) for device in body["devices"]}


def healthy(body: Json) -> bool:
    return bool(body["devices"]) and promised(body) == {(True, None, 700)}


async def test_a_task_gets_its_turn_and_the_heartbeat_counts_it(
    monitor: ServiceProcess, outside: Client, tmp_path: Path
) -> None:
    await heartbeat(outside, healthy, "gated devices with their margin")
    folder = labels_of(tmp_path / "rings", "c", realtime=TIMING)
    environment = os.environ | {"PYTHONPATH": str(SDK), "LAXITY_RING_DIR": str(folder), "LAXITY_GATE": "1"}
    code = "import laxity\nfor _ in range(3):\n  with laxity.task('turn', deadline_us=1_000_000): pass"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], env=environment, check=True, timeout=30)
    await heartbeat(outside, lambda body: body["counters"].get("gate.grants") == 3, "three turns")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_its_gate_a_device_promises_nothing_until_another_gate_is_there(
    monitor: ServiceProcess, outside: Client, how: signal.Signals
) -> None:
    first = gate_of(monitor)
    assert first is not None
    os.kill(first, how)
    down = "gate_down: nobody orders the tasks on the device"
    await heartbeat(outside, lambda body: promised(body) == {(False, down, 700)}, "devices without a gate")
    await heartbeat(outside, healthy, "devices with a gate again")
    assert gate_of(monitor) not in (first, None)


async def test_a_device_promises_nothing_because_of_a_container_that_overran_whoever_of_gate_and_monitor_is_killed(
    monitor: ServiceProcess, outside: Client, nats_url: str, tmp_path: Path
) -> None:
    core = (await heartbeat(outside, healthy, "gated devices with their margin"))["devices"][0]["uuid"]
    folder = labels_of(tmp_path / "rings", "c", realtime=TIMING.model_copy(update={"runtime_us": 1_000}), device=core)
    environment = os.environ | {"PYTHONPATH": str(SDK), "LAXITY_RING_DIR": str(folder), "LAXITY_GATE": "1"}
    code = "import laxity, time\nwith laxity.task('turn', deadline_us=1_000_000): time.sleep(0.1)"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], env=environment, check=True, timeout=30)
    lost = "gate_lost: c held it "
    await heartbeat(outside, lambda body: (reason_of(core, body) or "").startswith(lost), "the overrun")
    os.kill(gate_of(monitor) or 0, signal.SIGKILL)
    await heartbeat(outside, lambda body: (reason_of(core, body) or "").startswith("gate_down"), "no gate")
    again = await heartbeat(outside, lambda body: not (reason_of(core, body) or "").startswith("gate_down"), "a gate")
    told = reason_of(core, again)
    assert told is not None
    assert told.startswith(lost)
    monitor.kill()
    with start_monitor(nats_url, tmp_path):
        first = await heartbeat(
            outside, lambda body: body["start_id"] != again["start_id"] and bool(body["devices"]), "another monitor"
        )
        assert told == reason_of(core, first)


def reason_of(uuid: str, body: Json) -> str | None:
    return {device["uuid"]: device["reason"] for device in body["devices"]}.get(uuid)


async def test_the_gate_ends_with_its_monitor(monitor: ServiceProcess) -> None:
    gate = Path(f"/proc/{gate_of(monitor)}")
    assert await asyncio.to_thread(gate.exists)
    monitor.kill()
    await until(lambda: not gate.exists())

"""A miss is put down to a GPU whose driver told that its clock was held back: monitor and tracker on a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from shared.messages import DeviceFacts, NodeFacts, NodeReservations, NodeState, Regime, Reservation
from shared.testing.service_process import ServiceProcess
from tests.fake_nvml.build import FakeDriver, build_fake_nvml
from tests.monitor_folders import TIMING, labels_of
from tests.outside import events, heartbeat, until

SDK = Path(__file__).parents[2] / "sdk" / "src"
LATE = "import laxity, time\nwhile True:\n  with laxity.task('infer', deadline_us=1_000): time.sleep(0.1)"
GPU = "GPU-fake0000-0000-0000-0000-000000000000"


@pytest.fixture
def late(tmp_path: Path) -> Iterator[None]:
    """A container whose tasks miss."""
    folder = labels_of(tmp_path / "rings", "c", device=GPU)
    environment = {**os.environ, "PYTHONPATH": str(SDK), "LAXITY_RING_DIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", LATE], env=environment) as process:
        yield
        process.kill()


async def hold(client: Client) -> None:
    """What a placer and a node list would have written."""
    amounts = {"share_micro": 1_000_000, "device_memory_mib": 0, "cpu_milli": 0, "memory_mib": 0}
    whose = {"request_id": "q", "replica": 0, "generation": 1, "devices": (GPU,), "realtime": TIMING}
    held = NodeReservations(node="n1", reservations=(Reservation.model_validate(whose | amounts),))
    device = DeviceFacts(uuid=GPU, index=0, model="m", regime=Regime.TIME_SLICED, healthy=True, memory_mib=None)
    facts = NodeFacts(node="n1", state=NodeState.READY, at_us=0, devices=(device,), cpu_milli=1, memory_mib=1)
    for bucket, value in (("rt_ledger", held), ("rt_nodes", facts)):
        await (await client.jetstream().key_value(bucket)).put("node.n1", value.to_json())


async def test_a_miss_while_the_clock_was_held_back_names_it_with_what_the_driver_said(
    nats_url: str, tmp_path: Path, outside: Client, late: None
) -> None:
    driver = FakeDriver(build_fake_nvml(tmp_path), tmp_path / "profile")
    driver.fails("DeviceGetCurrentClocks*Reasons 0 4", "DeviceGetClockInfo:1 0 990")
    settings = {
        "LAXITY_MONITOR_NODE": "n1",
        "LAXITY_MONITOR_RING_ROOT": str(tmp_path / "rings"),
        "LAXITY_MONITOR_PROBE": "nvml",
        "LAXITY_MONITOR_PERIOD_US": "500000",
        **driver.environment,
    }

    async def held_back() -> Any:
        said = [body.get("because") or [] for _, body in await events(outside, "rt.events.deadline.n1.c")]
        return next((cause for causes in said for cause in causes if "power cap" in (cause["detail"] or "")), None)

    with (
        ServiceProcess("services.deadline_tracker", tmp_path, nats_url),
        ServiceProcess("services.monitor", tmp_path, nats_url, **settings),
    ):
        await hold(outside)
        await heartbeat(outside, lambda body: len(body["devices"]) == 2, "two GPUs")
        cause = await until(held_back, "a miss that is put down to the power cap", limit_s=45)
        assert ("throttled", None) == (cause["cause"], cause["container"])
        assert cause["detail"].startswith("power cap, at 990 of 1980 MHz, read ")

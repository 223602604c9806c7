"""A monitor with the probe of GPUs as a process on a real server, its driver a library without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from nats.aio.client import Client

from shared.testing.service_process import ServiceProcess
from tests.fake_nvml.build import FakeDriver, build_fake_nvml
from tests.outside import Json, heartbeat, until


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    return FakeDriver(build_fake_nvml(tmp_path), tmp_path / "profile")


@pytest.fixture
def monitor(nats_url: str, tmp_path: Path, driver: FakeDriver) -> Iterator[ServiceProcess]:
    settings = {
        "LAXITY_MONITOR_NODE": "n1",
        "LAXITY_MONITOR_RING_ROOT": str(tmp_path / "rings"),
        "LAXITY_MONITOR_PROBE": "nvml",
        "LAXITY_MONITOR_NVML_DEADLINE_US": "300000",
        "LAXITY_MONITOR_NVML_RETRY_US": "1000",
        "LAXITY_MONITOR_NVML_HOST_PIDS": "true",  # this driver has the pids that the tests give it
        "LAXITY_MONITOR_NVML_XID_QUIET_US": "500000",
        "LAXITY_MONITOR_PERIOD_US": "100000",
        **driver.environment,
    }
    with ServiceProcess("services.monitor", tmp_path, nats_url, **settings) as process:
        yield process


def healthy(body: Json) -> list[bool]:
    return [device["healthy"] for device in body["devices"]]


def reasons(body: Json) -> set[str | None]:
    return {device.get("reason") for device in body["devices"]}


async def test_gpus_are_told_and_the_monitor_never_loads_the_driver_itself(
    monitor: ServiceProcess, outside: Client
) -> None:
    body = await heartbeat(outside, lambda body: healthy(body) == [True, True], "two healthy GPUs")
    assert [("NVIDIA H100 80GB HBM3", 81_008, 0.25, 0, "time_sliced")] * 2 == [
        (d["model"], d["memory_mib"], d["utilisation_ratio"]["value"], d["foreign_memory_mib"], d["regime"])
        for d in body["devices"]
    ]
    service = psutil.Process(monitor.pid)
    (asking,) = service.children()
    assert [False, True] == [
        any("libnvidia-ml" in mapped.path for mapped in process.memory_maps()) for process in (service, asking)
    ]


async def test_M24_a_driver_that_hangs_makes_its_values_unknown_and_stops_nothing_else(
    monitor: ServiceProcess, outside: Client, driver: FakeDriver
) -> None:
    await heartbeat(outside, lambda body: healthy(body) == [True, True], "two healthy GPUs")
    driver.plays("hung")
    body = await heartbeat(outside, lambda body: reasons(body) == {"driver_hung"}, "two GPUs of a driver that hangs")
    assert [(False, 81_008, None, "driver_hung", None)] * 2 == [
        (
            d["healthy"],
            d["memory_mib"],
            d["utilisation_ratio"]["value"],
            d["utilisation_ratio"]["reason"],
            d["foreign_share_micro"],
        )
        for d in body["devices"]
    ]
    ping = await outside.request("$SRV.PING.monitor", b"", timeout=5)
    assert "monitor" == json.loads(ping.data)["name"]
    body = await heartbeat(outside, lambda body: body["counters"]["probe.nvml.driver_hung"] >= 2, "the hangs counted")
    assert body["foreign_memory_mib"] is not None  # the rest of the node is still read
    driver.plays("h100")
    await heartbeat(outside, lambda body: healthy(body) == [True, True], "two healthy GPUs again")


async def test_a_driver_that_crashes_does_not_end_the_monitor(
    monitor: ServiceProcess, outside: Client, driver: FakeDriver
) -> None:
    await heartbeat(outside, lambda body: healthy(body) == [True, True], "two healthy GPUs")
    driver.plays("crash")
    await heartbeat(outside, lambda body: body["counters"].get("probe.nvml.driver_crashed", 0) >= 2, "crashes counted")
    driver.plays("h100")
    await heartbeat(outside, lambda body: healthy(body) == [True, True], "two healthy GPUs again")
    assert monitor.running


async def test_the_process_that_asks_ends_with_a_killed_monitor_also_while_it_hangs(
    monitor: ServiceProcess, outside: Client, driver: FakeDriver
) -> None:
    await heartbeat(outside, lambda body: healthy(body) == [True, True], "two healthy GPUs")
    driver.plays("hung")
    await heartbeat(outside, lambda body: reasons(body) == {"driver_hung"}, "two GPUs of a driver that hangs")

    async def asking() -> Any:
        return psutil.Process(monitor.pid).children()

    (child,) = await until(asking, "another process that asks")
    monitor.kill()

    async def gone() -> bool:
        return not child.is_running()

    await until(gone, "the process that asked has ended")


async def test_a_fatal_xid_makes_a_gpu_ill_until_none_has_come_for_a_while(
    monitor: ServiceProcess, outside: Client, driver: FakeDriver
) -> None:
    await heartbeat(outside, lambda body: healthy(body) == [True, True], "two healthy GPUs")
    driver.fails("EventSetWait_v2 1 31:-1 79:-1")
    body = await heartbeat(outside, lambda body: reasons(body) == {None, "xid_79"}, "one GPU that is ill")
    first, second = body["devices"]
    assert [[], [(31, 1), (79, 1)]] == [[(x["xid"], x["count"]) for x in d["xids"]] for d in (first, second)]
    assert [0, 79] == [device["health"]["xid"]["value"] for device in (first, second)]
    body = await heartbeat(outside, lambda body: healthy(body) == [True, True], "two healthy GPUs again")
    assert [(31, 1), (79, 1)] == [(x["xid"], x["count"]) for x in body["devices"][1]["xids"]]


async def test_a_wait_for_events_that_hangs_ends_with_the_cycle(
    monitor: ServiceProcess, outside: Client, driver: FakeDriver
) -> None:
    await heartbeat(outside, lambda body: healthy(body) == [True, True], "two healthy GPUs")
    driver.fails("EventSetWait_v2 0 hang")
    await heartbeat(outside, lambda body: reasons(body) == {"driver_hung", None}, "one GPU in which the driver hangs")
    driver.fails()
    await heartbeat(outside, lambda body: healthy(body) == [True, True], "two healthy GPUs again")

"""Another size for what runs on a real engine: asked for on the bus, seen in the engine, whoever dies meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from shared.messages import RequestRecord
from shared.testing.wait import eventually, until
from tests.docker import test_placer_on_docker as on_docker
from tests.docker_engine import docker, inspect
from tests.integration import test_placer as placers

pytestmark = pytest.mark.docker
stack = placers.stack
cluster = placers.cluster
told = on_docker.settings


@pytest.fixture
def settings(told: dict[str, str]) -> Iterator[dict[str, str]]:
    yield told
    for name in on_docker.there(told):  # by now no placer lives that would start it again
        docker("rm", "-f", name)


def limits(name: str) -> tuple[float, int, int]:
    """CPUs, and MiB without and with swap, as the engine has them."""
    host = inspect(name)["HostConfig"]
    return host["CpuQuota"] / host["CpuPeriod"], host["Memory"] >> 20, host["MemorySwap"] >> 20


async def ended(cluster: placers.Cluster) -> RequestRecord:
    """The record once nothing is being resized."""

    async def look() -> RequestRecord | None:
        record = await cluster.record("a")
        return record if record and record.steps[-1].state in {"resized", "resize_failed"} else None

    return await eventually(look, 30)


async def reserved(cluster: placers.Cluster) -> list[tuple[int, int]]:
    found = await cluster.bus.get("rt_ledger", "node.n1")
    assert found is not None
    held: list[dict[str, Any]] = json.loads(found[0])["reservations"]
    return [(each["cpu_milli"], each["memory_mib"]) for each in held]


async def test_a_running_container_gets_its_new_limits_and_goes_on(
    settings: dict[str, str], cluster: placers.Cluster
) -> None:
    cluster.placer("p0", **settings)
    await cluster.place(command=["sleep", "60"], cpu_milli=250, memory_mib=64)
    await cluster.reach("a", "started")
    (name,) = on_docker.there(settings)
    pid = inspect(name)["State"]["Pid"]
    for cpu_milli, memory_mib in [(500, 128), (125, 96)]:
        said = await cluster.ask("resize", request_id="a", cpu_milli=cpu_milli, memory_mib=memory_mib)
        assert ("resizing", cpu_milli, memory_mib) == (said["outcome"], said["cpu_milli"], said["memory_mib"])
        await ended(cluster)
        assert (cpu_milli / 1000, memory_mib, memory_mib) == limits(name)
        assert [(cpu_milli, memory_mib)] == await reserved(cluster)
    assert pid == inspect(name)["State"]["Pid"]
    assert "resized" == (await cluster.ask("resize", request_id="a", cpu_milli=125))["outcome"]


async def test_what_the_engine_refuses_stays_as_it_was_and_says_why(
    settings: dict[str, str], cluster: placers.Cluster
) -> None:
    cluster.placer("p0", **settings)
    await cluster.place(command=["sleep", "60"], cpu_milli=250, memory_mib=64)
    await cluster.reach("a", "started")
    (name,) = on_docker.there(settings)
    await cluster.ask("resize", request_id="a", cpu_milli=500, memory_mib=1)  # less than any engine gives
    step = (await ended(cluster)).steps[-1]
    assert "resize_failed" == step.state
    assert "stays at cpu 250 milli, memory 64 MiB" in (step.detail or "")
    assert (0.25, 64, 64) == limits(name)
    assert [(250, 64)] == await reserved(cluster)


async def test_a_size_that_a_killed_placer_had_in_hand_is_given_by_the_next(
    settings: dict[str, str], cluster: placers.Cluster
) -> None:
    first = cluster.placer("p0", **settings)
    await cluster.place(command=["sleep", "60"], cpu_milli=250, memory_mib=64)
    await cluster.reach("a", "started")
    (name,) = on_docker.there(settings)
    await cluster.ask("resize", request_id="a", cpu_milli=500, memory_mib=128)
    first.kill()
    cluster.placer("p1", **settings)
    await ended(cluster)
    await until(lambda: limits(name) == (0.5, 128, 128))
    assert [(500, 128)] == await reserved(cluster)
    await cluster.ask("release", request_id="a")
    await cluster.reach("a", "released")
    await until(lambda: on_docker.there(settings) == [])


async def test_a_container_that_ends_is_started_anew_with_its_new_size(
    settings: dict[str, str], cluster: placers.Cluster
) -> None:
    cluster.placer("p0", **settings, LAXITY_PLACER_BACKOFF_FIRST_US="1000")
    await cluster.place(command=["sleep", "60"], cpu_milli=250, memory_mib=64, restart="on_failure")
    await cluster.reach("a", "started")
    (name,) = on_docker.there(settings)
    await cluster.ask("resize", request_id="a", memory_mib=128)
    await ended(cluster)
    docker("kill", name)

    async def again() -> str | None:
        record = await cluster.record("a")
        found = [each for each in on_docker.there(settings) if each != name]
        return found[0] if found and record and record.state == "started" else None

    assert (0.25, 128, 128) == limits(await eventually(again, 30))

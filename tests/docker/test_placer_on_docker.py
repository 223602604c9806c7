"""Placer processes on a real engine and a real nats-server: what an outside client asks for is what the engine runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from shared.testing.wait import until
from tests.docker_engine import IMAGE, docker, docker_options, inspect
from tests.integration import test_placer as placers

pytestmark = pytest.mark.docker
stack = placers.stack
cluster = placers.cluster


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """What a placer must be told to run its containers on the engine; its nodes' devices are made up."""
    options = docker_options(tmp_path).model_copy(update={"gpus": False, "stop_grace_us": 200_000})
    return {"LAXITY_PLACER_BACKENDS": '{"*": "docker"}', "LAXITY_PLACER_DOCKER": options.model_dump_json()}


def there(settings: dict[str, str]) -> list[str]:
    """Names of all containers of the test, in any state."""
    scope = json.loads(settings["LAXITY_PLACER_DOCKER"])["scope"]
    return docker("ps", "-a", "--filter", f"label=laxity.scope={scope}", "--format", "{{.Names}}").split()


async def test_what_is_placed_runs_with_exactly_the_limits_asked_until_it_is_released(
    cluster: placers.Cluster, settings: dict[str, str]
) -> None:
    cluster.placer("p0", **settings)
    await cluster.place(command=["sleep", "60"], image=IMAGE, cpu_milli=250, memory_mib=64)
    record = await cluster.reach("a", "started")
    (name,) = there(settings)
    found = inspect(name)
    host = found["HostConfig"]
    assert (True, ["sleep", "60"]) == (found["State"]["Running"], found["Config"]["Cmd"])
    assert (0.25, 64 << 20) == (host["CpuQuota"] / host["CpuPeriod"], host["Memory"])
    assert f"LAXITY_DEVICES={','.join(record.replicas[0].devices)}" in found["Config"]["Env"]
    await cluster.ask("release", request_id="a")
    await cluster.reach("a", "released")
    await until(lambda: there(settings) == [])  # the record says so when nothing runs any more


async def test_an_exit_ends_the_request_with_its_code_and_leaves_nothing(
    cluster: placers.Cluster, settings: dict[str, str]
) -> None:
    cluster.placer("p0", **settings)
    await cluster.place(command=["sh", "-c", "exit 7"])
    record = await cluster.reach("a", "exited")
    assert 7 == record.exit_code
    await until(lambda: there(settings) == [])


async def test_a_start_that_fails_says_why(cluster: placers.Cluster, settings: dict[str, str]) -> None:
    cluster.placer("p0", **settings, LAXITY_PLACER_MOST_TRIES="2", LAXITY_PLACER_BACKOFF_FIRST_US="1000")
    await cluster.place(command=["no-such-command"])
    record = await cluster.reach("a", "failed")
    assert "no-such-command" in record.model_dump_json()
    await until(lambda: there(settings) == [])  # the record says so when nothing runs any more


async def test_containers_outlive_a_killed_placer_and_are_not_started_again(
    cluster: placers.Cluster, settings: dict[str, str]
) -> None:
    first = cluster.placer("p0", **settings)
    for number in range(6):
        await cluster.place(request_id=f"r{number}", command=["sleep", "60"])
        if number == 3:
            first.kill()
            cluster.placer("p1", **settings)
    for number in range(6):
        await cluster.reach(f"r{number}", "started")
    names = there(settings)
    assert 6 == len(set(names)) == len(names)
    assert all(inspect(name)["State"]["Running"] for name in names)
    await asyncio.gather(*(cluster.ask("release", request_id=f"r{number}") for number in range(6)))
    for number in range(6):
        await cluster.reach(f"r{number}", "released")
    await until(lambda: there(settings) == [])  # the record says so when nothing runs any more

"""Profile gpu of compose/compose.yaml on an engine without a GPU: no driver first, then a driver library without one.

NVIDIA's part of the engine is tests/docker/hook, which .ci/docker-engine gives its engine.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from tests.docker.composed import UP_S, Project
from tests.docker_engine import IMAGE, docker, inspect
from tests.outside import Json, ask, until

pytest.importorskip("services.monitor.probes.nvml_process", reason="this monitor has no probe for GPUs")
pytestmark = [pytest.mark.docker, pytest.mark.timeout(UP_S + 60)]
NEEDED = ("placer", "node-list", "monitor-gpu-1", "monitor-fake-1", "events")
"""All that the tests look at; Compose adds what these depend on."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    made = Project(tmp_path_factory.mktemp("gpu"), profile="gpu")
    try:
        hooked()
        made.up(*NEEDED)
        yield made
    finally:
        made.down()


def hooked() -> None:
    """Skips where the engine does not serve requests for GPUs: it says so at the start, not before."""
    made = docker("create", "--gpus", "all", "--network", "none", IMAGE, "true")
    try:
        docker("start", made, check=False)
        why = inspect(made)["State"]["Error"]
    finally:
        docker("rm", "--force", made)
    if why:
        pytest.skip(f"this engine has no runtime for GPUs ({why}); make test-docker starts one with a stand-in")


@pytest.fixture
async def outside(project: Project, tmp_path: Path) -> AsyncIterator[Client]:
    seed = tmp_path / "client.nk"
    project("cp", "events:/keys/client.nk", str(seed))
    client = await nats.connect(project.url(), nkeys_seed=str(seed), inbox_prefix="_INBOX.client")
    yield client
    await client.close()


async def devices(client: Client, node: str) -> list[str]:
    """Of one node, as rt.nodes lists them."""
    answer = await ask(client, "rt.nodes", {"limit": 1000})
    return sorted(one["uuid"] for one in answer["devices"] if one["node"] == node)


async def test_without_a_driver_the_monitor_says_so_and_all_else_goes_on(project: Project, outside: Client) -> None:
    async def said() -> bool:
        return '"no_driver"' in project("logs", "--no-color", "monitor-gpu-1")

    await until(said, "the reason in the monitor's log", 30)
    await until(lambda: devices(outside, "fake-1"), "the devices of another node", 30)
    assert [] == await devices(outside, "gpu-1")
    assert "healthy" == project.inspect("monitor-gpu-1")["State"]["Health"]["Status"]

    async def placed() -> bool:
        body = {"request_id": "beside", "command": ["x"], "candidates": ["fake-1"], "queue": True}
        return (await ask(outside, "rt.place", body))["outcome"] in {"placed", "started"}

    await until(placed, "a place on another node", 30)


async def test_with_a_driver_a_container_gets_the_gpu_on_which_it_was_placed(
    project: Project, outside: Client, tmp_path: Path
) -> None:
    from tests.fake_nvml.build import FakeDriver, build_fake_nvml

    driver = FakeDriver(build_fake_nvml(tmp_path), tmp_path / "control")
    project.more(_with(driver, tmp_path))
    project.up("monitor-gpu-1")
    found = await until(lambda: devices(outside, "gpu-1"), "GPUs", 60)
    request = {"request_id": "on-gpu", "command": ["sleep", "600"], "gpu": {"share": 0.5}, "candidates": ["gpu-1"]}
    request["queue"] = True  # its node may be listed a moment before it is ready

    async def placed() -> Json | None:
        answer = await ask(outside, "rt.place", request)
        return answer if answer["outcome"] in {"placed", "started"} else None

    (placement,) = (await until(placed, "a place on a GPU", 30))["placements"]
    assert placement["devices"][0] in found

    async def running() -> Json | None:
        return next((one for one in map(inspect, project.placed()) if one["State"]["Running"]), None)

    container = await until(running, "the container", 30)
    (asked,) = container["HostConfig"]["DeviceRequests"]
    assert ("nvidia", placement["devices"]) == (asked["Driver"], asked["DeviceIDs"])
    told = docker("exec", container["Id"], "cat", "/proc/1/environ").split("\0")
    assert f"NVIDIA_VISIBLE_DEVICES={placement['devices'][0]}" in told

    await ask(outside, "rt.release", {"request_id": "on-gpu"})

    async def gone() -> bool:
        return not project.placed()

    await until(gone, "the end of the container", 30)


def _with(driver: object, folder: Path) -> Path:
    """A second file that gives the monitor the library, as NVIDIA's runtime would."""
    environment = driver.environment | {"LAXITY_MONITOR_NVML_HOST_PIDS": "true"}  # type: ignore[attr-defined]
    service = {"environment": environment, "volumes": [f"{folder}:{folder}:ro"]}
    path = folder / "driver.json"
    path.write_text(json.dumps({"services": {"monitor-gpu-1": service}}))
    return path


def test_down_leaves_nothing(project: Project) -> None:
    project("down", "--volumes", timeout_s=120)
    assert {"network": [], "volume": [], "containers": []} == project.left()

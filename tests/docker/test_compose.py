"""The cluster of compose/compose.yaml on a real engine, seen from outside: a plain NATS client and Docker's own.

The tests share one cluster and stand in the order of its life; the last one takes it down.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.docker.composed import UP_S, Project
from tests.docker_engine import inspect
from tests.outside import Json, ask, until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(UP_S + 60)]

DETECTOR = {
    "request_id": "detector",
    "command": ["python", "examples/work/infer.py", "--period-us", "100000", "--runtime-us", "10000"],
    "candidates": ["docker-1"],
    "queue": True,  # the services are ready a moment before docker-1 is listed, and a rejection would stay one
    "env": {"MODEL": "yolo"},
    "user": "1234",
    "shm_mib": 96,
    "gpu": {"share": 0.5},
    "cpu_milli": 500,
    "memory_mib": 256,
    # Three times too much work for the deadline: each task is judged as missed, whatever the machine does meanwhile.
    "realtime": {"deadline_us": 3_000, "period_us": 100_000, "runtime_us": 1_000, "kind": "soft"},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    made = Project(tmp_path_factory.mktemp("compose"))
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def seed(project: Project, tmp_path: Path) -> Path:
    """The key of a client, taken out as docs/compose.md says."""
    path = tmp_path / "client.nk"
    project("cp", "events:/keys/client.nk", str(path))
    return path


@pytest.fixture
async def outside(project: Project, seed: Path) -> AsyncIterator[Client]:
    client = await nats.connect(project.url(), nkeys_seed=str(seed), inbox_prefix="_INBOX.client")
    yield client
    await client.close()


class Heard:
    """What an outside client hears of the events."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, Json]] = []

    async def listen(self, client: Client) -> None:
        await client.subscribe("rt.events.>", cb=self._take)
        await client.flush()

    async def _take(self, message: Msg) -> None:
        self.bodies.append((message.subject, json.loads(message.data)))

    def states(self, request_id: str) -> list[str]:
        return [body["state"] for subject, body in self.bodies if subject == f"rt.events.place.{request_id}"]

    def tasks(self, container: str) -> int:
        """Ends and overdues of one container's tasks."""
        count = 0
        for subject, body in self.bodies:
            if subject == "rt.events.task.docker-1":
                mine = {number for number, ring in enumerate(body["rings"]) if ring["container"] == container}
                count += sum(ring in mine and kind > 1 for ring, kind in zip(body["ring"], body["kind"], strict=True))
        return count

    def missed(self, container: str) -> list[Json]:
        return [
            body
            for subject, body in self.bodies
            if subject == f"rt.events.deadline.docker-1.{container}" and body["kind"] == "missed"
        ]


async def test_a_request_from_outside_runs_on_the_engine_with_exactly_the_limits_asked_and_is_judged_and_released(
    project: Project, outside: Client
) -> None:
    heard = Heard()
    await heard.listen(outside)

    placed = await until(lambda: _placed(outside, DETECTOR), "a place on docker-1", 30)
    (placement,) = placed["placements"]
    assert "docker-1" == placement["node"]

    async def running() -> str | None:
        return next(iter(project.placed()), None) if "started" in heard.states("detector") else None

    found = inspect(await until(running, "the container", 30))
    labels = json.loads(found["Config"]["Labels"]["laxity.labels"])
    _assert_as_asked(found, placement["devices"])

    async def judged() -> bool:
        return heard.tasks(labels["container"]) >= 3 and len(heard.missed(labels["container"])) >= 3

    await until(judged, "tasks and their verdicts", 30)

    assert (await ask(outside, "rt.release", {"request_id": "detector"}))["outcome"] in {"stopping", "released"}

    async def gone() -> bool:
        return "released" in heard.states("detector") and not project.placed() and not list(project.rings.iterdir())

    await until(gone, "the end of the container and of its rings", 30)
    assert ["accepted", "placed", "started"] == [each for each in heard.states("detector") if each != "queued"][:3]


async def _placed(client: Client, request: dict[str, Any]) -> Json:
    answer = await ask(client, "rt.place", request)
    assert answer["outcome"] in {"placed", "started"}, answer
    return answer


def _assert_as_asked(found: Json, devices: list[str]) -> None:
    """``devices`` of the cpu probe end in the number of their core."""
    limits, config = found["HostConfig"], found["Config"]
    assert found["State"]["Running"]
    assert "laxity-workload:local" == config["Image"]
    assert DETECTOR["command"] == config["Cmd"]
    assert "1234" == config["User"]
    assert "MODEL=yolo" in config["Env"]
    assert 0.5 == limits["CpuQuota"] / limits["CpuPeriod"]
    assert (256 << 20, 256 << 20) == (limits["Memory"], limits["MemorySwap"])
    assert 96 << 20 == limits["ShmSize"]
    assert ",".join(device.rpartition("-")[2] for device in devices) == limits["CpusetCpus"]
    assert (["ALL"], None, False) == (limits["CapDrop"], limits["CapAdd"], limits["Privileged"])
    assert ["no-new-privileges:true"] == limits["SecurityOpt"]
    assert "no" == limits["RestartPolicy"]["Name"]


def test_the_server_is_reached_from_this_machine_alone(project: Project) -> None:
    assert project("port", "nats", "4222").startswith("127.0.0.1:")
    for service in project("config", "--services").split():
        ports = project.inspect(service)["HostConfig"]["PortBindings"] if project("ps", "--quiet", service) else {}
        assert all(one["HostIp"] == "127.0.0.1" for bound in (ports or {}).values() for one in bound), service


def test_each_service_tells_its_numbers_on_the_network_of_the_project_alone(project: Project) -> None:
    ask = "import sys, urllib.request as r; sys.stdout.write(r.urlopen(sys.argv[1]).read().decode())"
    for service, says in [
        ("placer", 'laxity_requests{state="placed"}'),
        ("deadline-tracker", "laxity_tracker_partitions 8.0"),
        ("node-list", "laxity_node_list_active 1.0"),
        ("monitor-fake-1", "DCGM_FI_DEV_FB_FREE{"),
    ]:
        url = f"http://{service}:9464/metrics"
        assert says in project("exec", "--no-TTY", "events", "python", "-c", ask, url), service
        assert not project("port", service, "9464", check=False)


def test_a_service_cannot_read_the_key_of_another(project: Project) -> None:
    look = ("exec", "--no-TTY", "node-list", "sh", "-c")
    assert "own" == project(*look, "cat /keys/node-list.nk >/dev/null && echo own")
    for other in ("placer", "deadline-tracker", "monitor-docker-1", "client", "operator"):
        assert "" == project(*look, f"cat /keys/{other}.nk 2>/dev/null", check=False)


def test_no_service_but_the_two_of_the_real_node_is_root_and_none_has_capabilities_beyond_those_of_its_work(
    project: Project,
) -> None:
    for service in ("nats", "node-list", "deadline-tracker", "placer", "monitor-docker-1", "monitor-fake-1", "events"):
        found = project.inspect(service)
        root = found["Config"]["User"].startswith("0")
        assert root == (service in {"placer", "monitor-docker-1"}), service
        assert ["ALL"] == found["HostConfig"]["CapDrop"]
        more = {name.removeprefix("CAP_") for name in found["HostConfig"]["CapAdd"] or ()}
        assert more == ({"SYS_PTRACE", "DAC_OVERRIDE"} if service == "monitor-docker-1" else set()), service
        assert found["HostConfig"]["ReadonlyRootfs"]


def test_the_commands_of_the_guide_work(project: Project) -> None:
    command = ("exec", "--no-TTY", "events", "python", "-m", "cli.main")
    assert "docker-1" in project(*command, "nodes", "--output", "json")

    operator = ("--user", "10005", "--env", "LAXITY_NATS_SEED_FILE=/keys/operator.nk")
    assert "placer" in project("exec", "--no-TTY", *operator, *command[2:], "status", "--output", "json")


async def test_placers_and_trackers_are_scaled_while_the_cluster_runs(project: Project, outside: Client) -> None:
    more = ("--scale", "placer=3", "--scale", "deadline-tracker=2")
    project("up", "--detach", "--no-build", "--wait", "--wait-timeout", "120", *more, timeout_s=UP_S)

    async def scaled() -> bool:
        return (3, 2) == (len(await _ping(outside, "placer")), len(await _ping(outside, "deadline-tracker")))

    await until(scaled, "three placers and two trackers", 30)


async def _ping(client: Client, service: str) -> set[str]:
    """The ids of those that answer."""
    inbox = client.new_inbox()
    sub = await client.subscribe(inbox)
    await client.publish(f"$SRV.PING.{service}", reply=inbox)
    found: set[str] = set()
    try:
        while True:
            found.add(json.loads((await sub.next_msg(timeout=1)).data)["id"])
    except TimeoutError:
        return found
    finally:
        await sub.unsubscribe()


def test_down_leaves_nothing(project: Project) -> None:
    assert [] == project.placed()
    project("down", "--volumes", timeout_s=120)
    assert {"network": [], "volume": [], "containers": []} == project.left()

"""Profile ha of compose/compose.yaml on a real engine: three servers, two of each service, and what survives.

The tests share one cluster and stand in the order of its life; the last one takes it down.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from tests.docker.composed import UP_S, Project
from tests.docker_engine import docker
from tests.outage import all_go_on, asking, nothing_lost_and_nothing_twice
from tests.outside import Json, ask, until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(UP_S + 120),
    # The plain client of the outside leaves the transport of a server that does not answer to the garbage collector.
    pytest.mark.filterwarnings("ignore:.*_SelectorTransport:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning"),
]
SERVERS = ("nats", "nats-2", "nats-3")
TWO_OF_EACH = {
    "node-list": ("rt_nodes", "lease.node-list"),
    "deadline-tracker": ("rt_deadlines", "lease.deadline-tracker-0"),
    "placer": ("rt_ledger", "lease.leader"),
}
"""Where the lease of the active one lies, of deadline-trackers that of their first partition."""
STREAMS = ("RT_EVENTS", "RT_PLACE", "KV_rt_ledger", "KV_rt_nodes", "KV_rt_deadlines", "KV_rt_learned")
BODY = {"command": ["serve"], "candidates": ["fake-1"], "queue": True}
PATIENCE_S = 90.0
"""Far beyond any election: only a cluster that never comes back fails by it."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    made = Project(tmp_path_factory.mktemp("ha"), env_file="ha.env")
    try:
        made.up(*SERVERS, *TWO_OF_EACH, "monitor-fake-1", "events", wait_s=300)
        yield made
    finally:
        made.down()


async def connect(project: Project, folder: Path, user: str, first: int = 0) -> Client:
    """With a key taken out as docs/compose.md says; it begins at one of the servers, and knows all."""
    seed = folder / f"{user}.nk"
    if not seed.exists():
        project("cp", f"events:/keys/{user}.nk", str(seed))
    urls = [project.url(server) for server in (*SERVERS[first:], *SERVERS[:first])]
    return await nats.connect(
        urls,
        nkeys_seed=str(seed),
        inbox_prefix=f"_INBOX.{user}",
        dont_randomize=True,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.1,
        ping_interval=1,
    )


@pytest.fixture
async def operator(project: Project, tmp_path: Path) -> AsyncIterator[Client]:
    client = await connect(project, tmp_path, "operator")
    yield client
    await client.close()


@pytest.fixture
async def clients(project: Project, tmp_path: Path) -> AsyncIterator[list[Client]]:
    """One that begins at each server."""
    found = [await connect(project, tmp_path, "client", at) for at in range(len(SERVERS))]
    yield found
    for client in found:
        await client.close()


async def info(operator: Client, stream: str) -> Json:
    """What the cluster says of a stream; nothing while it elects."""
    try:
        return await ask(operator, f"$JS.API.STREAM.INFO.{stream}", {}, 2.0)
    except nats.errors.Error:
        return {}


async def whole(operator: Client, stream: str) -> str | None:
    """The leader, once all three servers have all of the stream."""
    found = (await info(operator, stream)).get("cluster", {})
    current = [one for one in found.get("replicas", ()) if one.get("current") and not one.get("offline")]
    return found.get("leader") if len(current) == 2 else None


async def holder(operator: Client, service: str) -> str | None:
    """The container that holds a service's lease: its host name begins the holder's name."""
    bucket, key = TWO_OF_EACH[service]
    found = await ask(operator, f"$JS.API.DIRECT.GET.KV_{bucket}.$KV.{bucket}.{key}", {}, 2.0)
    return str(found["holder"]).partition("-")[0] if "holder" in found else None


def containers(project: Project, service: str) -> list[str]:
    """Short ids, which are the containers' host names."""
    return [each[:12] for each in project("ps", "--all", "--quiet", service).split()]


async def healthy(project: Project) -> bool:
    found = [json.loads(line) for line in project("ps", "--format", "json").splitlines()]
    return all(one["Health"] in {"healthy", ""} and one["State"] == "running" for one in found)


async def test_there_are_three_servers_with_three_replicas_of_each_stream_and_two_of_each_service(
    project: Project, operator: Client
) -> None:
    for stream in STREAMS:
        await until(lambda stream=stream: whole(operator, stream), f"three replicas of {stream}", PATIENCE_S)
        assert 3 == (await info(operator, stream))["config"]["num_replicas"]
    assert [2, 2, 2] == [len(containers(project, service)) for service in TWO_OF_EACH]
    for server in SERVERS:
        assert project("port", server, "4222").startswith("127.0.0.1:")


async def test_requests_go_on_when_the_leader_of_the_ledger_is_cut_off_and_nothing_accepted_is_lost(
    project: Project, operator: Client, clients: list[Client], capsys: pytest.CaptureFixture[str]
) -> None:
    await until(lambda: _answered(clients[0]), "a first answer", PATIENCE_S)
    leader = await until(lambda: whole(operator, "KV_rt_ledger"), "a leader", PATIENCE_S)
    (server,), network = containers(project, leader), f"{project.name}_default"
    async with asking(clients, BODY) as askers:
        await all_go_on(askers, PATIENCE_S)
        docker("network", "disconnect", network, server)
        await all_go_on(askers, PATIENCE_S)
        docker("network", "connect", "--alias", leader, network, server)
        await all_go_on(askers, PATIENCE_S)
        await until(lambda: whole(operator, "KV_rt_ledger"), "three replicas again", PATIENCE_S)
    with capsys.disabled():
        pauses = ", ".join(f"{asker.longest_pause_s:.1f}" for asker in askers)
        print(f"\n{leader}, leader of the ledger, cut off and back: longest pauses of three clients {pauses} s")
    await nothing_lost_and_nothing_twice(operator, askers, PATIENCE_S)


async def _answered(client: Client) -> bool:
    """False while the cluster does not know its nodes yet."""
    return (await ask(client, "rt.place", BODY | {"request_id": "first"}))["outcome"] in {"placed", "started"}


async def test_the_second_of_each_service_goes_on_when_the_active_one_is_killed(
    project: Project, operator: Client, clients: list[Client]
) -> None:
    async with asking(clients[:1], BODY | {"env": {"ROUND": "2"}}) as askers:
        askers[0].name = "killed"
        for service in TWO_OF_EACH:
            both = containers(project, service)
            active = await until(lambda service=service: holder(operator, service), f"a holder: {service}", PATIENCE_S)
            assert active in both
            docker("kill", "--signal", "KILL", active)

            async def taken_over(service: str = service, active: str = active) -> bool:
                return await holder(operator, service) not in {None, active}

            await until(taken_over, f"the second {service} is active", PATIENCE_S)
            await all_go_on(askers, PATIENCE_S)
            docker("start", active)
    await nothing_lost_and_nothing_twice(operator, askers, PATIENCE_S)
    await until(lambda: healthy(project), "all services healthy", PATIENCE_S)


def test_the_profile_without_its_settings_is_refused_with_what_to_do(tmp_path: Path) -> None:
    said = Project(tmp_path, profile="ha").refused("up", "--detach")
    assert "profile ha is started with: docker compose --env-file ha.env up" in said


def test_down_leaves_nothing(project: Project) -> None:
    project("down", "--volumes", timeout_s=120)
    assert {"network": [], "volume": [], "containers": []} == project.left()

"""Placers on three real servers: the leader of the ledger dies or stands still, and nothing accepted is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from shared.bus import Bus
from shared.messages import State
from shared.settings import ServiceSettings
from shared.subjects import NODES, node_key
from shared.testing.nats_server import NatsCluster
from tests.integration.test_bus_commit import raced
from tests.integration.test_placer import Cluster
from tests.outage import all_go_on, asking, nothing_lost_and_nothing_twice
from tests.outside import until
from tests.placer_world import facts

BODY = {"command": ["serve"], "queue": True}  # a placer that knows no node yet lets it wait
PATIENCE_S = 60.0
"""Far beyond any election: only a cluster that never comes back fails by it."""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path) as servers:
        yield servers


@pytest.fixture
async def clients(servers: NatsCluster) -> AsyncIterator[list[Client]]:
    """One that begins at each server, and knows all."""
    urls = [server.url for server in servers.servers]
    async with asyncio.timeout(PATIENCE_S):
        found = [await _client([*urls[at:], *urls[:at]]) for at in range(len(urls))]
    yield found
    for client in found:
        await client.close()


async def _client(urls: list[str]) -> Client:
    return await nats.connect(
        urls, dont_randomize=True, max_reconnect_attempts=-1, reconnect_time_wait=0.1, ping_interval=1
    )


async def replicas(client: Client, stream: str) -> tuple[str, int]:
    """The leader and how many servers hold all of a stream; an election has no leader."""
    info = (await client.jetstream(timeout=2).stream_info(stream)).cluster
    if info is None or not info.leader:
        return "", 0
    return info.leader, 1 + sum(bool(one.current) and not one.offline for one in info.replicas or ())


async def whole(client: Client, stream: str, count: int = 3) -> str:
    """The leader, once that many servers are up to date."""

    async def look() -> str:
        leader, current = await replicas(client, stream)
        return leader if current == count else ""

    return str(await until(lambda: _patient(look), f"{count} replicas of {stream}", PATIENCE_S))


async def _patient(look: Any) -> Any:
    try:
        return await look()
    except nats.js.errors.APIError:  # no leader to ask
        return None


# The plain client of the outside leaves the transport of a server that does not answer to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*_SelectorTransport:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", ["kill", "pause"])
async def test_requests_go_on_when_the_leader_of_the_ledger_fails_and_nothing_accepted_is_lost(
    tmp_path: Path, servers: NatsCluster, clients: list[Client], fault: str
) -> None:
    settings = ServiceSettings(nats_url=servers.url, replicas=3, ack_timeout_us=1_000_000)
    bus = await Bus.connect(settings)
    await bus.ensure_streams()
    leader = await whole(clients[0], "KV_rt_ledger")
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, servers, bus, clients[0], stack)
        env = {"LAXITY_STORAGE": "file", "LAXITY_REPLICAS": "3", "LAXITY_PING_INTERVAL_US": "500000"}
        env["LAXITY_ACK_TIMEOUT_US"] = "1500000"
        await asyncio.gather(*(asyncio.to_thread(cluster.placer, name, **env) for name in ("p0", "p1")))
        await bus.put(NODES, node_key("n1"), facts("n1", 1).to_json())
        async with asking(clients, BODY) as askers:
            await all_go_on(askers, PATIENCE_S)
            server = servers.named(leader)
            server.kill() if fault == "kill" else server.pause()
            await all_go_on(askers, PATIENCE_S)
            server.start() if fault == "kill" else server.resume()
            await all_go_on(askers, PATIENCE_S)
        print(f"\n{fault}: longest pauses {[round(asker.longest_pause_s, 1) for asker in askers]} s")
        await whole(clients[0], "KV_rt_ledger")
        for request_id in (name for asker in askers for name in asker.accepted):
            await cluster.reach(request_id, State.STARTED)
        await nothing_lost_and_nothing_twice(clients[0], askers, PATIENCE_S)
        accepted = sum(len(asker.accepted) for asker in askers)
        assert accepted <= len(cluster.containers()) <= accepted + len(askers)  # one of each may not be answered yet
    await bus.close()


async def test_streams_of_one_replica_get_three_when_a_placer_wants_them(
    servers: NatsCluster, clients: list[Client]
) -> None:
    for count in (1, 3):
        bus = await Bus.connect(ServiceSettings(nats_url=servers.url, replicas=count, ack_timeout_us=1_000_000))
        await bus.ensure_streams()
        await bus.close()
        await whole(clients[0], "RT_EVENTS", count)


async def test_nothing_with_a_fence_is_written_after_the_other_key_on_three_servers(servers: NatsCluster) -> None:
    settings = [ServiceSettings(nats_url=server.url, replicas=3) for server in servers.servers]
    async with asyncio.timeout(2 * PATIENCE_S):
        buses = [await Bus.connect(each, "bench") for each in settings[:2]]
        await buses[0].ensure_streams()
        before = await raced(*buses)
        for bus in buses:
            await bus.close()
    assert before
    assert min(before) > 0

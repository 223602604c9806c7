"""Nodes that are lost, with real processes: a monitor killed with -9, alone or with its node cut off as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from services.placer.backends.fake import SILENT
from shared.testing.service_process import ServiceProcess
from tests.e2e.embedded import call
from tests.e2e.processes import Cluster
from tests.outside import Json, ask, connect, states, until, value

pytestmark = pytest.mark.timeout(180)

SOON = {
    "services.node_list": {"LAXITY_NODE_LIST_GRACE_US": "3000000", "LAXITY_NODE_LIST_LOST_US": "6000000"},
    "services.placer": {"LAXITY_PLACER_LOST_GRACE_US": "1000000"},
}


class Losing(Cluster):
    """Of two nodes, with short times."""

    def service(self, module: str, name: str, **env: str) -> ServiceProcess:
        return super().service(module, name, **env | SOON.get(module, {}))

    def monitor_of(self, node: str) -> ServiceProcess:
        return self.others[int(node.removeprefix("fake-"))]

    def engine_of(self, node: str) -> Path:
        """What the fake backend knows of a node."""
        return self.folder / "state" / "fake" / node

    def on(self, node: str) -> list[str]:
        """The containers there, also while it is cut off."""
        return sorted(path.stem for path in self.engine_of(node).glob("laxity-*.json"))

    def cut_off(self, node: str) -> None:
        (self.engine_of(node) / SILENT).touch()

    def join(self, node: str) -> None:
        (self.engine_of(node) / SILENT).unlink()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Losing]:
    with Losing(tmp_path, placers=2, nodes=2, devices=2) as made:
        yield made


@pytest.fixture
async def outside(cluster: Losing) -> AsyncIterator[Client]:
    client = await connect(cluster.nats.url)
    yield client
    await client.close()


async def runs(client: Client, request_id: str) -> str:
    """Placed once the cluster knows its nodes; on which one."""
    body = {"request_id": request_id, "command": ["serve"], "gpu": {"share": 0.5}, "restart": "on_failure"}

    async def started() -> bool:
        return (await ask(client, "rt.place", body | {"queue": True}))["outcome"] == "started"

    await until(started, f"{request_id} runs", 40)
    return (await places(client, request_id))[0][0]


async def places(client: Client, request_id: str) -> list[tuple[str, int]]:
    """Node and generation of everything that is reserved for it."""
    nodes = [await value(client, "rt_ledger", f"node.fake-{number}") or {} for number in range(2)]
    held = [(node["node"], each) for node in nodes for each in node.get("reservations", [])]
    return sorted((node, each["generation"]) for node, each in held if each["request_id"] == request_id)


async def state_of(client: Client, node: str) -> str:
    facts: Json = await value(client, "rt_nodes", f"node.{node}") or {}
    return str(facts.get("state"))


async def said(cluster: Losing, *arguments: str) -> str:
    done = await asyncio.to_thread(call, *arguments, url=cluster.nats.url)
    return done.stdout


async def test_what_ran_where_a_monitor_was_killed_starts_elsewhere_and_is_removed_there(
    cluster: Losing, outside: Client
) -> None:
    """The node's backend answers, so nothing stops before its successor runs."""
    node = await runs(outside, "a")
    other = "fake-1" if node == "fake-0" else "fake-0"
    cluster.monitor_of(node).kill()

    async def moved() -> bool:
        return await places(outside, "a") == [(other, 2)] and not cluster.on(node)

    await until(moved, "it runs on the other node alone", 60)
    assert ["placed", "started", "moving", "moved"] == (await states(outside, "a"))[-4:]
    assert "lost" == await state_of(outside, node)
    assert 1 == len(cluster.on(other))

    cluster.monitor_of(node).start()

    async def back() -> bool:
        return await state_of(outside, node) == "ready"

    await until(back, "the node is back", 40)
    assert [(other, 2)] == await places(outside, "a")


async def test_a_lost_node_that_answers_nobody_is_counted_until_it_is_back_and_ends_what_was_placed_again(
    cluster: Losing, outside: Client
) -> None:
    node = await runs(outside, "a")
    other = "fake-1" if node == "fake-0" else "fake-0"
    cluster.monitor_of(node).kill()
    cluster.cut_off(node)

    async def again() -> bool:
        return (await states(outside, "a"))[-3:] == ["waiting", "placed", "started"]

    await until(again, "it is placed again", 60)
    assert sorted([(node, 1), (other, 2)]) == await places(outside, "a")
    assert (1, 1) == (len(cluster.on(node)), len(cluster.on(other)))
    told = await said(cluster, "explain", "a")
    assert f"{node} is lost: replica 0 goes elsewhere" in told
    assert f"replica 0, generation 1, may still run on {node}, which is lost" in told

    cluster.join(node)
    cluster.monitor_of(node).start()

    async def one() -> bool:
        return await places(outside, "a") == [(other, 2)] and not cluster.on(node)

    await until(one, "one is left", 40)
    assert 1 == len(cluster.on(other))


async def test_an_operator_says_that_a_lost_node_is_gone(cluster: Losing, outside: Client) -> None:
    node = await runs(outside, "a")
    assert "which is ready" in await said(cluster, "ledger", "gone", node)
    cluster.monitor_of(node).kill()
    cluster.cut_off(node)

    async def lost() -> bool:
        return await state_of(outside, node) in {"unreachable", "lost"}

    await until(lost, "its node is lost", 40)
    assert f"{node}: 1 reservation(s) given back" in await said(cluster, "ledger", "gone", node)

    async def again() -> bool:
        found = await places(outside, "a")
        return len(found) == 1 and found[0][0] != node

    await until(again, "it is placed again and counted once", 40)

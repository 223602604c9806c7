"""`laxity resize` against a placer process on a real nats-server: what it prints, how it ends, what the backend has."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cli.main import main
from shared.messages import NodeReservations
from shared.subjects import LEDGER, node_key
from shared.testing.wait import until
from tests.integration import test_placer as placers

stack = placers.stack
cluster = placers.cluster


class Command:
    """The command line in a thread of its own, as JSON."""

    def __init__(self, cluster: placers.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
        self._url, self._capsys = cluster.server.url, capsys

    async def resize(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Its exit code and its reply; what it said on stderr where there is no reply."""
        code, out, err = await self.run("resize", *arguments, "-o", "json")
        return code, json.loads(out) if out else {"stderr": err}

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        code = await asyncio.to_thread(main, [*arguments, "--nats-url", self._url])
        return code, *self._capsys.readouterr()


@pytest.fixture
def command(cluster: placers.Cluster, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(cluster, capsys)


def given(cluster: placers.Cluster) -> list[tuple[int, int]]:
    """What the fake backend's containers have."""
    files = [path for path in (cluster.folder / "state").rglob("*.json") if not path.name.startswith(".")]
    held = [json.loads(path.read_bytes())["labels"]["reservation"] for path in files]
    return [(each["cpu_milli"], each["memory_mib"]) for each in held]


async def reserved(cluster: placers.Cluster) -> list[tuple[int, int]]:
    found = await cluster.bus.get(LEDGER, node_key("n1"))
    assert found is not None
    return [(each.cpu_milli, each.memory_mib) for each in NodeReservations.trusted(found[0]).reservations]


async def test_the_command_waits_until_all_replicas_have_their_size(cluster: placers.Cluster, command: Command) -> None:
    cluster.placer("p1")
    await cluster.place(cpu_milli=500, memory_mib=64, replicas=3)
    await cluster.reach("a", "started")
    code, reply = await command.resize("a", "--cpu", "1500m", "--memory", "2Gi")

    assert (0, "resized", 1_500, 2_048) == (code, reply["outcome"], reply["cpu_milli"], reply["memory_mib"])
    assert [(1_500, 2_048)] * 3 == given(cluster) == await reserved(cluster)
    assert ["accepted", "placed", "started", "resizing", "resized"] == await told(cluster, 5)
    code, reply = await command.resize("a", "--cpu", "1")
    assert (0, 1_000, 2_048) == (code, reply["cpu_milli"], reply["memory_mib"])
    assert [(1_000, 2_048)] * 3 == given(cluster)


async def told(cluster: placers.Cluster, count: int) -> list[str]:
    await until(lambda: len(cluster.states("a")) >= count)
    return cluster.states("a")


async def test_what_the_backend_or_the_node_refuses_has_exit_code_1_and_its_reason(
    cluster: placers.Cluster, command: Command
) -> None:
    cluster.placer("p1")
    await cluster.place(cpu_milli=500, memory_mib=64, env={"FAKE_MOST_MEMORY_MIB": "100"})
    await cluster.reach("a", "started")
    code, reply = await command.resize("a", "--memory", "128Mi")
    assert (1, "resize_failed", "failed.resize") == (code, reply["outcome"], reply["reasons"][0]["code"])
    assert "stays at cpu 500 milli, memory 64 MiB: the fake was told" in reply["reasons"][0]["message"]
    code, reply = await command.resize("a", "--cpu", "65")
    assert (1, "rejected", "never.cpu") == (code, reply["outcome"], reply["reasons"][0]["code"])
    assert [(500, 64)] == given(cluster) == await reserved(cluster)


async def test_people_are_told_the_size_and_the_story(cluster: placers.Cluster, command: Command) -> None:
    cluster.placer("p1")
    await cluster.place(memory_mib=64)
    await cluster.reach("a", "started")
    code, out, _ = await command.run("resize", "a", "--memory", "128Mi")
    assert (0, True) == (code, "each replica: cpu without limit, memory 128 MiB" in out)
    story = (await command.run("explain", "a"))[1]
    assert "resized since: cpu without limit, memory 128 MiB" in story
    assert "from cpu without limit, memory 64 MiB to cpu without limit, memory 128 MiB" in story.replace("\n", " ")


async def test_mistakes_and_ids_that_nobody_knows(cluster: placers.Cluster, command: Command) -> None:
    cluster.placer("p1")
    assert (1, "unknown") == ((said := await command.resize("a", "--cpu", "1"))[0], said[1]["outcome"])
    assert 2 == (await command.resize("a"))[0]
    assert 2 == (await command.resize("a", "--memory", "0"))[0]
    code, said_on = await command.resize("a", "--memory", "2Gib")
    assert (2, True) == (code, "--memory: found 2Gib" in said_on["stderr"])
    await cluster.ask("release", request_id="b")
    code, reply = await command.resize("b", "--cpu", "1")
    assert (2, "b, which is released") == (code, reply["error"]["found"])


async def test_one_that_is_not_done_in_time_has_exit_code_3_and_goes_on(
    cluster: placers.Cluster, command: Command
) -> None:
    cluster.placer("p1")
    await cluster.place(cpu_milli=500, env={"FAKE_START_US": "1500000"})
    code, reply = await command.resize("a", "--cpu", "250m", "--wait", "0s")
    assert (3, "resizing") == (code, reply["outcome"])
    assert ["accepted", "placed", "resizing", "started", "resized"] == await told(cluster, 5)
    assert [(250, 0)] == given(cluster) == await reserved(cluster)

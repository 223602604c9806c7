"""Placer processes on a real nats-server, with the fake backend and hand-written node facts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from shared.bus import Bus
from shared.messages import LedgerIdentity, NodeReservations, PlaceEvent, RequestRecord
from shared.settings import ServiceSettings
from shared.subjects import LEDGER, NODES, node_key, request_key
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess
from shared.testing.wait import eventually, until
from tests.placer_world import facts


class Cluster:
    """A server, a folder, placers as they are asked for, and an outside client that knows NATS and JSON alone."""

    def __init__(self, folder: Path, server: NatsServer, bus: Bus, client: Client, stack: ExitStack) -> None:
        self.folder, self.server, self.bus, self.client, self._stack = folder, server, bus, client, stack
        self.events: list[PlaceEvent] = []

    def placer(self, name: str, **env: str) -> ServiceProcess:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        fixed = {
            "LAXITY_INSTANCE": name,
            "LAXITY_STORAGE": "memory",
            "LAXITY_PLACER_BACKENDS": json.dumps({"*": "fake"}),
            "LAXITY_PLACER_STATE_ROOT": str(self.folder / "state"),
            "LAXITY_PLACER_RING_ROOT": str(self.folder / "rings"),
            "LAXITY_PLACER_GRACE_US": "1000000",
        }
        process = ServiceProcess("services.placer", folder, self.server.url, **fixed | env)
        return self._stack.enter_context(process)

    async def placers(self, *names: str) -> list[ServiceProcess]:
        """Several at once: most of a start is the interpreter's."""
        return list(await asyncio.gather(*(asyncio.to_thread(self.placer, name) for name in names)))

    async def add_node(self, node: str, devices: int) -> None:
        await self.bus.put(NODES, node_key(node), facts(node, devices).to_json())

    async def ask(self, subject: str, **body: Any) -> dict[str, Any]:
        answer = await self.client.request(f"rt.{subject}", json.dumps(body).encode(), timeout=15)
        found = json.loads(answer.data)
        assert isinstance(found, dict)
        return found

    async def place(self, **body: Any) -> dict[str, Any]:
        return await self.ask("place", **wanted(**body))

    async def record(self, request_id: str) -> RequestRecord | None:
        found = await self.bus.get(LEDGER, request_key(request_id))
        return RequestRecord.trusted(found[0]) if found else None

    async def reach(self, request_id: str, *states: str) -> RequestRecord:
        """The record once it is in one of these states."""

        async def look() -> RequestRecord | None:
            record = await self.record(request_id)
            return record if record and record.state in states else None

        return await eventually(look, 30)

    def states(self, request_id: str) -> list[str]:
        return [event.state for event in self.events if event.request_id == request_id]

    def containers(self) -> list[str]:
        return [path.name for path in (self.folder / "state").rglob("*") if path.is_file()]


def wanted(**body: Any) -> dict[str, Any]:
    return {"request_id": "a", "command": ["serve"], "gpu": {"share": 0.5}, "strategy": "binpack"} | body


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
async def cluster(tmp_path: Path, stack: ExitStack) -> AsyncIterator[Cluster]:
    server = stack.enter_context(NatsServer(tmp_path / "nats"))
    settings = ServiceSettings(nats_url=server.url, storage="memory")
    bus = await Bus.connect(settings)
    await bus.ensure_streams()
    client = await nats.connect(server.url)
    cluster = Cluster(tmp_path, server, bus, client, stack)

    async def on_event(msg: Any) -> None:
        cluster.events.append(PlaceEvent.from_json(msg.data))

    await client.subscribe("rt.events.place.>", cb=on_event)
    await cluster.add_node("n1", 8)
    yield cluster
    await client.close()
    await bus.close()


@pytest.mark.parametrize("placers", [1, 3])
async def test_every_request_gets_exactly_one_reply_and_is_started(cluster: Cluster, placers: int) -> None:
    await cluster.placers(*(f"p{number}" for number in range(placers)))
    inbox, answers = cluster.client.new_inbox(), []
    await cluster.client.subscribe(f"{inbox}.*", cb=_append(answers))
    for number in range(12):
        body = json.dumps(wanted(request_id=f"r{number}")).encode()
        await cluster.client.publish("rt.place", body, reply=f"{inbox}.{number}")
    for number in range(12):
        await cluster.reach(f"r{number}", "started")
    await until(lambda: all(["accepted", "placed", "started"] == cluster.states(f"r{n}") for n in range(12)))

    assert 12 == len(answers)
    assert {"placed", "started"} >= {json.loads(answer.data)["outcome"] for answer in answers}


def _append(answers: list[Any]) -> Any:
    async def on_answer(msg: Any) -> None:
        answers.append(msg)

    return on_answer


async def test_a_repeat_to_any_of_three_placers_and_after_a_restart_of_all_is_a_duplicate(cluster: Cluster) -> None:
    placers = await cluster.placers("p0", "p1", "p2")
    first = await cluster.place()
    again = [await cluster.place() for _ in range(9)]
    assert [True] * 9 == [said["duplicate"] for said in again]
    for placer in placers:
        placer.kill()
    cluster.placer("p9")
    after = await cluster.place()

    assert (True, 1) == (after["duplicate"], after["generation"])
    assert [p["devices"] for p in first["placements"]] == [p["devices"] for p in after["placements"]]
    assert 1 == len(cluster.containers())


async def test_P1_sixteen_halves_sent_at_once_to_eight_devices_are_two_on_each(cluster: Cluster) -> None:
    await cluster.placers("p0", "p1", "p2")
    said = await asyncio.gather(*(cluster.place(request_id=f"r{number}") for number in range(16)))

    assert ["placed"] * 16 == [reply["outcome"] for reply in said]
    devices = [reply["placements"][0]["devices"][0] for reply in said]
    assert [2] * 8 == [devices.count(device) for device in sorted(set(devices))]


async def test_a_request_in_the_hands_of_a_stopped_placer_is_decided_once_by_another_after_the_grace(
    cluster: Cluster,
) -> None:
    first = cluster.placer("p1")
    os.kill(first.pid, signal.SIGSTOP)
    cluster.placer("p2")
    for number in range(10):
        await cluster.client.publish("rt.place", json.dumps(wanted(request_id=f"r{number}")).encode())
    for number in range(10):
        await cluster.reach(f"r{number}", "started")
    os.kill(first.pid, signal.SIGCONT)
    await asyncio.gather(*(cluster.place(request_id=f"r{number}") for number in range(10)))

    for number in range(10):
        record = await cluster.record(f"r{number}")
        assert record is not None
        assert [1] == [each.generation for each in record.replicas]
    assert 10 == len(cluster.containers())


async def test_what_a_killed_placer_owned_is_carried_on_by_the_leader(cluster: Cluster) -> None:
    first, _ = await cluster.placers("p1", "p2")
    env = {"FAKE_START_US": "3000000"}
    while True:
        request_id = uuid.uuid4().hex
        await cluster.place(request_id=request_id, env=env)
        record = await cluster.record(request_id)
        assert record is not None
        if record.owner.startswith("p1-"):
            break
        await cluster.ask("release", request_id=request_id)
    first.kill()
    record = await cluster.reach(request_id, "started")

    assert record.owner.startswith("p2-")
    assert [1] == [each.generation for each in record.replicas]
    await cluster.ask("release", request_id=request_id)
    await cluster.reach(request_id, "released")


async def test_without_a_placer_a_request_is_stored_and_decided_when_one_comes(cluster: Cluster) -> None:
    await cluster.client.publish("rt.place", json.dumps(wanted()).encode())
    await cluster.client.publish("rt.place", json.dumps(wanted(request_id=None)).encode())
    with pytest.raises(nats.errors.NoRespondersError):
        await cluster.client.request("$SRV.PING.placer", b"", timeout=2)
    cluster.placer("p1", LAXITY_PLACER_GRACE_US="60000000")

    await cluster.reach("a", "started")
    await until(lambda: ["accepted", "placed", "started"] == cluster.states("a"))


async def test_a_hold_is_confirmed_and_started_and_released(cluster: Cluster) -> None:
    cluster.placer("p1")
    held = await cluster.place(hold_us=30_000_000)
    assert ("held", 1) == (held["outcome"], held["generation"])
    said = await cluster.ask("confirm", request_id="a", generation=1)
    assert "placed" == said["outcome"]
    await cluster.reach("a", "started")
    assert "stopping" == (await cluster.ask("release", request_id="a"))["outcome"]
    await cluster.reach("a", "released")

    await until(lambda: ["accepted", "held", "placed", "started", "stopping", "released"] == cluster.states("a"))
    assert [] == cluster.containers()


async def test_a_start_that_fails_is_tried_again_and_an_end_is_seen(cluster: Cluster) -> None:
    cluster.placer("p1")
    await cluster.place(env={"FAKE_START_FAILS": "1", "FAKE_EXIT_AFTER_US": "300000", "FAKE_EXIT_CODE": "4"})
    record = await cluster.reach("a", "exited")

    assert 4 == record.exit_code
    assert ["accepted", "placed", "waiting", "placed", "started", "exited"] == [step.state for step in record.steps]


WRONG = (
    (b"{", "(body)"),
    (b"", "(body)"),
    (json.dumps(wanted(strategy="no-such")).encode(), "strategy"),
    (json.dumps(wanted(gpu={"share": "1.5"})).encode(), "gpu.share"),
    (b'{"request_id": "a", "x": "' + b"x" * 300_000 + b'"}', "(body)"),
)


async def test_a_wrong_request_is_answered_with_field_found_and_allowed(cluster: Cluster) -> None:
    cluster.placer("p1")
    for body, field in WRONG:
        answer = await cluster.client.request("rt.place", body, timeout=10)
        said = json.loads(answer.data)
        assert ("error", field) == (said["outcome"], said["error"]["field"])
        assert answer.headers is not None
        assert "Nats-Service-Error" in answer.headers


async def test_a_ledger_of_another_id_stops_the_placer_until_it_is_accepted(cluster: Cluster) -> None:
    cluster.placer("p1")
    await cluster.place()
    await cluster.reach("a", "started")
    found = await cluster.bus.get(LEDGER, "ledger")
    assert found is not None
    mine = LedgerIdentity.trusted(found[0])
    other = LedgerIdentity(ledger_id="another", created_at_us=1)
    await cluster.bus.put(LEDGER, "ledger", other.to_json())

    async def refused() -> dict[str, Any] | None:
        said = await cluster.place()  # again: as long as the placer has not seen it, nothing new is placed
        return said if said["outcome"] == "error" else None

    said = await eventually(refused)
    assert "ledger" == said["error"]["field"]
    refusal = await cluster.place(request_id="b")
    assert ("error", 1) == (refusal["outcome"], len(cluster.containers()))
    accepted = other.model_copy(update={"former": (mine.ledger_id,)})
    await cluster.bus.put(LEDGER, "ledger", accepted.to_json())

    async def placed() -> dict[str, Any] | None:
        said = await cluster.place(request_id="c")
        return said if said["outcome"] in {"placed", "started"} else None

    await eventually(placed)


async def test_used_is_the_sum_of_reservations_after_everything_ended(cluster: Cluster) -> None:
    cluster.placer("p1")
    for number in range(4):
        await cluster.place(request_id=f"r{number}", env={"FAKE_EXIT_AFTER_US": "100000"})
    for number in range(4):
        await cluster.reach(f"r{number}", "exited")
    found = await cluster.bus.get(LEDGER, node_key("n1"))

    assert found is not None
    assert () == NodeReservations.trusted(found[0]).reservations

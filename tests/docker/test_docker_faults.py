"""Engines and placers that are stopped, killed or halted in the middle of placements, on an engine of the test's own.

Each test ends in one look from outside, at the ledger, at the engine and at what the containers themselves wrote:
every request in a right state with a reason, every start run once, none left made and not started, nothing running
that the ledger does not say.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import psutil
import pytest
from nats.aio.client import Client

from services.placer.backends.base import StartSpec
from services.placer.backends.docker import DockerBackend
from services.placer.backends.docker_engine import Engine
from shared.messages import ContainerLabels, PlaceRequest, Reservation
from shared.testing.service_process import ServiceProcess
from tests.docker.engine import IMAGE, OwnEngine
from tests.docker_engine import docker_options, engine_url
from tests.e2e.processes import DEVICE, Cluster
from tests.outside import Json, ask, connect, until, value

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]

NODE, OTHER = "docker-1", "fake-0"
WORK = "trap 'exit 3' TERM; echo $LAXITY_CONTAINER >>/runs/log; sleep 600 & wait"
"""Says that it runs; ends with an error when it is asked to end: with no trap, a first process ignores TERM."""
IDLE_SOCKETS = 3
"""Of a placer at rest: asyncio's own pair, and the one stream of the engine's events."""
LIMIT_S = 60
TRIES = 8
OUTAGE = ("started", "exited", "failed")
"""Right states after one: on a busy machine an engine may take longer to come back than all tries do."""


class Docks(Cluster):
    """A node whose containers run on the engine, a fake one, and placers that reach both."""

    def __init__(self, folder: Path, engine: OwnEngine) -> None:
        super().__init__(folder, placers=2)
        self.engine = engine
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.runs.chmod(0o777)

    def __enter__(self) -> Docks:
        super().__enter__()
        env = {"LAXITY_MONITOR_NODE": NODE, "LAXITY_MONITOR_PROBE": "fake", "LAXITY_MONITOR_PERIOD_US": "300000"}
        devices = json.dumps([{"count": 8, **DEVICE}])
        self.others.append(self.service("services.monitor", "on-docker", LAXITY_MONITOR_FAKE_DEVICES=devices, **env))
        self.others[-1].start()
        return self

    def placer(self, number: int) -> ServiceProcess:
        options = {
            "engines": {NODE: {"url": self.engine.url}},
            "scope": "faults",
            "image": IMAGE,
            "pull": "never",
            "gpus": False,
            "volumes": {"runs": str(self.runs)},
            "stop_grace_us": 500_000,
            "call_timeout_us": 3_000_000,
            "start_timeout_us": 5_000_000,
            "rescan_us": 2_000_000,
        }
        env = {
            "LAXITY_PLACER_BACKENDS": json.dumps({NODE: "docker", "*": "fake"}),
            "LAXITY_PLACER_DOCKER": json.dumps(options),
            "LAXITY_PLACER_BACKOFF_FIRST_US": "500000",
            "LAXITY_PLACER_BACKOFF_MOST_US": "2000000",
            "LAXITY_PLACER_MOST_TRIES": str(TRIES),
        }
        return self.service("services.placer", f"placer-{number}", **env)

    def runs_of_each(self) -> Counter[str]:
        """How often each container's command was run, by its own words."""
        log = self.runs / "log"
        return Counter(log.read_text().split()) if log.exists() else Counter()


@pytest.fixture(scope="module")
def docks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docks]:
    engine_url()
    folder = tmp_path_factory.mktemp("docks")
    with OwnEngine(folder / "engine") as engine, Docks(folder, engine) as made:
        yield made


@pytest.fixture
async def outside(docks: Docks) -> AsyncIterator[Client]:
    client = await connect(docks.nats.url)

    async def listed() -> Any:
        devices = (await ask(client, "rt.nodes", {}))["devices"]
        return len(devices) == 16 and all(device["standing"] != "excluded" for device in devices)

    await until(listed, "all devices are in the list")
    yield client
    await client.close()


def wanted(request_id: str, command: str = WORK, **more: Any) -> Json:
    volume = {"source": "runs", "target": "/runs", "read_only": False}
    usual = {"request_id": request_id, "command": ["sh", "-c", command], "volumes": [volume]}
    return usual | {"gpu": {"share": 0.1}, "candidates": [NODE]} | more


async def _asked(client: Client, body: Json) -> None:
    """Without an answer from a placer that is gone, another one decides it."""
    try:
        assert (await ask(client, "rt.place", body, 5))["outcome"] == "placed"
    except nats.errors.TimeoutError:
        return


def begin(client: Client, name: str, count: int) -> list[str]:
    """Ask for that many at the same time; every second one is to be started again when it fails."""
    ids = [f"{name}-{number}" for number in range(count)]
    for number, each in enumerate(ids):
        restart = "on_failure" if number % 2 else "never"
        TASKS.add(task := asyncio.create_task(_asked(client, wanted(each, restart=restart))))
        task.add_done_callback(TASKS.discard)
    return ids


TASKS: set[asyncio.Task[None]] = set()


async def record(client: Client, request_id: str) -> Json:
    return await value(client, "rt_ledger", f"request.{request_id}") or {"state": "unknown", "steps": []}


async def records(client: Client, ids: list[str]) -> list[Json]:
    return list(await asyncio.gather(*(record(client, each) for each in ids)))


async def all_ids(client: Client) -> list[str]:
    """Of every request that the ledger knows."""
    try:
        keys = await (await client.jetstream().key_value("rt_ledger")).keys()
    except nats.js.errors.NoKeysError:  # also where the server is too slow for it: the caller asks again
        return []
    return [key.removeprefix("request.") for key in keys if key.startswith("request.")]


async def some_run(docks: Docks, least: int) -> None:
    async def seen() -> bool:
        ids = await asyncio.to_thread(docks.engine.docker, "ps", "-q")
        return len(ids.split()) >= least

    await until(seen, f"{least} containers run")


async def state_is(client: Client, request_id: str, *allowed: str) -> Json:
    async def seen() -> Json | None:
        found = await record(client, request_id)
        return found if found["state"] in allowed else None

    found: Json = await until(seen, f"{request_id} is {allowed}", LIMIT_S)
    return found


# --- the look from outside ---

Start = tuple[str, int, int]
"""Request, replica, generation."""


def starts_of(containers: list[Json]) -> list[Start]:
    held = [json.loads(each["Config"]["Labels"]["laxity.labels"])["reservation"] for each in containers]
    return sorted((each["request_id"], each["replica"], each["generation"]) for each in held)


def should_run(found: list[Json]) -> list[Start]:
    return sorted(
        (each["request_id"], replica["replica"], replica["generation"])
        for each in found
        for replica in each.get("replicas", [])
        if replica["state"] == "started" and replica["node"] == NODE
    )


def sockets(placer: ServiceProcess) -> int:
    return len(psutil.Process(placer.pid).net_connections("unix"))


async def settled(docks: Docks, client: Client, ids: list[str], *allowed: str) -> list[Json]:
    """The requests' records, once ledger and engine say the same, and nothing is left that should not be."""

    async def differences() -> dict[str, Any]:
        known = {each["request_id"]: each for each in await records(client, await all_ids(client))}
        there = await asyncio.to_thread(docks.engine.containers)
        node = await value(client, "rt_ledger", f"node.{NODE}") or {"reservations": []}
        held = sorted((each["request_id"], each["replica"], each["generation"]) for each in node["reservations"])
        run, runs = should_run(list(known.values())), starts_of(_running(there))
        return {
            "not in a right state": [_steps(known, each) for each in ids if _state(known, each) not in allowed],
            "running, against the ledger": (runs, run) if runs != run else None,
            "held, against what runs": (held, run) if held != run else None,
            "left over": [each["State"]["Status"] for each in there if not each["State"]["Running"]],
            "sockets": [n for each in docks.placers if each.running and (n := sockets(each)) > IDLE_SOCKETS],
        }

    deadline = time.monotonic() + LIMIT_S
    while any((wrong := await differences()).values()):
        if time.monotonic() > deadline:
            pytest.fail(json.dumps({what: seen for what, seen in wrong.items() if seen}, indent=1))
        await asyncio.sleep(0.2)
    found = await records(client, ids)
    for each in found:
        assert_told(each)
    assert {} == {name: runs for name, runs in docks.runs_of_each().items() if runs != 1}
    return found


def _state(known: dict[str, Json], request_id: str) -> str:
    return str(known[request_id]["state"]) if request_id in known else "unknown"


def _steps(known: dict[str, Json], request_id: str) -> str:
    steps = known[request_id]["steps"] if request_id in known else []
    return f"{request_id}: " + ", ".join(f"{step['state']} ({step.get('detail')})" for step in steps)


def _running(there: list[Json]) -> list[Json]:
    return [each for each in there if each["State"]["Running"]]


def assert_told(found: Json) -> None:
    """Each step back or end that nobody asked for says why."""
    silent = [
        step for step in found["steps"] if step["state"] in {"waiting", "failed", "exited"} and not step["detail"]
    ]
    assert [] == silent, found


def assert_engine_blamed(found: list[Json]) -> None:
    """Who used up all tries during an outage is told of the engine."""
    whys = [each["steps"][-1]["detail"] for each in found if each["state"] == "failed"]
    assert all(f"start on {NODE} failed, try {TRIES}: engine unix://" in why for why in whys), whys


async def cleared(docks: Docks, client: Client, ids: list[str]) -> None:
    """Release ends all of it, and nothing of it is left."""
    await asyncio.gather(*(ask(client, "rt.release", {"request_id": each}) for each in ids))
    await settled(docks, client, ids, "released", "exited", "failed")
    assert [] == [each for each in starts_of(await asyncio.to_thread(docks.engine.containers)) if each[0] in ids]


# --- engines ---


async def test_an_engine_that_is_killed_in_the_middle_of_twenty_four_placements_by_two_placers(
    docks: Docks, outside: Client
) -> None:
    ids = begin(outside, "killed", 24)
    await some_run(docks, 8)
    await asyncio.to_thread(docks.engine.kill)
    await asyncio.to_thread(docks.engine.start)
    found = await settled(docks, outside, ids, *OUTAGE)
    again = [each for each in found if each["body"]["restart"] == "on_failure"]
    assert "started" in {each["state"] for each in again}
    assert "exited" not in {each["state"] for each in again}
    assert_engine_blamed(found)
    assert any(each["replicas"][0]["generation"] > 1 for each in again)
    await cleared(docks, outside, ids)


async def test_an_engine_that_is_stopped_and_started_in_the_middle_of_twenty_placements_by_one_placer(
    docks: Docks, outside: Client
) -> None:
    assert 0 == docks.placers[1].stop()
    ids = begin(outside, "stopped", 20)
    await some_run(docks, 5)
    await asyncio.to_thread(docks.engine.terminate)
    await state_is(outside, "stopped-1", "waiting")  # so the outage is seen
    await asyncio.to_thread(docks.engine.start)
    found = await settled(docks, outside, ids, *OUTAGE)
    assert_engine_blamed(found)
    await asyncio.to_thread(docks.placers[1].start)
    await cleared(docks, outside, ids)


async def test_while_an_engine_is_halted_other_nodes_go_on(docks: Docks, outside: Client) -> None:
    before = begin(outside, "before", 4)
    await some_run(docks, 1)
    docks.engine.signal(signal.SIGSTOP)
    try:
        meanwhile = begin(outside, "meanwhile", 6)
        for number in range(5):
            await ask(outside, "rt.place", wanted(f"other-{number}", candidates=[OTHER]))
        for number in range(5):
            await state_is(outside, f"other-{number}", "started")
        assert {"started"}.isdisjoint({each["state"] for each in await records(outside, meanwhile)})
        await state_is(outside, "meanwhile-0", "waiting")
    finally:
        docks.engine.signal(signal.SIGCONT)
    others = [f"other-{number}" for number in range(5)]
    await settled(docks, outside, [*before, *meanwhile, *others], "started")
    await cleared(docks, outside, [*before, *meanwhile, *others])


class Lagging(Engine):
    """Its list says *created* of what runs, as engines do for up to two seconds after a start while they are busy."""

    async def ask(self, method: str, path: str, **more: Any) -> Any:
        answer = await super().ask(method, path, **more)
        if path == "containers/json":
            return [entry | {"State": "created"} for entry in answer]
        return answer


async def test_what_runs_is_in_the_list_also_while_the_engines_own_list_says_created(tmp_path: Path) -> None:
    options = docker_options(tmp_path)
    backend = DockerBackend(options, tmp_path / "rings")
    backend._engines = {"*": Lagging(options.engines["*"], options.call_timeout_us)}
    await backend.start(_spec("box"))
    listed = [(seen.container, seen.state) for seen in await backend.list(NODE)]
    await backend.stop(NODE, "box")
    await backend.close()
    assert [("box", "running")] == listed


def _spec(container: str) -> StartSpec:
    held = Reservation(
        request_id=container,
        replica=0,
        generation=1,
        devices=(),
        share_micro=0,
        device_memory_mib=0,
        cpu_milli=0,
        memory_mib=0,
    )
    labels = ContainerLabels(container=container, ledger_id="l", node=NODE, reservation=held)
    return StartSpec(labels, PlaceRequest(command=("sh", "-c", WORK.replace(">>/runs/log", ""))))


# --- containers ---


async def test_an_image_that_is_missing_moves_the_request_to_another_node_or_fails_it_with_the_reason(
    docks: Docks, outside: Client
) -> None:
    await ask(outside, "rt.place", wanted("anchor", gpu={"share": 0.5}))  # bin packing goes where it is
    missing = {"image": "laxity-none:1", "strategy": "binpack"}
    await ask(outside, "rt.place", wanted("moves", candidates=[NODE, OTHER], **missing))
    await ask(outside, "rt.place", wanted("fails", **missing))
    await state_is(outside, "fails", "failed")
    anchor, moves, fails = await settled(docks, outside, ["anchor", "moves", "fails"], "started", "failed")
    assert ("started", "started", "failed") == (anchor["state"], moves["state"], fails["state"])
    assert OTHER == moves["replicas"][0]["node"]
    whys = [
        step["detail"] for each in (moves, fails) for step in each["steps"] if step["state"] in {"waiting", "failed"}
    ]
    assert len(whys) >= 2
    assert all(f"start on {NODE} failed" in why and "laxity-none:1 is not on" in why for why in whys)
    await cleared(docks, outside, ["anchor", "moves", "fails"])


async def test_containers_that_exit_at_once_take_too_much_memory_or_ignore_term(docks: Docks, outside: Client) -> None:
    once = "echo $LAXITY_CONTAINER >>/runs/log; exit 7"
    hungry = "echo $LAXITY_CONTAINER >>/runs/log; exec dd if=/dev/zero of=/dev/null bs=200M"
    deaf = "echo $LAXITY_CONTAINER >>/runs/log; trap '' TERM; while :; do sleep 1; done"
    await ask(outside, "rt.place", wanted("once", once))
    await ask(outside, "rt.place", wanted("hungry", hungry, memory_mib=16))
    await ask(outside, "rt.place", wanted("deaf", deaf))
    await state_is(outside, "once", "exited")
    await state_is(outside, "hungry", "exited")
    found = await settled(docks, outside, ["once", "hungry", "deaf"], "exited", "started")
    assert [("exited", 7), ("exited", 137), ("started", None)] == [
        (each["state"], each.get("exit_code")) for each in found
    ]
    await ask(outside, "rt.release", {"request_id": "deaf"})
    await state_is(outside, "deaf", "released")
    await cleared(docks, outside, ["once", "hungry", "deaf"])


# --- placers ---


async def test_a_placer_that_is_killed_in_the_middle_of_twenty_placements_and_comes_back(
    docks: Docks, outside: Client
) -> None:
    ids = begin(outside, "orphaned", 20)
    await some_run(docks, 3)
    docks.placers[0].kill()
    await asyncio.to_thread(docks.placers[0].start)
    found = await settled(docks, outside, ids, "started")
    assert [1] * 20 == [each["replicas"][0]["generation"] for each in found]
    there = await asyncio.to_thread(docks.engine.containers)
    assert sorted((each, 0, 1) for each in ids) == [each for each in starts_of(_running(there)) if each[0] in ids]
    await cleared(docks, outside, ids)

"""Engines and placers that are stopped, killed or halted in the middle of placements, on engines of the test's own.

Each test ends in one look from outside, at the ledger, at the engines and at what the containers themselves wrote:
every request in a right state with a reason, every start run once, none left made and not started, nothing running
that the ledger does not say, no connection more than before. ``docks.py`` has that look.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from services.placer.backends.base import StartSpec
from services.placer.backends.docker import DockerBackend
from services.placer.backends.docker_engine import Engine, NoAnswerError
from services.placer.backends.docker_spec import create_body
from shared.messages import ContainerLabels, PlaceRequest, Reservation
from tests.docker.docks import NODE, OTHER, RESCAN_S, TRIES, WORK, Docks, Look
from tests.docker.engine import IMAGE, OwnEngine
from tests.docker_engine import IMAGE as BASE
from tests.docker_engine import docker, docker_options, engine_url
from tests.outside import Json, ask, connect, until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]

OUTAGE = ("started", "exited", "failed")
"""Right states after one: on a busy machine an engine may take longer to come back than all tries do."""
MANY = 50


@pytest.fixture(scope="module")
def moored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Docks]]:
    """The docks that all tests share, made anew after one that left something undone."""
    engine_url()
    made: list[Docks] = []

    def at_rest() -> Docks:
        if not made or not made[-1].at_rest:
            stack.close()
            folder = tmp_path_factory.mktemp("docks")
            hurt, well = (stack.enter_context(OwnEngine(folder / name)) for name in ("hurt", "well"))
            made.append(stack.enter_context(Docks(folder, hurt, well)))
        return made[-1]

    with ExitStack() as stack:
        yield at_rest


@pytest.fixture
def docks(moored: Callable[[], Docks]) -> Docks:
    return moored()


@pytest.fixture
async def look(docks: Docks) -> AsyncIterator[Look]:
    client = await connect(docks.nats.url)
    async with Look(docks, client) as made:
        yield made
    await client.close()


def assert_engine_blamed(found: list[Json]) -> None:
    """Who used up all tries during an outage is told of the engine."""
    whys = [each["steps"][-1]["detail"] for each in found if each["state"] == "failed"]
    assert all(f"start on {NODE} failed, try {TRIES}: engine unix://" in why for why in whys), whys


# --- engines ---


async def test_an_engine_that_is_killed_in_the_middle_of_fifty_placements_by_two_placers(
    docks: Docks, look: Look
) -> None:
    ids = look.begin("killed", MANY)
    await look.some_run(8)
    await asyncio.to_thread(docks.engine.kill)
    others = await look.others_go_on("while-killed")
    await asyncio.to_thread(docks.engine.start)
    found = await look.settled(ids, *OUTAGE)
    again = [each for each in found if each["body"]["restart"] == "on_failure"]
    assert "started" in {each["state"] for each in again}
    assert [] == [each for each in again if each["state"] == "exited"]
    assert_engine_blamed(found)
    assert any(each["replicas"][0]["generation"] > 1 for each in again)
    await look.cleared([*ids, *others])


async def test_an_engine_that_is_stopped_and_started_in_the_middle_of_fifty_placements_by_one_placer(
    docks: Docks, look: Look
) -> None:
    assert 0 == docks.placers[1].stop()
    ids = look.begin("stopped", MANY)
    await look.some_run(8)
    await asyncio.to_thread(docks.engine.terminate)
    await look.some_wait(ids)
    others = await look.others_go_on("while-stopped")
    await asyncio.to_thread(docks.engine.start)
    assert_engine_blamed(await look.settled(ids, *OUTAGE))
    await asyncio.to_thread(docks.placers[1].start)
    await look.cleared([*ids, *others])


async def test_while_an_engine_is_halted_other_nodes_go_on_also_with_a_placer_that_starts(
    docks: Docks, look: Look
) -> None:
    before = look.begin("before", 4)
    await look.some_run(1)
    docks.engine.signal(signal.SIGSTOP)
    try:
        meanwhile = look.begin("meanwhile", 6)
        docks.placers[1].kill()
        await asyncio.to_thread(docks.placers[1].start)
        others = await look.others_go_on("while-halted")
        assert {"started"}.isdisjoint({each["state"] for each in await look.records(meanwhile)})
        await look.state_is("meanwhile-0", "waiting")
    finally:
        docks.engine.signal(signal.SIGCONT)
    await look.settled([*before, *meanwhile, *others], "started")
    await look.cleared([*before, *meanwhile, *others])


async def test_D6_D7_ends_are_known_whatever_becomes_of_the_stream_of_events(docks: Docks, look: Look) -> None:
    ids, proxy = look.begin("cut", 6), docks.line.proxy
    await look.settled(ids, "started")

    proxy.refuses = True
    docks.line.cut()
    await docks.end(ids[0], ids[1])
    assert {"started"} == {each["state"] for each in await look.records(ids)}
    proxy.refuses = False
    await assert_ended(look, ids[0], ids[1])

    streams, before = proxy.streams, time.monotonic()
    docks.line.hush()  # half open: nothing says that it is over
    await docks.end(ids[2], ids[3])
    await assert_ended(look, ids[2], ids[3])
    assert time.monotonic() - before < 5 * RESCAN_S

    async def replaced() -> bool:
        return proxy.streams >= streams + len(docks.placers)

    await until(replaced, "streams that say nothing are replaced")
    proxy.silent = True
    docks.line.hush()
    await docks.end(ids[4], ids[5])
    others = await look.others_go_on("while-silent")
    assert ["started", "started"] == [each["state"] for each in await look.records(ids[4:])]
    proxy.silent = False
    await assert_ended(look, ids[4], ids[5])

    await look.settled([*ids, *others], "started", "exited")
    await look.cleared([*ids, *others])


async def assert_ended(look: Look, once: str, again: str) -> None:
    """The one with its exit code, and the other runs anew."""
    why = f"replica 0 ended on {NODE} with exit code 3"
    ended = await look.state_is(once, "exited")
    assert (3, why) == (ended["exit_code"], ended["steps"][-1]["detail"])

    async def runs_anew() -> Json | None:
        found = await look.record(again)
        return found if (found["state"], found["replicas"][0]["generation"]) == ("started", 2) else None

    found: Json = await until(runs_anew, f"{again} runs again", 30)
    assert why in [step["detail"] for step in found["steps"] if step["state"] == "waiting"]


async def test_an_engine_whose_disk_is_full_starts_nothing_until_it_has_room(docks: Docks, look: Look) -> None:
    ids = ["anchor", "waits", "moves"]
    await look.place("anchor", gpu={"share": 0.5})  # bin packing goes where it is
    await look.state_is("anchor", "started")
    docks.engine.fill()
    try:
        await look.place("waits")
        await look.place("moves", candidates=[NODE, OTHER], strategy="binpack")
        await look.state_is("moves", "started")
        await look.state_is("waits", "waiting")
        assert ["running"] == [each["State"] for each in docks.engine.containers()]
    finally:
        docks.engine.make_room()
    _, waits, moves = await look.settled(ids, "started")
    assert (NODE, OTHER) == (waits["replicas"][0]["node"], moves["replicas"][0]["node"])
    whys = [step["detail"] for each in (waits, moves) for step in each["steps"] if step["state"] == "waiting"]
    assert len(whys) >= 2
    assert all(f"start on {NODE} failed: " in why and "no space left on device" in why for why in whys), whys
    await look.cleared(ids)


# --- containers ---


async def test_an_image_that_is_missing_moves_the_request_to_another_node_or_fails_it_with_the_reason(
    docks: Docks, look: Look
) -> None:
    ids = ["packed", "moved", "fails"]
    image = "laxity-elsewhere:1"
    docks.engines[OTHER].docker("tag", IMAGE, image)
    await look.place("packed", gpu={"share": 0.5})  # bin packing goes where it is
    await look.place("fails", image=image)
    await look.place("moved", image=image, candidates=[NODE, OTHER], strategy="binpack")
    _, moved, fails = found = await look.settled(ids, "started", "failed")
    assert ["started", "started", "failed"] == [each["state"] for each in found]
    assert OTHER == moved["replicas"][0]["node"]
    steps = [*moved["steps"], *fails["steps"]]
    whys = [step["detail"] for step in steps if step["state"] in {"waiting", "failed"}]
    assert len(whys) == 1 + TRIES
    assert all(f"start on {NODE} failed" in why and f"{image} is not on" in why for why in whys), whys
    assert f"start on {NODE} failed, try {TRIES}: " in fails["steps"][-1]["detail"]
    await look.cleared(ids)


async def test_containers_that_exit_at_once_take_too_much_memory_or_ignore_term(look: Look) -> None:
    ids = ["once", "hungry", "deaf"]
    says = "echo $LAXITY_CONTAINER >>/runs/log; "
    await look.place("once", says + "exit 7")
    await look.place("hungry", says + "exec dd if=/dev/zero of=/dev/null bs=200M", memory_mib=16)
    await look.place("deaf", says + "trap '' TERM; while :; do sleep 1; done")
    found = [await look.state_is(each, state) for each, state in zip(ids, ["exited", "exited", "started"], strict=True)]
    assert [7, 137, None] == [each.get("exit_code") for each in found]
    why = f"replica 0 ended on {NODE} with exit code"
    assert [f"{why} 7", f"{why} 137 (OOMKilled)"] == [each["steps"][-1]["detail"] for each in found[:2]]
    await look.settled(ids, "exited", "started")
    await ask(look.client, "rt.release", {"request_id": "deaf"})
    await look.state_is("deaf", "released")
    await look.cleared(ids)


# --- placers ---


async def test_a_placer_that_is_killed_in_the_middle_of_twenty_placements_and_comes_back(
    docks: Docks, look: Look
) -> None:
    ids = look.begin("orphaned", 20)
    await look.some_run(3)
    docks.placers[0].kill()
    others = await look.others_go_on("while-orphaned")
    await asyncio.to_thread(docks.placers[0].start)
    found = await look.settled([*ids, *others], "started")
    assert {1} == {each["replicas"][0]["generation"] for each in found}
    await look.cleared([*ids, *others])


# --- an engine's own list ---


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


class Losing(Engine):
    """Its answers to starts are lost: it has done what it was asked."""

    async def ask(self, method: str, path: str, **more: Any) -> Any:
        answer = await super().ask(method, path, **more)
        if path.endswith("/start"):
            raise NoAnswerError("lost")
        return answer


async def test_a_start_whose_answer_is_lost_is_not_undone_since_others_may_have_seen_it_run(tmp_path: Path) -> None:
    options = docker_options(tmp_path)
    backend, other = DockerBackend(options, tmp_path / "rings"), DockerBackend(options, tmp_path / "rings")
    backend._engines = {"*": Losing(options.engines["*"], options.call_timeout_us)}
    started = await backend.start(_spec("box"))
    listed = await other.list(NODE)
    await other.stop(NODE, "box")
    await backend.close()
    await other.close()
    assert [("box", "running")] == [(seen.container, seen.state) for seen in listed]
    assert [started] == listed


class Removing(Engine):
    """As an engine in the middle of a removal."""

    async def inspect(self, container: str, timeout_us: int | None = None) -> dict[str, Any] | None:
        found = await super().inspect(container, timeout_us)
        return None if found is None else found | {"State": found["State"] | {"Status": "removing"}}


async def test_what_was_made_and_is_removed_before_it_ran_has_not_ended(tmp_path: Path) -> None:
    options = docker_options(tmp_path)
    backend = DockerBackend(options, tmp_path / "rings")
    body = create_body(_spec("box"), options, None)
    labels = [word for name, text in body["Labels"].items() for word in ("--label", f"{name}={text}")]
    made = docker("create", *labels, BASE, "true")
    backend._engines = {"*": Removing(options.engines["*"], options.call_timeout_us)}
    listed = await backend.list(NODE)
    await backend.close()
    docker("rm", made)
    assert [] == listed

"""A toy service on the real runtime when something breaks, and when it is asked to end."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.bus import Bus, Msg
from shared.effects import (
    Disconnected,
    KeyChanged,
    Received,
    Reconnected,
    WatchReplayed,
    Write,
)
from shared.metrics import Metric, Sample
from shared.service import Runtime
from shared.settings import ServiceSettings
from shared.subjects import LEDGER
from shared.testing.nats_server import NatsServer
from shared.testing.wait import eventually, until
from tests.integration.toy_service import SECOND_US, Running, Slowly, SlowlyDone, Toy, ask, toys

# --- faults ---


@dataclass
class Thing:
    """What the toy cannot do without."""

    trouble: str = ""

    def numbers(self) -> Iterator[Sample]:
        yield from Metric("toy_trouble", "gauge", "").of(bool(self.trouble))


async def test_a_service_that_cannot_do_without_something_is_ready_only_while_that_is_there(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    thing, ready_file = Thing("not yet"), tmp_path / "ready"
    async with toys(settings.model_copy(update={"ready_file": ready_file}), outside=[thing]) as (toy,):
        runtime, clock = toy.runtime, toy.clock

        def told() -> tuple[float, float]:
            numbers = {metric.name: value for metric, _, value in runtime.numbers()}
            return numbers["laxity_service_ready"], numbers["toy_trouble"]

        assert (False, "not yet", (0, 1)) == (ready_file.exists(), runtime.health, told())
        for trouble in ("", "silent", ""):
            thing.trouble = trouble
            await clock.advance(SECOND_US)
            await until(lambda: ready_file.exists() != bool(thing.trouble))
            assert (trouble or "ok", (not trouble, bool(trouble))) == (runtime.health, told())
    assert not ready_file.exists()


@pytest.mark.parametrize("kill", [True, False], ids=["kill -9", "SIGTERM"])
async def test_after_a_restart_of_the_server_everything_works_again_and_the_world_is_told(
    settings: ServiceSettings, bus: Bus, nats_server: NatsServer, kill: bool
) -> None:
    async with toys(settings) as (toy,):
        await bus.commit(LEDGER, [Write("a", b"1", 0)])
        await until(lambda: len(toy.core.of(KeyChanged)) == 1)
        nats_server.restart(kill)
        await until(lambda: len(toy.core.of(WatchReplayed)) == 2)
        await until(lambda: bus.connection.counters["reconnects"] == 1)
        (lost,), (back,) = toy.core.of(Disconnected), toy.core.of(Reconnected)
        assert toy.core.events.index(lost) < toy.core.events.index(back)
        await until(lambda: toy.runtime.health == "ok")

        async def answered() -> bool | None:
            return isinstance(await bus.request("rt.echo", b'{"text": "again"}', SECOND_US), Msg) or None

        await eventually(answered)
        await bus.publish("rt.metrics.a", b'{"text": "metric"}')
        await bus.publish("rt.place", b'{"text": "work"}')
        await bus.publish_event("rt.events.toy.x", b'{"text": "x"}', "1", "t", "/s")
        heard = {"rt.metrics.a", "rt.place", "rt.events.toy.x"}
        await until(lambda: heard <= {event.subject for event in toy.core.of(Received)})

        async def told() -> dict[str, Any] | None:
            last = await bus.last_event("rt.events.bus.toy")
            event = json.loads(last.body) if last else {}
            return event if event.get("kind") == "reconnected" else None

        event = await eventually(told)
    assert ("toy", "toy-0", "reconnected") == (event["service"], event["instance"], event["kind"])
    assert event["gap_us"] >= 0


async def test_a_server_that_forgot_everything_gets_its_streams_again(
    settings: ServiceSettings, nats_server: NatsServer
) -> None:
    memory = settings.model_copy(update={"storage": "memory"})
    async with toys(memory) as (toy,):
        nats_server.restart(kill=True)
        await until(lambda: len(toy.core.of(WatchReplayed)) == 2)
        bus = await Bus.connect(memory, "late")

        async def stored() -> bool | None:
            with contextlib.suppress(Exception):
                await bus.publish_event("rt.events.toy.x", b'{"text": "x", "number": 9}', "1", "t", "/s")
                return True
            return None

        await eventually(stored)
        await until(lambda: toy.core.numbers("rt.events.toy.x") == [9])
        await bus.close()


async def test_a_bug_in_the_core_stops_the_service(settings: ServiceSettings, bus: Bus) -> None:
    toy = await Running(settings, Toy(), None).ready()
    await bus.publish("rt.raise", b'{"text": "x"}')
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(toy.task, 10)
    assert raised.group_contains(RuntimeError, match="a bug")
    assert "stopped" == toy.runtime.state


async def test_a_bug_in_a_slow_effect_stops_the_service(settings: ServiceSettings, bus: Bus) -> None:
    async def slowly(effect: Slowly) -> None:
        raise ValueError("another bug")

    toy = await Running(settings, Toy(), None, slow={Slowly: slowly}).ready()
    await bus.publish("rt.echo", b'{"text": "slow"}')
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(toy.task, 10)
    assert raised.group_contains(ValueError, match="another bug")


@pytest.mark.parametrize("how", ["ends", "raises"])
async def test_a_root_task_that_ends_stops_the_service(settings: ServiceSettings, how: str) -> None:
    async def root(runtime: Runtime) -> None:
        runtime.post(SlowlyDone("from a root task"))
        runtime.count("rounds", 2)
        if how == "raises":
            raise ValueError("broken")

    toy = Running(settings, Toy(), None, tasks=(root,))
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await asyncio.wait_for(toy.task, 10)
    assert 2 == toy.runtime.counters["rounds"]


# --- the end ---


async def test_an_orderly_end_answers_what_it_has_says_its_last_and_is_gone(
    settings: ServiceSettings, bus: Bus, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready"
    toy = await Running(settings.model_copy(update={"ready_file": ready_file}), Toy(), None).ready()
    assert "toy" == json.loads(ready_file.read_text())["service"]
    asked = [asyncio.create_task(ask(bus, "rt.echo", text=f"{n}")) for n in range(50)]
    await until(lambda: len(toy.core.of(Received)) > 0)
    await toy.end()
    answered = [task for task in asked if not (await _settled(task))]
    assert len(toy.core.of(Received)) == len(answered)
    last = await bus.last_event("rt.events.last")
    assert last is not None
    assert ("stopped", False) == (toy.runtime.state, ready_file.exists())


async def _settled(task: "asyncio.Task[Msg]") -> BaseException | None:
    await asyncio.wait({task})
    return task.exception()


@pytest.mark.parametrize("server", ["up", "down"])
async def test_an_end_is_bounded_whatever_is_stuck(
    settings: ServiceSettings, bus: Bus, nats_server: NatsServer, server: str
) -> None:
    async def stuck(effect: Slowly) -> None:
        await asyncio.Event().wait()

    toy = await Running(settings, Toy(), None, slow={Slowly: stuck}).ready()
    await ask(bus, "rt.echo", text="slow")
    if server == "down":
        nats_server.kill()
        await until(lambda: not toy.runtime.bus.connection.is_up)
    toy.stop.set()
    await asyncio.wait_for(toy.task, 8)


async def test_an_end_before_the_server_is_there_is_immediate(
    settings: ServiceSettings, nats_server: NatsServer
) -> None:
    nats_server.kill()
    toy = Running(settings, Toy(), None)
    await asyncio.sleep(0)
    toy.stop.set()
    await asyncio.wait_for(toy.task, 3)

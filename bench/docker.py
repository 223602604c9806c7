"""What a start through ``rt.place`` costs over the same container started directly: ``make bench-docker``.

Both on the same engine, in turn, with the same body of the engine's create. The engine's own stamps say where the
time goes: from the question until the engine has made the container, until it runs, until an outsider hears of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import nats
from nats.aio.client import Client

from bench import report as form
from services.placer.backends.base import StartSpec
from services.placer.backends.docker_options import DockerEngine, DockerOptions
from services.placer.backends.docker_spec import create_body
from shared.messages import ContainerLabels, PlaceRequest, Reservation
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess

NODE = "bench-1"
IMAGE = os.environ.get("BASE_IMAGE", "laxity-base:local")
ROUNDS = 20
STORAGES = ("file", "memory")
WARM = 3
TARGET_RATIO = 1.15
ASKED = {"command": ["sleep", "600"], "gpu": {"share": 0.5}, "cpu_milli": 500, "memory_mib": 64}
API = "http://engine/v1.41"


@dataclass(frozen=True)
class Took:
    """Of one start, in microseconds since it was asked for."""

    decided_us: float
    """The placer's answer; of a direct start nothing."""
    made_us: float
    """The engine's stamp of the container."""
    running_us: float
    """The engine's stamp of its start."""
    known_us: float
    """Who asked knows that it runs."""


def stamp_us(text: str) -> float:
    """An engine's stamp, with its nanoseconds cut to what a datetime holds."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    seconds = datetime.fromisoformat(f"{whole}+00:00").timestamp()
    return seconds * 1e6 + float(f"0.{fraction or 0}") * 1e6


def wall_us() -> float:
    return time.time_ns() / 1000


class Engine:
    """Plain calls to it, on connections that are kept open."""

    def __init__(self, socket: str) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket))

    async def call(self, method: str, path: str, body: Any = None, **params: str) -> Any:
        async with self._session.request(method, f"{API}/{path}", json=body, params=params) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {text}")
            return json.loads(text) if text else None

    async def close(self) -> None:
        await self._session.close()


class Bench:
    """An outside client, an engine, and the rings of what is started directly."""

    def __init__(self, client: Client, engine: Engine, folder: Path, options: DockerOptions) -> None:
        self._client, self._engine, self._folder = client, engine, folder
        self._scope = options.scope
        # Of another scope, so that the placer does not take it for its own.
        self._options = options.model_copy(update={"scope": f"{options.scope}-direct"})

    async def placed(self, number: int) -> Took:
        """Through the bus: until an outsider hears that it runs."""
        name = f"start-{number}"
        events = await self._client.subscribe(f"rt.events.place.{name}")
        await self._client.flush()
        began = wall_us()
        reply = await self._ask("place", request_id=name, **ASKED)
        decided = wall_us()
        if reply["outcome"] != "placed":
            raise RuntimeError(f"not placed: {reply}")
        await _hear(events, "started")
        known = wall_us()
        engine_name = f"{self._scope}.{reply['placements'][0]['container']}"
        found = await self._engine.call("GET", f"containers/{engine_name}/json")
        await self._ask("release", request_id=name)
        await _hear(events, "released")
        await events.unsubscribe()
        return _took(began, decided, known, found)

    async def _ask(self, subject: str, **body: Any) -> dict[str, Any]:
        answer = await self._client.request(f"rt.{subject}", json.dumps(body).encode(), timeout=30)
        found: dict[str, Any] = json.loads(answer.data)
        return found

    async def direct(self, number: int) -> Took:
        """Create, start, inspect: until the engine has said that it runs."""
        name = f"direct-{number}"
        ring = self._folder / "direct" / name
        ring.mkdir(parents=True)
        body = create_body(_spec(name), self._options, ring)
        began = wall_us()
        made = await self._engine.call("POST", "containers/create", body, name=f"{self._options.scope}.{name}")
        await self._engine.call("POST", f"containers/{made['Id']}/start")
        found = await self._engine.call("GET", f"containers/{made['Id']}/json")
        known = wall_us()
        if not found["State"]["Running"]:
            raise RuntimeError(f"does not run: {found['State']}")
        await self._engine.call("DELETE", f"containers/{made['Id']}", force="true", v="true")
        return _took(began, began, known, found)


def _took(began: float, decided: float, known: float, found: dict[str, Any]) -> Took:
    made, running = stamp_us(found["Created"]), stamp_us(found["State"]["StartedAt"])
    return Took(decided - began, made - began, running - began, known - began)


async def _hear(events: Any, state: str) -> None:
    while json.loads((await events.next_msg(timeout=30)).data)["state"] != state:
        pass


def _spec(name: str) -> StartSpec:
    """What the placer would start for the same request."""
    held = Reservation(
        request_id=name,
        replica=0,
        generation=1,
        devices=("GPU-0",),
        share_micro=500_000,
        device_memory_mib=0,
        cpu_milli=500,
        memory_mib=64,
    )
    labels = ContainerLabels(container=name, ledger_id="l" * 32, node=NODE, reservation=held)
    return StartSpec(labels, PlaceRequest.from_json(json.dumps(ASKED).encode()))


@contextmanager
def cluster(folder: Path, options: DockerOptions, storage: str) -> Iterator[str]:
    """Real services in processes of their own; the devices of the node are made up."""
    usual = {"LAXITY_STORAGE": storage, "LAXITY_CHECK": "false"}
    rings = str(folder / "rings")
    monitor = {"LAXITY_MONITOR_NODE": NODE, "LAXITY_MONITOR_PROBE": "fake", "LAXITY_MONITOR_RING_ROOT": rings}
    placer = {
        "LAXITY_PLACER_BACKENDS": '{"*": "docker"}',
        "LAXITY_PLACER_DOCKER": options.model_dump_json(),
        "LAXITY_PLACER_RING_ROOT": rings,
        "LAXITY_PLACER_STATE_ROOT": str(folder / "state"),
    }
    with (
        NatsServer(folder / "nats") as server,
        ServiceProcess("services.monitor", folder, server.url, **usual, **monitor),
        ServiceProcess("services.node_list", folder, server.url, **usual),
        ServiceProcess("services.placer", folder, server.url, **usual, **placer),
    ):
        yield server.url


async def ready(client: Client) -> None:
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        devices = json.loads((await client.request("rt.nodes", b"{}", timeout=5)).data)["devices"]
        if devices and all(device["standing"] != "excluded" for device in devices):
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("the node list has no devices")


async def measure(socket: str, storage: str) -> tuple[list[Took], list[Took]]:
    """Ours and the direct ones, in turn."""
    folder = Path(tempfile.mkdtemp(prefix="laxity-bench-"))
    options = DockerOptions(
        engines={"*": DockerEngine(url=f"unix://{socket}")},
        scope=f"bench-{storage}-{os.getpid()}",
        image=IMAGE,
        pull="never",
        gpus=False,
        stop_grace_us=0,
    )
    engine = Engine(socket)
    try:
        with cluster(folder, options, storage) as url:
            client = await nats.connect(url)
            await ready(client)
            bench = Bench(client, engine, folder, options)
            taken = [(await bench.placed(number), await bench.direct(number)) for number in range(WARM + ROUNDS)]
            await client.close()
    finally:
        await engine.close()
        shutil.rmtree(folder, ignore_errors=True)
    return [ours for ours, _ in taken[WARM:]], [direct for _, direct in taken[WARM:]]


def medians(taken: list[Took]) -> Took:
    names = ("decided_us", "made_us", "running_us", "known_us")
    return Took(*(round(statistics.median(getattr(each, name) for each in taken)) for name in names))


def report(results: dict[str, tuple[list[Took], list[Took]]]) -> dict[str, Any]:
    """In the form of all benches."""
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for storage, (ours, direct) in results.items():
        ours_median, direct_median = medians(ours), medians(direct)
        for what, median in (("ours", ours_median), ("direct", direct_median)):
            figures |= {f"{storage}_{what}_{name}": value for name, value in vars(median).items()}
        ratios[f"{storage}_known_ours_over_direct"] = round(ours_median.known_us / direct_median.known_us, 3)
        ratios[f"{storage}_running_ours_over_direct"] = round(ours_median.running_us / direct_median.running_us, 3)
        pairs = [one.known_us / other.known_us for one, other in zip(ours, direct, strict=True)]
        ratios[f"{storage}_known_median_of_pairs"] = round(statistics.median(pairs), 3)
    holds = {
        f"our share <= 15 %, {storage} ledger": ratios[f"{storage}_known_ours_over_direct"] <= TARGET_RATIO
        for storage in results
    }
    notes = (
        f"{ROUNDS} starts of each, in turn. Real: engine, containers, nats-server, services in processes. Simulated: "
        "the node's devices. known: an outside client has heard the started event (direct: create, start and inspect "
        "have answered); made and running: the engine's own stamps; decided: the placer's answer."
    )
    return form.found("docker", figures, ratios, holds, notes)


def show(told: dict[str, Any]) -> None:
    """The same for people."""
    for storage in STORAGES:
        print(f"\n{storage} ledger, ms since asked      decided    made  running   known")
        for what in ("ours", "direct"):
            row = [
                told["figures"][f"{storage}_{what}_{name}_us"] / 1000
                for name in ("decided", "made", "running", "known")
            ]
            print(f"  {what:<28}" + "".join(f"{each:9.1f}" for each in row))
    form.show(told)


async def measure_all(socket: str) -> dict[str, tuple[list[Took], list[Took]]]:
    return {storage: await measure(socket, storage) for storage in STORAGES}


def engine_socket() -> str:
    """Of an engine that answers or is started, with the image there; exits with the reason where there is none."""
    started = subprocess.run([".ci/docker-engine"], stdout=subprocess.PIPE, text=True, check=False)
    if started.returncode:
        sys.exit(started.returncode)
    host = started.stdout.partition("=")[2].partition(";")[0]
    if not host.startswith("unix://"):
        sys.exit(f"the engine at {host} is not on a unix socket: its stamps would be of another clock")
    made = subprocess.run([".ci/docker-image", sys.executable], env=os.environ | {"DOCKER_HOST": host}, check=False)
    if made.returncode:
        sys.exit(made.returncode)
    return host.removeprefix("unix://")


def main() -> None:
    socket = engine_socket()
    told = report(asyncio.run(measure_all(socket)))
    show(told)
    form.keep(told)


if __name__ == "__main__":
    main()

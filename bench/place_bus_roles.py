"""The processes of ``bench.place_bus``, each a role of its own: who answers, who asks, and who commits.

``python -m bench.place_bus_roles ROLE WORDS…``: echo, bare, ask, seldom or commit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping
from random import Random
from typing import Any

import nats
from nats.aio.client import Client

from bench.place_bus_bare import Bare
from shared.bus import Bus
from shared.bus.connection import CLIENT_BUFFER_BYTES, MAX_OUTSTANDING_PINGS
from shared.effects import CommitOutcome, Write
from shared.settings import ServiceSettings

Json = dict[str, Any]

PAUSE_S = int(os.environ.get("LAXITY_BENCH_PAUSE_MS", "50")) / 1000
"""At low load, after a request has started and after a bare commit."""
COMMIT_S = 1.5
"""How long bare commits are made."""
BUCKET = "bench"
"""A second ledger, for bare commits and the bare responder."""
ROLE = [sys.executable, "-m", "bench.place_bus_roles"]
ANSWER = json.dumps(
    {
        "outcome": "placed",
        "request_id": "r" * 16,
        "generation": 1,
        "placements": [{"replica": 0, "node": "n" * 12, "devices": ["GPU-" + "0" * 16], "share": 0.25}],
        "score": {"total": 1.0, "by": {"slack": 1.0}},
    }
).encode()


def asked(name: str, chance: Random) -> bytes:
    """Small shares of a few sizes, so that a hundred nodes do not fill up; nothing of it is started for real."""
    body: Json = {"request_id": name, "command": ["serve"], "cpu_milli": chance.choice([100, 250])}
    body["gpu"] = {"share": chance.choice([0.05, 0.1, 0.2]), "memory_mib": chance.choice([0, 512])}
    return json.dumps(body).encode()


async def connect(url: str) -> Client:
    """As services are connected."""
    settings = ServiceSettings(nats_url=url)
    return await nats.connect(
        url,
        ping_interval=settings.ping_interval_us / 1_000_000,
        max_outstanding_pings=MAX_OUTSTANDING_PINGS,
        pending_size=CLIENT_BUFFER_BYTES,
    )


async def echo(url: str) -> None:
    """Answers until it is ended."""
    client = await connect(url)

    async def answer(message: Any) -> None:
        await client.publish(message.reply, ANSWER)

    await client.subscribe("bench.echo", queue="echo", cb=answer)
    await client.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def bare(url: str, size: int) -> None:
    """Answers until it is ended, as a placer does that decides nothing; its writes have ``size`` bytes."""
    bus = await Bus.connect(ServiceSettings(nats_url=url), "bench")
    responder = Bare(bus, BUCKET, size, ANSWER)
    await bus.subscribe("bench.bare", responder.heard, queue="bare")
    print("ready", flush=True)
    await responder.run()


async def ask(url: str, subject: str, name: str, count: int, in_flight: int) -> None:
    """One client, several questions in flight; prints how long all took, and each."""
    client = await connect(url)
    chance, took_us, outcomes = Random(name), list[float](), dict[str, int]()
    bodies = iter([asked(f"{name}-{number}", chance) for number in range(count)])

    async def one_after_another() -> None:
        for body in bodies:
            before = time.perf_counter()
            answer = json.loads((await client.request(subject, body, timeout=60)).data)
            took_us.append((time.perf_counter() - before) * 1e6)
            outcomes[answer["outcome"]] = outcomes.get(answer["outcome"], 0) + 1

    began, cpu_began = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    await client.close()
    print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "took_us": took_us, "outcomes": outcomes}))


async def seldom(url: str, name: str, count: int, size: int) -> None:
    """At low load: in turn a question to the echo, a request that is let start, one to the bare responder, and a bare
    commit of two keys; prints how long each took.
    """
    client, bus = await connect(url), await Bus.connect(ServiceSettings(nats_url=url), "bench")
    batch, chance, started = Batch(bus, 2, size), Random(name), asyncio.Event()
    took_us: Json = {"echo": [], "place": [], "bare": [], "commit": []}

    async def heard(event: Any) -> None:
        if json.loads(event.data)["state"] == "started":
            started.set()

    for number in range(count):
        request_id = f"{name}-{number}"
        took_us["echo"].append(await _timed(client.request("bench.echo", b"{}", timeout=60)))
        events = await client.subscribe(f"rt.events.place.{request_id}", cb=heard)
        await client.flush()
        await asyncio.sleep(PAUSE_S)
        took_us["place"].append(await _timed(client.request("rt.place", asked(request_id, chance), timeout=60)))
        await started.wait()
        started.clear()
        await events.unsubscribe()
        await asyncio.sleep(PAUSE_S)
        took_us["bare"].append(await _timed(client.request("bench.bare", asked(f"{request_id}-b", chance), timeout=60)))
        await asyncio.sleep(PAUSE_S)
        took_us["commit"].append(await _timed(batch.commit()))
    await client.close()
    await bus.close()
    print(json.dumps(took_us))


async def _timed(work: Awaitable[Any]) -> float:
    before = time.perf_counter()
    await work
    return (time.perf_counter() - before) * 1e6


class Batch:
    """The same keys, committed again and again as a placer does."""

    def __init__(self, bus: Bus, keys: int, size: int) -> None:
        self._bus, self._body = bus, b"x" * size
        self._revisions: Mapping[str, int] = {f"request.{os.getpid()}-{number}": 0 for number in range(keys)}

    async def commit(self) -> None:
        done = await self._bus.commit(BUCKET, [Write(key, self._body, seen) for key, seen in self._revisions.items()])
        if done.outcome != CommitOutcome.WRITTEN:
            raise RuntimeError(f"not written: {done}")
        self._revisions = done.revisions


async def commit(url: str, keys: int, size: int) -> None:
    """The same batch again and again, one at a time, as a placer commits; prints how long each took."""
    bus = await Bus.connect(ServiceSettings(nats_url=url), "bench")
    batch, took_us, began = Batch(bus, keys, size), list[float](), time.perf_counter()
    while time.perf_counter() - began < COMMIT_S:
        took_us.append(await _timed(batch.commit()))
    await bus.close()
    print(json.dumps({"took_us": took_us[3:]}))


async def run(*arguments: object) -> Json:
    """A role as a process of its own; what it printed."""
    command = [*ROLE, *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    found: Json = json.loads(printed)
    return found


@contextlib.contextmanager
def responder(*arguments: object) -> Iterator[int]:
    """A role that answers; its process id."""
    process = subprocess.Popen([*ROLE, *map(str, arguments)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.communicate()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("echo", "bare", "ask", "seldom", "commit"))
    parser.add_argument("words", nargs="*")
    told = parser.parse_args()
    match told.role, told.words:
        case "echo", (url,):
            await echo(url)
        case "bare", (url, size):
            await bare(url, int(size))
        case "ask", (url, subject, name, count, in_flight):
            await ask(url, subject, name, int(count), int(in_flight))
        case "seldom", (url, name, count, size):
            await seldom(url, name, int(count), int(size))
        case "commit", (url, keys, size):
            await commit(url, int(keys), int(size))
        case _:
            parser.error(f"{told.role} does not take {told.words}")


if __name__ == "__main__":
    asyncio.run(main())

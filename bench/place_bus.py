"""How many requests a second the placer takes over a real server, and how long one waits: ``make bench-place-bus``.

In turn with a responder that does nothing but answer, on the same connection settings, and with one that also does the
messages of a placer, but decides and starts nothing (place_bus_bare.py): more than that one reaches no placer can.
Server, placer, responders and client are processes of their own (place_bus_roles.py). The bare commit of a batch as
large as the placer's are says what the ledger allows. At low load a client asks for one, waits until that has started,
and a pause longer; the bare responder and a bare commit follow each.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from nats.aio.client import Client

from bench import report as form
from bench.place_bus_roles import BUCKET, PAUSE_S, connect, responder, run
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess

Json = dict[str, Any]

STORAGES = ("file", "memory")
ROUNDS = int(os.environ.get("LAXITY_BENCH_ROUNDS", "3"))
REQUESTS, IN_FLIGHT = int(os.environ.get("LAXITY_BENCH_REQUESTS", "1000")), 64
ALONE = 120
"""Requests of a round at low load."""
NODES, DEVICES = 200, 8
MOST_COMMITS = 2.0
SHM = "/dev/shm"  # noqa: S108  # what is in it lies in a folder made for this run
IN_MEMORY = SHM if os.access(SHM, os.W_OK) else None
"""Where the fake backend keeps its files: it stands for engines that keep theirs elsewhere."""
PLACER = os.environ.get("LAXITY_BENCH_PLACER", "services.placer")
"""The module that is run as the placer: another one may put a profiler around it."""


# --- the ledger ---


async def jetstream(client: Client, path: str, body: Json | None = None) -> Json:
    payload = json.dumps(body).encode() if body else b""
    answer: Json = json.loads((await client.request(f"$JS.API.{path}", payload, timeout=10)).data)
    if "error" in answer:
        raise RuntimeError(f"{path}: {answer['error']}")
    return answer


async def second_ledger(client: Client) -> None:
    """A bucket like the ledger, for bare commits."""
    info = await jetstream(client, "STREAM.INFO.KV_rt_ledger")
    config = info["config"] | {"name": f"KV_{BUCKET}", "subjects": [f"$KV.{BUCKET}.>"]}
    await jetstream(client, f"STREAM.CREATE.KV_{BUCKET}", config)


async def size_of_writes(client: Client) -> int:
    """Of a usual one to the ledger, in bytes."""
    state = (await jetstream(client, "STREAM.INFO.KV_rt_ledger"))["state"]
    return int(state["bytes"] / state["messages"])


# --- one storage ---


@dataclass
class Measured:
    """Of one storage; rates per second, times in microseconds."""

    echo_per_s: list[float] = field(default_factory=list)
    bare_per_s: list[float] = field(default_factory=list)
    place_per_s: list[float] = field(default_factory=list)
    echo_us: list[float] = field(default_factory=list)
    bare_us: list[float] = field(default_factory=list)
    place_us: list[float] = field(default_factory=list)
    echo_alone_us: list[float] = field(default_factory=list)
    bare_alone_us: list[float] = field(default_factory=list)
    place_alone_us: list[float] = field(default_factory=list)
    commits_share: list[float] = field(default_factory=list)
    """Of each round: the time that its commits would take alone, of the time that it took."""
    commits: list[float] = field(default_factory=list)
    requests_per_commit: list[float] = field(default_factory=list)
    keys_per_commit: list[float] = field(default_factory=list)
    until_started_per_s: list[float] = field(default_factory=list)
    commit_us: list[float] = field(default_factory=list)
    commit_alone_us: list[float] = field(default_factory=list)
    cpu_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of each process, a request: of the placer and the server until everything was started."""


class Bench:
    """A server with one placer and two responders, and what is asked of them."""

    def __init__(self, url: str, client: Client, processes: Mapping[str, int]) -> None:
        self._url, self._client = url, client
        self._processes = {name: psutil.Process(pid) for name, pid in processes.items()}
        self.found = Measured()

    async def prepare(self) -> None:
        """Facts of nodes, and a second bucket like the ledger for the bare commits."""
        for number in range(NODES):
            name = f"node-{number:04d}"
            await self._client.publish(f"$KV.rt_nodes.node.{name}", json.dumps(facts(name)).encode())
        await second_ledger(self._client)
        await self._ask("rt.place", "warm", 200, IN_FLIGHT)
        await self._ask("bench.echo", "warm", 200, IN_FLIGHT)
        await self._quiet()

    async def joined(self, pid: int) -> None:
        """The bare responder, which is told how large writes are once there are some."""
        self._processes["bare"] = psutil.Process(pid)
        await self._ask("bench.bare", "warm", 200, IN_FLIGHT)

    async def _ask(self, subject: str, name: str, count: int, in_flight: int) -> Json:
        found = await run("ask", self._url, subject, name, count, in_flight)
        if set(found["outcomes"]) != {"placed"}:
            raise RuntimeError(f"not all placed: {found['outcomes']}")
        return found

    async def _state(self) -> tuple[int, int, int]:
        """Commits so far, writes so far, and what the placer has in its hands."""
        message = await self._client.request("$SRV.STATS.placer", b"", timeout=10)
        data = json.loads(message.data)["data"]
        info = await jetstream(self._client, "STREAM.INFO.KV_rt_ledger")
        busy = data["inbox"] + data["outbox"]
        return data["counters"].get("commits.written", 0), info["state"]["last_seq"], busy

    async def _quiet(self) -> float:
        """Nothing is written but leases, and nothing is left to do; how long that took, in seconds."""
        began = time.perf_counter()
        before = await self._state()
        while True:
            since = time.perf_counter()
            await asyncio.sleep(0.2)
            now = await self._state()
            if not (before[2] or now[2]) and now[1] - before[1] <= 2:
                return since - began
            before = now

    async def round(self, number: int) -> None:
        """Responders and placer in turn, many in flight and at low load."""
        found = self.found
        found.echo_per_s.append(await self._respond("echo", number, found.echo_us))
        found.bare_per_s.append(await self._respond("bare", number, found.bare_us))
        await self._place(number)
        took_us = await run("seldom", self._url, f"pa{number}", ALONE, await size_of_writes(self._client))
        found.echo_alone_us += took_us["echo"]
        found.bare_alone_us += took_us["bare"]
        found.place_alone_us += took_us["place"]
        found.commit_alone_us += took_us["commit"]

    async def _respond(self, who: str, number: int, took_us: list[float]) -> float:
        """Requests a second; `took_us` gets what each took."""
        cpu_s = self._cpu_s()
        answered = await self._ask(f"bench.{who}", f"{who}{number}", REQUESTS, IN_FLIGHT)
        self._note_cpu(who, answered["cpu_s"], cpu_s)
        took_us += answered["took_us"]
        return float(REQUESTS / answered["wall_s"])

    async def _place(self, number: int) -> None:
        found = self.found
        before, cpu_s = await self._state(), self._cpu_s()
        placed = await self._ask("rt.place", f"p{number}", REQUESTS, IN_FLIGHT)
        found.place_per_s.append(REQUESTS / placed["wall_s"])
        found.place_us += placed["took_us"]
        rest_s = await self._quiet()
        self._note_cpu("place", placed["cpu_s"], cpu_s)
        found.until_started_per_s.append(REQUESTS / (placed["wall_s"] + rest_s))
        after = await self._state()
        commits, writes = after[0] - before[0], after[1] - before[1]
        keys = max(1, round(writes / commits))
        bare = (await run("commit", self._url, keys, await size_of_writes(self._client)))["took_us"]
        found.commit_us += bare
        found.commits.append(commits)
        found.keys_per_commit.append(keys)
        found.requests_per_commit.append(REQUESTS / commits)
        found.commits_share.append(commits * statistics.median(bare) / 1e6 / (placed["wall_s"] + rest_s))

    def _cpu_s(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: each.user + each.system for name, each in times.items()}

    def _note_cpu(self, what: str, client_s: float, before_s: Mapping[str, float]) -> None:
        spent_s = {name: now_s - before_s[name] for name, now_s in self._cpu_s().items()} | {"client": client_s}
        for name, seconds in spent_s.items():
            self.found.cpu_us[f"{what}_{name}"].append(seconds / REQUESTS * 1e6)


def facts(name: str) -> Json:
    usual = {"model": "fake", "regime": "time_sliced", "slice_us": 2000, "switch_us": 100, "healthy": True}
    devices = [{"uuid": f"{name}-{index}", "index": index, "memory_mib": 80_000} | usual for index in range(DEVICES)]
    return {
        "node": name,
        "state": "ready",
        "at_us": 0,
        "devices": devices,
        "labels": {},
        "cpu_milli": 128_000,
        "memory_mib": 512_000,
    }


async def measure(storage: str) -> Measured:
    with (
        tempfile.TemporaryDirectory(prefix="laxity-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="laxity-bench-", dir=IN_MEMORY) as state,
        NatsServer(Path(folder) / "nats") as server,
        placer(Path(folder), Path(state), server.url, storage) as asked,
        responder("echo", server.url) as echoing,
    ):
        client = await connect(server.url)
        bench = Bench(server.url, client, {"server": server.pid, "placer": asked.pid, "echo": echoing})
        await bench.prepare()
        with responder("bare", server.url, await size_of_writes(client)) as bare:
            await bench.joined(bare)
            for number in range(ROUNDS):
                await bench.round(number)
                print(f"{storage}, round {number + 1} of {ROUNDS}", file=sys.stderr)
        await client.close()
        return bench.found


def placer(folder: Path, state: Path, url: str, storage: str) -> ServiceProcess:
    env = {
        "LAXITY_CHECK": "false",
        "LAXITY_STORAGE": storage,
        "LAXITY_LOG_LEVEL": "warning",
        "LAXITY_PLACER_BACKENDS": '{"*": "fake"}',
        "LAXITY_PLACER_STATE_ROOT": str(state),
        "LAXITY_PLACER_RING_ROOT": str(folder / "rings"),
    }
    return ServiceProcess(PLACER, folder, url, **env)


# --- the report ---


def report(results: dict[str, Measured]) -> Json:
    """In the form of all benches."""
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for storage, found in results.items():
        figures |= {f"{storage}_{name}": value for name, value in _figures(found).items()}
        for some, others in (("place", "echo"), ("bare", "echo"), ("place", "bare")):
            pairs = zip(getattr(found, f"{some}_per_s"), getattr(found, f"{others}_per_s"), strict=True)
            ratios[f"{storage}_{some}_over_{others}"] = round(statistics.median(s / o for s, o in pairs), 3)
        ratios[f"{storage}_commits_of_all_time"] = round(statistics.median(found.commits_share), 3)
        for p in (99, 50):
            alone_us, bare_us = _percentile(found.place_alone_us, p), _percentile(found.bare_alone_us, p)
            commit_us = _percentile(found.commit_alone_us, p)
            ratios[f"{storage}_alone_p{p}_over_commit"] = round(alone_us / commit_us, 2)
            ratios[f"{storage}_bare_alone_p{p}_over_commit"] = round(bare_us / commit_us, 2)
    return form.found(
        "place-bus",
        figures,
        ratios,
        _holds(ratios),
        (
            f"{ROUNDS} rounds in turn of {REQUESTS} requests, {IN_FLIGHT} in flight from one client, and of {ALONE} at "
            f"low load: one client asks, waits until that request's event `started` and {PAUSE_S:g} s more, asks the "
            "bare responder, pauses, makes one bare commit of two keys of the ledger's mean size, pauses, and so on; "
            f"{NODES} nodes of {DEVICES} devices. Real: nats-server, placer, commits, starts on the fake backend. "
            "Simulated: the nodes. The echo answers and stores nothing: one message in, one out. The bare responder "
            "commits, answers and stores events as a placer does, but for the copy in RT_PLACE: nothing is decided or "
            "started. A request of the "
            "placer is answered once it is in the ledger; beside that its copy in RT_PLACE is acknowledged, it is "
            "started, which is a second commit, and three events are stored, in all seven messages "
            "in and seven out. commits_of_all_time: what the same number of bare commits of the same size takes, of "
            "what the placer took until all were started. cpu: of each process, a request, starts included."
        ),
    )


def _figures(found: Measured) -> dict[str, float]:
    rates = {
        name: round(statistics.median(getattr(found, name)), 1) for name in ("echo_per_s", "bare_per_s", "place_per_s")
    }
    rates["until_started_per_s"] = round(statistics.median(found.until_started_per_s), 1)
    sizes = {
        name: round(statistics.median(getattr(found, name)), 1) for name in ("requests_per_commit", "keys_per_commit")
    }
    times = [f"{who}{load}_us" for load in ("", "_alone") for who in ("echo", "bare", "place", "commit")]
    cpu = {f"{name}_cpu_us": round(statistics.median(spent)) for name, spent in found.cpu_us.items()}
    return (
        rates
        | sizes
        | cpu
        | {
            f"{name.removesuffix('_us')}_p{p}_us": round(_percentile(getattr(found, name), p))
            for name in times
            for p in (50, 99)
        }
    )


def _holds(ratios: dict[str, float]) -> dict[str, bool]:
    return {
        ">= 0.5 of the echo's rate, memory ledger": ratios["memory_place_over_echo"] >= 0.5,
        "within 2x of its own group-commit limit, file ledger": ratios["file_commits_of_all_time"] >= 0.5,
        **{
            f"p99 of one request <= 2 commits, {storage} ledger": ratios[f"{storage}_alone_p99_over_commit"]
            <= MOST_COMMITS
            for storage in STORAGES
        },
    }


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def show(told: Json) -> None:
    """The same for people."""
    names = list(dict.fromkeys(name.split("_", 1)[1] for name in told["figures"]))
    print(f"\n{'':28}" + "".join(f"{storage:>12}" for storage in STORAGES))
    for name in names:
        print(f"  {name:<26}" + "".join(f"{told['figures'][f'{storage}_{name}']:12.1f}" for storage in STORAGES))
    form.show(told)


async def main() -> None:
    ours = asyncio.current_task()
    assert ours is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ours.cancel)
    told = report({storage: await measure(storage) for storage in STORAGES})
    form.keep(told)
    show(told)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except asyncio.CancelledError:  # by a signal, and all that it had started has ended with it
        sys.exit(128 + signal.SIGTERM)

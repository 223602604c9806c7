"""Four placers under load, killed at random: what must hold of the ledger holds at every single commit.

600 requests, in ``make chaos`` 5,000; LAXITY_CHAOS_REQUESTS and LAXITY_CHAOS_SEED say otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import nats.errors
import pytest
from nats.aio.client import Client

from shared.bus import Bus
from shared.settings import ServiceSettings
from shared.testing.invariants import EventChecker
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess
from shared.testing.wait import until
from tests.ledger_watch import FINAL, Capacity, LedgerWatch
from tests.outside import Json, ask, connect, events

REQUESTS = int(os.environ.get("LAXITY_CHAOS_REQUESTS", "600"))
SEED = int(os.environ.get("LAXITY_CHAOS_SEED", "2026"))
PLACERS = 4
NODES = {
    f"chaos-{number}": Capacity({f"chaos-{number}-gpu-{index}": 16_384 for index in range(8)}, 64_000, 65_536)
    for number in range(6)
}
LIVES = 96
"""Requests that live at the same time: somewhat more than fit."""
PLACERS_ARE = {
    "LAXITY_CHECK": "false",
    "LAXITY_STORAGE": "file",
    "LAXITY_PLACER_BACKENDS": '{"*": "fake"}',
    "LAXITY_PLACER_GRACE_US": "1000000",
    "LAXITY_PLACER_BACKOFF_FIRST_US": "200000",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300 + REQUESTS // 2),
]


async def test_nothing_is_promised_twice_and_no_request_is_lost_while_placers_are_killed(tmp_path: Path) -> None:
    async with chaos(tmp_path) as cluster:
        load = Load(cluster.client)
        killing = asyncio.create_task(cluster.kill_at_random(Random(SEED)))
        await load.run()
        killing.cancel()
        await cluster.all_run()
        watch = cluster.watch
        await load.quiet(watch)
        await cluster.everything_told()
        print(f"\nseed {SEED}: {await cluster.told(load)}")
        assert [] == watch.faults[:20], "\n".join(watch.faults[:20])
        assert set(load.bodies) <= {record["request_id"] for record in watch.records.values()} | load.left_no_key
        assert {} == {key: held for key, held in watch.reserved.items() if held}
        assert [] == load.contradictions(watch)
        assert [] == containers(tmp_path)
        assert [] == await unsound_events(cluster.client, watch)
        assert [] == [body for _, body in await events(cluster.client, "rt.events.bus.placer") if is_alarm(body)]
        assert cluster.kills > 0


async def unsound_events(client: Client, watch: LedgerWatch) -> list[str]:
    """Of what outsiders were told: every step of every request, without a gap."""
    checker = EventChecker()
    for event_id, body in await events(client, "rt.events.place.*"):
        checker.feed("rt.events.place", json.dumps(body).encode(), {"ce-id": event_id})
    untold = []
    for record in watch.records.values():
        steps = {step["number"] for step in record["steps"]} - checker.states[record["request_id"]].keys()
        untold += [f"{record['request_id']}: step {number} is not told" for number in sorted(steps)]
    return [*checker.finish(), *untold][:20]


def is_alarm(body: Json) -> bool:
    """Of a container or a ledger that nobody can explain."""
    return str(body["kind"]).startswith(("container_", "ledger_"))


def containers(folder: Path) -> list[str]:
    """Of the fake backend, those that are left."""
    return [path.name for path in folder.glob("state/fake/*/laxity-*.json")]


# --- the cluster ---


@dataclass
class Cluster:
    client: Client
    watch: LedgerWatch
    placers: list[ServiceProcess]
    kills: int = 0
    counters: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Of each start of a placer, as it told them last."""

    async def kill_at_random(self, rng: Random) -> None:
        """Now and then one of them dies, or two, also while it starts; each comes back after a while."""
        while True:
            await until(lambda: sum(each.ready for each in self.placers) >= 2, 60)
            await self.tell_counters()
            await asyncio.sleep(rng.uniform(0.3, 3))  # when, is what the seed says
            dying = [each for each in rng.sample(self.placers, rng.choice([1, 1, 1, 2])) if each.running]
            for each in dying:
                each.kill()
                self.kills += 1
            await asyncio.sleep(rng.uniform(0, 1))
            for each in dying:
                each.begin()

    async def all_run(self) -> None:
        for each in self.placers:
            if not each.running:
                each.begin()
        for each in self.placers:
            await asyncio.to_thread(each.until_ready)

    async def everything_told(self) -> None:
        """A lease says how far its placer has told; that of a dead one stays until all that it left untold is told."""
        told, last = self.watch.told, self.watch.stepped
        await until(lambda: len(told) == PLACERS and min(told.values()) >= last, 120)

    async def tell_counters(self) -> None:
        for found in await _stats(self.client):
            self.counters[found["id"]] = Counter(found["data"]["counters"])

    async def told(self, load: Load) -> str:
        await self.tell_counters()
        sums = sum(self.counters.values(), Counter[str]())
        ends = {name.removeprefix("commits."): n for name, n in sorted(sums.items()) if name.startswith("commits.")}
        return "; ".join(
            [
                f"{len(load.bodies)} requests in {load.took_s:.0f} s, {self.kills} kills",
                f"{self.watch.commits} commits of {self.watch.writes} writes checked",
                f"ends of commits, as far as placers lived to tell: {ends}",
                f"{load.asked} questions, asked again: {dict(load.again)}",
                f"outcomes {dict(load.outcomes)}",
            ]
        )


async def _stats(client: Client) -> list[Json]:
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    await client.publish("$SRV.STATS.placer", b"", reply=inbox)
    found = []
    with contextlib.suppress(nats.errors.TimeoutError):
        while len(found) < PLACERS:
            found.append(json.loads((await answers.next_msg(0.3)).data))
    await answers.unsubscribe()
    return [each for each in found if "data" in each]


@asynccontextmanager
async def chaos(folder: Path) -> AsyncIterator[Cluster]:
    """A server, a watch on its ledger, facts of nodes written by hand, four placers."""
    async with AsyncExitStack() as closing:
        server = closing.enter_context(NatsServer(folder / "nats"))
        bus = await Bus.connect(ServiceSettings(nats_url=server.url))
        await bus.ensure_streams()
        await bus.close()
        client, watching = await connect(server.url), await connect(server.url)
        closing.push_async_callback(client.close)
        closing.push_async_callback(watching.close)
        watch = LedgerWatch(NODES)
        await watch.follow(watching)
        for name, node in NODES.items():
            await client.jetstream().publish(f"$KV.rt_nodes.node.{name}", json.dumps(facts(name, node)).encode())
        placers = [closing.enter_context(started(folder, number, server.url)) for number in range(PLACERS)]
        for each in placers:
            each.until_ready()
        yield Cluster(client, watch, placers)


def facts(name: str, node: Capacity) -> Json:
    usual = {"model": "fake", "regime": "time_sliced", "slice_us": 2000, "switch_us": 100, "healthy": True}
    devices = [
        {"uuid": uuid, "index": index, "memory_mib": mib} | usual
        for index, (uuid, mib) in enumerate(node.devices.items())
    ]
    sizes = {"cpu_milli": node.cpu_milli, "memory_mib": node.memory_mib}
    return {"node": name, "state": "ready", "at_us": 0, "devices": devices, "labels": {}} | sizes


@contextlib.contextmanager
def started(folder: Path, number: int, url: str) -> Iterator[ServiceProcess]:
    own = folder / f"placer-{number}"
    own.mkdir()
    places = {"STATE_ROOT": str(folder / "state"), "RING_ROOT": str(folder / "rings")}
    env = {f"LAXITY_PLACER_{name}": value for name, value in places.items()} | {"LAXITY_INSTANCE": own.name}
    process = ServiceProcess("services.placer", own, url, **PLACERS_ARE, **env)
    process.begin()
    try:
        yield process
    finally:
        process.__exit__(None, None, None)


# --- the load ---


@dataclass
class Load:
    """Lives of requests, each with draws of its own: placed, doubled, confirmed, released; nobody gives up."""

    client: Client
    bodies: dict[str, Json] = field(default_factory=dict)
    replies: defaultdict[str, list[Json]] = field(default_factory=lambda: defaultdict(list))
    outcomes: Counter[str] = field(default_factory=Counter)
    """First answers."""
    left_no_key: set[str] = field(default_factory=set)
    """Refused holds."""
    asked: int = 0
    again: Counter[str] = field(default_factory=Counter)
    took_s: float = 0

    async def run(self) -> None:
        began, numbers = time.monotonic(), iter(range(REQUESTS))

        async def one_after_another() -> None:
            for number in numbers:
                await self._life(f"q{number}", Random(f"{SEED}/{number}"))

        await asyncio.gather(*(one_after_another() for _ in range(LIVES)))
        self.took_s = time.monotonic() - began

    async def _life(self, name: str, rng: Random) -> None:
        body = self.bodies[name] = drawn(name, rng)
        copies = rng.choice([1, 1, 1, 2, 3])
        answers = await asyncio.gather(*(self._place(body) for _ in range(copies)))
        self.outcomes[answers[0]["outcome"]] += 1
        if answers[0]["outcome"] == "held" and rng.random() < 0.7:
            confirm = {"request_id": name, "generation": answers[0]["generation"]}
            await self._until_answered("rt.confirm", confirm)
        await asyncio.sleep(rng.expovariate(2))  # how long it lives, is what the seed says
        if rng.random() < 0.1:
            await self._place(body)
        await self._until_answered("rt.release", {"request_id": name})

    async def _place(self, body: Json) -> Json:
        answer = await self._until_answered("rt.place", body)
        self.replies[body["request_id"]].append(answer)
        if answer["outcome"] == "rejected" and "hold_us" in body:
            self.left_no_key.add(body["request_id"])
        return answer

    async def _until_answered(self, subject: str, body: Json) -> Json:
        """The same again where a placer died with it; each try is a duplicate of the one before."""
        while True:
            self.asked += 1
            try:
                answer = await ask(self.client, subject, body, 3)
                if (answer.get("error") or {}).get("field") != "ledger":
                    return answer
                self.again["ledger"] += 1
            except nats.errors.Error as error:
                self.again[type(error).__name__] += 1
            await asyncio.sleep(0.05)  # nobody listens

    async def quiet(self, watch: LedgerWatch) -> None:
        """Everything has been released: it ends when the ledger says so of every request."""
        began = time.monotonic()
        while alive := [record["request_id"] for record in watch.records.values() if record["state"] not in FINAL]:
            assert time.monotonic() - began < 120, (
                f"not ended: {[watch.records[f'request.{name}'] for name in alive[:3]]}"
            )
            await asyncio.sleep(0.1)

    def contradictions(self, watch: LedgerWatch) -> list[str]:
        """Answers that the ledger never bore out, and requests that were new more than once."""
        found = []
        for name, replies in self.replies.items():
            if "hold_us" in self.bodies[name]:
                continue  # a repeat makes a new hold, and takes the place of one that was never written
            for each in (one for reply in replies for one in reply.get("placements", ())):
                place = (name, each["replica"], each["generation"], each["node"], tuple(each["devices"]))
                if place not in watch.ever[name]:
                    found.append(f"{place} was answered and never held")
            new = [reply["outcome"] for reply in replies if not reply.get("duplicate")]
            if len(new) > 1:
                found.append(f"{name} was new {len(new)} times: {new}")
        return found


def drawn(name: str, rng: Random) -> Json:
    """Shares, whole devices, several, gangs, containers without a GPU; holds, queues, starts that fail, early ends."""
    body: Json = {"request_id": name, "command": ["serve"], "env": {}, "cpu_milli": rng.choice([0, 500, 2000])}
    kind = rng.random()
    if kind < 0.6:
        body["gpu"] = {"share": rng.choice([0.1, 0.15, 0.25, 0.5, 0.7]), "memory_mib": rng.choice([0, 1024, 4096])}
    elif kind < 0.8:
        body["gpu"] = {"share": 1.0}
    elif kind < 0.9:
        body["gpu"] = {"count": rng.choice([2, 4, 8])}
    elif kind < 0.96:
        body |= {"gpu": {"share": rng.choice([0.3, 1.0])}, "replicas": rng.choice([2, 3, 5])}
    body["strategy"] = rng.choice(["binpack", "spread", "deadline"])
    if rng.random() < 0.7:
        body["queue"] = True
    if rng.random() < 0.1:
        body["hold_us"] = rng.choice([300_000, 2_000_000])
    if rng.random() < 0.05:
        body["env"]["FAKE_START_FAILS"] = "1"
    if rng.random() < 0.1:
        body["env"]["FAKE_EXIT_AFTER_US"] = str(rng.randrange(500_000))
        body["restart"] = rng.choice(["never", "on_failure"])
    return body

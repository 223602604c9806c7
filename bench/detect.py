"""How soon a miss is known, and how soon the node list is in order again: ``make bench-detect``.

Monitor, tracker, node-list and nats-server are processes of their own, as are the containers and the one outside
subscriber that stamps; all stamps are of one machine's monotonic clock. A bare publish into a stream and its way to the
same subscriber is measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import nats
from nats.aio.client import Client

import laxity
from bench import report as form
from services.monitor.open_tasks import GUARD_US
from services.monitor.settings import MonitorSettings
from shared.bus import Bus
from shared.effects import CommitOutcome, Write
from shared.messages import ContainerLabels, Kind, NodeReservations, Realtime, Reservation
from shared.settings import ServiceSettings
from shared.subjects import LEDGER, encode, node_key
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess

Json = dict[str, Any]

NODE: Final = "n1"
DEVICES: Final = 8
SWINGERS: Final = 4
"""Containers whose record goes below its guarantee and comes back, again and again."""
WINDOW: Final = 40
GUARANTEE: Final = 0.5
"""So wide a guarantee that a record can come back within one window."""
TASKS_PER_S: Final = 2_500
"""Of the background: two events each."""
TICK_S: Final = 0.01
MISS_DEADLINE_US: Final = 20_000
MISS_EVERY_S, HOP_EVERY_S, TASK_EVERY_S = 0.03, 0.02, 0.02
HOP: Final = "rt.events.bus.bench"
MOST_HOPS: Final = 4
REACHED: Final = ("missed", "at_risk_listed")
STORAGES: Final = ("file", "memory")


# ----------------------------------------------------------------------------------- in the containers


def background(seconds: float) -> None:
    """Short tasks that meet their deadline, evenly."""
    task = laxity.task("work", deadline_us=5_000)
    until_s = next_s = time.monotonic()
    until_s += seconds
    while next_s < until_s:
        next_s += TICK_S
        time.sleep(max(0.0, next_s - time.monotonic()))
        for _ in range(round(TASKS_PER_S * TICK_S)):
            with task:
                pass


def missing(seconds: float) -> None:
    """Tasks whose end never comes; prints when each began."""
    chance, began_ns, until_s = Random(1), dict[str, int](), time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(chance.uniform(0.5, 1.5) * MISS_EVERY_S)
        name = f"miss-{len(began_ns)}"
        began_ns[name] = time.monotonic_ns()
        laxity.begin(name, deadline_us=MISS_DEADLINE_US)
    time.sleep(1)  # a writer that is gone has no overdue tasks any more
    print(json.dumps(began_ns))


def swinging(seconds: float, seed: int) -> None:
    """A window of tasks in time, then one of tasks too late, and so on; prints when each ended."""
    chance, ended_ns, until_s = Random(seed), list[int](), time.monotonic() + seconds
    in_time, late = laxity.task("in time", deadline_us=1_000_000), laxity.task("late", deadline_us=1)
    while time.monotonic() < until_s:
        for task in (in_time, late):
            for _ in range(WINDOW):
                time.sleep(chance.uniform(0.5, 1.5) * TASK_EVERY_S)
                with task:
                    until_ns = time.monotonic_ns() + 2_000
                    while time.monotonic_ns() < until_ns:
                        pass
                    ended_ns.append(time.monotonic_ns())
    print(json.dumps(ended_ns))


async def hopping(url: str, seconds: float) -> None:
    """The bare publish into the stream, stamped when it is sent."""
    client, until_s = await nats.connect(url), time.monotonic() + seconds
    stream = client.jetstream()
    while time.monotonic() < until_s:
        await asyncio.sleep(HOP_EVERY_S)
        await stream.publish(HOP, json.dumps({"sent_ns": time.monotonic_ns(), "pad": "x" * 200}).encode())
    await client.close()


# ------------------------------------------------------------------------------------------ the cluster


def contained(root: Path, container: str, device: str | None) -> Reservation | None:
    """Makes the container's folder; its reservation, where it has a device."""
    timing = Realtime(deadline_us=50_000, runtime_us=100, kind=Kind.FIRM, guarantee=GUARANTEE, gate=True)
    reservation = Reservation(
        request_id=container,
        replica=0,
        generation=1,
        devices=(device,) if device else (),
        share_micro=100_000,
        device_memory_mib=0,
        cpu_milli=100,
        memory_mib=64,
        realtime=timing,
    )
    folder = root / encode(container)
    folder.mkdir(parents=True)
    labels = ContainerLabels(container=container, ledger_id="l", node=NODE, reservation=reservation)
    (folder / "container.json").write_bytes(labels.to_json())
    return reservation if device else None


@contextlib.contextmanager
def services(folder: Path, url: str, storage: str) -> Iterator[None]:
    monitor = {
        "LAXITY_MONITOR_NODE": NODE,
        "LAXITY_MONITOR_RING_ROOT": str(folder / "rings"),
        "LAXITY_MONITOR_PROBE": "fake",
        "LAXITY_MONITOR_FAKE_DEVICES": json.dumps([{"count": DEVICES, "regime": "gated"}]),
    }
    tracker = {"LAXITY_TRACKER_WINDOW": str(WINDOW), "LAXITY_TRACKER_GUARANTEE": str(GUARANTEE)}
    usual = {"LAXITY_CHECK": "false", "LAXITY_STORAGE": storage}
    with (
        ServiceProcess("services.node_list", folder, url, **usual),
        ServiceProcess("services.deadline_tracker", folder, url, **usual, **tracker),
        ServiceProcess("services.monitor", folder, url, **usual, **monitor),
    ):
        yield


def began(root: Path, container: str, *arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | {"LAXITY_RING_DIR": str(root / encode(container)), "LAXITY_GATE": "0"}
    command = [sys.executable, "-m", "bench.detect", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


async def devices(client: Client) -> list[str]:
    """The node's devices, once all can promise something."""
    while True:
        with contextlib.suppress(nats.errors.TimeoutError, nats.errors.NoRespondersError):
            answer = json.loads((await client.request("rt.nodes", b'{"standing": ["guaranteed"]}', timeout=1)).data)
            if len(answer["devices"]) == DEVICES:
                return [each["uuid"] for each in answer["devices"]]
        await asyncio.sleep(0.05)


async def reserved(url: str, reservations: Sequence[Reservation]) -> None:
    bus = await Bus.connect(ServiceSettings(nats_url=url), "bench")
    value = NodeReservations(node=NODE, reservations=tuple(reservations)).to_json()
    done = await bus.commit(LEDGER, [Write(node_key(NODE), value, 0)])
    await bus.close()
    if done.outcome != CommitOutcome.WRITTEN:
        raise RuntimeError(f"the ledger was not written: {done}")


# ------------------------------------------------------------------------------------------ what was heard


@dataclass
class Heard:
    """What the outside subscriber heard, and when."""

    hops_us: list[float] = field(default_factory=list)
    missed_ns: dict[str, int] = field(default_factory=dict)
    crossed: list[tuple[str, str, int, int]] = field(default_factory=list)
    """Container, at_risk or recovered, the number of the task that made it so, and when."""
    listed: list[tuple[str, bool, int]] = field(default_factory=list)
    """Device, whether it came to be at risk or ceased to be, and when."""

    async def hop(self, message: Any) -> None:
        self.hops_us.append((time.monotonic_ns() - json.loads(message.data)["sent_ns"]) / 1e3)

    async def verdict(self, message: Any) -> None:
        now_ns, body = time.monotonic_ns(), json.loads(message.data)
        if body["kind"] != "missed":
            self.crossed.append((body["container"], body["kind"], body["judged"], now_ns))
        elif body["container"] == "missing":
            self.missed_ns.setdefault(body["name"], now_ns)

    async def change(self, message: Any) -> None:
        now_ns = time.monotonic_ns()
        for change in json.loads(message.data)["changes"]:
            if "at_risk" in (change["was"], change["standing"]):
                self.listed.append((change["uuid"], change["standing"] == "at_risk", now_ns))


@dataclass(frozen=True)
class Found:
    """Of one run: what was heard, when tasks without end began, when the others ended, who was on which device."""

    heard: Heard
    began_ns: dict[str, int]
    ended_ns: dict[str, list[int]]
    on: dict[str, str]

    def misses_us(self) -> list[float]:
        """From each deadline and its guard to hearing of it."""
        due_ns = {name: at_ns + (MISS_DEADLINE_US + GUARD_US) * 1_000 for name, at_ns in self.began_ns.items()}
        return [(at_ns - due_ns[name]) / 1e3 for name, at_ns in self.heard.missed_ns.items()]

    def said_us(self, word: str) -> list[float]:
        """From the end of the task that made a record cross its bound to the tracker's word on it."""
        ended = self.ended_ns
        crossed = [one for one in self.heard.crossed if one[0] in ended and one[1] == word]
        return [(at_ns - ended[who][judged - 1]) / 1e3 for who, _, judged, at_ns in crossed]

    def orders_us(self, word: str) -> list[float]:
        """From the end of the task that made a record cross its bound to the list that says so: the last before it."""
        found = []
        for container, ends_ns in self.ended_ns.items():
            crossed = [judged for who, kind, judged, _ in self.heard.crossed if (who, kind) == (container, word)]
            crossed_ns = [ends_ns[judged - 1] for judged in crossed]
            for uuid, became, at_ns in self.heard.listed:
                place = bisect.bisect(crossed_ns, at_ns)
                if place and uuid == self.on[container] and became == (word == "at_risk"):
                    found.append((at_ns - crossed_ns[place - 1]) / 1e3)
        return found


async def measured(folder: Path, url: str, seconds: float) -> Found:
    client = await nats.connect(url)
    heard, root = Heard(), folder / "rings"
    names = [f"swinging-{number}" for number in range(SWINGERS)]
    on = dict(zip(names, await devices(client), strict=False))
    reservations = [contained(root, name, on.get(name)) for name in ("background", "missing", *names)]
    await reserved(url, [each for each in reservations if each])
    await client.subscribe("rt.events.deadline.>", cb=heard.verdict)
    await client.subscribe("rt.events.list.interactive", cb=heard.change)
    await client.subscribe(HOP, cb=heard.hop)
    await client.flush()
    load = began(root, "background", "background", seconds + 2)
    await asyncio.sleep(1)
    others = [began(root, "missing", "missing", seconds), began(root, "hop", "hopping", url, seconds)]
    swinging = [began(root, name, "swinging", seconds, seed) for seed, name in enumerate(names)]
    said = [await asyncio.to_thread(process.communicate) for process in (load, *others, *swinging)]
    await asyncio.sleep(1)
    await client.close()
    ended_ns = {name: json.loads(text) for name, (text, _) in zip(names, said[3:], strict=True)}
    return Found(heard, json.loads(said[1][0]), ended_ns, on)


# ------------------------------------------------------------------------------------------ the report


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else float("nan")


def told(found: Found, storage: str) -> tuple[dict[str, float], dict[str, float]]:
    """The figures of one run, and how they compare with its limit."""
    heard, figures = found.heard, dict[str, float]()
    seen = {"hop": heard.hops_us, "missed": found.misses_us()}
    seen |= {f"{word}_said": found.said_us(word) for word in ("at_risk", "recovered")}
    seen |= {"at_risk_listed": found.orders_us("at_risk"), "recovered_listed": found.orders_us("recovered")}
    for name, values in seen.items():
        middle, high, most = statistics.median(values), p99(values), max(values)
        figures |= {f"{name}_p50_us": round(middle), f"{name}_p99_us": round(high), f"{name}_count": len(values)}
        shown = f"p50 {middle:8.0f} us  p99 {high:8.0f} us  most {most:8.0f} us  of {len(values)}"
        print(f"{storage:>8} {name:>18}: {shown}")
    poll_us, hop_us = MonitorSettings(node=NODE).poll_us, figures["hop_p99_us"]
    limit_us = poll_us + MOST_HOPS * hop_us
    figures |= {"limit_us": limit_us, "misses_not_heard": len(found.began_ns) - len(seen["missed"])}
    ratios = {f"{name}_over_limit": round(figures[f"{name}_p99_us"] / limit_us, 2) for name in REACHED}
    return figures, ratios


NOTES: Final = (
    "Real: server, monitor, tracker, node-list, containers' rings, clock. Simulated: the devices. Background: "
    f"{2 * TASKS_PER_S} events/s. missed: from deadline + {GUARD_US} us to the event. at_risk_listed, recovered_listed "
    "are from the end that made the record cross its bound to the list's change. What is late is published at once, "
    "ends in time gather: a recovery takes up to 50 ms more and has no target. Nobody commits to the ledger meanwhile: "
    "with file storage each batch makes all others wait for the disk. Limit: ring poll + 4 x hop's p99."
)


def bench(seconds: float) -> None:
    figures, ratios = dict[str, float](), dict[str, float]()
    for storage in STORAGES:
        with (
            tempfile.TemporaryDirectory() as name,
            NatsServer(Path(name) / "nats") as server,
            services(Path(name), server.url, storage),
        ):
            seen, compared = told(asyncio.run(measured(Path(name), server.url, seconds)), storage)
        figures |= {f"{storage}_{name}": value for name, value in seen.items()}
        ratios |= {f"{storage}_{name}": value for name, value in compared.items()}
    figures["load_of_the_machine"] = round(os.getloadavg()[0], 1)
    holds = {name.replace("_over_limit", "_within_a_poll_and_four_hops"): ratio <= 1 for name, ratio in ratios.items()}
    holds["every_miss_was_heard"] = not any(figures[f"{storage}_misses_not_heard"] for storage in STORAGES)
    form.tell("detect", figures, ratios, holds, NOTES)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", nargs="*")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    match args.role:
        case ["background", seconds]:
            background(float(seconds))
        case ["missing", seconds]:
            missing(float(seconds))
        case ["swinging", seconds, seed]:
            swinging(float(seconds), int(seed))
        case ["hopping", url, seconds]:
            asyncio.run(hopping(url, float(seconds)))
        case _:
            bench(args.seconds)


if __name__ == "__main__":
    main()

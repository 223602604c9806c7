"""Two nodes with engines of the test's own, placers on a real nats-server, and one look at all of it from outside.

One engine is there to be hurt, behind a proxy; the other shows that placement goes on meanwhile. No tests live here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import nats.errors
import psutil
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.testing.invariants import EventChecker, LedgerChecker
from shared.testing.service_process import ServiceProcess
from tests.docker.engine import IMAGE, OwnEngine
from tests.docker.proxy import ProxyThread
from tests.e2e.processes import DEVICE, Cluster
from tests.outside import Json, ask, until, value

NODE, OTHER = "docker-1", "docker-2"
"""The one that is hurt, and the one that is well."""
WORK = "trap 'exit 3' TERM; echo $LAXITY_CONTAINER >>/runs/log; sleep 600 & wait"
"""Says that it runs; ends with an error when it is asked to end: with no trap, a first process ignores TERM."""
IDLE_SOCKETS = 4
"""Of a placer at rest: asyncio's own pair, and one stream of events for each engine."""
CALL_TIMEOUT_S, RESCAN_S = 3, 2
LIMIT_S = 120
"""Far more than anything takes: an engine on a busy machine takes ten seconds for one container that it lost."""
TRIES = 8
LEDGER = "$KV.rt_ledger."

Start = tuple[str, int, int]
"""Request, replica, generation."""


class Docks(Cluster):
    """The two nodes, and two placers that reach both."""

    def __init__(self, folder: Path, hurt: OwnEngine, well: OwnEngine) -> None:
        super().__init__(folder, placers=2, nodes=0)
        self.engine = hurt
        self.engines = {NODE: hurt, OTHER: well}
        self.line = ProxyThread(hurt.socket, hurt.socket.with_name("proxy.sock"))
        """All that placers say to the engine that is hurt."""
        self.at_rest = True
        """Whether all that was asked of it is over; where a test failed on the way no other one can use it."""
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.runs.chmod(0o777)

    def __enter__(self) -> Docks:
        self.line.__enter__()
        super().__enter__()
        devices = json.dumps([{"count": 8, **DEVICE}])
        for node in self.engines:
            env = {"LAXITY_MONITOR_NODE": node, "LAXITY_MONITOR_PROBE": "fake", "LAXITY_MONITOR_PERIOD_US": "300000"}
            self.others.append(self.service("services.monitor", node, LAXITY_MONITOR_FAKE_DEVICES=devices, **env))
            self.others[-1].begin()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.line.__exit__(*error)

    def placer(self, number: int) -> ServiceProcess:
        options = {
            "engines": {NODE: {"url": self.line.url}, OTHER: {"url": self.engines[OTHER].url}},
            "scope": "faults",
            "image": IMAGE,
            "pull": "never",
            "gpus": False,
            "network": "host",  # the engine's own: to make and end one for each container takes it most of its time
            "volumes": {"runs": str(self.runs)},
            "stop_grace_us": 500_000,
            "call_timeout_us": CALL_TIMEOUT_S * 1_000_000,
            "start_timeout_us": 5_000_000,
            "rescan_us": RESCAN_S * 1_000_000,
        }
        env = {
            "LAXITY_PLACER_BACKENDS": json.dumps({"*": "docker"}),
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

    async def end(self, *request_ids: str) -> None:
        """What the world does to running containers: they end with exit code 3, and the engine knows it."""
        there = [each for each in await asyncio.to_thread(self.engine.containers) if _start(each)[0] in request_ids]
        names = [str(each["Id"]) for each in there if each["State"] == "running"]
        assert len(request_ids) == len(names)
        await asyncio.to_thread(self.engine.docker, "kill", "--signal", "TERM", *names)
        await asyncio.to_thread(self.engine.docker, "wait", *names)


class Look:
    """A plain client, all that the ledger and the events said, and the engines as their own client shows them."""

    def __init__(self, docks: Docks, client: Client) -> None:
        self.docks, self.client = docks, client
        self._ledger, self._events = LedgerChecker(), EventChecker()
        self._asking: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Look:
        async def ready() -> bool:
            devices = (await ask(self.client, "rt.nodes", {}))["devices"]
            well = len(devices) == 16 and all(device["standing"] != "excluded" for device in devices)
            return well and not any(self._sockets())

        await until(ready, "all devices are in the list, and each placer has its streams of events and no more")
        js = self.client.jetstream()
        for subject, heard in ((f"{LEDGER}>", self._hear_ledger), ("rt.events.>", self._hear_event)):
            sub = await js.subscribe(subject, ordered_consumer=True, cb=heard)
            self._stack.push_async_callback(sub.unsubscribe)
        self._usual_s = await self._takes_s(usual := f"usual-{time.monotonic_ns()}")
        await self.cleared([usual])
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.gather(*self._asking)
        await self._stack.aclose()

    async def _hear_ledger(self, message: Msg) -> None:
        headers = message.headers or {}
        gone = headers.get("KV-Operation") in {"DEL", "PURGE"} or "Nats-Marker-Reason" in headers
        key, value = message.subject.removeprefix(LEDGER), None if gone else message.data
        self._ledger.feed(key, value, headers, message.metadata.num_pending)

    async def _hear_event(self, message: Msg) -> None:
        self._events.feed(message.subject, message.data, message.headers or {})

    # --- asking ---

    async def place(self, request_id: str, command: str = WORK, **more: Any) -> None:
        """Without an answer from a placer that is gone, another one decides it."""
        self.docks.at_rest = False
        volume = {"source": "runs", "target": "/runs", "read_only": False}
        body = {"request_id": request_id, "command": ["sh", "-c", command], "volumes": [volume]}
        body |= {"gpu": {"share": 0.1}, "candidates": [NODE]} | more
        try:
            assert "placed" == (await ask(self.client, "rt.place", body, 5))["outcome"]
        except nats.errors.TimeoutError:
            return

    def begin(self, name: str, count: int) -> list[str]:
        """Ask for that many at the same time; every second one is to be started again when it fails."""
        ids = [f"{name}-{number}" for number in range(count)]
        for number, each in enumerate(ids):
            restart = "on_failure" if number % 2 else "never"
            self._asking.add(asyncio.create_task(self.place(each, restart=restart)))
        return ids

    async def others_go_on(self, name: str) -> list[str]:
        """Five, one after the other, on the node that is well: none waits for what is asked of the other one."""
        ids = [f"{name}-{number}" for number in range(5)]
        took_s = [await self._takes_s(each) for each in ids]
        # Three times, since what goes on meanwhile takes its share of the machine; one time-out is too long.
        assert median(took_s) < 3 * self._usual_s + CALL_TIMEOUT_S, (took_s, self._usual_s)
        return ids

    async def _takes_s(self, request_id: str) -> float:
        """To be placed and started on the node that is well."""
        before = time.monotonic()
        await self.place(request_id, candidates=[OTHER])
        await self.state_is(request_id, "started")
        return time.monotonic() - before

    # --- looking ---

    async def record(self, request_id: str) -> Json:
        return await value(self.client, "rt_ledger", f"request.{request_id}") or {"state": "unknown", "steps": []}

    async def records(self, ids: list[str]) -> list[Json]:
        return list(await asyncio.gather(*(self.record(each) for each in ids)))

    async def state_is(self, request_id: str, *allowed: str) -> Json:
        async def seen() -> Json | None:
            found = await self.record(request_id)
            return found if found["state"] in allowed else None

        found: Json = await until(seen, f"{request_id} is {allowed}", LIMIT_S)
        return found

    async def some_run(self, least: int) -> None:
        async def seen() -> bool:
            there = await asyncio.to_thread(self.docks.engine.containers)
            return len([each for each in there if each["State"] == "running"]) >= least

        await until(seen, f"{least} containers run", LIMIT_S)

    async def some_wait(self, ids: list[str]) -> None:
        """Somebody was told of the outage."""

        async def seen() -> bool:
            return "waiting" in {self._state(each) for each in ids}

        await until(seen, "one of them waits", LIMIT_S)

    async def settled(self, ids: list[str], *allowed: str) -> list[Json]:
        """The requests' records, once ledger and engines say the same, and nothing is left that should not be."""
        deadline = time.monotonic() + LIMIT_S
        while any((wrong := await self._differences(ids, allowed)).values()):
            if time.monotonic() > deadline:
                pytest.fail(json.dumps({what: seen for what, seen in wrong.items() if seen}, indent=1))
            await asyncio.sleep(0.2)
        found = await self.records(ids)
        for each in found:
            _assert_told(each)
        return found

    async def cleared(self, ids: list[str]) -> None:
        """Release ends all of it, and nothing of it is left."""
        await asyncio.gather(*(ask(self.client, "rt.release", {"request_id": each}) for each in ids))
        await self.settled(ids, "released", "exited", "failed")
        there = [_start(each)[0] for each in await self._containers()]
        assert [] == [each for each in there if each in ids]
        self.docks.at_rest = True

    async def _differences(self, ids: list[str], allowed: tuple[str, ...]) -> dict[str, Any]:
        there = await self._containers()
        running = [each for each in there if each["State"] == "running"]
        runs, run, times = sorted(map(_start, running)), self._should_run(), self.docks.runs_of_each()
        held = self._held()
        names = {str(each["Labels"]["laxity.container"]) for each in running}
        return {
            "not in a right state": [self._steps(each) for each in ids if self._state(each) not in allowed],
            "running, against the ledger": (runs, run) if runs != run else None,
            "held, against what runs": (held, run) if held != run else None,
            "run, not once": {name: times[name] for name in names | times.keys() if times[name] != 1},
            "left over": [each["State"] for each in there if each["State"] != "running"],
            "sockets more than at rest": self._sockets() if any(self._sockets()) else None,
            "faults of the ledger": self._ledger.faults,
            "faults of the events": self._events.finish(),
        }

    # --- the ledger, as it was heard ---

    def _should_run(self) -> list[Start]:
        return sorted(
            (record.request_id, each.replica, each.generation)
            for record in self._ledger.records.values()
            for each in record.replicas
            if each.state == "started"
        )

    def _held(self) -> list[Start]:
        nodes = self._ledger.nodes.values()
        return sorted((each.request_id, each.replica, each.generation) for node in nodes for each in node.reservations)

    def _state(self, request_id: str) -> str:
        record = self._ledger.records.get(f"request.{request_id}")
        return "unknown" if record is None else record.state

    def _steps(self, request_id: str) -> str:
        record = self._ledger.records.get(f"request.{request_id}")
        return f"{request_id}: {[(step.state, step.detail) for step in record.steps] if record else None}"

    # --- the processes and the engines ---

    def _sockets(self) -> list[int]:
        """Of each placer, how many more than at rest."""
        processes = [psutil.Process(each.pid) for each in self.docks.placers if each.running]
        return [len(each.net_connections("unix")) - IDLE_SOCKETS for each in processes]

    async def _containers(self) -> list[Json]:
        """All, in any state, on both engines."""
        engines = self.docks.engines.values()
        both = await asyncio.gather(*(asyncio.to_thread(engine.containers) for engine in engines))
        return [each for there in both for each in there]


def _start(container: Json) -> Start:
    """What a container says of itself; node and generation are in it, so none is there twice."""
    held = json.loads(container["Labels"]["laxity.labels"])["reservation"]
    return held["request_id"], held["replica"], held["generation"]


def _assert_told(found: Json) -> None:
    """Each step back or end that nobody asked for says why."""
    back = [step for step in found["steps"] if step["state"] in {"waiting", "failed", "exited"}]
    assert [] == [step for step in back if not step["detail"]], found

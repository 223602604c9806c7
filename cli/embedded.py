"""A supervisor for the processes of a cluster on this machine: keeps each alive, tells their pids, leaves no orphan."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from cli.client import Client, connected
from cli.output import CommandError, Exit
from cli.programs import Cluster, Program, programs, server
from services.placer.backends.process import ProcessBackend
from shared.errors import BackendError, BusError, FieldError
from shared.messages import NodeFacts, NodeState
from shared.service.shutdown import HARD_KILL_US
from shared.subjects import NODES, node_key
from shared.testing.nats_server import executable

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MOST_S: Final = 5.0
LIVED_S: Final = 10.0
"""A process that lived so long is started again at once; one that dies sooner waits longer each time."""
SERVER_START_S: Final = 15.0
POLL_S: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

Say = Callable[[str], None]


def dies_with(parent: int, with_signal: signal.Signals = signal.SIGKILL, cores: frozenset[int] | None = None) -> None:
    """In a new process, before its program: let the kernel end it when ``parent`` dies, however that dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, with_signal, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)
    if cores is not None:
        os.sched_setaffinity(0, cores)


async def ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process, waited for without a thread: starting others must find one thread alone."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


class Kept:
    """One program that is started again whenever it ends."""

    def __init__(self, program: Program, cluster: Cluster, changed: Callable[[], None], say: Say) -> None:
        self.program = program
        self._cluster = cluster
        self._changed = changed
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Of the process, while it lives."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def keep(self) -> None:
        wait_s = BACKOFF_FIRST_S
        while True:
            began_s = time.monotonic()
            process = self._process if self._process and self.pid else self.start()
            code = await ended(process)
            if self._stopping:
                return
            wait_s = BACKOFF_FIRST_S if time.monotonic() - began_s > LIVED_S else min(BACKOFF_MOST_S, 2 * wait_s)
            self._say(f"{self.program.label} (pid {process.pid}) ended with {code}: started again")
            self._changed()
            await asyncio.sleep(wait_s)

    def start(self) -> subprocess.Popen[bytes]:
        parent, cores = os.getpid(), self.program.cores
        with (self._cluster.logs / f"{self.program.label}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.program.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.program.env},
                cwd=self._cluster.work_dir,
                start_new_session=True,
                preexec_fn=lambda: dies_with(parent, cores=cores),  # noqa: PLW1509  # this process has one thread
            )
        return self._process

    async def stop(self) -> None:
        """TERM, and KILL for its whole group once the time of an orderly end is over."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(HARD_KILL_US / 1_000_000):
                    await ended(process)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Embedded:
    """A cluster from start to end."""

    def __init__(self, cluster: Cluster, ready_files: list[Path], say: Say, *, keep_containers: bool) -> None:
        self.cluster = cluster
        self.url = ""
        self._ready_files = ready_files
        self._say = say
        self._keep_containers = keep_containers
        self._changed = asyncio.Event()
        self._server: Kept | None = None
        self._services: list[Kept] = []
        self._told: dict[Kept, int] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop``; whatever ends it, nothing of the cluster is left but, with ``keep``, the containers."""
        for folder in (self.cluster.state_dir, self.cluster.logs, self.cluster.rings, self.cluster.containers):
            folder.mkdir(parents=True, exist_ok=True)
        tasks: list[asyncio.Task[None]] = []
        with _alone(self.cluster.state_dir):
            try:
                await self._start(tasks)
                tasks.append(asyncio.create_task(self._tell(), name="ready file"))
                await _first(stop, tasks)
            finally:
                for path in self._ready_files:
                    path.unlink(missing_ok=True)
                await self._end(tasks)

    async def _start(self, tasks: list[asyncio.Task[None]]) -> None:
        await self._start_server(tasks)
        for program in programs(self.cluster):
            with_url = replace(program, env={**program.env, "LAXITY_NATS_URL": self.url})
            kept = Kept(with_url, self.cluster, self._changed.set, self._say)
            self._services.append(kept)
            tasks.append(asyncio.create_task(kept.keep(), name=program.label))

    async def _start_server(self, tasks: list[asyncio.Task[None]]) -> None:
        """The first time on a free port, later always on that one: clients come back to it."""
        ports = self.cluster.state_dir / "ports"
        ports.mkdir(exist_ok=True)
        for old in ports.glob("*.ports"):
            old.unlink()
        kept = Kept(server(executable(), self.cluster, ports, -1), self.cluster, self._changed.set, self._say)
        self._server = kept
        port = await self._first_port(ports, kept.start())
        self.url = f"nats://127.0.0.1:{port}"
        kept.program = server(executable(), self.cluster, ports, port)
        tasks.append(asyncio.create_task(kept.keep(), name="nats-server"))

    async def _first_port(self, ports: Path, process: subprocess.Popen[bytes]) -> int:
        logs = self.cluster.logs
        try:
            async with asyncio.timeout(SERVER_START_S):
                while (port := _port_of(ports, process.pid)) is None:
                    if process.poll() is not None:
                        raise CommandError(f"nats-server does not start: see {logs}", Exit.NO_ANSWER)
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise CommandError(f"nats-server is not ready: see {logs}", Exit.NO_ANSWER) from None
        return port

    # --- telling the world ---

    async def _tell(self) -> None:
        """Write the ready files once everything is ready, and again whenever a process that took another's place is."""
        async with connected(self.url, self.cluster.prefix) as client:
            while True:
                self._changed.clear()
                ready = await self._ready(client)
                whole = len(ready) == len(self._everything())
                if self._told or (whole and await self._nodes_ready(client)):
                    self._write(ready)
                await (self._changed.wait() if whole and self._told else asyncio.sleep(POLL_S))

    async def _ready(self, client: Client) -> dict[Kept, int]:
        """Those that live and say that they are ready, and their pids."""
        try:
            answers = await client.services()
        except BusError:
            answers = []
        ready = {a["metadata"].get("pid") for a in answers if a["metadata"].get("state") == "ready"}
        alive = {kept: pid for kept in self._everything() if (pid := kept.pid) is not None}
        return {kept: pid for kept, pid in alive.items() if kept is self._server or str(pid) in ready}

    async def _nodes_ready(self, client: Client) -> bool:
        facts = [await client.read_key(NODES, node_key(name), NodeFacts) for name in self.cluster.node_names]
        return all(found is not None and found.state == NodeState.READY for found in facts)

    def _everything(self) -> list[Kept]:
        return [*([self._server] if self._server else []), *self._services]

    def _write(self, ready: dict[Kept, int]) -> None:
        """A process that is not back yet keeps the pid of the one before it: nothing lives under it."""
        before = dict(self._told)
        self._told |= ready
        if before == self._told:
            return
        services: dict[str, list[int]] = {}
        for kept in self._everything():
            services.setdefault(kept.program.service, []).append(self._told[kept])
        body = json.dumps({"nats_url": self.url, "services": services})
        for path in self._ready_files:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            beside.write_text(body, encoding="utf-8")
            beside.replace(path)
        self._say(f"ready: {self.url}")

    # --- the end ---

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Services first, while they can still say their last words; then containers; the server last."""
        await asyncio.gather(*(kept.stop() for kept in self._services))
        if not self._keep_containers:
            await self._end_containers()
        if self._server is not None:
            await self._server.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_containers(self) -> None:
        backend = ProcessBackend(self.cluster.containers, self.cluster.rings)
        for node in self.cluster.node_names:
            try:
                found = await backend.list(node)
                await asyncio.gather(*(backend.stop(node, seen.container) for seen in found if seen.state == "running"))
            except (BackendError, FieldError) as error:
                self._say(f"containers of {node} may still run: {error}")


async def _first(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Wait for ``stop``, or for a task to fail: none of them ends by itself."""
    stopped = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopped}:
            task.result()
    finally:
        stopped.cancel()


def _port_of(ports: Path, pid: int) -> int | None:
    with suppress(OSError, ValueError, LookupError):
        return int(json.loads((ports / f"nats-server_{pid}.ports").read_text())["nats"][0].rsplit(":", 1)[1])
    return None


@contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
    """Two clusters in one folder would write over each other."""
    with (state_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"another laxity up runs in {state_dir}", Exit.USAGE) from None
        yield


def say_on_stderr(text: str) -> None:
    print(f"laxity up: {text}", file=sys.stderr, flush=True)

"""Real nats-servers for tests: free ports, JetStream in a folder of their own, stopped and restarted at will."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

START_TIMEOUT_S = 15.0


def executable() -> str:
    """Where the nats-server of the environment lies; raises FileNotFoundError."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server: not beside the interpreter and not on PATH")
    return found


class NatsServer:
    """One server process; ``folder`` keeps its store, its log and its ports file over restarts."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        self._arguments = arguments
        self._port = -1
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return (self._folder / "server.log").read_text(errors="replace")

    def start(self) -> Self:
        """Start, or start again on the same port with the same store; returns when it takes connections."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"nats-server did not start: {self.log[-2000:]}")
            time.sleep(0.01)
        return self

    def _command(self) -> list[str]:
        store, port = str(self._folder / "store"), str(self._port)
        return [
            *(executable(), "-a", "127.0.0.1", "-p", port, "-js", "-sd", store),
            *("--ports_file_dir", str(self._folder), *self._arguments),
        ]

    def _answers(self) -> bool:
        ports = self._folder / f"nats-server_{self.pid}.ports"
        try:
            self._port = int(json.loads(ports.read_text())["nats"][0].rsplit(":", 1)[1])
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as connection:
                return connection.recv(4) == b"INFO"
        except (OSError, ValueError, LookupError):
            return False

    def terminate(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nobody is told."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)
        while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self, kill: bool = False) -> None:
        (self.kill if kill else self.terminate)()
        self.start()

    def keep(self) -> None:
        """Stop, put a copy of the store aside, and start again."""
        self.terminate()
        shutil.copytree(self._folder / "store", self._folder / "kept")
        self.start()

    def rewind(self) -> None:
        """SIGKILL, and start again with the store as it was kept: as after a power loss, or from a backup."""
        self.kill()
        shutil.rmtree(self._folder / "store")
        shutil.copytree(self._folder / "kept", self._folder / "store")
        self.start()

    def stop(self) -> None:
        """End it whatever its state; harmless when it is not running."""
        if self.running:
            self._signal(signal.SIGCONT)
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server was not started"
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        self._signal(number)
        assert self._process is not None
        self._process.wait(timeout=START_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class NatsCluster:
    """Three servers on this machine that know each other by routes; ``servers`` are stopped and started one by one."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        ports = _free_ports(size)
        routes = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
        self.servers = [
            NatsServer(
                folder / f"nats-{number}",
                *("-n", f"nats-{number}", "--cluster_name", "test", "--routes", routes),
                *("--cluster", f"nats://127.0.0.1:{port}"),
            )
            for number, port in enumerate(ports)
        ]

    @property
    def url(self) -> str:
        """As services take it: all of them."""
        return ",".join(server.url for server in self.servers)

    def named(self, name: str) -> NatsServer:
        """The server that calls itself so, as the leader of a stream is named."""
        return self.servers[int(name.removeprefix("nats-"))]

    def __enter__(self) -> Self:
        for server in self.servers:
            server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.stop()


def _free_ports(count: int) -> list[int]:
    """Servers of a cluster must know each other's ports before they start, so these are looked for."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]

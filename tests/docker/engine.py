"""A Docker engine of a test's own, with folders, socket and image of its own, so that killing it harms nobody."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import pytest

IMAGE = "laxity-faults:local"
"""A busybox and nothing else: made in a fifth of a second, without a registry."""
START_TIMEOUT_S = 90.0
"""Of one that was killed: it ends the containers that it finds, one after the other, before it answers."""
APPLETS = ("sh", "sleep", "dd", "true", "false", "echo")
SIZE_MIB = 96
"""Of its disk, which is in memory: quick, and small enough to be filled. A container takes 60 KiB of it."""


class _Connection(http.client.HTTPConnection):
    """To a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class OwnEngine:
    """One dockerd, in a network namespace of its own: with --bridge=none it removes docker0, which is another's."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """``arguments``: more of them for dockerd, such as a second address, which only its own namespace has."""
        if os.geteuid() != 0 or shutil.which("dockerd") is None or shutil.which("busybox") is None:
            pytest.skip(
                "an engine of the test's own needs root, dockerd and a static busybox; make test-docker has them"
            )
        self._folder = folder
        self._arguments = arguments
        # Sockets lie below it, and a socket's path may have 107 bytes only.
        self._run = Path(tempfile.mkdtemp(prefix="laxity-faults-", dir="/run"))
        self._process: subprocess.Popen[bytes] | None = None
        self._containerd: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def socket(self) -> Path:
        return self._run / "docker.sock"

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def log(self) -> str:
        return (self._folder / "dockerd.log").read_text(errors="replace")

    def start(self) -> Self:
        """Start, or start again on the same data; returns when it answers."""
        self._begin()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dockerd did not start: {self.log[-2000:]}")
            time.sleep(0.05)
        return self

    def _begin(self) -> None:
        (self._run / "docker.pid").unlink(missing_ok=True)  # of one that was killed
        if self._containerd is None:
            (self._folder / "containerd.toml").write_text(
                'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
            )
            self._containerd = self._spawn(
                *("containerd", "--config", str(self._folder / "containerd.toml"), "--address", self._address),
                *("--root", str(self._folder / "containerd"), "--state", str(self._run / "state"), "-l", "warn"),
            )
        self._process = self._spawn(
            *("dockerd", "--storage-driver=overlay2", "--data-root", str(self._data)),
            *("--exec-root", str(self._run / "exec"), "--pidfile", str(self._run / "docker.pid"), "-H", self.url),
            *("--shutdown-timeout=5", "--bridge=none", "--iptables=false", "--ip-masq=false", "--ip-forward=false"),
            *("--containerd", self._address),
            *self._arguments,
        )

    @property
    def _address(self) -> str:
        return str(self._run / "containerd.sock")

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{command[0]}.log").open("ab") as log:
            loopback = 'busybox ip link set lo up; exec "$@"'
            alone = ("unshare", "--net", "sh", "-c", loopback, "-", *command)
            return subprocess.Popen(alone, stdout=log, stderr=log, start_new_session=True)

    def _answers(self) -> bool:
        try:  # one that was killed ends the containers that it finds before it answers
            self.ask("/_ping", timeout_s=5)
        except OSError:
            return False
        return True

    def make_image(self) -> None:
        """IMAGE, from this machine's busybox."""
        root = self._folder / "image"
        for name in ("bin", "tmp", "proc", "sys", "dev"):
            (root / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(shutil.which("busybox") or "", root / "bin" / "busybox")
        for applet in APPLETS:
            (root / "bin" / applet).symlink_to("busybox")
        packed = self._folder / "image.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(packed), "."], check=True)
        self.docker("import", str(packed), IMAGE)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the engine was not started"
        return self._process.pid

    # --- what an outsider sees ---

    def docker(self, *arguments: str) -> str:
        """Output of Docker's own client."""
        done = subprocess.run(self._client(*arguments), capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    def ask(self, path: str, timeout_s: float = 60) -> bytes:
        """Answer to a GET; much cheaper than Docker's client, for what is asked again and again."""
        connection = _Connection(self.socket, timeout_s)
        with closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read()

    def containers(self) -> list[dict[str, Any]]:
        """All there are, in any state, as the engine lists them: it may be a second late."""
        found: list[dict[str, Any]] = json.loads(self.ask("/containers/json?all=1"))
        return found

    def _client(self, *arguments: str) -> list[str]:
        return ["docker", "--host", self.url, *arguments]

    # --- what is done to it ---

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the engine was not started"
        self._process.send_signal(number)

    def terminate(self) -> None:
        """As a system that shuts down: it ends its containers first."""
        self.signal(signal.SIGTERM)
        self._wait()

    def kill(self) -> None:
        """As a crash: its containers run on until it is started again."""
        self.signal(signal.SIGKILL)
        self._wait()

    def fill(self) -> None:
        """Its disk: no byte is left."""
        with suppress(OSError), (self._data / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))

    def make_room(self) -> None:
        (self._data / "filler").unlink(missing_ok=True)

    def _wait(self) -> None:
        assert self._process is not None
        self._process.wait(START_TIMEOUT_S)

    def __enter__(self) -> Self:
        try:
            self._data.mkdir(parents=True)
            disk = ("mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(self._data))
            subprocess.run(disk, check=True)
            self.start().make_image()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing of it is left, whatever was done to it."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.kill()
        if self._containerd is not None:
            self._containerd.kill()
            self._containerd.wait()
        self._end_containers()
        for mounted in self._mounts():
            subprocess.run(["umount", "-l", mounted], check=False)
        shutil.rmtree(self._run, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_containers(self) -> None:
        """Each has a process beside it that outlives the engine and goes with it."""
        for each in psutil.process_iter(["name", "cmdline"]):
            if each.info["name"].startswith("containerd-shim") and f"{self._run}/" in " ".join(
                each.info["cmdline"] or ()
            ):
                for process in [*each.children(recursive=True), each]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()

    def _mounts(self) -> list[str]:
        """Deepest first."""
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        below = (f"{self._folder}/", f"{self._run}/")
        return sorted((path for path in mounted if path.startswith(below)), reverse=True)

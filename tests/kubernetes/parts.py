"""The programs of a Kubernetes of the tests' own: where they are, how one is started, killed and started again."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 90.0
"""An API server takes up to a minute to end after TERM."""
ADVICE = "make test-kubernetes builds or finds them"


@functools.cache
def missing() -> str | None:
    """Why there is no Kubernetes here; None where there is one."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        return f"no Kubernetes: KUBEBUILDER_ASSETS is not set; {ADVICE}"
    lacking = [name for name in CONTROL_PLANE if not os.access(Path(folder, name), os.X_OK)]
    if lacking:
        return f"no Kubernetes: {', '.join(lacking)} not in KUBEBUILDER_ASSETS={folder}; {ADVICE}"
    if shutil.which("openssl") is None:
        return "no Kubernetes: certificates and keys are made with openssl"
    return None


def missing_node() -> str | None:
    """Why no real kubelet can run here; None where it can."""
    if os.geteuid() != 0:
        return "no kubelet: only root can run one"
    lacking = [name for name in ("containerd", "ctr", "runc", "iptables", "busybox") if shutil.which(name) is None]
    if not os.access(program("kubelet"), os.X_OK):
        lacking.append("kubelet")
    if not Path("/usr/lib/cni/bridge").exists():
        lacking.append("containernetworking-plugins")
    return f"no kubelet: {', '.join(lacking)} not installed; {ADVICE}" if lacking else None


def program(name: str) -> str:
    return str(Path(os.environ["KUBEBUILDER_ASSETS"], name))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Part:
    """One process. Its command stays the same over restarts, and its log goes on."""

    def __init__(self, name: str, command: list[str], folder: Path, ready: Callable[[], bool]) -> None:
        self.name = name
        self._command, self._log, self._ready = command, folder / f"{name}.log", ready
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def begin(self) -> None:
        """Start it, or start it again."""
        assert not self.running, f"{self.name} runs"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            if not self.running or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start: {self.log[-3000:]}")
            time.sleep(0.05)

    def start(self) -> None:
        self.begin()
        self.wait_ready()

    def signal(self, number: signal.Signals) -> None:
        """To it, and to whatever it is stopped by before it is killed."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As a crash; returns when it is gone, and its ports are free."""
        if self.running:
            self.signal(signal.SIGKILL)
            self._wait()

    def stop(self) -> None:
        """As it is asked to."""
        if self.running:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            self._wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def _wait(self) -> None:
        assert self._process is not None
        self._process.wait(END_TIMEOUT_S)


def kill_all(mark: str) -> None:
    """All processes whose command line has this text in it, and what they started."""
    for each in psutil.process_iter(["cmdline"]):
        if mark in " ".join(each.info["cmdline"] or ()) and each.pid != os.getpid():
            try:
                for process in [*each.children(recursive=True), each]:
                    process.kill()
            except psutil.NoSuchProcess:
                continue

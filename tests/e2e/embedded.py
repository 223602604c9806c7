"""``laxity up`` as outside tools use it: started as a process, held on to by its ready file."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cli.main import main

READY_S = 40.0
Json = dict[str, Any]


def wait_for(seen: Callable[[], Any], what: str, limit_s: float = 20.0) -> Any:
    """The first true answer; AssertionError with the last one when the time is over."""
    deadline, last = time.monotonic() + limit_s, None
    while time.monotonic() < deadline:
        if last := seen():
            return last
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {limit_s} s, last seen {last!r}")


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Embedded:
    """A cluster; ``arguments`` go to ``laxity up``. ``folder`` keeps its state over several starts."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.ready_file = folder / "cluster.json"
        self.state_dir = folder / "state"
        self._arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["up", "--state-dir", str(self.state_dir), "--ready-file", str(self.ready_file), *self._arguments]
        with (self.folder / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", *command, "--heartbeat-us", "300000"],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(lambda: self.ready_file.exists() or self._over(), "the ready file", READY_S)
        assert self.ready_file.exists(), self.log
        return self

    def _over(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    @property
    def log(self) -> str:
        return (self.folder / "up.log").read_text(errors="replace")

    @property
    def ready(self) -> Json:
        found: Json = json.loads(self.ready_file.read_bytes())
        return found

    @property
    def url(self) -> str:
        return str(self.ready["nats_url"])

    def pids(self, service: str) -> list[int]:
        return list(self.ready["services"][service])

    def all_pids(self) -> list[int]:
        return [pid for pids in self.ready["services"].values() for pid in pids]

    def kill(self, service: str, index: int = 0) -> int:
        """Kill one process by force; returns the pid of the one that took its place, once that is ready."""
        before = self.pids(service)
        os.kill(before[index], signal.SIGKILL)
        wait_for(lambda: before[index] not in self.pids(service), f"{service} is started again", READY_S)
        return self.pids(service)[index]

    def laxity(self, *arguments: str, code: int = 0) -> Json:
        """One command for machines, as ``call`` runs it; its one object, after looking at its exit code."""
        done = call("-o", "json", *arguments, url=self.url)
        assert code == done.returncode, (done.stdout, done.stderr)
        found: Json = json.loads(done.stdout)
        return found

    def stop(self, limit_s: float = 30.0) -> int:
        """TERM; its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=limit_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def run(*arguments: str, url: str = "", timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """One ``laxity`` command as a process. ``-o json`` may stand before its name here."""
    command = [sys.executable, "-m", "cli.main", *_in_order(arguments, url)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def call(*arguments: str, url: str = "") -> subprocess.CompletedProcess[str]:
    """The same within this process, which saves the start of an interpreter each time."""
    command, out, err, handlers = _in_order(arguments, url), io.StringIO(), io.StringIO(), logging.root.handlers[:]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(command)
    finally:
        logging.root.handlers[:] = handlers
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def _in_order(arguments: tuple[str, ...], url: str) -> list[str]:
    options = [*arguments[:2]] if arguments[:1] == ("-o",) else []
    name, *rest = arguments[len(options) :]
    return [name, *options, *(["--nats-url", url] if url else []), *rest]

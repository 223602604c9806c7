"""A service of ours as a real process, for integration tests: started, killed and stopped as a supervisor would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
"""What supervisors give before they kill (Docker's default)."""


class ServiceProcess:
    """``python -m <module>`` with its log in ``folder``; settings are environment variables."""

    def __init__(self, module: str, folder: Path, nats_url: str, **env: str) -> None:
        self._module, self._folder = module, folder
        self._ready = folder / f"{module}.ready"
        fixed = {"LAXITY_NATS_URL": nats_url, "LAXITY_READY_FILE": str(self._ready), "LAXITY_CHECK": "true"}
        self._env = os.environ | fixed | env
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the service was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ready(self) -> bool:
        """It runs, and has said that it is ready."""
        return self.running and self._ready.exists()

    @property
    def log(self) -> str:
        return (self._folder / f"{self._module}.log").read_text(errors="replace")

    def start(self) -> Self:
        """Returns once the service says that it is ready; one that does not is not left behind."""
        self.begin()
        try:
            return self.until_ready()
        except RuntimeError:
            self.kill()
            raise

    def begin(self) -> None:
        """Started, and not waited for: several can get ready at the same time."""
        self._ready.unlink(missing_ok=True)
        with (self._folder / f"{self._module}.log").open("ab") as log:
            command = [sys.executable, "-m", self._module]
            self._process = subprocess.Popen(command, env=self._env, stdout=log, stderr=log, start_new_session=True)

    def until_ready(self) -> Self:
        """Raises RuntimeError with the log's end when it dies or takes too long."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()  # whoever waited in vain has no end to call
                raise RuntimeError(f"{self._module} did not get ready: {self.log[-3000:]}")
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        """As a crash: no last words."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> int:
        """Asks it to stop, and returns its exit code; a service that does not stop in time is a failed test."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

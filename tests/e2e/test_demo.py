"""The demo as `make demo` runs it: it ends by itself, and all that should have happened was seen on the bus."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.embedded import wait_for

pytestmark = [pytest.mark.demo, pytest.mark.slow, pytest.mark.timeout(240)]


class Demo:
    """One run of the demo, with what it leaves behind."""

    def __init__(self, folder: Path) -> None:
        self.ready_file, self._report = folder / "cluster.json", folder / "demo.json"
        files = ["--state-dir", folder / "state", "--report", self._report, "--ready-file", self.ready_file]
        command = [sys.executable, "-m", "cli.main", "demo", *map(str, files)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def kill(self, service: str) -> None:
        """Kill one process of a service by force, and wait until it is back."""
        pid = json.loads(self.ready_file.read_bytes())["services"][service][0]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: pid not in json.loads(self.ready_file.read_bytes())["services"][service], f"{service} is back")

    def finish(self) -> dict[str, Any]:
        """Its report, after looking at its checks and its exit code."""
        printed, _ = self.process.communicate(timeout=200)
        found: dict[str, Any] = json.loads(self._report.read_text())
        assert [] == [check for check in found["checks"] if not check["holds"]], printed
        assert 0 == self.process.returncode
        return found


@pytest.fixture
def demo(tmp_path: Path) -> Any:
    running = Demo(tmp_path)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.communicate()


def test_everything_that_should_happen_is_seen_by_an_independent_subscriber(demo: Demo) -> None:
    assert demo.finish()["seconds"] < 90


def test_all_of_it_holds_too_when_each_process_is_killed_in_turn(demo: Demo) -> None:
    wait_for(demo.ready_file.exists, "the cluster is ready", 60)
    for service in ("monitor", "deadline-tracker", "node-list", "placer", "nats-server"):
        demo.kill(service)
    demo.finish()

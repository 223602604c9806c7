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

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.ready_file, self._report = folder / "cluster.json", folder / "demo.json"
        files = ["--state-dir", folder / "state", "--report", self._report, "--ready-file", self.ready_file]
        command = [sys.executable, "-m", "cli.main", "demo", *map(str, files), *arguments]
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

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def test_everything_that_should_happen_is_seen_by_an_independent_subscriber(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    try:
        demo.finish()
    finally:
        demo.end()


def test_all_of_it_holds_too_when_each_process_is_killed_in_turn(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    demo = Demo(tmp_path, "--go-on-file", str(go_on))
    try:
        wait_for(demo.ready_file.exists, "the cluster is ready", 60)
        for service in ("monitor", "deadline-tracker", "node-list", "placer", "nats-server"):
            demo.kill(service)
        go_on.touch()
        demo.finish()
    finally:
        demo.end()

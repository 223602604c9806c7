"""The demo as `make demo` runs it: it ends by itself, and all that should have happened was seen on the bus."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_everything_that_should_happen_is_seen_by_an_independent_subscriber(tmp_path: Path) -> None:
    report = tmp_path / "demo.json"
    command = [
        sys.executable,
        "-m",
        "cli.main",
        "demo",
        "--state-dir",
        str(tmp_path / "state"),
        "--report",
        str(report),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    found = json.loads(report.read_text())
    assert [] == [check for check in found["checks"] if not check["holds"]], done.stdout
    assert 0 == done.returncode
    assert found["seconds"] < 90

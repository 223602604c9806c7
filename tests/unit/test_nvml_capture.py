"""A machine whose driver's answers were written down is the same machine where they are played."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_nvml import machine
from tests.fake_nvml.build import PROFILES
from tests.gpu_node import FOREIGN, OURS, Node, told

PROGRAM = Path(machine.__file__)
MACHINES = ("h100", "h200-mig", "geforce", "gb10", "jetson", "lost", "gone", "garbage", "old", "mismatch")


def captured(folder: Path) -> Path:
    """What the program writes of the driver that is played now, on its own: nothing of ours is on its path."""
    profile = folder / "captured"
    with profile.open("wb") as out:
        command = [sys.executable, "-I", PROGRAM, "capture"]
        subprocess.run(command, stdout=out, check=True, timeout=30, cwd=folder)
    return profile


def published(node: Node) -> str:
    node.process.restart()
    node.read()
    return (
        told(node.seen[-1])
        .model_copy(update={"counters": {}})
        .model_dump_json(exclude={"devices": {"__all__": {"age_us"}}})
    )


@pytest.mark.parametrize("profile", MACHINES)
def test_what_was_captured_plays_as_the_machine_that_it_is_of(node: Node, tmp_path: Path, profile: str) -> None:
    node.driver.plays(profile, (0, FOREIGN, 300), (0, OURS, -1))
    before = published(node)
    written = captured(tmp_path)
    node.driver.replays(written)
    node.probe = Node(node.driver, node.process).probe  # one that remembers nothing
    assert before == published(node)
    assert written.read_text(errors="surrogateescape") == captured(tmp_path).read_text(errors="surrogateescape")


def test_a_machine_without_a_driver_says_so(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    run = subprocess.run(
        [sys.executable, PROGRAM, "capture"], env=environment, capture_output=True, text=True, check=False
    )
    assert (1, "") == (run.returncode, run.stdout)
    assert run.stderr.startswith("no driver here: libnvidia-ml.so.1")


def test_a_command_finds_the_driver_that_is_replayed(tmp_path: Path) -> None:
    ask = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))"
    command = [
        sys.executable,
        "-m",
        "tests.fake_nvml.machine",
        "replay",
        PROFILES / "l40s",
        "--",
        sys.executable,
        "-c",
        ask,
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=PROGRAM.parents[2])
    assert "NVIDIA L40S" == run.stdout.splitlines()[-1]

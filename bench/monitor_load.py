"""A full node for the monitor: containers with a ring each, task events at a rate, and what a process uses by them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

import laxity
from laxity.ring import Ring

CONTAINERS: Final = 100
DEVICES: Final = 8
EVENTS_PER_S: Final = 5_000
NODE: Final = "n1"


def settings(root: Path) -> dict[str, str]:
    """Of a monitor of made-up devices whose containers have their rings under ``root``."""
    return {
        "LAXITY_CHECK": "false",
        "LAXITY_MONITOR_NODE": NODE,
        "LAXITY_MONITOR_RING_ROOT": str(root),
        "LAXITY_MONITOR_PROBE": "fake",
        "LAXITY_MONITOR_FAKE_DEVICES": json.dumps([{"count": DEVICES}]),
    }


def open_rings(root: Path) -> list[Ring]:
    """One for each container, all of this process."""
    rings = []
    for number in range(CONTAINERS):
        folder = root / f"c{number:03d}"
        folder.mkdir(parents=True)
        rings.append(Ring(str(folder)))
    return rings


def play(rings: Sequence[Ring], seconds: float, events_per_s: int, step_s: float) -> int:
    """Tasks in all rings, evenly; returns how many events there were."""
    began_s, tasks = time.monotonic(), 0
    while (passed_s := time.monotonic() - began_s) < seconds:
        while 2 * tasks < events_per_s * passed_s:
            task = laxity.task("infer", deadline_us=50_000)
            task.ring = rings[tasks % len(rings)]
            with task:
                tasks += 1
        time.sleep(step_s)
    return 2 * tasks


class Cost:
    """Of a process, since this was made."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._began_s, self._began_cpu_s = time.monotonic(), self._cpu_s()

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    @property
    def percent(self) -> float:
        """Of a core, user and system."""
        return 100 * (self._cpu_s() - self._began_cpu_s) / (time.monotonic() - self._began_s)

    @property
    def memory_mib(self) -> float:
        return float(self._process.memory_info().rss) / (1 << 20)


__all__ = ["CONTAINERS", "DEVICES", "EVENTS_PER_S", "NODE", "Cost", "open_rings", "play", "settings"]

"""What thousands of rings cost the monitor of one node: `make bench-rings`.

Rings in folders of ten, as of containers with ten processes each: to find them all, to scan when nothing changed, to
look whether one has news, to read ten records of each. Then a real monitor beside them, idle and with tasks.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

import laxity
from bench.monitor_load import Cost, play, settings
from bench.report import tell
from laxity.ring import Ring
from services.monitor.rings import RingDirectory, waiting
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess

NUMBERS: Final = (100, 1_000, 3_000)
PER_FOLDER: Final = 10
TASKS: Final = 5
EVENTS_PER_S: Final = 1_000
STEP_S: Final = 0.02
REPEATS: Final = 5


def open_rings(root: Path, number: int) -> list[Ring]:
    folders = [root / f"c{index:04d}" for index in range(number // PER_FOLDER)]
    for folder in folders:
        folder.mkdir(parents=True)
    return [Ring(str(folder)) for folder in folders for _ in range(PER_FOLDER)]


def mark(rings: list[Ring]) -> None:
    """A few tasks in each."""
    for ring in rings:
        for _ in range(TASKS):
            task = laxity.task("infer", deadline_us=50_000)
            task.ring = ring
            with task:
                pass


def cpu_ms(work: Callable[[], object]) -> float:
    began_ns = time.process_time_ns()
    work()
    return (time.process_time_ns() - began_ns) / 1e6


def reader(rings: list[Ring], root: Path) -> dict[str, float]:
    """Processor time of each step, in milliseconds, the least of several; the first scan happens once."""
    mark(rings)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    directory = RingDirectory(root)
    found = {"find_ms": cpu_ms(directory.scan)}
    readers = directory.readers
    assert len(rings) == len(readers)
    read = [cpu_ms(lambda: [each.read() for each in readers])]
    for _ in range(REPEATS):
        mark(rings)
        read.append(cpu_ms(lambda: [each.read() for each in readers]))
    time.sleep(0.3)  # so that no folder has changed just now
    directory.scan()
    found |= {
        "read_ten_records_of_each_ms": min(read),
        "memory_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024,
        "scan_without_change_ms": min(cpu_ms(directory.scan) for _ in range(REPEATS)),
        "look_at_each_ms": min(cpu_ms(lambda: waiting(readers)) for _ in range(REPEATS)),
    }
    directory.close()
    return found


def monitor(rings: list[Ring], root: Path, seconds: float) -> dict[str, float]:
    """Of a real one, in percent of a core, while nothing happens and with tasks in all rings in turn; its memory."""
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name, "nats")) as server:
        env = settings(root) | {"LAXITY_STORAGE": "memory"}
        with ServiceProcess("services.monitor", Path(name), server.url, **env) as process:
            play(rings, 5.0, EVENTS_PER_S, STEP_S)
            idle = Cost(psutil.Process(process.pid))
            time.sleep(seconds)
            found = {"monitor_idle_percent": idle.percent}
            busy = Cost(psutil.Process(process.pid))
            play(rings, seconds, EVENTS_PER_S, STEP_S)
            return found | {"monitor_busy_percent": busy.percent, "monitor_memory_mib": busy.memory_mib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="per measurement of the real monitor")
    chosen = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    figures: dict[str, float] = {"load_average": os.getloadavg()[0]}
    for number in NUMBERS:
        with tempfile.TemporaryDirectory() as name:
            rings = open_rings(Path(name), number)
            found = reader(rings, Path(name)) | monitor(rings, Path(name), chosen.seconds)
            figures |= {f"{number}_rings_{what}": round(value, 2) for what, value in found.items()}
            for ring in rings:
                ring.close()
    tell(
        "rings",
        figures,
        ratios={},
        holds={},
        notes=f"Rings, server and monitor are real; devices are made up. Tasks: {EVENTS_PER_S} events a second in all, "
        "of 50 ms deadlines, from one process that writes all rings. Times are of the processor.",
    )


if __name__ == "__main__":
    main()

"""The monitor for a long time at full load: ``make bench-soak ARGS="--seconds 600"``.

100 containers on 8 made-up devices write 5,000 task events a second in all; their rings, the server and the monitor are
real, and each event that was written is looked for in what an outside client receives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import nats
import psutil
from nats.aio.msg import Msg

from bench.monitor_load import EVENTS_PER_S, NODE, Cost, open_rings, play, settings
from bench.report import tell
from shared.messages import TaskEventKind
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess

STEP_S: Final = 0.01
WARM_S: Final = 5.0
PATIENCE_S: Final = 20.0
"""How long the last events may take to arrive."""
MOST_GROWTH_MIB: Final = 4.0


def write(root: Path) -> None:
    """Writes for as many seconds as each line of the input says, and answers with the number of records."""
    rings = open_rings(root)
    print("0", flush=True)
    for line in sys.stdin:
        print(play(rings, float(line), EVENTS_PER_S, STEP_S), flush=True)
    for ring in rings:
        ring.close()


@dataclass
class Received:
    """What the stream carried: each record once, however often it came."""

    last: dict[str, int] = field(default_factory=dict)
    gaps: int = 0
    lost: int = 0

    async def take(self, message: Msg) -> None:
        batch = json.loads(message.data)
        rings = [ring["ring"] for ring in batch.get("rings", ())]
        self.lost += sum(batch.get("lost_records", {}).values())
        for kind, place, seq in zip(batch.get("kind", ()), batch.get("ring", ()), batch.get("seq", ()), strict=True):
            if kind in (TaskEventKind.BEGIN, TaskEventKind.END):
                last = self.last.get(rings[place], 0)
                self.gaps += seq != last + 1
                self.last[rings[place]] = seq

    @property
    def records(self) -> int:
        return sum(self.last.values())


async def _ask(writer: asyncio.subprocess.Process, seconds: float) -> int:
    assert writer.stdin is not None
    assert writer.stdout is not None
    if seconds:
        writer.stdin.write(f"{seconds}\n".encode())
    return int(await writer.stdout.readline())


async def soak(folder: Path, url: str, seconds: float, idle_s: float) -> dict[str, float]:
    """What the monitor cost idle and under load, and what of the events has arrived."""
    root, received = folder / "rings", Received()
    client = await nats.connect(url)
    await client.subscribe(f"rt.events.task.{NODE}", cb=received.take)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = (sys.executable, "-m", "bench.soak", "--write", str(root))
    writer = await asyncio.create_subprocess_exec(*command, **pipes)  # type: ignore[arg-type]
    try:
        await _ask(writer, 0)
        with ServiceProcess("services.monitor", folder, url, **settings(root)) as monitor:
            process = psutil.Process(monitor.pid)
            written = await _ask(writer, WARM_S)
            idle = Cost(process)
            await asyncio.sleep(idle_s)
            idle_percent, busy = idle.percent, Cost(process)
            first_mib = busy.memory_mib
            written += await _ask(writer, seconds)
            percent, last_mib = busy.percent, busy.memory_mib
            until_s = time.monotonic() + PATIENCE_S
            while received.records < written and time.monotonic() < until_s:  # noqa: ASYNC110 - counted by a callback
                await asyncio.sleep(0.1)
    finally:
        writer.kill()
        await writer.wait()
        await client.close()
    return {
        "seconds": seconds,
        "events": written,
        "events_missing": written - received.records,
        "events_out_of_turn": received.gaps,
        "records_lost": received.lost,
        "cpu_idle_percent": round(idle_percent, 2),
        "cpu_busy_percent": round(percent, 2),
        "memory_mib": round(last_mib, 1),
        "memory_growth_mib": round(last_mib - first_mib, 1),
        "load_average": os.getloadavg()[0],
    }


def holds(figures: dict[str, float]) -> dict[str, bool]:
    """The row ``overhead`` and the soak's own."""
    return {
        "no event lost": not (figures["events_missing"] or figures["events_out_of_turn"] or figures["records_lost"]),
        "memory flat": figures["memory_growth_mib"] <= MOST_GROWTH_MIB,
        "idle at most 2 % of a core": figures["cpu_idle_percent"] <= 2,
        "at most 10 % of a core at 5,000 events a second": figures["cpu_busy_percent"] <= 10,
        "at most 60 MiB": figures["memory_mib"] <= 60,
    }


def measure(seconds: float, idle_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        server = NatsServer(Path(name) / "nats").start()
        try:
            return asyncio.run(soak(Path(name), server.url, seconds, idle_s))
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--idle", type=float, default=10.0)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.write:
        write(chosen.write)
        return
    figures = measure(chosen.seconds, chosen.idle)
    notes = "Rings, server and monitor are real; devices are made up, and one process writes all rings."
    tell("soak", figures, {}, holds(figures), notes)


if __name__ == "__main__":
    main()

"""``laxity demo``: starts a cluster, plays the script, judges what was heard, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.text import Text

from cli.client import connected
from cli.demo.checks import Check, judge
from cli.demo.recorder import Recorder
from cli.demo.script import EXAMPLES, ROOT, Played, play
from cli.demo.view import watching
from cli.embedded import dies_with
from cli.output import CommandError, Exit, Output, table

HELP = "place, run, track and judge real tasks on a real bus, in about 45 s"
READY_S: Final = 40.0
END_S: Final = 20.0
MOST_CORES: Final = 4
"""Cores of the real node: more of them make the demo no richer."""


def arguments(parser: ArgumentParser) -> None:
    build = ROOT / "build"
    parser.add_argument("--state-dir", type=Path, default=build / "demo", help="made anew; keeps the logs")
    parser.add_argument("--report", type=Path, default=build / "demo.json", help="gets all checks and figures")
    parser.add_argument("--ready-file", type=Path, help="as of laxity up: for those who disturb the demo")
    parser.add_argument("--go-on-file", type=Path, help="the demo does not end before this file is there")


def run(args: Namespace, output: Output) -> Exit:
    if not EXAMPLES.is_dir():
        raise CommandError(f"the demo needs the examples of a checkout: none at {EXAMPLES}", Exit.USAGE)
    began_s = time.monotonic()
    state_dir = args.state_dir.absolute()
    shutil.rmtree(state_dir, ignore_errors=True)
    state_dir.mkdir(parents=True)
    console = Console(stderr=output.machine, highlight=False)
    report = asyncio.run(_demo(state_dir, args.ready_file, args.go_on_file, console))
    report["seconds"] = round(time.monotonic() - began_s, 1)
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    output.result(report, lambda console: show(console, report))
    return Exit.OK if report["ok"] else Exit.REFUSED


async def _demo(state_dir: Path, ready_file: Path | None, go_on: Path | None, console: Console) -> dict[str, Any]:
    cluster = _Cluster(state_dir, ready_file)
    recorder = Recorder()
    try:
        console.print(Text("starting: nats-server, four monitors, deadline-tracker, node-list, two placers"))
        url = await cluster.ready()
        async with connected(url) as client, recorder.recording(url):
            async with watching(console, client, recorder) as view:
                played = await play(client, recorder, view.say, go_on)
            checks = judge(played, recorder)
    finally:
        code, left = await cluster.end()
    seen = f"exit code {code}, {'still there: ' + ', '.join(left) if left else 'no process left'}"
    checks.append(Check("the cluster ends", code == 0 and not left, "exit code 0, no process left", seen))
    return _report(checks, played, recorder)


class _Cluster:
    """``laxity up`` as a process of its own, held on to by its ready file as any script would."""

    def __init__(self, state_dir: Path, ready_file: Path | None) -> None:
        self._ready_file = (ready_file or state_dir / "cluster.json").absolute()
        self._log = state_dir / "up.log"
        self._pids: dict[str, list[int]] = {}
        parent = os.getpid()
        command = [sys.executable, "-m", "cli.main", "up", "--state-dir", state_dir, "--ready-file", self._ready_file]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*map(str, command), "--cores", str(MOST_CORES), "--heartbeat-us", "500000"],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: dies_with(parent, signal.SIGTERM),  # noqa: PLW1509  # this process has one thread
            )

    async def ready(self) -> str:
        """The server's address once everything is ready; CommandError where it does not come to that."""
        until_s = time.monotonic() + READY_S
        while not self._ready_file.exists():
            if self._process.poll() is not None or time.monotonic() > until_s:
                tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise CommandError(f"the cluster does not start, see {self._log.parent}:\n{tail}", Exit.NO_ANSWER)
            await asyncio.sleep(0.05)
        return str(self._read()["nats_url"])

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._ready_file.read_bytes())
        self._pids = found["services"]
        return found

    async def end(self) -> tuple[int | None, list[str]]:
        """Its exit code, and what of it is still there."""
        if self._ready_file.exists():
            self._read()
        self._process.terminate()
        until_s = time.monotonic() + END_S
        while (code := self._process.poll()) is None and time.monotonic() < until_s:  # noqa: ASYNC110  # not ours
            await asyncio.sleep(0.05)
        if code is None:
            self._process.kill()
            self._process.wait()
        pids = [(name, pid) for name, each in self._pids.items() for pid in each]
        return code, [f"{name} {pid}" for name, pid in pids if psutil.pid_exists(pid)]


def _report(checks: list[Check], played: Played, recorder: Recorder) -> dict[str, Any]:
    delays = recorder.delays_us()
    return {
        "ok": all(check.holds for check in checks),
        "checks": [vars(check) for check in checks],
        "events": recorder.events.events,
        "events_repeated": recorder.events.repeated,
        "commits": recorder.ledger.commits,
        "verdicts": {name: dict(counts) for name, counts in recorder.events.counts.items()},
        "records": {name: json.loads(record.to_json()) for name, record in recorder.records.items()},
        "miss_delays_us": delays,
        "busy_neighbours": played.neighbours,
        "replies": {name: json.loads(reply.to_json()) for name, reply in played.replies.items()},
        "list_before": [json.loads(device.to_json()) for device in played.before],
        "list_after": [json.loads(device.to_json()) for device in played.after],
        "processors": os.cpu_count(),
    }


def show(console: Console, report: dict[str, Any]) -> None:
    """The summary; for what failed also what was expected."""
    checks = report["checks"]
    marks = [Text("ok", style="green") if check["holds"] else Text("FAILED", style="bold red") for check in checks]
    rows = [(mark, check["name"], check["seen"]) for mark, check in zip(marks, checks, strict=True)]
    console.print(table("", ("", "what should happen", "what was seen on the bus"), rows))
    failed = [check for check in checks if not check["holds"]]
    for check in failed:
        console.print(Text(f"{check['name']}: expected {check['expected']}, seen: {check['seen']}", style="red"))
    held = len(checks) - len(failed)
    console.print(Text(f"{held} of {len(checks)} hold, in {report['seconds']} s", style="red" if failed else "green"))

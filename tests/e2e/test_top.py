"""``laxity top`` on a terminal, beside a real cluster: it draws, obeys keys, and outlives the server."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.embedded import Embedded, run, wait_for

REQUEST = {
    "request_id": "infer",
    "command": ["sleep", "60"],
    "gpu": {"share": 0.2},
    "realtime": {"deadline_us": 100_000, "runtime_us": 5_000, "period_us": 50_000},
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Embedded]:
    with Embedded(tmp_path, "--nodes", "0", "--fake-nodes", "1", "--placers", "1") as embedded:
        file = tmp_path / "infer.json"
        file.write_text(json.dumps(REQUEST))
        assert "placed" == embedded.laxity("place", "-f", str(file))["outcome"]
        yield embedded


class Terminal:
    """A command on a pseudo-terminal; ``text`` is what it wrote since the last look."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        env = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        self._all = ""

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def until(self, pattern: str, limit_s: float = 20.0) -> None:
        """Reads until it shows; then forgets what came before."""
        deadline = time.monotonic() + limit_s
        while not re.search(pattern, self._all):
            assert time.monotonic() < deadline, f"{pattern} is not shown: {self._all[-3000:]}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self._all += os.read(self._ours, 65_536).decode(errors="replace")
        self._all = ""

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_it_draws_obeys_keys_outlives_the_server_and_ends_on_q(cluster: Embedded) -> None:
    terminal = Terminal("top", "--nats-url", cluster.url)
    try:
        terminal.until(r"by attention")
        terminal.until(r"infer\s+fake-1\s+\d+(\.\d+)? ?ms")
        terminal.press("s")
        terminal.until(r"by misses")
        assert cluster.process is not None
        cluster.process.send_signal(signal.SIGSTOP)  # so that nobody starts the server again meanwhile
        os.kill(cluster.pids("nats-server")[0], signal.SIGKILL)
        terminal.until(r"the bus is away for \d")
        cluster.process.send_signal(signal.SIGCONT)
        terminal.until(r"oldest heartbeat 0\.\d s", 40)
        terminal.press("q")
        wait_for(lambda: terminal.process.poll() is not None, "the end")
        assert 0 == terminal.process.returncode
    finally:
        terminal.close()


def test_in_a_pipe_it_prints_one_frame_or_its_rows(cluster: Embedded) -> None:
    shown = run("top", url=cluster.url)
    assert (0, "") == (shown.returncode, shown.stderr)
    assert "\x1b" not in shown.stdout
    assert re.search(r"^fake-1 +ready +\d\.\d s +3 of 3 well", shown.stdout, re.MULTILINE)

    found = wait_for(lambda: _containers(cluster), "the container's record")
    assert [("infer", "fake-1")] == [(row["request"], row["node"]) for row in found]


def _containers(cluster: Embedded) -> list[dict[str, object]]:
    found: list[dict[str, object]] = cluster.laxity("top", "--once")["containers"]
    return found


def test_where_nothing_runs_it_says_so(tmp_path: Path) -> None:
    done = run("top", url="nats://127.0.0.1:1")
    assert (4, "") == (done.returncode, done.stdout)

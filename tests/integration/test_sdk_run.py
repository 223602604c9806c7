"""`python -m laxity` as a user runs it: programs that nobody can change, marked from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import laxity
from tests.ring_columns import column
from tests.unit.test_sdk import rows, taken

BEGIN, END = 1, 2
SDK = Path(laxity.__file__).parents[1]


def start(box: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "laxity", *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SDK), "LAXITY_RING_DIR": str(box)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(box: Path, *arguments: str, **env: str) -> tuple[int, str, str]:
    with start(box, *arguments, **env) as process:
        told, wrong = process.communicate(timeout=20)
    return process.returncode, told, wrong


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_is_one_task_and_its_exit_code_is_passed_on(code: int, tmp_path: Path) -> None:
    assert (code, "done\n", "") == run(
        tmp_path, "run", "--deadline", "1.5s", "--", "sh", "-c", f"echo done; exit {code}"
    )
    assert [("sh", BEGIN, 1, False), ("sh", END, 1, code != 0)] == rows(tmp_path)
    assert [1_500_000, 1_500_000] == column(taken(tmp_path), "deadline_us")


def test_lines_of_its_output_begin_and_end_tasks(tmp_path: Path) -> None:
    script = "echo start 1; echo start 2; echo noise; echo done 1; echo start 3; echo done 2"
    arguments = ("--name", "infer", "--begin", "^start", "--end", "^done", "--", "sh", "-c", script)
    code, told, _ = run(tmp_path, "run", *arguments, LAXITY_DEADLINE_US="9000")
    assert (0, 6) == (code, len(told.splitlines()))
    ends = [(begun, failed) for _, kind, begun, failed in rows(tmp_path) if kind == END]
    assert [(1, False), (2, False), (4, True)] == ends  # the third was open when it ended


def test_a_signal_is_handed_on_and_told_by_the_exit_code(tmp_path: Path) -> None:
    with start(tmp_path, "run", "--deadline", "50ms", "--", "sh", "-c", "echo up; exec sleep 60") as process:
        assert process.stdout is not None
        assert "up\n" == process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert 128 + signal.SIGTERM == process.wait(20)
    assert ("sh", END, 1, True) == rows(tmp_path)[-1]


def test_a_signal_that_comes_as_the_command_starts_is_handed_on(tmp_path: Path) -> None:
    script = "kill -TERM $PPID; exec sleep 60"
    assert (128 + signal.SIGTERM, "", "") == run(tmp_path, "run", "--deadline", "50ms", "--", "sh", "-c", script)


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    script = f"trap '' HUP; exec {sys.executable} -m laxity run --deadline 5s -- sh -c 'kill -HUP $$ $PPID; echo on'"
    told = subprocess.run(
        ["sh", "-c", script],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SDK), "LAXITY_RING_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (0, "on\n", "") == (told.returncode, told.stdout, told.stderr)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--deadline", "fast", "--", "true"), "found 'fast', allowed: a time such as 50ms"),
        (("--deadline", "0ms", "--", "true"), "found '0ms'"),
        (("--begin", "x", "--", "true"), "--begin and --end go together"),
        (("--begin", "(", "--end", "x", "--", "true"), "a regular expression"),
        (("--", "true"), "no LAXITY_DEADLINE_US"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_run(arguments: tuple[str, ...], told: str, tmp_path: Path) -> None:
    code, _, wrong = run(tmp_path, "run", *arguments)
    assert (2, True) == (code, told in wrong)


def test_a_command_that_is_not_there_has_failed(tmp_path: Path) -> None:
    code, _, wrong = run(tmp_path, "run", "--deadline", "50ms", "--", "no-such-command")
    assert (127, "laxity: no-such-command: No such file or directory\n") == (code, wrong)
    assert ("no-such-command", END, 1, True) == rows(tmp_path)[-1]


def test_the_folder_of_the_header_is_told(tmp_path: Path) -> None:
    code, told, _ = run(tmp_path, "include")
    assert (0, True) == (code, Path(told.strip(), "laxity.h").is_file())

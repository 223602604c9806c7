"""`laxity run`, and the command where the SDK is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import main

WITHOUT_SDK = "import sys; sys.modules['laxity'] = None; from cli.main import main; sys.exit(main(sys.argv[1:]))"


def test_the_exit_code_of_the_command_is_passed_on() -> None:
    assert 3 == main(["run", "--deadline", "50ms", "--", "sh", "-c", "exit 3"])


def test_what_is_wrong_is_a_mistake_in_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["run", "--deadline", "50ms", "--begin", "x", "--", "true"])
    assert "--begin and --end go together" in capsys.readouterr().err


def test_without_the_sdk_all_other_commands_work() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SDK, "keys", "--help"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)

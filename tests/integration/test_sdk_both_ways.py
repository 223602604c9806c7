"""The SDK writes its records compiled or in Python: its tests hold for the way that the other tests do not run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import laxity

ROOT = Path(__file__).parents[2]
OF_THE_SDK = (
    "tests/unit/test_sdk.py",
    "tests/unit/test_sdk_requests.py",
    "tests/property/test_ring_interleavings.py",
    "tests/integration/test_gate.py",
    "tests/integration/test_laxity_h.py::test_the_header_and_the_python_sdk_write_the_same_bytes",
    "tests/integration/test_sdk_processes.py",
)


def env(pure: str) -> dict[str, str]:
    """Of a pytest of its own, not of this one's workers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "LAXITY_"))}
    return kept | {"LAXITY_PURE": pure}


def compiled(pure: str) -> bool:
    command = [sys.executable, "-c", "import laxity; print(laxity.COMPILED)"]
    return "True" in subprocess.run(command, env=env(pure), cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_an_environment_variable_takes_python() -> None:
    assert not compiled("1")


@pytest.mark.timeout(300)
def test_the_tests_of_the_sdk_hold_the_other_way_too() -> None:
    if not compiled("0"):
        pytest.skip("laxity._fast is not compiled here: there is one way")
    command = [sys.executable, "-m", "pytest", "-q", *OF_THE_SDK]
    other = env("1" if laxity.COMPILED else "0")
    done = subprocess.run(command, env=other, cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout[-8000:] + done.stderr[-2000:]

"""Builds a driver library without a GPU; what it answers stands in fake_nvml.c and in a file that steers it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")


def build_fake_nvml(folder: Path) -> Path:
    """Make ``folder``/libnvidia-ml.so.1, which a process finds whose LD_LIBRARY_PATH names the folder.

    Skips the test where there is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler, cc or gcc, for a driver library without a GPU")
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-O1", "-std=gnu11", "-shared", "-fPIC", "-o", library, SOURCE]
    subprocess.run(command, check=True, timeout=60)
    return library


class FakeDriver:
    """The library and the file that steers it, and what a process needs in its environment to find both."""

    def __init__(self, library: Path, control: Path) -> None:
        self.library, self.control = library, control
        self.environment = {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML": str(control)}
        self.plays("h100")

    def plays(self, profile: str, *processes: tuple[int, int, int]) -> None:
        """From now on, also in what runs already. ``processes``: GPU, pid and MiB, or -1 where that is not told."""
        lines = [profile, *(" ".join(map(str, process)) for process in processes)]
        written = self.control.with_suffix(".new")
        written.write_text("\n".join(lines))
        written.replace(self.control)

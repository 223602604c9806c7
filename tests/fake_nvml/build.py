"""Builds a driver library without a GPU; what it answers are rows in a file: those of a profile, and more on top."""

from __future__ import annotations

import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
PROFILES = Path(__file__).with_name("profiles")


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


def rows_of(profile: Path) -> list[str]:
    """The rows of a profile; in place of ``from NAME`` those of the one of that name beside it."""
    rows: list[str] = []
    for line in profile.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        word, _, name = line.partition(" ")
        rows += rows_of(profile.with_name(name)) if word == "from" else [line] if line[:1] not in ("", "#") else []
    return rows


class FakeDriver:
    """The library and the file that steers it, and what a process needs in its environment to find both."""

    def __init__(self, library: Path, control: Path) -> None:
        self.library, self.control = library, control
        self.environment = {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML": str(control)}
        self.plays("h100")

    def plays(self, profile: str, *processes: tuple[int, int, int]) -> None:
        """From now on, also in what runs already. ``processes``: GPU, pid and MiB, or -1 where that is not told."""
        self.rows = rows_of(PROFILES / profile)
        for gpu in sorted({gpu for gpu, _, _ in processes}):
            held = [(pid, mib) for on, pid, mib in processes if on == gpu]
            self.rows += _held(self.rows, str(gpu), held)
        self.fails()

    def replays(self, profile: Path) -> None:
        """As ``plays``, a profile that lies anywhere, such as one that machine.py wrote."""
        self.rows = rows_of(profile)
        self.fails()

    def fails(self, *rows: str) -> None:
        """These rows on top of the profile, in place of those of the call before; none: no fault."""
        written = self.control.with_suffix(".new")
        written.write_text("\n".join([*self.rows, *rows]), encoding="utf-8", errors="surrogateescape")
        written.replace(self.control)


def _held(machine: list[str], gpu: str, processes: list[tuple[int, int]]) -> list[str]:
    """Rows for processes that hold memory of a GPU, and for its memory, of which they use so much."""
    listed = [f"{pid}:{-1 if mib < 0 else mib << 20}" for pid, mib in processes]
    rows = [f"DeviceGetComputeRunningProcesses{version} {gpu} {' '.join(listed)}" for version in ("", "_v2", "_v3")]
    sum_mib = sum(max(0, mib) for _, mib in processes)
    for name in ("DeviceGetMemoryInfo", "DeviceGetMemoryInfo_v2"):
        answers = [row.split()[2:] for row in machine if _about(row, name, gpu)]
        if answers and answers[-1][0].endswith("MiB"):
            *others, free, used = (int(number.removesuffix("MiB")) for number in answers[-1])
            numbers = [*others, free - sum_mib, used + sum_mib]
            rows.append(f"{name} {gpu} {' '.join(f'{number}MiB' for number in numbers)}")
    # a driver that refuses a version of a list refuses it also where somebody is on it
    refused = [row for row in machine if "RunningProcesses" in row and " error " in row]
    return rows + refused


def _about(row: str, call: str, device: str) -> bool:
    pattern, on, _ = row.split(maxsplit=2)
    return fnmatchcase(call, pattern) and fnmatchcase(device, on)

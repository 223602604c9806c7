"""The form of what a bench has found (BENCHMARKS): a table for people, and a file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FOLDER: Final = Path("build/bench")


def tell(
    name: str, figures: Mapping[str, float], ratios: Mapping[str, float], holds: Mapping[str, bool], notes: str
) -> None:
    """Prints it and writes `build/bench/NAME.json`."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    machine = {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()}
    found = {"figures": dict(figures), "ratios": dict(ratios), "holds": dict(holds), "notes": notes}
    for key, value in {**figures, **ratios, **holds}.items():
        print(f"  {key}: {value}")
    print(f"\n{notes}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    told = {"name": name, "machine": machine, "commit": commit, **found}
    (FOLDER / f"{name}.json").write_text(json.dumps(told, indent=2) + "\n")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())

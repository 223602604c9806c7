"""The form of what a bench has found (BENCHMARKS): for people, and as a file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path("build/bench")


def found(
    name: str, figures: Mapping[str, Any], ratios: Mapping[str, float], holds: Mapping[str, bool], notes: str
) -> dict[str, Any]:
    """All of it, with the machine and the commit that it was found on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    machine = {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()}
    said = {"figures": dict(figures), "ratios": dict(ratios), "holds": dict(holds), "notes": notes}
    return {"name": name, "machine": machine, "commit": commit, **said}


def show(told: Mapping[str, Any], *, figures: bool = False) -> None:
    """For people; the figures too where no table has shown them."""
    for name, value in {**(told["figures"] if figures else {}), **told["ratios"], **told["holds"]}.items():
        print(f"  {name}: {value}")
    print(f"\n{told['notes']}")


def keep(told: Mapping[str, Any], to: Path | None = None) -> None:
    """Writes `build/bench/NAME.json`, or another file."""
    file = to or FOLDER / f"{told['name']}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told, indent=2) + "\n")


def tell(
    name: str, figures: Mapping[str, float], ratios: Mapping[str, float], holds: Mapping[str, bool], notes: str
) -> None:
    """Shows and keeps it, of a bench that has no table of its own."""
    told = found(name, figures, ratios, holds, notes)
    show(told, figures=True)
    keep(told)


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())

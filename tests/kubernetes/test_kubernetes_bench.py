"""``make bench-kubernetes`` runs, in small: its figures are those of a bench, what it promises of places holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kubernetes.cluster import KubeCluster

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240)]


def test_the_bench_runs_in_small(kube: KubeCluster, tmp_path: Path) -> None:
    """It starts a Kubernetes of its own; `kube` only says whether there can be one."""
    small = ["--nodes", "12", "--pods", "60", "--rounds", "1", "--to", str(tmp_path / "found.json")]
    command = [sys.executable, "-m", "bench.kubernetes", *small]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=200, check=False)
    assert 0 == done.returncode, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())

    assert {"extender_over_plain", "place_over_plain"} == found["ratios"].keys()
    assert found["holds"]["32 at once onto devices that just suffice: no failed bind"]
    assert found["holds"]["every deadline can be guaranteed"]
    assert found["figures"]["plain_kept_ratio"] < 1 == found["figures"]["extender_kept_ratio"]

"""Hard containers on a gated core, placed by the whole cluster: who is admitted, in what turns they run, and judged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.gate import SET
from bench.gate_real import run

TASKS = 40


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core alone: what others use of it cannot be told")
async def test_three_hard_containers_take_turns_on_a_gated_core_and_every_task_is_judged(tmp_path: Path) -> None:
    gated = await run(tmp_path, TASKS, gated=True)
    assert {"placed", "started"} >= set(gated.outcomes(*(task.name for task in SET)))
    assert ["rejected", "rejected"] == gated.outcomes("one-more", "without-gate")
    refused = " ".join(reason.message for reason in gated.answers["without-gate"].reasons)
    assert "gated devices take only requests with gate: true" in refused
    assert 0 == gated.trace.overlaps()
    assert len(SET) * (TASKS + 1) == gated.judged.met + gated.judged.missed  # each begins with one by itself

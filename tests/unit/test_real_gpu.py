"""What `bench.real_gpu` makes of its numbers, on simulated traces; and what it says where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

import laxity
from bench.real_gpu import attribution_error, runs_of, switch_us, task_times_us
from laxity.records import HEADER_SIZE, RECORD_SIZE, pack_record
from laxity.ring import Ring, words_of
from services.monitor.slices import Sharing, judge

ROOT = Path(__file__).parents[2]


def shared_in_turn(work_us: list[int], slice_us: int, theta_us: int) -> tuple[list[list[int]], int]:
    """Marks of each of several processes that a GPU serves in turn, in ns, and when the last one is done, in us.

    A switch comes before each turn, the first included (THEORY, section 1, counts a process's own).
    """
    left, marks, now_us = list(work_us), [list[int]() for _ in work_us], 0
    for each in cycle(range(len(left))):
        if not any(left):
            return marks, now_us
        if ran_us := min(slice_us, left[each]):
            now_us += theta_us
            marks[each] += [now_us * 1_000, (now_us + ran_us) * 1_000]
            now_us, left[each] = now_us + ran_us, left[each] - ran_us
    raise AssertionError


@pytest.mark.parametrize("slice_us, theta_us", [(2_000, 150), (1_000, 30), (6_000, 400)])
def test_slice_and_switch_cost_are_found_in_traces(slice_us: int, theta_us: int) -> None:
    marks, _ = shared_in_turn([40 * slice_us] * 2, slice_us, theta_us)
    runs = [run for process, own in enumerate(marks) for run in runs_of(own, process)]
    assert Sharing(slice_us, theta_us) == judge(runs)


@pytest.mark.parametrize("copies", [2, 3, 5])
@pytest.mark.parametrize("slice_us, theta_us", [(2_000, 150), (1_000, 30)])
def test_the_switch_cost_is_found_by_copies_of_one_kernel(copies: int, slice_us: int, theta_us: int) -> None:
    alone_us = 20 * slice_us
    _, together_us = shared_in_turn([alone_us] * copies, slice_us, theta_us)
    assert theta_us == pytest.approx(switch_us(alone_us, together_us, copies, slice_us))


def test_copies_that_take_no_longer_than_their_sum_show_no_switch_cost() -> None:
    assert 0 == switch_us(10_000, 29_990, 3, 2_000)


def test_the_error_of_attribution_is_a_share_of_what_the_device_says() -> None:
    assert attribution_error([103.0, 105.0], [100.0, 100.0]) == pytest.approx(0.04)
    assert attribution_error([95.0], [100.0]) == pytest.approx(-0.05)


def test_times_of_tasks_are_those_of_their_ring(tmp_path: Path) -> None:
    ring = Ring(str(tmp_path), 16)
    begin, end, _ = words_of(b"work")
    two_tasks_and_an_open_one = [(10, 1, begin), (20, 2, begin), (50, 2, end), (100, 1, end), (200, 5, begin)]
    for seq, (stamp_us, begun, words) in enumerate(two_tasks_and_an_open_one, 1):
        at = HEADER_SIZE + (seq - 1) * RECORD_SIZE
        pack_record(ring.map, at, seq, stamp_us * 1_000, begun, 1_000, words, seq)
    assert [90.0, 30.0] == task_times_us(ring.path.read_bytes())
    ring.close()


def test_without_a_gpu_it_says_that_it_was_not_run(tmp_path: Path) -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{Path(laxity.__file__).parents[1]}"}
    command = [sys.executable, "-m", "bench.real_gpu"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert "Not run, nothing was measured: " in done.stdout
    told = json.loads((tmp_path / "build" / "bench" / "real_gpu.json").read_text())
    assert ({}, {}) == (told["figures"], told["holds"])

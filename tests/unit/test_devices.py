"""Simulated devices, by hand: who has the device when in each regime, overruns, and containers that come and go."""

from itertools import islice
from random import Random

import numpy as np
import pytest

from shared.admission import RtTask, Sharing
from shared.messages import Kind, Regime
from shared.testing.devices import (
    Container,
    Device,
    Event,
    Job,
    Sets,
    What,
    gated_misses,
    just_before,
    run,
    sporadic,
    time_sliced_misses,
)
from shared.testing.devices.policies import Gate

GATED = Sharing(Regime.GATED)
SLICED = Sharing(Regime.TIME_SLICED, slice_us=10, switch_us=1)
MPS = Sharing(Regime.MPS)


def container(name: str, runtime_us: int, deadline_us: int, *releases_us: int, **more: object) -> Container:
    fields = {name: more.pop(name) for name in ("host_us", "segments", "kind") if name in more}
    task = RtTask(name, runtime_us, 1_000, deadline_us, gate=True, **fields)  # type: ignore[arg-type]
    return Container(name, task, releases_us, **more)  # type: ignore[arg-type]


def spans(jobs: list[Job]) -> dict[str, tuple[int | None, int | None]]:
    """Of the last job of each container: when it first had the device, and its end."""
    return {job.container: (job.start_us, job.end_us) for job in jobs}


# ---------------------------------------------------------------------------------------------- gated


def test_the_gate_takes_the_earliest_due_and_interrupts_nobody() -> None:
    jobs = run(GATED, [container("long", 50, 500, 0), container("b", 5, 90, 1), container("a", 5, 70, 2)], 100)
    assert {"long": (0, 50), "a": (50, 55), "b": (55, 60)} == spans(jobs)


def test_the_gate_sees_who_arrives_in_the_moment_in_which_another_ends() -> None:
    jobs = run(GATED, [container("first", 10, 90, 0), container("later", 5, 95, 3), container("now", 5, 50, 10)], 100)
    assert {"first": (0, 10), "now": (10, 15), "later": (15, 20)} == spans(jobs)


def test_each_hand_over_costs() -> None:
    jobs = run(Sharing(Regime.GATED, handover_us=2), [container("a", 5, 70, 0), container("b", 5, 90, 0)], 100)
    assert {"a": (2, 7), "b": (9, 14)} == spans(jobs)


def test_a_soft_part_waits_for_all_others() -> None:
    soft = container("soft", 5, 10, 1, kind=Kind.SOFT)
    jobs = run(GATED, [container("a", 20, 500, 0), soft, container("b", 5, 400, 10)], 100)
    assert {"a": (0, 20), "b": (20, 25), "soft": (25, 30)} == spans(jobs)


def test_the_gate_orders_by_what_the_host_part_leaves_of_the_deadline() -> None:
    hosted = container("hosted", 10, 100, 0, host_us=30, before_us=20)
    (job,) = run(GATED, [hosted], 100)
    assert (20, 20, 30, 40) == (job.arrival_us, job.start_us, job.start_us and job.start_us + 10, job.end_us)


def test_an_overrun_makes_a_neighbour_late_and_a_gate_that_ends_it_does_not() -> None:
    sharing = Sharing(Regime.GATED, margin_us=5)
    for policy, expected in ((None, {"bad": 50, "good": 60}), (Gate(ends_overruns=True), {"bad": 25, "good": 35})):
        device = Device(sharing, policy)
        for each in (container("bad", 20, 100, 0), container("good", 10, 40, 1)):
            device.add(each)
        device.overrun("bad", 30)
        ended = [event.job for event in device.advance(100) if event.what is What.ENDED]
        assert expected == {job.container: job.end_us for job in ended}
        assert [("bad", policy is not None, False), ("good", False, policy is None)] == [
            (job.container, job.cut, job.missed(100)) for job in ended
        ]


# ------------------------------------------------------------------------------------- other regimes


def test_a_time_sliced_device_turns_between_contexts_and_pays_for_each_change() -> None:
    """a: 1-11, b: 12-22, a again: 23-33, b: 34-39, and then a alone without a change of context but the first."""
    jobs = run(SLICED, [container("a", 40, 500, 0), container("b", 15, 500, 0)], 100)
    assert {"a": (1, 60), "b": (12, 39)} == spans(jobs)


def test_segments_come_one_after_the_other_with_host_parts_between() -> None:
    """3 before, a change, 8, 3 between, 10 and 2 in two slices, 3 behind."""
    split = container("split", 20, 500, 0, segments=(8, 12), host_us=9, before_us=3)
    assert {"split": (4, 30)} == spans(run(SLICED, [split], 100))


def test_a_context_that_is_always_busy_takes_its_slice_each_time() -> None:
    busy = Container("busy", RtTask("busy", 1_000, 1_000, 1_000, kind=Kind.SOFT), None)
    jobs = run(SLICED, [busy, container("a", 20, 500, 0)], 100)
    assert (12, 44) == spans(jobs)["a"]


def test_containers_that_run_at_once_slow_each_other_down() -> None:
    pair = [container("a", 100, 500, 0, pressure_milli=500), container("b", 100, 500, 0)]
    assert {"a": (0, 100), "b": (0, 134)} == spans(run(MPS, pair, 500))


def test_an_exclusive_device_takes_one_container() -> None:
    device = Device(Sharing(Regime.EXCLUSIVE))
    device.add(container("a", 10, 50, 0))
    with pytest.raises(ValueError, match="shared with nobody"):
        device.add(container("b", 10, 50, 0))


def test_a_time_sliced_device_that_was_not_measured_is_not_simulated() -> None:
    with pytest.raises(ValueError, match="slice and switch cost"):
        Device(Sharing(Regime.TIME_SLICED))


# ------------------------------------------------------------------------------------- come and go


def told(events: list[Event]) -> list[tuple[int, str, str]]:
    return [(event.at_us, event.what.value, event.job.container) for event in events]


def test_a_container_that_comes_and_one_that_goes_change_what_follows() -> None:
    device = Device(GATED)
    device.add(container("a", 30, 100, 0, 50))
    assert [(0, "released", "a")] == told(device.advance(10))
    device.add(container("b", 5, 40, 0))
    assert [(10, "released", "b"), (30, "ended", "a"), (35, "ended", "b"), (50, "released", "a")] == told(
        device.advance(60)
    )
    (running,) = device.open_jobs()
    device.remove("a")
    assert (True, False, []) == (running.aborted, running.missed(10_000), told(device.advance(1_000)))


@pytest.mark.parametrize("sharing", [GATED, SLICED, MPS])
def test_the_steps_in_which_time_is_moved_on_change_nothing(sharing: Sharing) -> None:
    def device() -> Device:
        made = Device(sharing)
        for number in range(4):
            task = RtTask("", 17, 90, 90, host_us=4, gate=True)
            releases = sporadic(number, 90, Random(number), 30)
            made.add(Container(str(number), task, releases, pressure_milli=300, before_us=2))
        return made

    whole, stepwise, chance = device(), device(), Random(5)
    expected, found = told(whole.advance(3_000)), []
    while stepwise.now_us < 3_000:
        found += told(stepwise.advance(min(3_000, stepwise.now_us + chance.randint(0, 40))))
    assert expected == found
    assert len(expected) > 200


# ---------------------------------------------------------------------------------------------- releases


def test_the_worst_releases_are_the_blocker_a_tick_before_all_others() -> None:
    tasks = [RtTask(n, 1, 10 + p, 10, gate=True) for p, n in enumerate("abc")]
    releases = [list(islice(each.releases_us or (), 2)) for each in just_before(tasks, blocker=1)]
    assert [[1, 11], [0, 11], [1, 13]] == releases


# --------------------------------------------------------------------------------- many, side by side


@pytest.mark.parametrize("seed", range(60))
def test_many_devices_side_by_side_go_as_one_event_by_event(seed: int) -> None:
    chance, count = Random(seed), 4
    tasks = [
        RtTask("", *(chance.randint(*span) for span in ((1, 4), (3, 20), (2, 25))), gate=True) for _ in range(count)
    ]
    first = [chance.randint(0, 6) for _ in tasks]
    slice_us, switch_us = chance.randint(1, 3), chance.randint(0, 1)
    times = [(task.runtime_us, task.period_us, task.deadline_us, at) for task, at in zip(tasks, first, strict=True)]
    sets = Sets(*np.array(times).T[:, None, :])
    containers = [
        Container(f"{n}", task, list(range(at, 200, task.period_us)))
        for n, (task, at) in enumerate(zip(tasks, first, strict=True))
    ]

    gate = [job for job in run(GATED, containers, 200) if job.end_us is not None]
    assert any(job.missed(0) for job in gate) == gated_misses(sets, len(gate), until_idle=False)[0][0]
    ring = [
        job for job in run(Sharing(Regime.TIME_SLICED, slice_us, switch_us), containers, 200) if job.end_us is not None
    ]
    turns = sum(-(-job.runtime_us // slice_us) for job in ring)
    late = time_sliced_misses(sets, np.array([slice_us]), np.array([switch_us]), turns)
    assert any(job.missed(0) for job in ring) == late[0]

"""On a miss the tracker says who did it: from begins, ends, and what containers declared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.deadline_tracker.clocks import Clock
from services.deadline_tracker.culprits import Resident, Scene, causes
from services.deadline_tracker.device_time import OPEN, Tasks, Terms, device_time_us, slowdown_by_neighbour
from services.deadline_tracker.suspects import MOST_LOOKS, Suspects
from shared.admission import RtTask, Sharing
from shared.effects import Publish
from shared.messages import (
    CauseKind,
    DeadlineEvent,
    DeviceFacts,
    Kind,
    NodeFacts,
    NodeReservations,
    NodeState,
    Realtime,
    Regime,
    Reservation,
    RingInfo,
    TaskBatch,
)
from shared.subjects import LEDGER, NODES

GATED = Sharing(Regime.GATED, handover_us=100)
SLICED = Sharing(Regime.TIME_SLICED, slice_us=1_000, switch_us=0)
Task = tuple[int, int, int]
"""Container, begin, end."""


def tasks(*rows: Task, due_us: int = 20_000, containers: int = 2) -> Tasks:
    who, begin, end = np.array(rows, np.int64).T
    return Tasks(containers, who, begin, end, begin + due_us).sorted()


def declared(name: str, runtime_us: int = 5_000, period_us: int = 20_000, kind: Kind = Kind.HARD) -> RtTask:
    return RtTask(name, runtime_us, period_us, period_us, kind=kind, gate=True)


def scene(seen: Tasks, sharing: Sharing = GATED, trouble: str | None = None, **first_us: int) -> Scene:
    names = ["a", "b", "c"][: seen.containers]
    return Scene(sharing, tuple(Resident(n, declared(n), first_us.get(n)) for n in names), seen, trouble)


def told(look: Scene, victim: int, begin_us: int, at_us: int) -> list[tuple[str, str | None, int | None]]:
    return [(cause.cause, cause.container, cause.amount_us) for cause in causes(look, victim, begin_us, at_us)]


# --- device time ---


@pytest.mark.parametrize(
    "sharing, seen, expected",
    [
        (Sharing(Regime.EXCLUSIVE), [(0, 0, 4_000)], [4_000]),
        (GATED, [(0, 0, 5_000), (1, 1_000, 9_000), (0, 12_000, 13_000)], [5_000, 4_000, 1_000]),
        (GATED, [(0, 0, 5_000), (1, 1_000, OPEN), (0, 2_000, OPEN)], [5_000, 15_000, 0]),
        (SLICED, [(0, 0, 8_000), (1, 2_000, 6_000)], [6_000, 2_000]),
        (SLICED, [(0, 0, 4_000), (0, 1_000, 6_000)], [4_000, 2_000]),
        (SLICED, [(0, 10_000, OPEN), (1, 10_000, OPEN)], [5_000, 5_000]),
    ],
)
def test_the_device_time_of_a_task_follows_from_stamps_and_the_regime(
    sharing: Sharing, seen: list[Task], expected: list[float]
) -> None:
    terms = Terms.of([declared("a"), declared("b")])
    assert expected == device_time_us(sharing, tasks(*seen), 20_000, terms).tolist()


def test_soft_tasks_hold_the_gate_only_when_nobody_else_waits() -> None:
    terms = Terms.of([declared("a", kind=Kind.SOFT), declared("b")])
    seen = tasks((0, 1_000, OPEN), (1, 2_000, OPEN), (1, 0, 3_000))
    assert [3_000, 0, 7_000] == device_time_us(GATED, seen, 10_000, terms).tolist()


def test_what_a_neighbour_takes_is_learned_from_tasks_that_it_was_beside_for_different_parts() -> None:
    own = [(0, 100_000 * k, 100_000 * k + 10_000 + 1_000 * (k % 5)) for k in range(20)]
    beside = [(1, 100_000 * k, 100_000 * k + 2_000 * (k % 5)) for k in range(20) if k % 5]
    found = slowdown_by_neighbour(tasks(*own, *beside), 2_000_000)
    assert (0.0, True) == (found[0, 0], abs(found[0, 1] - 0.5) < 0.02)


def test_nothing_is_learned_from_a_few_tasks() -> None:
    found = slowdown_by_neighbour(tasks((0, 0, 1_000), (1, 0, 1_000)), 2_000)
    assert np.isnan(found).all()


# --- causes ---


HELD = Clock(0, ("thermal slowdown",), 0.5, "thermal slowdown, at 990 of 1980 MHz")
FREE = Clock(0, ())


def clocked(seen: Tasks, clock: Clock | None) -> Scene:
    return replace(scene(seen), clock=clock)


def test_what_a_clock_that_was_held_back_explains_of_a_task_accuses_nobody() -> None:
    seen = tasks((0, 0, 9_000), (1, 1_000, 21_000))
    assert [("throttled", None, 10_500), ("itself", "b", 1_000)] == told(clocked(seen, HELD), 1, 1_000, 21_000)
    (cause, *_) = causes(clocked(seen, HELD), 1, 1_000, 21_000)
    assert "thermal slowdown, at 990 of 1980 MHz" == cause.detail


def test_a_culprit_beyond_what_the_clock_explains_comes_first() -> None:
    mild = replace(HELD, speed=0.95)
    seen = tasks((0, 0, 18_000), (1, 1_000, 22_000))
    assert [("overran", "a", 12_100), ("throttled", None, 1_100)] == told(clocked(seen, mild), 1, 1_000, 22_000)


def test_a_clock_that_was_held_back_by_nobody_knows_how_much_is_named_first_and_acquits_nobody() -> None:
    seen = tasks((0, 0, 18_000), (1, 1_000, 22_000))
    look = clocked(seen, replace(HELD, speed=None))
    assert [("throttled", None, None), ("overran", "a", 13_000)] == told(look, 1, 1_000, 22_000)


def test_a_clock_that_was_hardly_slower_is_no_cause() -> None:
    seen = tasks((0, 0, 18_000), (1, 1_000, 22_000))
    look = replace(clocked(seen, replace(HELD, speed=0.999)), sharing=replace(GATED, margin_us=1_000))
    assert [("overran", "a", 12_982)] == told(look, 1, 1_000, 22_000)


def test_that_a_device_is_slower_for_all_is_inferred_only_where_it_does_not_tell() -> None:
    slow = tasks(*[(k % 2, 7_000 * k, 7_000 * (k + 1)) for k in range(6)])
    assert "throttled" == told(clocked(slow, None), 1, 35_000, 42_000)[0][0]
    assert "throttled" not in [c for c, _, _ in told(clocked(slow, FREE), 1, 35_000, 42_000)]


def suspects(*devices: str) -> Suspects:
    """One node; container c0 holds the first device."""
    found = Suspects()
    facts = [
        DeviceFacts(uuid=d, index=0, model="m", regime=Regime.GATED, healthy=True, memory_mib=None) for d in devices
    ]
    node = NodeFacts(node="n1", state=NodeState.READY, at_us=0, devices=tuple(facts), cpu_milli=1, memory_mib=1)
    amounts = {"share_micro": 1, "device_memory_mib": 1, "cpu_milli": 1, "memory_mib": 1}
    realtime = Realtime(deadline_us=20_000, runtime_us=5_000)
    whose = {"request_id": "q", "replica": 0, "generation": 1, "devices": devices[:1], "realtime": realtime}
    held = Reservation.model_validate(whose | amounts)
    found.heard(NODES, "node.n1", node.to_json())
    found.heard(LEDGER, "node.n1", NodeReservations(node="n1", reservations=(held,)).to_json())
    return found


def batch(watermark_us: int, container: str = "c0", boot_id: str = "b") -> TaskBatch:
    ring = RingInfo(
        ring="r", container=container, request_id="q" if container == "c0" else None, replica=0, generation=1
    )
    said = {"node": "n1", "start_id": "s", "counter": 1, "boot_id": boot_id, "at_us": 1}
    return TaskBatch.model_validate(said | {"watermark_us": watermark_us, "rings": (ring,)})


def missed(container: str = "c0") -> Publish:
    said = {"at_us": 1, "node": "n1", "container": container, "kind": "missed", "task": 1, "deadline_us": 20_000}
    counts = {"met": 0, "missed": 1, "ratio": 0.0, "lower": 0.0, "upper": 1.0, "guarantee": 0.9}
    return Publish("s", DeadlineEvent.model_validate({**said, **counts, "ring": "r", "seq": 1}), "id", "type")


def warned() -> Publish:
    said = missed()
    assert isinstance(said.body, DeadlineEvent)
    return said._replace(body=said.body.model_copy(update={"kind": "at_risk", "task": None, "ring": None}))


def because(found: Suspects, told: TaskBatch, begin_us: int, end_us: int | None, container: str = "c0") -> list[str]:
    task = ("r", 1, begin_us, end_us, 20_000)
    (effect,) = found.explained(told, lambda: [task], [missed(container)], lambda _: ())
    assert isinstance(effect, Publish)
    assert isinstance(effect.body, DeadlineEvent)
    return [cause.cause for cause in effect.body.because or ()]


def test_a_miss_is_explained_by_what_the_ledger_and_the_list_of_nodes_say() -> None:
    assert ["itself"] == because(suspects("d1"), batch(40_000), 0, 30_000)
    assert ["unknown"] == because(suspects("d1"), batch(40_000, "other"), 0, 30_000, "other")
    assert [] == because(Suspects(), batch(40_000), 0, 30_000)


def test_a_warning_does_not_wait_for_the_causes_of_misses() -> None:
    said = [warned(), missed()]
    assert ([warned()], [missed()]) == suspects("d1").parted("n1", said)
    assert ([], said) == Suspects().parted("n1", said)


def test_times_that_are_none_are_not_looked_at() -> None:
    for begin_us, end_us in ((1 << 70, None), (0, 1 << 70), (-5, 30_000)):
        assert [] == because(suspects("d1"), batch(40_000), begin_us, end_us)


def test_misses_beyond_those_that_are_explained_between_two_ticks_have_no_causes() -> None:
    found = suspects("d1")
    told = [because(found, batch(40_000), 0, 30_000) for _ in range(MOST_LOOKS + 1)]
    found.tick()
    told.append(because(found, batch(40_000), 0, 30_000))
    assert [True, False, True] == [bool(said) for said in told[-3:]]


def test_a_device_that_nobody_uses_is_no_fault() -> None:
    found = suspects("d1", "d2")
    because(found, batch(40_000), 0, 30_000)
    assert [] == list(found.noisy("n1", 300_000, lambda _: ()))


def test_after_a_reboot_of_the_node_its_stamps_begin_anew() -> None:
    found = suspects("d1")
    because(found, batch(9_000_000), 8_000_000, 8_900_000)
    assert ["itself"] == because(found, batch(40_000, boot_id="c"), 0, 30_000)


def test_a_neighbour_that_held_the_gate_too_long_is_named_with_by_how_much() -> None:
    seen = tasks((0, 0, 18_000), (1, 1_000, 22_000))
    assert [("overran", "a", 13_000)] == told(scene(seen), 1, 1_000, 22_000)


def test_a_neighbour_is_named_while_it_still_holds_the_gate() -> None:
    seen = tasks((0, 0, OPEN), (1, 1_000, OPEN))
    assert [("overran", "a", 17_000)] == told(scene(seen), 1, 1_000, 22_000)


def test_what_came_after_the_end_of_the_late_task_is_no_cause_of_it() -> None:
    seen = tasks((0, 0, 15_000), (1, 1_000, 21_100), (2, 2_000, 40_000), containers=3)
    assert [("overran", "a", 10_000), ("itself", "b", 1_100)] == told(scene(seen), 1, 1_000, 21_100)


def test_an_overrun_before_the_device_was_last_idle_is_no_cause() -> None:
    seen = tasks((0, 0, 9_000), (1, 10_000, 40_000))
    assert [("itself", "b", 25_000)] == told(scene(seen), 1, 10_000, 40_000)


def test_a_margin_that_the_gate_grants_is_no_overrun() -> None:
    seen = tasks((0, 0, 5_100), (1, 1_000, 10_200))
    (cause,) = causes(scene(seen), 1, 1_000, 10_200)
    assert (CauseKind.UNKNOWN, None) == (cause.cause, cause.container)
    assert cause.detail == "nobody was seen beyond what it declared; of the last 10.2 ms: a 5.1 ms, b 5.1 ms"


def test_a_container_that_begins_tasks_too_often_is_named_with_what_they_cost() -> None:
    early = [(0, 4_000 * k, 4_000 * k + 4_000) for k in range(5)]
    seen = tasks(*early, (1, 100, 24_000))
    assert [("too_often", "a", 16_000)] == told(scene(seen), 1, 100, 24_000)


def test_a_new_neighbour_that_kept_to_what_it_declared_is_named_after_all_that_broke_something() -> None:
    seen = tasks((0, 0, 5_000), (1, 0, 17_000), (2, 0, 22_000), containers=3)
    assert [("overran", "b", 7_000), ("arrived", "a", 5_000)] == told(scene(seen, a=0), 2, 0, 22_000)
    assert [("overran", "b", 7_000)] == told(scene(seen, a=-2_000_000), 2, 0, 22_000)


def test_a_device_that_is_slower_for_all_is_named_before_those_whose_tasks_took_longer() -> None:
    slow = [(k % 2, 7_000 * k, 7_000 * (k + 1)) for k in range(6)]
    first = told(scene(tasks(*slow)), 1, 35_000, 42_000)[0]
    assert ("throttled", None, 12_000) == first


def test_a_device_that_is_ill_is_a_cause_with_its_reason() -> None:
    (cause, *_) = causes(scene(tasks((0, 0, 4_000), (1, 0, 22_000)), trouble="gate_down"), 1, 0, 22_000)
    assert ("throttled", "gate_down") == (cause.cause, cause.detail)


def test_a_container_that_declared_no_runtime_cannot_break_it() -> None:
    seen = tasks((0, 0, 18_000), (1, 1_000, 22_000))
    look = Scene(GATED, (Resident("a", None), Resident("b", declared("b"))), seen)
    assert [("unknown", None, None)] == told(look, 1, 1_000, 22_000)


def test_on_a_device_used_at_once_nobody_is_accused_before_slowdowns_are_known() -> None:
    look = scene(tasks((0, 0, 18_000), (1, 1_000, 22_000)), Sharing(Regime.MPS))
    (cause,) = causes(look, 1, 1_000, 22_000)
    assert (CauseKind.UNKNOWN, "too few tasks were seen to tell what its neighbours take from it") == (
        cause.cause,
        cause.detail,
    )

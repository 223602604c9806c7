"""The newest response times of a container stand in its record, so that others can learn from them."""

from __future__ import annotations

from services.deadline_tracker.timing import NEWEST, Timing
from shared.messages import ContainerRecord, NodeDeadlines, TaskEventKind
from tests.tracker_server import led, tracker
from tests.unit.test_tracker_core import D, Told, row

BEGIN, END, OVERDUE, ABORTED, *_ = TaskEventKind


def record(saved: bytes) -> ContainerRecord:
    return NodeDeadlines.trusted(saved).containers[0]


def test_tasks_that_ended_are_timed_late_ones_too() -> None:
    told = Told()
    told.hear(row(BEGIN, 1, stamp_us=5), row(END, 2, 1, stamp_us=35))
    told.hear(row(BEGIN, 3, stamp_us=0), row(OVERDUE, 3), row(END, 4, 3, stamp_us=D + 9))
    assert (2, (30, D + 9)) == (record(found := told.saved()).timed, record(found).newest_us)


def test_a_task_that_was_overdue_and_aborted_never_ended_and_one_that_was_only_aborted_tells_nothing() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(OVERDUE, 1), row(ABORTED, 1), row(BEGIN, 2), row(ABORTED, 2))
    assert (1, (None,)) == (record(found := told.saved()).timed, record(found).newest_us)


def test_an_end_before_its_begin_is_not_timed() -> None:
    told = Told()
    told.hear(row(BEGIN, 1, stamp_us=50), row(END, 2, 1, stamp_us=10))
    assert 0 == record(told.saved()).timed


def test_the_newest_are_kept_and_all_are_counted() -> None:
    timing = Timing()
    for response_us in range(100):
        timing.add(response_us)
    assert (100, tuple(range(100 - NEWEST, 100))) == (timing.count, timing.newest_us)
    again = Timing.load(timing.dump())
    assert (timing.count, timing.newest_us) == (again.count, again.newest_us)


def test_a_restart_goes_on_counting() -> None:
    told, again = Told(), Told()
    told.hear(row(BEGIN, 1, stamp_us=5), row(END, 2, 1, stamp_us=35))
    again.core = led(tracker(), told.saved()).core
    again.hear(row(BEGIN, 3, stamp_us=0), row(END, 4, 3, stamp_us=7), seq=2)
    assert (2, (30, 7)) == (record(found := again.saved()).timed, record(found).newest_us)

"""What a record keeps of (m,k), what a batch matched in arrays, and which clocks take part."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from services.deadline_tracker.judging import MOST_MET
from services.deadline_tracker.matched import Matched, TaskVerdict
from services.deadline_tracker.record import Record, Ring
from shared.deadlines import SlidingWindow
from shared.effects import Publish, Received, Tick
from shared.messages import DeadlineEvent, NodeDeadlines, TaskEventKind
from tests.tracker_server import lead, tracker
from tests.unit.test_tracker_core import D, Told, batch, row

BEGIN, END, OVERDUE, *_ = TaskEventKind
DAY_US = 86_400_000_000


class Firm(Told):
    """Of one container that declared (m,k)."""

    def __init__(self, m: int, k: int) -> None:
        super().__init__()
        self.window, self.tasks = (m, k), 0

    def run(self, outcomes: str, guarantee: float = 0.9) -> None:
        """Tasks one after another: + met, - missed."""
        rows: list[tuple[int, ...]] = []
        for outcome in outcomes:
            begin = 2 * self.tasks + 1
            rows += [row(BEGIN, begin), row(END, begin + 1, begin, stamp_us=D + (outcome == "-"))]
            self.tasks += 1
        self.seq += 1
        told = batch(rows, window=self.window, guarantee=guarantee)
        self.effects += self.core.handle(Received("rt.events.task.n1", told, seq=self.seq), 0)
        self.core.check()

    @property
    def said(self) -> list[tuple[str, int, int | None]]:
        bodies = [e.body for e in self.effects if isinstance(e, Publish) and isinstance(e.body, DeadlineEvent)]
        return [(body.kind, body.judged, body.distance_to_failure) for body in bodies if body.kind != "missed"]


def test_a_container_that_misses_more_than_m_of_k_allows_is_at_risk_whatever_its_ratio() -> None:
    firm = Firm(9, 10)
    firm.run("+" * 400 + "-")
    assert [] == firm.said
    firm.run("-")
    assert [("at_risk", 402, 0)] == firm.said


def test_it_recovers_when_enough_of_the_last_k_are_met_again() -> None:
    firm = Firm(9, 10)
    firm.run("+" * 400 + "--" + "+" * 30)
    assert [("at_risk", 402, 0), ("recovered", 411, 2)] == firm.said


def test_a_record_at_risk_by_its_ratio_does_not_recover_while_m_of_k_is_violated() -> None:
    firm = Firm(60, 60)
    firm.run("-" * 9 + "+" * 230)
    (at_risk, recovered) = firm.said
    assert ("at_risk", 1, 0) == at_risk
    assert recovered[0] == "recovered"
    assert recovered[1] > 69


def test_a_record_for_which_more_is_asked_is_held_against_that_at_the_next_task_met_or_not() -> None:
    firm = Firm(1, 10)
    firm.run("++++++----", guarantee=0.5)
    assert [] == firm.said
    firm.run("++", guarantee=0.9)
    assert [("at_risk", 11, 10)] == firm.said


def test_m_of_k_and_the_distance_to_failing_it_are_published() -> None:
    firm = Firm(8, 10)
    firm.run("+-+")
    declared, other = NodeDeadlines.trusted(firm.saved()).containers
    assert ((8, 10), 2) == (declared.m_of_k, declared.distance_to_failure)
    assert (None, None) == (other.m_of_k, other.distance_to_failure)


def test_a_restarted_tracker_knows_how_far_from_failing_a_container_was() -> None:
    firm = Firm(9, 10)
    firm.run("+" * 400 + "-")
    again = Firm(9, 10)
    again.core = tracker()
    lead(again.core, firm.saved())
    again.tasks, again.seq = firm.tasks, firm.seq
    again.run("-")
    assert [("at_risk", 402, 0)] == again.said


@pytest.mark.parametrize("window", [(0, 10), (11, 10), (1, 10_001)])
def test_an_m_of_k_that_cannot_be_is_as_if_none_was_declared(window: tuple[int, int]) -> None:
    firm = Firm(*window)
    firm.run("--")
    assert None is firm.core.nodes["n1"].records["c0"].constraint


def test_a_task_that_still_runs_has_no_end_among_what_a_batch_matched() -> None:
    ring = Ring("r0", Record("c0", 0.9, SlidingWindow(10)))
    met, runs = (7, 5, D, "infer"), (8, 10, D, "infer")
    matched = Matched([ring], [(0, 1, met, 9, TaskVerdict.MET), (0, 3, runs, None, TaskVerdict.OVERDUE)])
    assert [("r0", 1, 5, 9, D), ("r0", 3, 10, None, D)] == matched.tasks()


def test_met_tasks_that_nobody_asks_about_do_not_pile_up_and_each_is_counted() -> None:
    core, waiting = tracker(), list[int]()
    lead(core)
    for seq in range(1, 3 * MOST_MET):
        rows = [row(BEGIN, 2 * seq - 1), row(END, 2 * seq, 2 * seq - 1, stamp_us=5)]
        core.handle(Received("rt.events.task.n1", batch(rows), seq=seq), 0)
        waiting.append(len(core.nodes["n1"].records["c0"].met_us))
    record = core.nodes["n1"].records["c0"]
    assert max(waiting) == MOST_MET
    assert (3 * MOST_MET - 1,) * 2 == (record.counts["met"], record.times.count)


def _said_with(wall_us: Iterable[int]) -> list[DeadlineEvent]:
    """What is said, and the record at the end, while the wall clocks of monitor and tracker go as they like."""
    core, said = tracker(), list[DeadlineEvent]()
    lead(core)
    for seq, at_us in enumerate(wall_us, 1):
        core.handle(Tick("checkpoint", at_us), seq * 1_000_000)
        late = D + 1 if seq % 3 else 5
        rows = [row(BEGIN, 2 * seq - 1), row(END, 2 * seq, 2 * seq - 1, stamp_us=late)]
        told = batch(rows).model_copy(update={"at_us": at_us})
        for effect in core.handle(Received("rt.events.task.n1", told, seq=seq), seq * 1_000_000):
            if isinstance(effect, Publish) and isinstance(effect.body, DeadlineEvent):
                said.append(effect.body.model_copy(update={"at_us": 0}))
    return said


def test_steps_of_the_wall_clock_by_a_day_change_no_verdict() -> None:
    steady = [10**15 + 10**6 * n for n in range(40)]
    stepped = [at_us + DAY_US * (0, 1, -1)[n // 7 % 3] for n, at_us in enumerate(steady)]
    said = _said_with(steady)
    assert said == _said_with(stepped)
    assert {"missed", "at_risk"} == {event.kind for event in said}

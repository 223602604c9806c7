"""The gate's arbiter in virtual time: whose turn it is, and what becomes of who stays too long."""

from __future__ import annotations

import pytest

from services.monitor.gate.core import (
    Arbiter,
    Asked,
    Effect,
    End,
    Event,
    Gone,
    Grant,
    Inside,
    Joined,
    Left,
    Looked,
    Opened,
    Overran,
    Owed,
    Released,
    Spared,
    Standing,
    Terms,
    Watch,
)

GPU = "GPU-0"
MARGIN_US = 100


class Gate:
    """An arbiter with its clock. Clients are named by one letter; each is a container of its own unless said."""

    def __init__(self, *, end: bool = False, opened: bool = True) -> None:
        self.arbiter = Arbiter(MARGIN_US, end_overruns=end)
        self.now_us = 0
        self.numbers: dict[str, int] = {}
        self.opened = opened
        self.owed: dict[str, Owed] = {}

    def do(self, event: Event) -> list[Effect]:
        """What is to be kept is kept, and the rest returned."""
        effects = self.arbiter.handle(event, self.now_us)
        self.arbiter.check()
        self.owed |= {effect.container: effect for effect in effects if isinstance(effect, Owed)}
        return [effect for effect in effects if not isinstance(effect, Owed)]

    def restart(self) -> list[Effect]:
        """Another arbiter, which knows what was kept; what it says of that."""
        self.arbiter = Arbiter(MARGIN_US, end_overruns=False)
        self.numbers.clear()
        return [effect for owed in self.owed.values() for effect in self.do(owed)]

    def join(self, name: str, runtime_us: int = 1_000, deadline_us: int = 10_000, **more: object) -> None:
        number = self.numbers[name] = len(self.numbers) + 1
        given: dict[str, object] = {"container": name, "device": GPU, "period_us": deadline_us, **more}
        terms = Terms(runtime_us=runtime_us, deadline_us=deadline_us, **given)  # type: ignore[arg-type]
        watched = self.do(Joined(number, terms))
        if watched and self.opened:
            assert [Watch(terms.device)] == watched
            self.do(Opened(terms.device))

    def ask(self, name: str, left_us: int = 0) -> str:
        return self.said(self.do(Asked(self.numbers[name], left_us)))

    def release(self, name: str) -> str:
        return self.said(self.do(Released(self.numbers[name])))

    def said(self, effects: list[Effect]) -> str:
        """Who was let in."""
        names = {number: name for name, number in self.numbers.items()}
        return "".join(names[effect.client] for effect in effects if isinstance(effect, Grant))

    def look(self, at_us: int) -> list[Effect]:
        self.now_us = at_us
        return self.do(Looked())


def test_a_free_device_is_given_at_once() -> None:
    gate = Gate()
    gate.join("a")
    assert "a" == gate.ask("a")
    assert ["GPU-0: a since 0 us, until at most 1100 us"] == gate.arbiter.story("a")


def test_the_earliest_deadline_is_next_whoever_came_first() -> None:
    gate = Gate()
    for name, deadline_us in (("a", 10_000), ("b", 50_000), ("c", 20_000), ("d", 20_000)):
        gate.join(name, deadline_us=deadline_us)
    assert "a" == gate.ask("a")
    assert ["", "", ""] == [gate.ask(name) for name in "bcd"]
    assert ["c", "d", "b", ""] == [gate.release(name) for name in "acdb"]


def test_a_holder_is_not_preempted() -> None:
    gate = Gate()
    gate.join("long", runtime_us=9_000, deadline_us=90_000)
    gate.join("short", deadline_us=2_000)
    assert "long" == gate.ask("long")
    gate.now_us = 10
    assert "" == gate.ask("short")
    assert "short" == gate.release("long")


def test_an_asked_deadline_counts_where_it_is_later_than_the_declared_one_and_else_does_not() -> None:
    gate = Gate()
    for name in "abc":
        gate.join(name, deadline_us=10_000)
    assert "a" == gate.ask("a")
    gate.ask("b", left_us=11_000)
    gate.ask("c", left_us=1)
    assert ["c", "b"] == [gate.release("a"), gate.release("c")]


def test_each_device_has_its_own_turn() -> None:
    gate = Gate()
    gate.join("a")
    gate.join("b", device="GPU-1")
    assert ["a", "b"] == [gate.ask("a"), gate.ask("b")]


def test_nobody_is_let_in_before_the_device_is_known_to_be_free() -> None:
    gate = Gate(opened=False)
    gate.join("a")
    assert "" == gate.ask("a")
    assert gate.arbiter.due_us is None
    assert "a" == gate.said(gate.do(Opened(GPU)))


def test_the_death_of_a_holder_frees_its_device_once_nobody_is_on_it() -> None:
    gate = Gate()
    gate.join("a")
    gate.join("b")
    gate.ask("a")
    gate.ask("b")
    assert [Watch(GPU)] == gate.do(Left(gate.numbers["a"]))
    assert "b" == gate.said(gate.do(Opened(GPU)))


def test_who_dies_while_it_waits_is_forgotten() -> None:
    gate = Gate()
    for name in "abc":
        gate.join(name)
    gate.ask("a")
    gate.ask("b")
    gate.ask("c")
    assert [] == gate.do(Left(gate.numbers["b"]))
    assert "c" == gate.release("a")


def test_who_asks_twice_or_is_unknown_is_not_heard() -> None:
    gate = Gate()
    gate.join("a")
    gate.join("b")
    gate.ask("a")
    gate.ask("b")
    assert ["", ""] == [gate.ask("a"), gate.ask("b")]
    assert [] == gate.do(Asked(99, 0))
    assert [] == gate.do(Released(99))
    assert ["b", ""] == [gate.release("a"), gate.release("b")]


def test_best_effort_is_let_in_only_when_no_real_time_task_waits() -> None:
    gate = Gate()
    gate.join("soft", deadline_us=1, best_effort=True)
    gate.join("a", deadline_us=10_000)
    gate.join("b", deadline_us=90_000)
    gate.ask("a")
    gate.ask("soft")
    gate.ask("b")
    assert ["b", "soft"] == [gate.release("a"), gate.release("b")]


def test_who_comes_more_often_than_declared_is_ordered_as_if_it_had_not() -> None:
    gate = Gate()
    gate.join("eager", deadline_us=10_000)
    gate.join("other", deadline_us=15_000)
    gate.join("holder")
    gate.ask("eager")
    gate.release("eager")
    gate.ask("holder")
    gate.ask("eager")  # due at 20 ms: it should not have come before 10 ms
    gate.ask("other")
    assert ["other", "eager"] == [gate.release("holder"), gate.release("other")]


def test_a_turn_may_last_the_runtime_and_the_margin() -> None:
    gate = Gate()
    gate.join("a", runtime_us=1_000)
    gate.ask("a")
    assert 1_101 == gate.arbiter.due_us
    assert [] == gate.look(1_100)
    assert [] == gate.do(Released(gate.numbers["a"]))


def test_an_overrun_takes_the_guarantees_of_the_device_and_names_who_and_whose() -> None:
    gate = Gate()
    for name in ("culprit", "waiting", "idle"):
        gate.join(name)
    gate.ask("culprit")
    gate.ask("waiting")
    lost = Standing(GPU, gated=False, culprit="culprit", neighbours=("idle", "waiting"))
    assert [Overran(GPU, "culprit", 1_101, 1_000, ("waiting",), over=False), lost] == gate.look(1_101)
    assert [] == gate.look(5_000)


def test_nobody_is_let_in_beside_a_holder_that_overruns() -> None:
    gate = Gate()
    gate.join("culprit")
    gate.join("other")
    gate.ask("culprit")
    gate.look(1_101)
    assert "" == gate.ask("other")
    gate.now_us = 1_500
    effects = gate.do(Released(gate.numbers["culprit"]))
    assert [Overran(GPU, "culprit", 1_500, 1_000, ("other",), over=True), Grant(gate.numbers["other"])] == effects


def test_an_overrun_that_ended_before_anybody_looked_is_one_all_the_same() -> None:
    gate = Gate()
    gate.join("a")
    gate.ask("a")
    gate.now_us = 1_101
    overran, lost = gate.do(Released(gate.numbers["a"]))
    assert isinstance(overran, Overran)
    assert isinstance(lost, Standing)


def test_after_an_overrun_its_own_tasks_wait_until_its_bandwidth_has_paid_for_it() -> None:
    gate = Gate()
    gate.join("culprit", runtime_us=1_000, period_us=10_000, deadline_us=10_000)
    gate.join("other")
    gate.ask("culprit")
    gate.now_us = 2_500  # 2.5 runtimes: 2.5 periods
    gate.release("culprit")
    assert "" == gate.ask("culprit")
    assert "other" == gate.ask("other")
    assert "" == gate.release("other")
    assert 25_000 == gate.arbiter.due_us
    assert "" == gate.said(gate.look(24_999))
    assert "culprit" == gate.said(gate.look(25_000))


def test_another_thread_of_the_culprit_waits_with_it() -> None:
    gate = Gate()
    gate.join("a", container="culprit")
    gate.join("b", container="culprit")
    gate.ask("a")
    gate.ask("b")
    gate.now_us = 1_500
    assert "" == gate.release("a")


def test_a_node_may_have_who_overruns_ended_and_keeps_its_guarantees() -> None:
    gate = Gate(end=True)
    gate.join("culprit")
    gate.join("other")
    gate.ask("culprit")
    gate.ask("other")
    assert [Overran(GPU, "culprit", 1_101, 1_000, ("other",), over=False), End(1)] == gate.look(1_101)
    assert [Overran(GPU, "culprit", 1_101, 1_000, ("other",), over=True), Watch(GPU)] == gate.do(Left(1))
    assert "other" == gate.said(gate.do(Opened(GPU)))


def test_who_was_to_be_ended_and_could_not_be_costs_the_device_its_guarantees() -> None:
    gate = Gate(end=True)
    gate.join("culprit")
    gate.join("other")
    gate.ask("culprit")
    gate.look(1_101)
    assert [Standing(GPU, gated=False, culprit="culprit", neighbours=("other",))] == gate.do(Spared(1))
    assert "" == gate.ask("other")


@pytest.mark.parametrize("end", [False, True])
def test_best_effort_that_overruns_is_ended_on_any_node(end: bool) -> None:
    gate = Gate(end=end)
    gate.join("soft", best_effort=True)
    gate.ask("soft")
    assert [Overran(GPU, "soft", 1_101, 1_000, (), over=False), End(1)] == gate.look(1_101)


def test_the_guarantees_are_back_when_every_culprit_is_gone() -> None:
    gate = Gate()
    for name in "ab":
        gate.join(name)
        gate.ask(name)
        gate.look(gate.now_us + 1_101)
        gate.release(name)
    assert [] == gate.do(Gone("a"))
    assert [Standing(GPU, gated=True, culprit="b", neighbours=())] == gate.do(Gone("b"))


def test_after_a_restart_the_culprits_tasks_wait_as_long_as_before() -> None:
    gate = Gate()
    gate.join("culprit", runtime_us=1_000, period_us=10_000, deadline_us=10_000)
    gate.ask("culprit")
    gate.now_us = 2_500
    gate.release("culprit")
    gate.restart()
    gate.do(Opened(GPU))
    gate.join("culprit", runtime_us=1_000, period_us=10_000, deadline_us=10_000)
    assert "" == gate.ask("culprit")
    assert 25_000 == gate.arbiter.due_us
    assert "culprit" == gate.said(gate.look(25_000))


def test_after_a_restart_a_device_stays_without_guarantees_until_the_culprit_is_gone() -> None:
    gate = Gate()
    for name in ("culprit", "idle"):
        gate.join(name)
    gate.ask("culprit")
    gate.look(1_101)
    lost = Standing(GPU, gated=False, culprit="culprit", neighbours=("idle",))
    assert [Watch(GPU), Overran(GPU, "culprit", 1_101, 1_000, (), over=False), lost] == gate.restart()
    assert [Standing(GPU, gated=True, culprit="culprit", neighbours=())] == gate.do(Gone("culprit"))


def test_a_node_that_ends_overruns_remembers_only_how_long_they_wait() -> None:
    gate = Gate(end=True)
    gate.join("culprit", runtime_us=1_000, period_us=10_000, deadline_us=10_000)
    gate.ask("culprit")
    gate.look(1_101)
    gate.do(Left(1))
    assert [Watch(GPU)] == gate.restart()
    gate.do(Opened(GPU))
    gate.join("culprit")
    assert "" == gate.ask("culprit")
    assert 11_010 == gate.arbiter.due_us


def test_who_was_let_in_before_a_restart_is_judged_by_when_that_was() -> None:
    gate = Gate()
    gate.join("inside", runtime_us=1_000)
    gate.ask("inside")
    gate.now_us = 600
    gate.restart()
    gate.opened = False
    gate.join("inside", runtime_us=1_000)
    assert [] == gate.do(Inside(gate.numbers["inside"], since_us=0))
    gate.join("other")
    assert "" == gate.ask("other")
    assert 1_101 == gate.arbiter.due_us
    seen, lost = gate.look(1_101)
    assert Overran(GPU, "inside", 1_101, 1_000, ("other",), over=False) == seen
    assert isinstance(lost, Standing)
    assert [Overran(GPU, "inside", 1_101, 1_000, ("other",), over=True), Watch(GPU)] == gate.do(Left(1))
    assert "other" == gate.said(gate.do(Opened(GPU)))


def test_the_story_tells_who_has_a_device_and_who_waits_for_it() -> None:
    gate = Gate()
    gate.join("a")
    gate.join("b")
    gate.ask("a")
    gate.ask("b")
    assert [
        "GPU-0: a since 0 us, until at most 1100 us",
        "GPU-0: b waits, due at 10000 us, not before 0 us",
    ] == gate.arbiter.story(GPU)
    assert gate.arbiter.story(GPU)[1:] == gate.arbiter.story("b")

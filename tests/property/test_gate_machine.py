"""Random lives at a gate, in virtual time: one at a time, by deadline, and no turn is lost when anybody dies.

Also the gate: the next one knows who is inside, who has to wait for what it overran, and which device promises nothing.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.monitor.gate.core import (
    Arbiter,
    Asked,
    End,
    Event,
    Gone,
    Grant,
    Inside,
    Joined,
    Left,
    Looked,
    Opened,
    Owed,
    Released,
    Spared,
    Standing,
    Terms,
    Watch,
)
from shared.admission import RtTask, Sharing, gated_linear
from shared.messages import Regime

GPUS = ("GPU-0", "GPU-1")
MARGIN_US = 5
MOST = 12


class Gate(RuleBasedStateMachine):
    """What the outside knows of the gate: who asked for what and when, who was let in, who is on which device."""

    @initialize(end=st.booleans())
    def begin(self, end: bool) -> None:
        self.end = end
        self.arbiter = Arbiter(MARGIN_US, end_overruns=end)
        self.kept: dict[str, Owed] = {}
        self.lost: set[str] = set()
        self.inside: set[int] = set()
        """Who is on a device since before a restart: it has no connection."""
        self.now_us = 0
        self.terms: dict[int, Terms] = {}
        self.waiting: dict[int, int] = {}
        """Since when each client waits."""
        self.on: dict[str, set[int]] = {gpu: set() for gpu in GPUS}
        """Who is on a device: a client that left may still be there for a while."""
        self.holding: dict[int, int] = {}
        self.watched: set[str] = set()
        self.joined = 0
        for container in range(3):
            self.join(GPUS[0], 2, 10, 10, best_effort=False, container=container)

    def feed(self, event: Event) -> None:
        todo = deque(self.arbiter.handle(event, self.now_us))
        while todo:
            match todo.popleft():
                case Grant(client):
                    self.let_in(client)
                case Watch(device):
                    self.watched.add(device)
                case End(client):
                    assert client in self.holding
                    todo += self.arbiter.handle(Spared(client), self.now_us)
                case Owed() as owed:
                    self.kept[owed.container] = owed
                case Standing(device, gated):
                    (self.lost.discard if gated else self.lost.add)(device)
        for device in sorted(self.watched):
            if not self.on[device]:
                self.watched.discard(device)
                self.feed(Opened(device))

    def let_in(self, client: int) -> None:
        device = self.terms[client].device
        assert set() == self.on[device], "two at once"
        assert client in self.waiting, "let in without having asked"
        owed = self.kept.get(self.terms[client].container)
        assert owed is None or owed.until_us <= self.now_us, "let in although it has to wait for what it overran"
        self.waiting.pop(client)
        self.on[device].add(client)
        self.holding[client] = self.now_us

    @precondition(lambda self: self.joined < MOST)
    @rule(
        gpu=st.sampled_from(GPUS),
        runtime_us=st.integers(1, 20),
        period_us=st.integers(1, 60),
        deadline_us=st.integers(1, 60),
        best_effort=st.booleans(),
        container=st.integers(0, 3),
    )
    def join(
        self, gpu: str, runtime_us: int, period_us: int, deadline_us: int, best_effort: bool, container: int
    ) -> None:
        self.joined += 1
        self.terms[self.joined] = Terms(f"{gpu}/{container}", gpu, runtime_us, period_us, deadline_us, best_effort)
        self.feed(Joined(self.joined, self.terms[self.joined]))

    @precondition(lambda self: self.kept or self.holding)
    @rule()
    def restart(self) -> None:
        """Whoever waits comes again, and who is inside is known."""
        lost, self.lost = self.lost, set()
        self.arbiter = Arbiter(MARGIN_US, end_overruns=self.end)
        self.waiting.clear()
        self.watched.clear()
        for owed in self.kept.values():
            self.feed(owed)
        assert lost == self.lost
        self.inside = set(self.holding)
        for client in sorted(self.inside):
            self.feed(Joined(client, self.terms[client]))
            self.feed(Inside(client, self.holding[client]))
        for client in sorted(self.terms.keys() - self.inside):
            self.feed(Joined(client, self.terms[client]))

    @precondition(lambda self: self.terms.keys() - self.inside)
    @rule(data=st.data(), left_us=st.integers(0, 80))
    def ask(self, data: st.DataObject, left_us: int) -> None:
        client = data.draw(st.sampled_from(sorted(self.terms.keys() - self.inside)))
        if client not in self.waiting and client not in self.holding:
            self.waiting[client] = self.now_us
        self.feed(Asked(client, left_us))

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(sorted(self.holding)))
        del self.holding[client]
        self.on[self.terms[client].device].discard(client)
        if client in self.inside:
            self.leave(client)
        else:
            self.feed(Released(client))

    @precondition(lambda self: self.terms)
    @rule(data=st.data(), lingers=st.booleans())
    def die(self, data: st.DataObject, lingers: bool) -> None:
        """At any point; its connection may be gone before it is."""
        client = data.draw(st.sampled_from(sorted(self.terms)))
        device = self.terms[client].device
        held = self.holding.pop(client, None)
        if held is not None and (client in self.inside or not lingers):
            self.on[device].discard(client)
        self.waiting.pop(client, None)
        self.leave(client)

    def leave(self, client: int) -> None:
        self.inside.discard(client)
        self.feed(Left(client))
        del self.terms[client]

    @precondition(lambda self: any(self.on.values()))
    @rule()
    def the_dead_are_off(self) -> None:
        for device in GPUS:
            self.on[device] &= set(self.holding)
            if device in self.watched and not self.on[device]:
                self.watched.discard(device)
                self.feed(Opened(device))

    @rule(container=st.integers(0, 3), gpu=st.sampled_from(GPUS))
    def a_container_is_gone(self, container: int, gpu: str) -> None:
        name = f"{gpu}/{container}"
        for client in [client for client, terms in self.terms.items() if terms.container == name]:
            self.waiting.pop(client, None)
            if self.holding.pop(client, None) is not None:
                self.on[gpu].discard(client)
            self.leave(client)
        self.kept.pop(name, None)
        self.feed(Gone(name))

    @rule(passed_us=st.integers(0, 200))
    def time_passes(self, passed_us: int) -> None:
        """As in the shell: whatever is due is looked at when it is."""
        until_us = self.now_us + passed_us
        while (due_us := self.arbiter.due_us) is not None and due_us <= until_us:
            self.now_us = max(self.now_us, due_us)
            self.feed(Looked())
        self.now_us = until_us

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "arbiter"):
            return
        self.arbiter.check()
        for device in GPUS:
            assert len(self.on[device]) <= 1
            waits = [client for client in self.waiting if self.terms[client].device == device]
            if waits and not self.on[device]:
                due_us = self.arbiter.due_us
                assert due_us is not None, "a turn is lost"


TestGate = Gate.TestCase
TestGate.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 12)), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_those_who_wait_are_let_in_by_deadline_and_best_effort_last(
    waiting: list[tuple[int, bool, int]],
) -> None:
    arbiter = Arbiter(MARGIN_US, end_overruns=False)
    arbiter.handle(Joined(0, Terms("holder", GPUS[0], 1, 1, 1)), 0)
    arbiter.handle(Opened(GPUS[0]), 0)
    arbiter.handle(Asked(0, 0), 0)
    for client, (deadline_us, best_effort, left_us) in enumerate(waiting, 1):
        arbiter.handle(Joined(client, Terms(f"c{client}", GPUS[0], 1, 1, deadline_us, best_effort)), 0)
        assert [] == arbiter.handle(Asked(client, left_us), 0)
    order = [0]
    for _ in waiting:
        (grant,) = arbiter.handle(Released(order[-1]), 0)
        assert isinstance(grant, Grant)
        order.append(grant.client)
    due = {client: (soft, max(declared, left)) for client, (declared, soft, left) in enumerate(waiting, 1)}
    assert [0, *sorted(due, key=lambda client: (*due[client], client))] == order


@st.composite
def sets(draw: st.DrawFn) -> list[RtTask]:
    count = draw(st.integers(1, 4))
    kinds = st.tuples(st.integers(1, 6), st.integers(4, 40), st.integers(4, 40))
    return [RtTask(f"t{n}", c, t, d, gate=True) for n, (c, t, d) in enumerate(draw(kinds) for _ in range(count))]


@given(sets(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_set_that_the_test_admits_never_misses_at_the_gate(tasks: list[RtTask], data: st.DataObject) -> None:
    while not gated_linear(tasks, Sharing(Regime.GATED)).admitted:
        tasks = tasks[:-1]
    coming: list[tuple[int, int, int]] = []
    for client, task in enumerate(tasks, 1):
        at_us = data.draw(st.integers(0, 20))
        while at_us < 200:
            heappush(coming, (at_us, client, at_us + task.deadline_us))
            at_us += task.period_us + data.draw(st.sampled_from([0, 0, 1, 7]))
    late = play(tasks, coming)
    assert [] == late


def play(tasks: list[RtTask], coming: list[tuple[int, int, int]]) -> list[str]:
    """Who ended too late, each task running for its whole runtime, and each by a thread of its own."""
    arbiter = Arbiter(0, end_overruns=False)
    clients: dict[int, tuple[int, int]] = {}
    ends: list[tuple[int, int]] = []
    late: list[str] = []
    joined = 0

    def perform(effects: list[object], now_us: int) -> None:
        for effect in effects:
            if isinstance(effect, Grant):
                heappush(ends, (now_us + tasks[clients[effect.client][0] - 1].runtime_us, effect.client))

    while coming or ends:
        if ends and (not coming or ends[0][0] < coming[0][0]):
            now_us, client = heappop(ends)
            number, due_us = clients[client]
            late += [tasks[number - 1].name] if now_us > due_us else []
            perform([*arbiter.handle(Released(client), now_us)], now_us)
            continue
        now_us, number, due_us = heappop(coming)
        joined += 1
        clients[joined] = (number, due_us)
        task = tasks[number - 1]
        terms = Terms(task.name, GPUS[0], task.runtime_us, task.period_us, task.deadline_us)
        if arbiter.handle(Joined(joined, terms), now_us):
            perform([*arbiter.handle(Opened(GPUS[0]), now_us)], now_us)
        perform([*arbiter.handle(Asked(joined, task.deadline_us), now_us)], now_us)
    return late

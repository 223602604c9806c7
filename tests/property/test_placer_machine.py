"""Several placers over one ledger, with every delay, loss, repeat and death that hypothesis can think of.

After every step each core's check() and the world's are called: nothing over-committed, nothing started twice, a
final state is final, one reply at most. In the end, once everything had time, what runs is what the ledger says, every
step was told, and no request that was taken is lost.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.placer.core.cluster import Cluster
from services.placer.core.intents import Rules
from shared.effects import Commit, Disconnected, Received, Reconnected, Tick
from shared.messages import (
    ConfirmRequest,
    DefragmentRequest,
    GoneRequest,
    NodeState,
    PlaceRequest,
    ReleaseRequest,
    ResizeRequest,
    State,
)
from tests.placer_world import SECOND, WALL, World, request

pytestmark = pytest.mark.timeout(240)  # a quarter of a minute alone, several beside others

MOST_PLACERS = 3
IDS = st.sampled_from(["a", "b", "c", "d", "e", "f"])
BODIES: tuple[dict[str, Any], ...] = (
    {},
    {"queue": True},
    {"queue": True, "gpu": {"share": 1}, "priority": 1},
    {"queue": True, "restart": "on_failure"},
    {"queue": True, "replicas": 3},
    {"hold_us": 5 * SECOND},
    {"hold_us": 5 * SECOND, "queue": True},
    {"gpu": {"count": 2}, "queue": True},
    {"gpu": None, "cpu_milli": 20_000, "memory_mib": 1_024, "queue": True, "restart": "on_failure"},
    {"gpu": None, "cpu_milli": 10_000, "memory_mib": 1_024, "queue": True, "replicas": 2},
    {"strategy": "spread", "restart": "on_failure"},
)
WHOLE, SPREAD = 2, 10
SEEN_NUMBER = st.integers(0, 1_000)


def counted(cluster: Cluster) -> dict[str, list[int]]:
    slots = {name: cluster.slot(name) for name in ("n1", "n2")}
    return {name: cluster.nodes["held"][slot].tolist() for name, slot in slots.items() if slot is not None}


def counted_anew(cluster: Cluster) -> dict[str, list[int]]:
    """What one reservation after another has left, from all of them at once."""
    fresh = Cluster()
    for name in ("n1", "n2"):
        fresh.set_facts(name, cluster.facts(name), 0)
        fresh.set_reservations(name, cluster.reservations(name))
    for request_id, kept in cluster._shadows.items():
        fresh.set_shadow(request_id, kept)
    return counted(fresh)


class PlacersMachine(RuleBasedStateMachine):
    """Requests by id always have the body that belongs to the id and the variant: a repeat is a repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.copies: dict[int, PlaceRequest] = {}
        self.cut_off: set[str] = set()

    @initialize(
        placers=st.integers(1, MOST_PLACERS),
        defragment=st.sampled_from(["off", "waiting", "widen"]),
        fragmented=st.sampled_from([None, 0, 2]),
        glances=st.booleans(),
    )
    def begin(self, placers: int, defragment: Literal["off", "waiting"], fragmented: int | None, glances: bool) -> None:
        self.world.rules = Rules(
            defragment=defragment, moves_at_once=2, move_rest_us=5 * SECOND, lost_grace_us=SECOND, lost_most_ratio=1.0
        )
        if glances:
            self.world.look()
        self.world.add_node("n1", 2)
        self.world.add_node("n2", 1)
        for _ in range(placers):
            self.world.placer()
        self.world.pass_time(2)
        if fragmented is not None:
            self.fragment(fragmented)

    def fragment(self, failing: int) -> None:
        """Half of each device is free, and one that waits for a whole one asks for room; so many moves fail."""
        for request_id in ("a", "b", "c"):
            self.place(request_id, SPREAD, 0, 0)
            self.world.pass_time(1)
            self.world.generations_fail[f"{request_id}{SPREAD}"] = failing
        self.place("a", WHOLE, 0, 0)
        self.world.settle()
        self.defragment("a", WHOLE, 0)

    def pick(self, number: int) -> str:
        names = list(self.world.placers)
        return names[number % len(names)]

    # --- clients ---

    @rule(request_id=IDS, variant=st.integers(0, len(BODIES) - 1), to=SEEN_NUMBER, stored_to=SEEN_NUMBER)
    def place(self, request_id: str, variant: int, to: int, stored_to: int) -> None:
        """To one placer live, and the stored copy to any."""
        message = request(request_id=f"{request_id}{variant}", **BODIES[variant])
        self.world.ask(self.pick(to), message)
        self.copies[len(self.copies) + 1] = message
        self.deliver_copy(len(self.copies), stored_to)

    def deliver_copy(self, number: int, to: int) -> None:
        event = Received("rt.place", self.copies[number], seq=number, ack=number)
        self.world.tell(self.pick(to), event)

    @precondition(lambda self: self.copies)
    @rule(number=SEEN_NUMBER, to=SEEN_NUMBER)
    def copy_again(self, number: int, to: int) -> None:
        self.deliver_copy(number % len(self.copies) + 1, to)

    @rule(request_id=IDS, variant=st.integers(0, len(BODIES) - 1), to=SEEN_NUMBER)
    def release(self, request_id: str, variant: int, to: int) -> None:
        self.world.ask(self.pick(to), ReleaseRequest(request_id=f"{request_id}{variant}"))

    @rule(request_id=IDS, variant=st.sampled_from([5, 6]), to=SEEN_NUMBER, generation=st.integers(1, 2))
    def confirm(self, request_id: str, variant: int, to: int, generation: int) -> None:
        self.world.ask(self.pick(to), ConfirmRequest(request_id=f"{request_id}{variant}", generation=generation))

    @rule(
        request_id=IDS,
        variant=st.sampled_from([3, 5, 8, 9, 8, 9]),
        to=SEEN_NUMBER,
        cpu_milli=st.sampled_from([None, 1_000, 10_000, 30_000, 60_000]),
        memory_mib=st.sampled_from([512, 2_048]),
    )
    def resize(self, request_id: str, variant: int, to: int, cpu_milli: int | None, memory_mib: int) -> None:
        size = {"cpu_milli": cpu_milli, "memory_mib": memory_mib}
        self.world.ask(self.pick(to), ResizeRequest(request_id=f"{request_id}{variant}", **size))

    @rule(request_id=IDS, variant=st.sampled_from([WHOLE, 4, 7]), to=SEEN_NUMBER)
    def defragment(self, request_id: str, variant: int, to: int) -> None:
        self.world.ask(self.pick(to), DefragmentRequest(request_id=f"{request_id}{variant}"))

    @rule(most_mib=st.sampled_from([None, 1_024]))
    def engines_refuse(self, most_mib: int | None) -> None:
        self.world.most_memory_mib = most_mib

    @rule(node=st.sampled_from(["n1", "n2"]), silent=st.booleans())
    def engine_is_silent(self, node: str, silent: bool) -> None:
        (self.world.silent_nodes.add if silent else self.world.silent_nodes.discard)(node)

    @rule(node=st.sampled_from(["n1", "n2"]), lost=st.booleans(), silent=st.booleans())
    def node_is_lost(self, node: str, lost: bool, silent: bool) -> None:
        """Or back; with its engine or without."""
        state = NodeState.LOST if lost else NodeState.READY
        self.world.set_facts(self.world.facts[node].model_copy(update={"state": state}))
        self.engine_is_silent(node, silent and lost)

    @rule(node=st.sampled_from(["n1", "n2"]), to=SEEN_NUMBER)
    def node_is_gone(self, node: str, to: int) -> None:
        self.world.ask(self.pick(to), GoneRequest(node=node))

    # --- what takes time ---

    @precondition(lambda self: self.world.tasks)
    @rule(index=SEEN_NUMBER)
    def task(self, index: int) -> None:
        self.world.step_task(index % len(self.world.tasks))

    @precondition(lambda self: self.world.tasks)
    @rule(times=st.integers(1, 12))
    def tasks(self, times: int) -> None:
        for _ in range(min(times, len(self.world.tasks))):
            self.world.step_task()

    @precondition(lambda self: any(isinstance(task.effect, Commit) for task in self.world.tasks))
    @rule(written=st.booleans())
    def commit_unknown(self, written: bool) -> None:
        """The answer to a commit is lost."""
        task = next(task for task in self.world.tasks if isinstance(task.effect, Commit))
        self.world.tasks.remove(task)
        done = self.world.ledger.unknown(task.effect, written=written)
        self.world.tell(task.placer, done)

    @rule(which=SEEN_NUMBER, times=st.integers(1, 10))
    def watch(self, which: int, times: int) -> None:
        name = self.pick(which)
        for _ in range(times):
            if name in self.cut_off or not self.world.step_watch(name):
                return

    @rule(which=SEEN_NUMBER, name=st.sampled_from(["soon", "beat", "list"]), later_us=st.integers(0, 2 * SECOND))
    def tick(self, which: int, name: str, later_us: int) -> None:
        self.world.now += later_us
        self.world.tell(self.pick(which), Tick(name, WALL + self.world.now))

    @rule(seconds=st.integers(1, 4))
    def quiet(self, seconds: int) -> None:
        """Everything happens as it should for a while."""
        self.heal()
        self.world.pass_time(seconds)

    @precondition(lambda self: self.world.shown is not None)
    @rule()
    def backends_look(self) -> None:
        """What a glance shows until then may be long over."""
        self.world.look()

    # --- what goes wrong ---

    @rule(which=SEEN_NUMBER, tasks=st.sampled_from(["lost", "done"]))
    def kill(self, which: int, tasks: str) -> None:
        name = self.pick(which)
        self.world.kill(name, tasks=tasks)
        self.cut_off.discard(name)
        if not self.world.placers:
            self.world.placer()

    @precondition(lambda self: len(self.world.placers) < MOST_PLACERS)
    @rule()
    def another(self) -> None:
        self.world.placer()

    @rule(which=SEEN_NUMBER)
    def disconnect(self, which: int) -> None:
        name = self.pick(which)
        self.cut_off.add(name)
        self.world.tell(name, Disconnected())

    @rule(most=st.sampled_from([1, 5, 1_000]))
    def leases_go_back(self, most: int) -> None:
        """The server comes back without its last writes; of others than leases placers would raise an alarm."""
        self.world.ledger.rewind_leases(most)
        for name in self.world.placers:
            self.cut_off.add(name)
            self.world.tell(name, Disconnected())
        while any(isinstance(task.effect, Commit) for task in self.world.tasks):
            self.commit_unknown(written=False)

    @rule()
    def heal(self) -> None:
        for name in sorted(self.cut_off):
            self.world.tell(name, Reconnected(1))
            self.world.replay(name)
        self.cut_off.clear()

    @precondition(lambda self: self.world.running())
    @rule(which=SEEN_NUMBER, code=st.sampled_from([0, 1]), told=st.booleans())
    def container_ends(self, which: int, code: int, told: bool) -> None:
        running = sorted(self.world.running())
        self.world.end(running[which % len(running)], code, told=told)

    @rule(request_id=IDS, variant=st.integers(0, len(BODIES) - 1), times=st.integers(1, 6))
    def starts_will_fail(self, request_id: str, variant: int, times: int) -> None:
        self.world.generations_fail[f"{request_id}{variant}"] = times

    @invariant()
    def holds(self) -> None:
        self.world.check()
        self.none_runs_that_is_said_to_have_exited()
        for core in self.world.placers.values():
            assert counted_anew(core.cluster) == counted(core.cluster)

    def none_runs_that_is_said_to_have_exited(self) -> None:
        exited = {
            (record.request_id, each.replica, each.generation)
            for record in self.world.records().values()
            for each in record.replicas
            if each.state == State.EXITED
        }
        running = {box.labels.reservation.which for box in self.world.boxes.values() if box.running}
        assert not exited & running

    def teardown(self) -> None:
        if not self.world.placers:
            return
        self.heal()
        for node in ("n1", "n2"):
            self.node_is_lost(node, lost=False, silent=False)
        self.world.settle()
        acknowledged = {ack.token for ack in self.world.acks if ack.delay_us is None}
        for number in self.copies.keys() - acknowledged:
            self.deliver_copy(number, 0)
        self.world.pass_time(100)
        self.world.check_settled()
        records = self.world.records()
        lost = [m.request_id for m in self.copies.values() if not m.hold_us and m.request_id not in records]
        assert not lost, lost
        settled = {State.STARTED, State.QUEUED, State.WAITING}  # waiting: for room, as a queued one does
        assert not [r for r in records.values() if not r.state.final and r.state not in settled]
        assert not [r for r in records.values() if any(each.resizing for each in r.replicas)]


PlacersMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_placers = PlacersMachine.TestCase

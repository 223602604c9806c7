"""Plans of moves hold what they promise, whatever the cluster; checked step by step, from the reservations alone."""

from random import Random

from decide_draw import facts_of
from hypothesis import given
from hypothesis import strategies as st

from services.placer.core.capabilities import ALL_CAN_ALL
from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import Fits, Move
from services.placer.core.pipeline import decide, moves
from services.placer.core.planners.defrag import apply, moves_to_widen
from services.placer.core.question import Question, Tenant
from services.placer.core.strategies import STRATEGIES
from shared.admission import RtTask, Sharing, admit_kind
from shared.messages import (
    SHARE_WHOLE_MICRO,
    DeviceFacts,
    Gpu,
    Kind,
    NodeFacts,
    NodeState,
    PlaceRequest,
    Realtime,
    Regime,
    Reservation,
)


class Busy:
    """A cluster that is mostly taken, in pieces: containers came, and some left."""

    def __init__(self, seed: int) -> None:
        self._chance = Random(seed)
        self.cluster = Cluster()
        self.bodies: dict[str, PlaceRequest] = {}
        for index in range(self._chance.randint(1, 4)):
            self.cluster.set_facts(f"n{index}", self._node(f"n{index}"), 0)
        for number in range(self._chance.randint(4, 24)):
            self._put(f"r{number}")
        for name in self._chance.sample(sorted(self.bodies), len(self.bodies) // 3):
            for facts in facts_of(self.cluster):
                held = self.cluster.reservations(facts.node)
                self.cluster.set_reservations(facts.node, tuple(each for each in held if each.request_id != name))

    def _node(self, name: str) -> NodeFacts:
        regime = self._chance.choice((Regime.TIME_SLICED, Regime.TIME_SLICED, Regime.EXCLUSIVE, Regime.MPS))
        devices = tuple(
            DeviceFacts(
                uuid=f"{name}.{index}",
                index=index,
                model=self._chance.choice(("H100", "H100", "L4")),
                regime=regime,
                slice_us=2_000,
                switch_us=100,
                healthy=True,
                memory_mib=16_384,
            )
            for index in range(self._chance.choice((1, 2, 4, 4)))
        )
        cpu_milli = self._chance.choice((4_000, 16_000))
        return NodeFacts(
            node=name, state=NodeState.READY, at_us=0, devices=devices, cpu_milli=cpu_milli, memory_mib=65_536
        )

    def _put(self, name: str) -> None:
        asked = self.request(small=True)
        anywhere = asked.model_copy(
            update={"strategy": "spread", "candidates": (self._chance.choice(("n0", "n1", "n2")),)}
        )
        decision = decide(self.cluster, anywhere, 0, advise=False)
        if isinstance(decision, Fits):
            self.bodies[name] = asked
            (to,) = decision.assignments
            held = Demand.of(asked).reservation(name, 0, 1, to.devices)
            self.cluster.set_reservations(to.node, (*self.cluster.reservations(to.node), held))

    def request(self, *, small: bool = False) -> PlaceRequest:
        count = self._chance.choice((1, 1, 1, 2)) if small else self._chance.choice((1, 1, 2, 3, 4))
        parts = (0.25, 0.5, 0.75, 1.0) if small else (0.75, 1.0)
        realtime = None
        if self._chance.random() < 0.3:
            kind = self._chance.choice(tuple(Kind))
            realtime = Realtime(deadline_us=self._chance.choice((9_000, 40_000)), runtime_us=3_000, kind=kind)
        return PlaceRequest(
            command=("serve",),
            gpu=Gpu(count=count, share=self._chance.choice(parts) if count == 1 else 1.0, memory_mib=1_024),
            cpu_milli=self._chance.choice((0, 500)),
            realtime=realtime,
            replicas=1 if small else self._chance.choice((1, 1, 1, 2)),
            strategy=self._chance.choice(("deadline", "binpack", "spread")),
        )

    def tenant(self, held: Reservation) -> Tenant | None:
        return Tenant(self.bodies[held.request_id])

    def question(self, asked: PlaceRequest) -> Question:
        replicas = tuple(range(asked.replicas))
        return Question(self.cluster, asked, STRATEGIES[asked.strategy], replicas, ALL_CAN_ALL, tenants=self.tenant)


busy = st.builds(Busy, st.integers(0, 2**32))


def assert_all_is_well(made: Cluster) -> None:
    """No device and no node is over-committed, and everybody to whom something is promised still passes the test."""
    for facts in facts_of(made):
        held = made.reservations(facts.node)
        assert sum(each.cpu_milli for each in held) <= facts.cpu_milli
        for device in facts.devices:
            assert_device_is_well(device, [each for each in held if device.uuid in each.devices])


def assert_device_is_well(device: DeviceFacts, held: list[Reservation]) -> None:
    """A soft or undeclared neighbour counts for hard ones only: beside a firm one it may come whenever it likes."""
    assert sum(each.share_micro for each in held) <= SHARE_WHOLE_MICRO
    assert sum(each.device_memory_mib for each in held) <= (device.memory_mib or 0)
    promised = {each.request_id: each.realtime for each in held if each.realtime and each.kind is not Kind.SOFT}
    tasks = {name: RtTask.of(name, realtime) for name, realtime in promised.items()}
    for name, realtime in promised.items():
        residents = [task for other, task in tasks.items() if task and other != name]
        contexts = len(held) - len(promised) if realtime.kind is Kind.HARD else 0
        assert admit_kind(realtime.kind, Sharing.of(device), residents, tasks[name], contexts).admitted


def assert_is_carried_out(world: Busy, question: Question, planned: tuple[Move, ...]) -> None:
    """Each one is a normal placement while its container holds its old place too; hard ones are not among them."""
    made = world.cluster
    for move in planned:
        body = world.bodies[move.request_id]
        assert not (body.realtime and body.realtime.kind is Kind.HARD)
        there = Demand.of(body).reservation(move.request_id, 0, 2, move.to.devices)
        with made.trial():
            made.set_reservations(move.to.node, (*made.reservations(move.to.node), there))
            assert_all_is_well(made)
        apply(question, move)
        assert_all_is_well(made)
        assert sum(there in made.reservations(facts.node) for facts in facts_of(made)) == 1


@given(busy, st.integers(1, 3))
def test_after_the_moves_of_a_plan_the_request_fits(world: Busy, most: int) -> None:
    assert_all_is_well(world.cluster)
    asked = world.request()
    refused = not isinstance(decide(world.cluster, asked, 0, advise=False), Fits)
    before = {facts.node: world.cluster.reservations(facts.node) for facts in facts_of(world.cluster)}
    planned = moves(world.cluster, asked, tenants=world.tenant, most=most)
    assert before == {facts.node: world.cluster.reservations(facts.node) for facts in facts_of(world.cluster)}
    assert len(planned) <= (most if refused else 0)
    if planned:
        assert_is_carried_out(world, world.question(asked), planned)
        assert isinstance(decide(world.cluster, asked, 0, advise=False), Fits)


@given(busy)
def test_after_moves_that_widen_the_largest_block_is_wider(world: Busy) -> None:
    question = world.question(PlaceRequest(command=("serve",), gpu=Gpu()))
    before = int(world.cluster.nodes["whole_free"].max())
    planned = moves_to_widen(question)
    assert_is_carried_out(world, question, planned)
    assert bool(planned) == (int(world.cluster.nodes["whole_free"].max()) > before)

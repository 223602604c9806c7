"""The queue with requests, releases and leaders as hypothesis likes: nothing starves, nothing sleeps too long."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.placer.core.intents import Rules
from shared.messages import NodeState, State
from tests.placer_world import SECOND, World, facts

WAITING = {State.QUEUED, State.WAITING}
BIG = st.fixed_dictionaries(
    {
        "gpu": st.one_of(
            st.fixed_dictionaries({"count": st.sampled_from([2, 3, 4])}),
            st.fixed_dictionaries({"share": st.sampled_from([0.3, 0.7, 1.0])}),
        ),
        "replicas": st.integers(1, 2),
        "priority": st.sampled_from([0, 0, 0, 5]),
        "candidates": st.sampled_from([None, None, ["n0"], ["n1"]]),
        "cpu_milli": st.sampled_from([0, 0, 20_000]),
    }
)
SMALL = st.fixed_dictionaries(
    {
        "gpu": st.fixed_dictionaries({"share": st.sampled_from([0.2, 0.5, 1.0])}),
        "cpu_milli": st.sampled_from([0, 8_000]),
    }
)
QUICK = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def world_of_two(rules: Rules | None = None) -> World:
    world = World(rules=rules or Rules())
    for node in ("n0", "n1"):
        world.add_node(node, 4)
    for name in ("p1", "p2"):
        world.placer(name)
        world.pass_time(2)
    return world


class Load:
    """Small requests that come whenever there is room for them, at either placer, and leave in the order they came."""

    def __init__(self, world: World, kinds: list[dict[str, Any]]) -> None:
        self.world, self.kinds = world, kinds
        self.running: list[str] = []
        self.number = 0

    def press(self) -> None:
        """As many as there is room for, and one that waits."""
        for kind in self.kinds:
            while self._one(kind, queue=False) == "placed":
                pass
        self._one(self.kinds[0], queue=True)

    def _one(self, kind: dict[str, Any], *, queue: bool) -> str:
        self.number += 1
        name = f"s{self.number}"
        placer = list(self.world.placers)[self.number % len(self.world.placers)]
        said = self.world.place(placer, request_id=name, queue=queue, **kind)
        if said.outcome in {"placed", "queued"}:
            self.running.append(name)
        return said.outcome

    def release_oldest(self) -> None:
        """Of those that have a place; those that wait go on waiting."""
        name = next(name for name in self.running if self.world.record(name).state not in WAITING)
        self.running.remove(name)
        self.world.release(next(iter(self.world.placers)), name)
        self.world.pass_time(0.4)


@settings(QUICK, max_examples=4)
@given(
    bigs=st.lists(BIG, min_size=1, max_size=3), kinds=st.lists(SMALL, min_size=1, max_size=2), kill=st.integers(0, 30)
)
def test_whatever_fits_an_empty_cluster_is_placed_after_a_bounded_number_of_releases(
    bigs: list[dict[str, Any]], kinds: list[dict[str, Any]], kill: int
) -> None:
    """However many small ones press in, and whoever dies: twice all who were there for each that waits."""
    world = world_of_two()
    world.checking = False  # each step; the machine of placers does
    load = Load(world, kinds)
    load.press()
    there = sum(len(held) for held in world.reservations().values())
    waits = []
    for number, body in enumerate(bigs):
        said = world.place("p2", request_id=f"big{number}", queue=True, **body)
        assert said.outcome in {"queued", "placed", "rejected"}
        waits += [f"big{number}"] if said.outcome == "queued" else []
    world.pass_time(0.4)
    for released in range(1, 2 * there * (len(waits) + 1)):
        if released == kill and "p1" in world.placers:
            world.kill("p1")
            world.pass_time(5)
        load.press()
        load.release_oldest()
        if not [name for name in waits if world.record(name).state in WAITING]:
            return
        for name in waits:  # those that have their place leave at once: it is the others that are looked at
            if world.record(name).state not in {*WAITING, State.RELEASED, State.STOPPING}:
                world.release(next(iter(world.placers)), name)
                world.pass_time(0.4)
    raise AssertionError({name: (world.record(name).state, world.record(name).shadow) for name in waits})


ACTION = st.one_of(
    st.tuples(st.just("place"), BIG),
    st.tuples(st.just("place"), SMALL),
    st.tuples(st.just("release"), st.integers(0, 100)),
    st.tuples(st.just("facts"), st.tuples(st.sampled_from(["n0", "n1"]), st.integers(0, 4), st.booleans())),
    st.tuples(st.just("shrink"), st.integers(0, 100)),
    st.tuples(st.just("time"), st.sampled_from([0.2, 1, 15])),
    st.tuples(st.just("kill"), st.none()),
)


def act(world: World, number: int, what: str, with_it: Any) -> None:
    placers = list(world.placers)
    placer = placers[number % len(placers)]
    ids = sorted(name for name, record in world.records().items() if not record.final)
    match what:
        case "place":
            world.place(placer, request_id=f"r{number}", queue=True, **with_it)
        case "release" if ids:
            world.release(placer, ids[with_it % len(ids)])
        case "shrink" if ids:
            world.resize(placer, ids[with_it % len(ids)], cpu_milli=1_000)
        case "facts":
            node, ill, lost = with_it
            found = facts(node, 4)
            devices = tuple(d.model_copy(update={"healthy": d.index >= ill}) for d in found.devices)
            state = NodeState.LOST if lost else NodeState.READY
            world.set_facts(found.model_copy(update={"devices": devices, "state": state}))
        case "time":
            world.pass_time(with_it)
        case "kill":
            world.kill(placers[0])
            world.placer()


@QUICK
@given(actions=st.lists(ACTION, min_size=5, max_size=25))
def test_who_still_sleeps_would_not_fit_were_it_woken(actions: list[tuple[str, Any]]) -> None:
    """Every event that helps wakes: in the end a new leader, who tries everyone, places nobody."""
    world = world_of_two(Rules(patience_us=10 * SECOND))
    for number, (what, with_it) in enumerate(actions):
        act(world, number, what, with_it)
    world.pass_time(8)  # takes over, if need be
    waiting = {name for name, record in world.records().items() if record.state in WAITING}
    leader = world.leader()
    assert leader is not None
    world.placers[leader].leader.queue.forget()
    world.pass_time(0.4)
    tried = {name for name, record in world.records().items() if record.state in WAITING}

    assert waiting == tried
    world.check_settled()


@QUICK
@given(bodies=st.lists(BIG, min_size=1, max_size=6), kinds=st.lists(SMALL, min_size=1, max_size=2))
def test_what_is_kept_is_never_taken_by_who_comes_after(
    bodies: list[dict[str, Any]], kinds: list[dict[str, Any]]
) -> None:
    """Nothing that was placed since it was kept lies in it: what is reserved anew and what is kept fit together."""
    world = world_of_two()
    load = Load(world, kinds)
    load.press()
    for number, body in enumerate(bodies):
        world.place("p2", request_id=f"big{number}", queue=True, **body)
    world.pass_time(0.4)
    before = {(r.request_id, r.replica) for held in world.reservations().values() for r in held}
    records = world.records()
    least = max((r.body.priority for r in records.values() if r.shadow and r.body), default=0)
    kept = [place for r in records.values() if r.shadow and r.body and r.body.priority >= least for place in r.shadow]
    load.release_oldest()
    load.press()
    kept_for = {name for name, record in world.records().items() if record.shadow}
    came = [
        (node, device, r.request_id)
        for node, held in world.reservations().items()
        for r in held
        if (r.request_id, r.replica) not in before and r.share_micro == 1_000_000 and r.request_id.startswith("s")
        for device in r.devices
    ]
    whole = {
        (place.node, device)
        for name in kept_for
        for place in world.record(name).shadow
        if place in kept
        for device in place.devices
    }

    assert [] == [each for each in came if each[:2] in whole]

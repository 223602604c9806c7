"""Moves that make room: which are planned, in what order, and who never moves."""

from collections.abc import Callable

from decide_world import cluster, device, firm, node, place, request, share, would_fit_if

from services.placer.core.capabilities import ALL_CAN_ALL
from services.placer.core.cluster import Cluster
from services.placer.core.outcome import Fits, Move
from services.placer.core.pipeline import decide, moves
from services.placer.core.planners.defrag import apply, moves_to_widen
from services.placer.core.question import Question, Tenant
from services.placer.core.strategies import STRATEGIES
from shared.messages import Gpu, Kind, PlaceRequest, Regime, Reservation


class Full:
    """A cluster and what was asked for by whoever is there."""

    def __init__(self, made: Cluster) -> None:
        self.cluster = made
        self.bodies: dict[str, PlaceRequest] = {}

    def put(self, name: str, asked: PlaceRequest, on: str) -> None:
        """There because it was asked to be there; it could be anywhere."""
        self.bodies[name] = asked
        assert [on] == place(self.cluster, asked.model_copy(update={"candidates": (on,)}), name)

    def tenant(self, held: Reservation) -> Tenant | None:
        return Tenant(self.bodies[held.request_id]) if held.request_id in self.bodies else None

    def moves(self, asked: PlaceRequest, most: int = 3) -> list[str]:
        return [str(move) for move in moves(self.cluster, asked, tenants=self.tenant, most=most)]

    def question(self, asked: PlaceRequest) -> Question:
        strategy = STRATEGIES[asked.strategy]
        return Question(self.cluster, asked, strategy, (0,), ALL_CAN_ALL, tenants=self.tenant)


def whole(count: int = 1, **fields: object) -> PlaceRequest:
    return request(Gpu(count=count), **fields)


def test_one_move_makes_room_for_a_block_of_devices() -> None:
    full = Full(cluster(node("a", 4), node("b", 4)))
    full.put("small", whole(), "a")
    full.put("wide", whole(3), "b")
    assert ["small/0 moves from a to b"] == full.moves(whole(4))


def test_nothing_is_moved_for_what_fits_or_never_will() -> None:
    full = Full(cluster(node("a", 4), node("b", 4)))
    full.put("small", whole(), "a")
    assert [] == full.moves(whole(4))
    assert [] == full.moves(whole(8))


def test_the_fewest_moves_are_planned_and_no_more_than_allowed() -> None:
    full = Full(cluster(node("a", 4), node("b", 4), node("c", 4)))
    for number, on in enumerate("aabbcc"):
        full.put(f"r{number}", whole(), on)
    assert ["r0/0 moves from a to b", "r1/0 moves from a to b"] == full.moves(whole(4))
    assert [] == full.moves(whole(4), most=1)


def test_parts_of_devices_are_put_together_on_their_own_node() -> None:
    full = Full(cluster(node("a", 2)))
    full.put("left", share(0.5, strategy="spread"), "a")
    full.put("right", share(0.5, strategy="spread"), "a")
    assert ["left/0 moves to a.1 of a"] == full.moves(whole())


def test_who_moves_needs_both_places_for_a_while() -> None:
    """On one node with CPU for one, a move to its other device cannot start."""
    full = Full(cluster(node("a", 2, cpu_milli=2_000)))
    full.put("left", share(0.5, strategy="spread", cpu_milli=1_000), "a")
    full.put("right", share(0.5, strategy="spread", cpu_milli=1_000), "a")
    assert [] == full.moves(whole())


def test_hard_real_time_containers_stay_where_they_are() -> None:
    made = cluster(
        *(node(name, tuple(device(f"{name}.{i}", i, regime=Regime.EXCLUSIVE) for i in range(2))) for name in "ab")
    )
    full = Full(made)
    full.put("hard", whole(realtime=firm(kind=Kind.HARD)), "a")
    full.put("other", whole(), "b")
    assert ["other/0 moves from b to a"] == full.moves(whole(2))
    made.set_reservations("b", ())
    full.put("other", whole(realtime=firm(kind=Kind.HARD)), "b")
    assert [] == full.moves(whole(2))


def test_nobody_is_moved_to_where_a_neighbour_would_be_late() -> None:
    def crowded(deadline_us: int) -> Full:
        full = Full(cluster(node("a", 2), node("b", 1)))
        full.put("mover", share(0.5, realtime=firm(90_000, 8_000)), "a")
        full.put("neighbour", share(0.5, realtime=firm(deadline_us, 8_000)), "b")
        return full

    assert ["mover/0 moves from a to b"] == crowded(50_000).moves(whole(2))
    assert [] == crowded(12_500).moves(whole(2))


def test_who_is_not_known_stays() -> None:
    full = Full(cluster(node("a", 4), node("b", 4)))
    full.put("small", whole(), "a")
    full.put("wide", whole(3), "b")
    del full.bodies["small"], full.bodies["wide"]
    assert [] == full.moves(whole(4))


def test_a_gang_gets_room_for_all_of_its_replicas() -> None:
    full = Full(cluster(node("a", 2), node("b", 2), node("c", 2), node("d", 1)))
    for number, on in enumerate("abc"):
        full.put(f"r{number}", whole(), on)
    asked = whole(2, replicas=2)
    planned = moves(full.cluster, asked, tenants=full.tenant)
    assert 2 == len(planned)
    with full.cluster.trial():
        for move in planned:
            apply(full.question(asked), move)
        assert isinstance(decide(full.cluster, asked, 0), Fits)


def test_a_plan_leaves_the_cluster_as_it_was() -> None:
    full = Full(cluster(node("a", 4), node("b", 4)))
    full.put("small", whole(), "a")
    full.put("wide", whole(3), "b")
    before = [full.cluster.reservations(name) for name in "ab"]
    assert full.moves(whole(4))
    assert before == [full.cluster.reservations(name) for name in "ab"]


def test_the_largest_block_is_widened_as_far_as_the_moves_go() -> None:
    full = Full(cluster(node("a", 4), node("b", 4), node("c", 4)))
    for number, on in enumerate("aabbcc"):
        full.put(f"r{number}", whole(), on)

    def block(most: int) -> int:
        with full.cluster.trial():
            question = full.question(whole())
            for move in moves_to_widen(question, most):
                apply(question, move)
            return int(full.cluster.nodes["whole_free"].max())

    assert [2, 3, 4] == [block(most) for most in (0, 1, 2)]


# ------------------------------------------------------------------------------------------ what is told


def told(full: Full, asked: PlaceRequest, holds: Callable[[str], bool]) -> list[str]:
    return [text for text in would_fit_if(decide(full.cluster, asked, 0, tenants=full.tenant)) if holds(text)]


def test_the_move_that_would_help_is_told() -> None:
    full = Full(cluster(node("a", 4), node("b", 4)))
    full.put("small", whole(), "a")
    full.put("wide", whole(3), "b")
    assert ["small/0 moves from a to b"] == told(full, whole(4), lambda text: "moves" in text)


def test_where_no_release_of_one_helps_two_are_told_and_never_a_larger_pair() -> None:
    full = Full(cluster(node("a", 4), node("b", 4)))
    for name, count, on in (("big", 2, "a"), ("bigger", 2, "a"), ("one", 1, "b"), ("two", 1, "b")):
        full.put(name, whole(count), on)
    assert ["one and two on b are released"] == told(full, whole(4), lambda text: "released" in text)
    assert ["one on b is released"] == told(full, whole(3), lambda text: "released" in text)


def test_for_a_gang_a_request_is_released_on_all_of_its_nodes() -> None:
    full = Full(cluster(node("a", 2), node("b", 2)))
    place(full.cluster, whole(replicas=2, spread_over="node"), "pair")
    assert ["pair on a, b is released"] == told(full, whole(2, replicas=2), lambda text: "released" in text)


def test_a_move_is_a_value_that_reads_as_a_sentence() -> None:
    full = Full(cluster(node("a", 2)))
    full.put("left", share(0.5, strategy="spread"), "a")
    full.put("right", share(0.5, strategy="spread"), "a")
    (move,) = moves(full.cluster, whole(), tenants=full.tenant)
    assert isinstance(move, Move)
    assert (("a.0",), ("a.1",)) == (move.devices, move.to.devices)

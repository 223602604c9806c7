"""One code path turns a request into what it takes: what is decided on is what is reserved."""

import pytest

from services.placer.core.demand import Demand
from services.placer.core.records import new_record, reservation_of
from shared.messages import Gpu, PlaceRequest, Realtime, ReplicaRecord, State
from tests.placer_world import World


@pytest.mark.parametrize("share", [1.0, 0.5, 0.15, 1 / 3, 0.0625, 0.000001, 0.1 + 0.2])
def test_P23_the_ledger_holds_exactly_what_the_decision_took(share: float) -> None:
    request = PlaceRequest(
        request_id="q",
        command=("x",),
        gpu=Gpu(share=share, memory_mib=7),
        cpu_milli=3,
        memory_mib=5,
        realtime=Realtime(deadline_us=10, runtime_us=1),
        priority=2,
    )
    replica = ReplicaRecord(replica=0, state=State.PLACED, generation=4, node="n", devices=("g",))
    held = reservation_of(new_record(request, "me", 0), replica)
    assert held == Demand.of(request).reservation("q", 0, 4, ("g",))
    assert held.share_micro == round(share * 1_000_000)


@pytest.mark.parametrize(
    ("image", "profile", "expected"),
    [
        ("registry/detector:3", None, "registry/detector:3 12"),
        ("registry/detector:3", "detector", "detector"),
        (None, None, None),
        ("x" * 300, None, None),
    ],
)
def test_times_are_learned_under_the_declared_profile_or_else_under_the_image_and_the_runtime(
    image: str | None, profile: str | None, expected: str | None
) -> None:
    timing = Realtime(deadline_us=50, runtime_us=12, profile=profile)
    request = PlaceRequest(request_id="q", image=image, command=("x",), gpu=Gpu(), realtime=timing)
    held = Demand.of(request).reservation("q", 0, 1, ("g",))
    assert held.realtime == timing.model_copy(update={"profile": expected})


def test_P21_a_member_that_was_restarted_counts_once_in_what_is_used() -> None:
    world = World()
    world.add_node("n1", devices=2)
    world.placer("p1")
    world.pass_time(2)
    world.place("p1", replicas=2, restart="on_failure", gpu={"share": 0.5})
    world.end(world.running()[0], 1)
    world.pass_time(5)
    held = sorted((r.replica, r.generation, r.share_micro) for r in world.reservations()["n1"])
    assert len(world.running()) == 2
    assert [(replica, share) for replica, _, share in held] == [(0, 500_000), (1, 500_000)]
    assert sum(generation for _, generation, _ in held) == 3, "one of the two is in its second generation"

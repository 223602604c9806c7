"""What our own code makes of messages is not checked where it is made: here it is, and what is read always is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.errors import FieldError
from shared.messages import NodeReservations, ReplicaRecord, Reservation, Step
from shared.messages.base import Message, Own
from tests.placer_world import SECOND, World, led


def test_all_that_a_placer_tells_and_writes_would_pass_the_check() -> None:
    said = list(_said(_busy()))
    told = {type(each) for each in said}

    assert {"PlaceReply", "PlaceEvent", "RequestRecord", "NodeReservations", "ContainerLabels"} <= {
        each.__name__ for each in told
    }
    for each in said:
        assert each == type(each).trusted(each.to_json()), each
        assert each.model_fields_set == type(each).trusted(each.to_json()).model_fields_set, each
        assert each.to_json() == each.model_dump_json(exclude_unset=True).encode()


def _said(world: World) -> Iterator[Message]:
    yield from (event.body for event in world.events)
    yield from (reply for replies in world.replies.values() for reply in replies)
    yield from (box.labels for box in world.boxes.values())
    for placer in world.placers.values():
        yield from (stored.value for stored in placer.ledger.records.values() if stored.value)
        yield from (stored.value for stored in placer.ledger.nodes.values() if stored.value)


def _busy() -> World:
    """Placed, held, queued, rejected, failed, moved on, ended, resized and released."""
    world = led(n1=2, n2=1)
    world.place("p1", name="with a name", realtime={"deadline_us": 50_000, "runtime_us": 1_000, "period_us": 100_000})
    world.place("p1", request_id="held", hold_us=30 * SECOND)
    world.place("p1", request_id="both", replicas=2, restart="on_failure")
    world.generations_fail["fails"] = 1
    world.place("p1", request_id="fails", gpu={"share": 0.25})
    world.place("p1", request_id="waits", gpu={"share": 1}, queue=True)
    world.place("p1", request_id="never", gpu={"count": 5})
    world.place("p1", request_id="dry", gpu={"share": 0.1}, dry_run=True)
    world.resize("p1", "both", cpu_milli=500)
    world.end(next(name for name, box in world.boxes.items() if box.labels.reservation.request_id == "both"), 1)
    world.pass_time(5)
    world.release("p1", "a")
    world.pass_time(5)
    return world


def test_what_is_not_said_has_its_default_and_stays_unsaid() -> None:
    made, read = (
        Step(number=1, state="placed", at_us=5, generation=0),
        Step.from_json(b'{"number":1,"state":"placed","at_us":5,"generation":0}'),
    )

    assert (made, made.detail, made.model_fields_set) == (read, None, read.model_fields_set)
    assert made.to_json() == read.to_json()


def test_a_node_says_what_its_reservations_are_by_now() -> None:
    """Each is written once; one that was changed is another."""
    one = Reservation.from_json(
        b'{"request_id":"\xc3\xa4","replica":0,"generation":1,"devices":["d"],"share_micro":1,"device_memory_mib":0,'
        b'"cpu_milli":100,"memory_mib":0,"realtime":null}'
    )
    before = NodeReservations(node='a "node"', reservations=(one, one))
    assert before == NodeReservations.from_json(before.to_json())

    after = NodeReservations(node="n1", reservations=(one, one.model_copy(update={"cpu_milli": 200})))
    assert after == NodeReservations.from_json(after.to_json())
    assert before != after


def test_what_is_read_is_checked() -> None:
    with pytest.raises(FieldError, match="replica"):
        ReplicaRecord.from_json(b'{"replica":"0","state":"placed"}')


@pytest.mark.parametrize("model", Own.__subclasses__())
def test_no_default_can_be_changed(model: type[Own]) -> None:
    """Those that are made share them."""
    assert all(field.default_factory is None for field in model.model_fields.values())

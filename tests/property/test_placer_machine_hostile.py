"""Anybody who can write to the buckets can write rubbish: the placer stays up, and what it knew stays true."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.effects import KeyChanged
from shared.subjects import LEDGER, NODES
from tests.placer_world import World, request

KEYS = st.sampled_from(
    [
        *("request.a", "request.b", "request.", "request.=ZZ", "request.a.b", "node.n1", "node.n2", "node.", "node.=2"),
        *("lease.p1", "lease.leader", "lease.x", "lease.", "other", "", "ledger.x"),
    ]
)
VALUES = st.none() | st.binary(max_size=40)


def damaged(body: bytes, place: int, byte: int) -> bytes:
    place %= len(body)
    return body[:place] + bytes([byte]) + body[place + 1 :]


@given(st.lists(st.tuples(st.sampled_from([LEDGER, NODES]), KEYS, VALUES), max_size=12))
def test_rubbish_in_the_buckets_stops_nobody(changes: list[tuple[str, str, bytes | None]]) -> None:
    world = World(checking=False)
    world.add_node("n1")
    world.placer("p1")
    world.place("p1")
    for number, (bucket, key, value) in enumerate(changes):
        if bucket == NODES:
            world.tell("p1", KeyChanged(bucket, key, value, number))
        else:
            world.ledger.put(key, value)

    assert world.place("p1", request_id="fresh", queue=True).outcome in {"placed", "queued", "rejected", "error"}


@given(
    st.sampled_from(["request.a", "node.n1", "lease.leader", "lease.p1", "ledger"]), st.integers(0), st.integers(0, 255)
)
def test_one_damaged_byte_in_a_key_of_the_ledger_stops_nobody(key: str, place: int, byte: int) -> None:
    world = World(checking=False)
    world.add_node("n1")
    world.placer("p1")
    world.pass_time(1)
    world.place("p1")
    value, _ = world.ledger.values[key]
    assert value is not None
    world.ledger.put(key, damaged(value, place, byte))

    said = world.answer(world.ask("p1", request(request_id="fresh", queue=True)))
    assert said.outcome in {"placed", "queued", "rejected", "error"}

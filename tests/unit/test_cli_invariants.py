"""The checker of the invariants finds each kind of fault, and none where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from shared.messages import (
    DeadlineEvent,
    Message,
    NodeReservations,
    PlaceEvent,
    ReplicaRecord,
    RequestRecord,
    Reservation,
    RingInfo,
    Site,
    State,
    Step,
    TaskBatch,
    TaskEventKind,
)
from shared.testing.invariants import EventChecker, LedgerChecker

BEGIN, END, OVERDUE, LOST = TaskEventKind.BEGIN, TaskEventKind.END, TaskEventKind.OVERDUE, TaskEventKind.LOST


def replica(state: State = State.STARTED, generation: int = 1, node: str | None = "n") -> ReplicaRecord:
    devices = ("d",) if node else ()
    return ReplicaRecord(replica=0, state=state, generation=generation, node=node, devices=devices)


def record(name: str, *replicas: ReplicaRecord, state: State = State.STARTED, steps: int = 1) -> RequestRecord:
    return RequestRecord(
        request_id=name,
        body=None,
        body_hash="",
        state=state,
        owner="p",
        replicas=replicas,
        steps=tuple(Step(number=n, state=state, at_us=0, generation=1) for n in range(1, steps + 1)),
        final=state.final,
    )


def reserved(*requests: str, share_micro: int = 500_000, generation: int = 1) -> NodeReservations:
    held = [
        Reservation(
            request_id=name,
            replica=0,
            generation=generation,
            devices=("d",),
            share_micro=share_micro,
            device_memory_mib=0,
            cpu_milli=0,
            memory_mib=0,
        )
        for name in requests
    ]
    return NodeReservations(node="n", reservations=tuple(held))


def ledger(*writes: tuple[str, Message] | list[tuple[str, Message]]) -> list[str]:
    """The faults after commits: one write each, or a list of writes in one batch."""
    checker = LedgerChecker()
    for commit in writes:
        batch = commit if isinstance(commit, list) else [commit]
        for place, (key, value) in enumerate(batch, 1):
            headers = {"Nats-Batch-Id": "b", **({"Nats-Batch-Commit": "1"} if place == len(batch) else {})}
            checker.feed(key, value.to_json(), headers, 0)
    return checker.faults


def test_a_placement_in_one_batch_is_sound() -> None:
    batch: list[tuple[str, Message]] = [("node.n", reserved("a")), ("request.a", record("a", replica()))]
    assert [] == ledger(batch)


def test_a_device_that_promises_more_than_itself_is_found() -> None:
    batch: list[tuple[str, Message]] = [
        ("node.n", reserved("a", "b", share_micro=600_000)),
        ("request.a", record("a", replica())),
        ("request.b", record("b", replica())),
    ]
    assert ["n: d promises 1200000 of 1000000 millionths"] == ledger(batch)


def test_what_is_held_and_not_reserved_is_found_and_the_other_way_round() -> None:
    (fault,) = ledger(("request.a", record("a", replica())))
    assert "held and not reserved" in fault
    (fault,) = ledger(("node.n", reserved("a")))
    assert "reserved and not held" in fault
    faults = ledger([("node.n", reserved("a", generation=2)), ("request.a", record("a", replica()))])
    assert 2 == len(faults)


def test_a_final_state_that_changes_is_found() -> None:
    released = record("a", replica(State.RELEASED, node=None), state=State.RELEASED)
    queued = record("a", replica(State.QUEUED, node=None), state=State.QUEUED)
    assert ["a was released, which is final, and became queued"] == ledger(
        ("request.a", released), ("request.a", queued)
    )


def test_a_final_request_that_still_holds_something_is_found() -> None:
    faults = ledger([("node.n", reserved("a")), ("request.a", record("a", replica(), state=State.FAILED))])
    assert ["a is final, and replica 0 is started"] == faults


def test_what_moves_holds_both_of_its_places() -> None:
    away = replica(generation=2).model_copy(update={"leaving": Site(generation=1, node="n", devices=("d",)), "used": 2})
    both = NodeReservations(
        node="n", reservations=(*reserved("a").reservations, *reserved("a", generation=2).reservations)
    )
    assert [] == ledger([("node.n", both), ("request.a", record("a", away))])
    (fault,) = ledger([("node.n", reserved("a", generation=2)), ("request.a", record("a", away))])
    assert "held and not reserved" in fault


@pytest.mark.parametrize("after, sound", [(1, True), (2, True), (3, False), (0, False)])
def test_a_generation_that_does_not_follow_is_found(after: int, sound: bool) -> None:
    first: list[tuple[str, Message]] = [("node.n", reserved("a")), ("request.a", record("a", replica()))]
    second: list[tuple[str, Message]] = [
        ("node.n", reserved("a", generation=after)),
        ("request.a", record("a", replica(generation=after))),
    ]
    assert sound == (ledger(first, second) == [])


def test_steps_that_go_back_are_found() -> None:
    queued = {"state": State.QUEUED}
    waiting = replica(State.QUEUED, node=None)
    faults = ledger(
        ("request.a", record("a", waiting, steps=3, **queued)), ("request.a", record("a", waiting, **queued))
    )
    assert ["a: steps went back from 3"] == faults


# --- events ---


def batch(*rows: tuple[int, int, int, int], container: str = "c", ring: str = "r") -> TaskBatch:
    """Rows of (kind, sequence, sequence of the begin, stamp); every deadline is 100 us."""
    columns = list(zip(*rows, strict=True))
    same: dict[str, Any] = {"ring": [0] * len(rows), "name": [0] * len(rows), "task": list(columns[1])}
    return TaskBatch(
        node="n",
        start_id="s",
        counter=1,
        boot_id="b",
        at_us=0,
        watermark_us=0,
        rings=(RingInfo(ring=ring, container=container),),
        names=("infer",),
        kind=list(columns[0]),
        seq=list(columns[1]),
        begin_seq=list(columns[2]),
        stamp_us=list(columns[3]),
        deadline_us=[100] * len(rows),
        **same,
    )


def missed(seq: int, ring: str = "r") -> DeadlineEvent:
    said = {"container": "c", "kind": "missed", "task": seq, "deadline_us": 100, "ring": ring, "seq": seq}
    return DeadlineEvent(at_us=0, node="n", met=0, missed=1, ratio=0.0, lower=0.0, upper=1.0, guarantee=0.9, **said)


def step(number: int, state: str, generation: int = 1) -> PlaceEvent:
    return PlaceEvent(at_us=0, request_id="a", state=state, generation=generation, step=number)


def checked(*events: Message) -> EventChecker:
    kinds = {PlaceEvent: "place", TaskBatch: "task", DeadlineEvent: "deadline"}
    checker = EventChecker()
    for number, event in enumerate(events):
        checker.feed(f"rt.events.{kinds[type(event)]}.x", event.to_json(), {"ce-id": str(number)})
    return checker


def test_verdicts_are_recounted_by_whichever_came_first() -> None:
    rows = [(BEGIN, 1, 1, 0), (END, 2, 1, 90), (BEGIN, 3, 3, 200), (OVERDUE, 3, 3, 0), (END, 4, 3, 290)]
    rows += [(BEGIN, 5, 5, 400), (END, 6, 5, 501), (BEGIN, 7, 7, 600), (LOST, 7, 7, 0)]
    checker = checked(batch(*rows), missed(3), missed(5))
    assert [] == checker.finish()
    assert {"met": 1, "missed": 2, "lost": 1} == checker.counts["c"]
    assert 300 == checker.due_us["r", 3]


def test_a_miss_that_nobody_told_and_one_that_was_none_are_found() -> None:
    rows = [(BEGIN, 1, 1, 0), (END, 2, 1, 200), (BEGIN, 3, 3, 300), (END, 4, 3, 310)]
    faults = checked(batch(*rows), missed(3)).finish()
    assert ["missed by recount and not told: ('r', 1)", "told as missed and met by recount: ('r', 3)"] == faults


def test_two_verdicts_on_one_task_are_found_and_a_repeat_with_the_same_id_is_none() -> None:
    assert ["c: task 1 has two verdicts"] == checked(missed(1), missed(1)).faults
    checker = EventChecker()
    told = [checker.feed("rt.events.deadline.n.c", missed(1).to_json(), {"ce-id": "same"}) for _ in range(2)]
    assert ([True, False], [], 1) == (told, checker.faults, checker.repeated)


def test_an_event_without_an_id_is_found() -> None:
    checker = EventChecker()
    checker.feed("rt.events.place.a", step(1, "accepted").to_json(), {})
    assert ["rt.events.place.a: an event without ce-id"] == checker.faults


@pytest.mark.parametrize(
    "steps, faults",
    [
        ([(1, "accepted", 0), (2, "placed", 1), (3, "started", 1)], []),
        ([(1, "accepted", 0), (3, "started", 1)], ["a: steps [1, 3] are not told without a gap"]),
        ([(1, "released", 0), (2, "placed", 1)], ["a: placed after released, which is final"]),
        ([(1, "placed", 2), (2, "started", 1)], ["a: generation 1 after 2"]),
    ],
)
def test_a_life_that_cannot_be_is_found(steps: list[tuple[int, str, int]], faults: list[str]) -> None:
    assert faults == checked(*(step(*each) for each in steps)).finish()


def test_a_container_that_ran_twice_is_found() -> None:
    begun = (BEGIN, 1, 1, 0)
    assert ["c was started 2 times"] == checked(batch(begun, ring="r"), batch(begun, ring="s")).finish()

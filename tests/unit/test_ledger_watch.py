"""The watch over the ledger finds each kind of fault, and none where there is none."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.ledger_watch import Capacity, LedgerWatch

Json = dict[str, Any]
NODES = {"n": Capacity({"d": 100, "e": 100}, cpu_milli=1000, memory_mib=1000)}


class Writer:
    """Writes as the server republishes them."""

    def __init__(self) -> None:
        self.watch = LedgerWatch(NODES)
        self._batches = itertools.count(1)

    def commit(self, *writes: tuple[str, Json | None]) -> list[str]:
        """One batch; what the watch found wrong so far, without where."""
        batch = f"b{next(self._batches)}"
        for number, (key, value) in enumerate(writes, 1):
            headers = {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
            headers |= {"Nats-Batch-Commit": "1"} if number == len(writes) else {}
            self.write(key, value, headers)
        return self.found()

    def write(self, key: str, value: Json | None, headers: dict[str, str] | None = None, skip: int = 0) -> None:
        place = {"Nats-Sequence": str(self.watch.seq + 1 + skip), "Nats-Subject": f"$KV.rt_ledger.{key}"}
        gone = {"KV-Operation": "DEL"} if value is None else {}
        self.watch.feed(json.dumps(value or {}).encode(), place | gone | (headers or {}))

    def found(self) -> list[str]:
        return [fault.partition(": ")[2] for fault in self.watch.faults]


def request(*states: str, name: str = "q", final: bool = False, **more: Any) -> tuple[str, Json]:
    """A request of half a device of one replica on d; its steps."""
    steps = [{"number": number, "state": state, "at_us": 0} for number, state in enumerate(states, 1)]
    holds = {"node": "n", "devices": ["d"]} if states[-1] in {"held", "placed", "started", "stopping"} else {}
    replica = {"replica": 0, "state": states[-1], "generation": 1} | holds
    body = {"gpu": {"share": 0.5, "memory_mib": 50}, "cpu_milli": 500}
    record = {"request_id": name, "body": body, "body_hash": "h", "state": states[-1], "final": final}
    return f"request.{name}", record | {"replicas": [replica], "steps": steps} | more


def node(*requests: str, **more: Any) -> tuple[str, Json]:
    held = {"replica": 0, "generation": 1, "devices": ["d"], "share_micro": 500_000, "device_memory_mib": 50}
    held |= {"cpu_milli": 500, "memory_mib": 0} | more
    return "node.n", {"node": "n", "reservations": [held | {"request_id": each} for each in requests]}


PLACED = ("accepted", "placed")


@pytest.fixture
def ledger() -> Writer:
    return Writer()


def test_a_life_without_a_fault_is_found_to_be_one(ledger: Writer) -> None:
    ledger.commit(request(*PLACED), node("q"))
    ledger.commit(request(*PLACED, name="r"), node("q", "r"))
    ledger.write(*request(*PLACED, "started"))
    ledger.commit(request(*PLACED, "started", "stopping"), ("lease.p", {}))
    ledger.commit(request(*PLACED, "started", "stopping", "released", final=True), node("r"))
    ledger.write("request.q", None, {"Nats-Marker-Reason": "MaxAge"})
    assert ([], 6) == (ledger.found(), ledger.watch.commits)


def test_what_is_held_and_not_reserved_is_a_fault_and_the_other_way_round(ledger: Writer) -> None:
    said = "('q', 0, 1, 'n', ('d',), 500000, 50, 500, 0)"
    assert [f"{said} is held and not reserved"] == ledger.commit(request(*PLACED))
    ledger.commit(node("q"))
    assert f"{said} is reserved and not held" in ledger.commit(request(*PLACED, "failed", final=True))


def test_a_move_holds_both_of_its_places(ledger: Writer) -> None:
    life = (*PLACED, "started", "moving")
    place = {"node": "n", "devices": ["e"]}
    there = {"replica": 0, "state": "started", "generation": 1, "node": "n", "devices": ["d"]}
    moving = request(*life, state="started", replicas=[there | {"to": place | {"generation": 2}, "used": 2}])
    new = node("q", generation=2, devices=["e"])[1]["reservations"]
    both = ("node.n", {"node": "n", "reservations": node("q")[1]["reservations"] + new})
    ledger.commit(request(*PLACED), node("q"))
    ledger.commit(request(*PLACED, "started"), node("q"))
    assert [] == ledger.commit(moving, both)
    left = {"replica": 0, "state": "started", "generation": 2, "used": 2} | place
    ledger.commit(
        request(
            *life,
            "moved",
            state="started",
            replicas=[left | {"leaving": {"node": "n", "devices": ["d"], "generation": 1}}],
        )
    )
    ledger.commit(
        request(*life, "moved", state="started", replicas=[left]), ("node.n", {"node": "n", "reservations": new})
    )
    assert [] == ledger.found()
    ledger.commit(moving, ("node.n", {"node": "n", "reservations": new}))
    assert "steps went back" in " ".join(ledger.found())
    assert "('q', 0, 1, 'n', ('d',), 500000, 50, 500, 0) is held and not reserved" in ledger.found()


def test_a_reservation_of_another_size_is_a_fault(ledger: Writer) -> None:
    assert 2 == len(ledger.commit(request(*PLACED), node("q", share_micro=400_000)))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, ["d promises 1500000 millionths", "d promises 150 MiB", "n promises 1500 cpu_milli"]),
        ({"share_micro": 0, "device_memory_mib": 0, "cpu_milli": 0, "memory_mib": 400}, ["n promises 1200 memory_mib"]),
    ],
)
def test_what_is_promised_and_not_there_is_a_fault(ledger: Writer, more: Json, said: list[str]) -> None:
    ledger.write(*node("q", "r", "s", **more))
    assert said == [fault.partition(" to [")[0] for fault in ledger.found()[: len(said)]]


def test_a_device_that_is_not_there_is_a_fault(ledger: Writer) -> None:
    ledger.write(*node("q", devices=["x"]))
    assert "x is not on n" == ledger.found()[0]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (request(*PLACED, "rejected", final=True), "rejected after placed"),
        (request(*PLACED, body_hash="g"), "has another body"),
        (request("accepted", "queued", "placed"), "its past is another one"),
        (request(*PLACED, state="started"), "is started, its last step says ['placed']"),
        (request(*PLACED, final=True), "is placed, and final says True"),
        (request("accepted"), "steps went back"),
        (request(*PLACED, replicas=[{"replica": 0, "state": "waiting", "generation": 3}]), "generation of 0 went"),
        (("request.q", None), "request.q is gone and was placed"),
    ],
)
def test_a_change_that_may_not_be_is_a_fault(ledger: Writer, after: tuple[str, Json | None], said: str) -> None:
    assert [] == ledger.commit(request(*PLACED), node("q"))
    ledger.write(*after)
    assert [fault for fault in ledger.found() if said in fault]


def test_a_final_state_stays(ledger: Writer) -> None:
    ledger.write(*request("accepted", "rejected", final=True))
    ledger.commit(request("accepted", "rejected", "queued"))
    assert "q: was rejected, which is final, and became queued" in ledger.found()


def test_a_write_that_was_not_seen_is_a_fault(ledger: Writer) -> None:
    ledger.write("lease.p", {}, skip=1)
    assert ["after write 0 came 2"] == ledger.found()


def test_a_write_within_the_batch_of_another_is_a_fault(ledger: Writer) -> None:
    ledger.write("lease.p", {}, {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1"})
    ledger.write("lease.r", {})
    assert ["write 0 of batch '' within batch 'b' at 1"] == ledger.found()

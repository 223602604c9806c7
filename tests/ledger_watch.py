"""The ledger as its server tells it, write by write, and what must hold after every commit.

JSON alone, no code of ours. The server is asked to republish what it stores in the ledger's stream (`republish`),
so that also those writes are seen that were overwritten at once. Every write has its sequence: one that was not seen
is a fault.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from nats.aio.client import Client

Json = dict[str, Any]
Held = tuple[Any, ...]
"""Request, replica, generation, node, devices; share, memory on each device, CPU, memory."""

WHOLE = 1_000_000
LEDGER = "KV_rt_ledger"
SEEN = "seen"
HOLDING = {"held", "placed", "started", "stopping"}
FINAL = {"exited", "released", "rejected", "failed", "expired"}
NO_STATES = {"accepted", "resizing", "resized", "resize_failed", "moving", "moved", "move_failed"}
FOLLOWS = {
    "accepted": {"placed", "held", "queued", "rejected", "expired"},
    "queued": {"placed", "held", "expired", "released"},
    "held": {"placed", "held", "expired", "released"},
    "expired": {"held", "released"},
    "placed": {"placed", "started", "waiting", "stopping", "failed"},
    "waiting": {"waiting", "placed", "stopping", "released", "failed"},
    "started": {"waiting", "stopping", "exited"},
    "stopping": {"released", "failed", "exited"},
}
"""Which state may follow which (docs/ledger.md); nothing follows the others."""


@dataclass(frozen=True)
class Capacity:
    """What a node has; memory of each device by its uuid."""

    devices: Mapping[str, int]
    cpu_milli: int
    memory_mib: int


@dataclass
class LedgerWatch:
    """Fed with every write in order; `faults` collects in words what may not be."""

    nodes: Mapping[str, Capacity]
    faults: list[str] = field(default_factory=list)
    seq: int = 0
    commits: int = 0
    writes: int = 0
    records: dict[str, Json] = field(default_factory=dict)
    reserved: dict[str, tuple[Held, ...]] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    """By placer that has a lease: up to which write all its steps are in the stream of events."""
    stepped: int = 0
    """The last write of a request."""
    ever: defaultdict[str, set[Held]] = field(default_factory=lambda: defaultdict(set))
    """By request: what it held at any time, up to its devices."""
    _held: dict[str, tuple[Held, ...]] = field(default_factory=dict)
    _open: Counter[Held] = field(default_factory=Counter)
    """What records hold less what nodes have reserved: nothing is left of it between two commits."""
    _batch: tuple[str, int] = ("", 0)

    async def follow(self, client: Client) -> None:
        """From now on: before anything is in the ledger."""
        info = json.loads((await client.request(f"$JS.API.STREAM.INFO.{LEDGER}")).data)
        config = info["config"] | {"republish": {"src": ">", "dest": f"{SEEN}.>"}}
        answer = json.loads((await client.request(f"$JS.API.STREAM.UPDATE.{LEDGER}", json.dumps(config).encode())).data)
        assert "error" not in answer, answer
        assert info["state"]["last_seq"] == 0, "the ledger is not new"

        async def take(message: Any) -> None:
            self.feed(message.data, message.headers)

        await client.subscribe(f"{SEEN}.>", cb=take, pending_msgs_limit=0, pending_bytes_limit=0)
        await client.flush()

    def feed(self, body: bytes, headers: Mapping[str, str]) -> None:
        """One stored write."""
        seq = int(headers["Nats-Sequence"])
        if seq != self.seq + 1:
            self._fault(f"after write {self.seq} came {seq}")
        self.seq = seq
        self.writes += 1
        key = headers["Nats-Subject"].split(".", 2)[2]
        gone = headers.get("KV-Operation") in {"DEL", "PURGE"} or "Nats-Marker-Reason" in headers
        if key.startswith("node."):
            self._node(key, {} if gone else json.loads(body), gone=gone)
        elif key.startswith("request."):
            self._request(key, {} if gone else json.loads(body), gone=gone)
        elif key.startswith("lease."):
            self._lease(key, {} if gone else json.loads(body), gone=gone)
        if self._ends_commit(headers):
            self.commits += 1
            for each, count in self._open.items():
                self._fault(f"{each} is {'held and not reserved' if count > 0 else 'reserved and not held'}")

    def _fault(self, text: str) -> None:
        self.faults.append(f"write {self.seq}: {text}")

    def _ends_commit(self, headers: Mapping[str, str]) -> bool:
        """Batches are stored whole: nothing of another one comes between."""
        batch, number = headers.get("Nats-Batch-Id", ""), int(headers.get("Nats-Batch-Sequence", "0"))
        before, last = self._batch
        if (batch, number) != ((before, last + 1) if before else (batch, 1 if batch else 0)):
            self._fault(f"write {number} of batch {batch!r} within batch {before!r} at {last}")
        ends = not batch or "Nats-Batch-Commit" in headers
        self._batch = ("", 0) if ends else (batch, number)
        return ends

    def _lease(self, key: str, found: Json, *, gone: bool) -> None:
        if gone:
            self.told.pop(key, None)
        elif key != "lease.leader":
            self.told[key] = found.get("told", 0)

    # --- nodes ---

    def _node(self, key: str, found: Json, *, gone: bool) -> None:
        if gone:
            self._fault(f"{key} was deleted")
        now = [each for each in found.get("reservations", ()) if each.get("container") is None]
        node = found.get("node", key)
        held = tuple(_reserved(node, each) for each in now)
        self._balance(self.reserved.get(key, ()), held, -1)
        self.reserved[key] = held
        if node in self.nodes:
            for fault in _over(node, self.nodes[node], found["reservations"]):
                self._fault(fault)
        elif not gone:
            self._fault(f"{node} is no node")

    def _balance(self, before: tuple[Held, ...], now: tuple[Held, ...], sign: int) -> None:
        for each in now:
            self._open[each] += sign
        for each in before:
            self._open[each] -= sign
        for each in {*before, *now}:
            if not self._open[each]:
                del self._open[each]

    # --- requests ---

    def _request(self, key: str, found: Json, *, gone: bool) -> None:
        self.stepped = self.seq
        held = tuple(_held_by(found)) if not gone else ()
        self._balance(self._held.get(key, ()), held, 1)
        self._held[key] = held
        before = self.records.pop(key, None)
        if gone:
            if before is not None and not before.get("final"):
                self._fault(f"{key} is gone and was {before['state']}")
            return
        self.records[key] = found
        self.ever[found["request_id"]].update(each[:5] for each in held)
        for fault in (*_unsound(found), *(_unsound_change(before, found) if before else ())):
            self._fault(f"{found['request_id']}: {fault}")


def _reserved(node: str, each: Json) -> Held:
    sizes = (each["share_micro"], each["device_memory_mib"], each["cpu_milli"], each["memory_mib"])
    return (each["request_id"], each["replica"], each["generation"], node, tuple(each["devices"]), *sizes)


def _held_by(record: Json) -> Iterator[Held]:
    """What the request is to have by its own words, for each replica that has a place."""
    body = record.get("body") or {}
    gpu = body.get("gpu") or {}
    share = round(gpu.get("share", 1.0) * WHOLE) if gpu else 0
    sizes = (share, gpu.get("memory_mib", 0), body.get("cpu_milli", 0), body.get("memory_mib", 0))
    for each in record.get("replicas", ()):
        sites = [each] if each["state"] in HOLDING else []
        sites += [each[other] for other in ("to", "leaving") if each.get(other)]
        for site in sites:
            devices = tuple(site.get("devices", ()))
            yield (record["request_id"], each["replica"], site["generation"], site["node"], devices, *sizes)


def _over(node: str, has: Capacity, reservations: list[Json]) -> Iterator[str]:
    shares: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    for each in reservations:
        shares.update(dict.fromkeys(each["devices"], each["share_micro"]))
        memory.update(dict.fromkeys(each["devices"], each["device_memory_mib"]))
    yield from (f"{device} is not on {node}" for device in shares if device not in has.devices)
    for device, share in shares.items():
        if share > WHOLE:
            by = [(each["request_id"], each.get("container")) for each in reservations if device in each["devices"]]
            yield f"{device} promises {share} millionths to {by}"
    yield from (f"{device} promises {mib} MiB" for device, mib in memory.items() if mib > has.devices.get(device, mib))
    for what in ("cpu_milli", "memory_mib"):
        if (used := sum(each[what] for each in reservations)) > getattr(has, what):
            yield f"{node} promises {used} {what}"


def _unsound(record: Json) -> Iterator[str]:
    """What a record may not say by itself."""
    state, final = record["state"], record.get("final", False)
    steps = record.get("steps", [])
    words = [step["state"] for step in steps if step["state"] not in NO_STATES]
    if words[-1:] != [state]:
        yield f"is {state}, its last step says {words[-1:]}"
    if final != (state in FINAL) and not (state == "expired" and not final):
        yield f"is {state}, and final says {final}"
    if final and any(
        each["state"] in HOLDING | {"waiting"} or each.get("leaving") for each in record.get("replicas", ())
    ):
        yield f"is final, its replicas are {[each['state'] for each in record['replicas']]}"
    numbers = [step["number"] for step in steps]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        yield f"has steps {numbers}"
    told = [step["state"] for step in steps if step["state"] not in NO_STATES - {"accepted"}]
    for one, two in pairwise(told):
        if two not in FOLLOWS.get(one, set()):
            yield f"{two} after {one}"


def _unsound_change(before: Json, after: Json) -> Iterator[str]:
    if before.get("final") and after["state"] != before["state"]:
        yield f"was {before['state']}, which is final, and became {after['state']}"
    if before["body_hash"] != after["body_hash"]:
        yield "has another body"
    known = {step["number"]: step for step in after["steps"]}
    if any(known.get(step["number"], step) != step for step in before["steps"]):
        yield "its past is another one"
    if after["steps"][-1]["number"] < before["steps"][-1]["number"]:
        yield "steps went back"
    was = {each["replica"]: each for each in before.get("replicas", ())}
    new = after["steps"][-1]["number"] - before["steps"][-1]["number"]
    for each in after.get("replicas", ()):
        if not _follows(old := was.get(each["replica"], {}), each, new):
            yield f"generation of {each['replica']} went from {old.get('generation')} to {each['generation']}"


def _follows(before: Json, after: Json, steps: int) -> bool:
    """A step gives out one generation at most, also where a move comes to nothing; none comes back."""
    was, now = (max(each.get("generation", 0), each.get("used", 0)) for each in (before, after))
    return 0 <= now - was <= steps and before.get("generation", 0) <= after["generation"]

"""The placer's view of the ledger, and the draft of what the batch under way will write to it; no decisions.

The view is what the watch, the placer's own commits and reads after a conflict have shown, each key with its
revision; the newest revision of a key wins, whichever way it came. A draft lies over the view: whatever plans after
something else was planned in the same batch sees it, and nothing of it remains when the batch fails.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, Generic, NamedTuple, TypeVar

from services.placer.core.cluster import Cluster
from services.placer.core.invariants import node_faults, record_faults
from services.placer.core.records import UNPLACED, Order, holders, reservation_of, shadow_of, starts_elsewhere
from shared.effects import KeyChanged, Write
from shared.errors import FieldError
from shared.messages import (
    Lease,
    LedgerIdentity,
    Message,
    NodeReservations,
    ReplicaRecord,
    RequestRecord,
    Reservation,
    State,
    Which,
    which_of,
)
from shared.subjects import decode, lease_key, node_key, request_key

M = TypeVar("M", bound=Message)

IDENTITY_KEY = "ledger"
LEADER = "leader"
MOST_KEYS = 1000
"""Of one batch: the server's limit."""


class Stored(NamedTuple, Generic[M]):
    """A key as it was last seen. `value` None: deleted, or `broken`, which nobody may overwrite."""

    value: M | None = None
    revision: int = 0
    seen_us: int = 0
    """When this placer saw this revision first, by its own monotonic clock: all ages are counted from here."""
    broken: bool = False


_ABSENT: Stored[Any] = Stored()


@dataclass(frozen=True, slots=True)
class Key:
    """A key taken apart; `kind` is the name of one of the ledger's tables."""

    kind: str
    name: str


@lru_cache(maxsize=4096)
def parse_key(key: str) -> Key:
    """Raises FieldError for a key that is none of the ledger's."""
    kind, dot, token = key.partition(".")
    if key == IDENTITY_KEY:
        return Key(IDENTITY_KEY, "")
    if not dot or kind not in {"request", "node", "lease"}:
        raise FieldError("key", key, "ledger, lease.<holder>, node.<node> or request.<request id>")
    return Key(kind, decode(token))


class Ledger:
    """Every key by kind and name."""

    def __init__(self) -> None:
        self.identities: dict[str, Stored[LedgerIdentity]] = {}
        self.records: dict[str, Stored[RequestRecord]] = {}
        self.nodes: dict[str, Stored[NodeReservations]] = {}
        self.leases: dict[str, Stored[Lease]] = {}
        self.live: set[str] = set()
        """Requests that are not final."""
        self.waiting: set[str] = set()
        """Those of them that wait for a place, queued or after a failed start."""
        self.held: set[str] = set()
        """Those that nobody has confirmed yet."""
        self.freed: set[str] = set()
        """Nodes where something was seen to go or to shrink, reserved or kept: who waits may fit there. Whoever looks
        after those clears it."""
        self.elsewhere: set[str] = set()
        """Requests of which a replica is being started at a second place."""
        self.owned: dict[str, set[str]] = {}
        """By owner: requests that go on, or may."""
        self.movers: set[str] = set()
        """Requests that asked to be moved where it helps (`on_risk: move`)."""
        self.pursued: set[str] = set()
        """Requests of which something is to be stopped or resized."""
        self.ended: dict[str, None] = {}
        """Requests that are over, in the order in which that was seen."""
        self.helped: set[str] = set()
        """Requests that wait and for which others may still move."""
        self.rebuilt: set[str] = set()
        """Nodes with reservations rebuilt from containers that no key explains."""
        self._tables: dict[str, dict[str, Stored[Any]]] = {
            IDENTITY_KEY: self.identities,
            "request": self.records,
            "node": self.nodes,
            "lease": self.leases,
        }

    @property
    def identity(self) -> LedgerIdentity | None:
        stored = self.identities.get("")
        return stored.value if stored else None

    def record(self, request_id: str) -> RequestRecord | None:
        """Raises FieldError where the key holds what cannot be read: it is neither absent nor known."""
        stored = self.records.get(request_id)
        if stored is not None and stored.broken:
            raise FieldError("request_id", request_id, "one whose record can be read: its key in the ledger cannot")
        return stored.value if stored else None

    def reservations(self, node: str) -> tuple[Reservation, ...]:
        stored = self.nodes.get(node)
        return stored.value.reservations if stored and stored.value else ()

    def lease(self, holder: str) -> Lease | None:
        stored = self.leases.get(holder)
        return stored.value if stored else None

    def leader(self) -> str | None:
        """Who wrote the leader's lease last; it may have run out since."""
        lease = self.lease(LEADER)
        return lease.holder if lease else None

    def live_records(self) -> Iterator[RequestRecord]:
        """All requests that are not final."""
        for request_id in self.live:
            record = self.records[request_id].value
            if record is not None:
                yield record

    def revision(self, key: Key) -> int:
        stored = self._tables[key.kind].get(key.name)
        return stored.revision if stored else 0

    def written(self) -> Iterator[tuple[str, Stored[Message]]]:
        """Every key that has a value, as it is written."""
        for kind, name_key in _KEYS.items():
            for name, stored in self._tables[kind].items():
                if stored.value is not None or stored.broken:
                    yield name_key(name), stored

    def begins(self) -> None:
        """The watch says everything anew. Leases are taken as they are then, be they older, since no decision is lost
        with one, and those that are gone run out; of other keys an older revision is a reason to stop."""
        self.leases.update({name: stored._replace(revision=0) for name, stored in self.leases.items()})

    def observe(self, change: KeyChanged, now_us: int, ours: Message | None = None) -> Key | None:
        """Take in what a key is now. Returns the key where that is news, None where as new or newer is known.

        A read that finds nothing is news only where a key can vanish by itself: deleted and final ones. `ours`: what
        the value says where we wrote it, so that it need not be read.
        """
        try:
            key = parse_key(change.key)
        except FieldError:
            return None
        table = self._tables[key.kind]
        known = table.get(key.name, _ABSENT)
        gone = change.value is None and change.revision == 0
        if (gone and not _may_vanish(known)) or (not gone and change.revision <= known.revision):
            return None
        if gone:
            table.pop(key.name, None)
        else:
            table[key.name] = Stored(ours, change.revision, now_us) if ours else _stored(key.kind, change, now_us)
        self._index(key, known)
        return key

    def clear(self) -> None:
        """Nothing is known any more."""
        for kind in _KEYS:
            self._tables[kind].clear()
        for names in (self.live, self.waiting, self.held, self.elsewhere, self.helped, self.movers, self.pursued):
            names.clear()
        self.rebuilt.clear()
        self.owned.clear()
        self.ended.clear()

    def forget(self, request_id: str) -> None:
        """Drop a record whose time in the ledger is over."""
        self.records.pop(request_id, None)
        self.ended.pop(request_id, None)
        for names in (self.live, self.waiting, self.held, self.movers):
            names.discard(request_id)

    def outlived(self, seen_before_us: int) -> list[str]:
        """Requests that were seen to be over before that."""
        return list(takewhile(lambda name: self.records[name].seen_us < seen_before_us, self.ended))

    def faults(self) -> Iterator[str]:
        """What one placer's view can show of broken invariants."""
        for stored in self.records.values():
            yield from record_faults(stored.value) if stored.value else ()
        for node in self.nodes:
            yield from node_faults(node, self.reservations(node))
        yield from self.index_faults()

    def index_faults(self) -> Iterator[str]:
        """Where what is kept beside the records is not what a look at every record finds."""
        seen = {name: stored.value for name, stored in self.records.items() if stored.value and not stored.value.final}
        going = {name: record for name, record in seen.items() if not record.state.final}
        owners = {record.owner for record in going.values()}
        if self.live != seen.keys():
            yield f"live: {self.live ^ seen.keys()}"
        if self.owned != {o: {name for name, record in going.items() if record.owner == o} for o in owners}:
            yield f"owned: {self.owned}"
        if self.pursued != {name for name, record in seen.items() if _is_pursued(record)}:
            yield f"pursued: {self.pursued}"
        if self.movers != {name for name, record in seen.items() if _is_mover(record)}:
            yield f"movers: {self.movers}"
        over = {n for n, s in self.records.items() if not s.broken and (s.value is None or s.value.state.final)}
        if self.ended.keys() != over:
            yield f"ended: {self.ended.keys() ^ over}"

    def _index(self, key: Key, before: Stored[Any]) -> None:
        if key.kind == "request":
            self._index_request(key.name, before.value, self.records.get(key.name))
        elif key.kind == "node":
            reservations = self.reservations(key.name)
            _keep(self.rebuilt, key.name, any(each.container for each in reservations))
            if before.value and _gave_up(before.value.reservations, reservations):
                self.freed.add(key.name)

    def _index_request(self, name: str, before: RequestRecord | None, stored: Stored[RequestRecord] | None) -> None:
        record = stored.value if stored and stored.value and not stored.value.final else None
        self._index_end(name, stored)
        self._index_owner(name, before, record)
        _keep(self.movers, name, record is not None and _is_mover(record))
        _keep(self.pursued, name, record is not None and _is_pursued(record))
        _keep(self.live, name, record is not None)
        _keep(self.waiting, name, record is not None and record.state in UNPLACED)
        _keep(self.held, name, record is not None and record.state == State.HELD)
        _keep(self.elsewhere, name, record is not None and starts_elsewhere(record))
        _keep(self.helped, name, record is not None and _is_helped(record))
        now = record.shadow if record else ()
        if before is not None and before.shadow != now:
            self.freed |= {place.node for place in before.shadow if place not in now}

    def _index_end(self, name: str, stored: Stored[RequestRecord] | None) -> None:
        self.ended.pop(name, None)
        if stored is not None and not stored.broken and (stored.value is None or stored.value.state.final):
            self.ended[name] = None

    def _index_owner(self, name: str, before: RequestRecord | None, now: RequestRecord | None) -> None:
        owner = now.owner if now is not None and not now.state.final else None
        if before is not None and before.owner != owner and name in (names := self.owned.get(before.owner, set())):
            names.discard(name)
            if not names:
                del self.owned[before.owner]
        if owner is not None:
            self.owned.setdefault(owner, set()).add(name)


def _keep(names: set[str], name: str, kept: bool) -> None:
    if kept:
        names.add(name)
    else:
        names.discard(name)


def _is_mover(record: RequestRecord) -> bool:
    return record.body is not None and record.body.on_risk == "move"


def _is_pursued(record: RequestRecord) -> bool:
    for each in record.replicas:
        if each.state == State.STOPPING or each.leaving is not None or each.resizing is not None:
            return True
    return False


def _is_helped(record: RequestRecord) -> bool:
    return record.room is not None and record.room.left > 0 and record.state in UNPLACED


_MODELS: dict[str, type[Message]] = {
    IDENTITY_KEY: LedgerIdentity,
    "request": RequestRecord,
    "node": NodeReservations,
    "lease": Lease,
}
_KEYS = {IDENTITY_KEY: lambda _: IDENTITY_KEY, "request": request_key, "node": node_key, "lease": lease_key}


def _may_vanish(known: Stored[Message]) -> bool:
    return known.value is None or (isinstance(known.value, RequestRecord) and known.value.state.final)


def _stored(kind: str, change: KeyChanged, now_us: int) -> Stored[Message]:
    if change.value is None:
        return Stored(None, change.revision, now_us)
    try:
        value = _MODELS[kind].trusted(change.value)
    except FieldError:
        return Stored(None, change.revision, now_us, broken=True)
    odd = _is_anothers(change.key, value) or _contradicts(value)
    return Stored(None if odd else value, change.revision, now_us, broken=odd)


def _is_anothers(key: str, value: Message) -> bool:
    """Whether no placer can have written this under this key: another's name is in it."""
    if isinstance(value, RequestRecord):
        return request_key(value.request_id) != key
    return isinstance(value, NodeReservations) and node_key(value.node) != key


def _contradicts(value: Message) -> bool:
    """Whether no placer can have written this at all: a contradiction in itself."""
    if isinstance(value, RequestRecord):
        return any(record_faults(value))
    return isinstance(value, NodeReservations) and any(node_faults(value.node, value.reservations))


class Draft:
    """What one batch will write, over the view; keeps the cluster in step with what it plans."""

    def __init__(self, ledger: Ledger, cluster: Cluster, final_ttl_s: int) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._final_ttl_s = final_ttl_s
        self.identity = ledger.identity
        self._records: dict[str, RequestRecord] = {}
        self._steps_before: dict[str, int] = {}
        self._shaded: set[str] = set()
        """Those of them for which something is or was kept."""
        self._nodes: dict[str, tuple[Reservation, ...]] = {}
        self._reserved: dict[Which, Reservation] = {}
        self._leases: dict[str, Lease | None] = {}
        self._written: dict[str, tuple[bytes, Message]] = {}

    # --- reading ---

    @property
    def ledger_id(self) -> str:
        assert self.identity is not None, "the ledger is made before anything is planned on it"
        return self.identity.ledger_id

    def record(self, request_id: str) -> RequestRecord | None:
        """Raises FieldError where the key cannot be read."""
        return self._records.get(request_id) or self._ledger.record(request_id)

    def known(self, request_id: str) -> RequestRecord | None:
        """The same, and None where the key cannot be read."""
        stored = self._ledger.records.get(request_id)
        return self._records.get(request_id) or (stored.value if stored else None)

    def reservations(self, node: str) -> tuple[Reservation, ...]:
        return self._nodes[node] if node in self._nodes else self._ledger.reservations(node)

    def lease(self, holder: str) -> Lease | None:
        return self._leases[holder] if holder in self._leases else self._ledger.lease(holder)

    def waiting_before(self, record: RequestRecord, key: Callable[[RequestRecord], Order]) -> int:
        """How many waiting requests come before this one in the order of the key."""
        mine = key(record)
        return sum(key(each) < mine for each in self._all_waiting())

    def _all_waiting(self) -> Iterator[RequestRecord]:
        yield from (record for record in self._records.values() if record.state in UNPLACED)
        yield from filter(None, map(self._ledger.record, self._ledger.waiting - self._records.keys()))

    def elsewhere(self) -> int:
        """Of how many requests a replica is being started at a second place."""
        planned = sum(starts_elsewhere(record) for record in self._records.values())
        return planned + len(self._ledger.elsewhere - self._records.keys())

    def rebuilt_generation(self, request_id: str) -> int:
        """The newest generation of this request among containers that no key explains: a new one must be newer."""
        if not self._ledger.rebuilt:
            return 0
        rebuilt = (each for node in self._ledger.rebuilt for each in self.reservations(node) if each.container)
        return max((each.generation for each in rebuilt if each.request_id == request_id), default=0)

    def records(self) -> Iterator[tuple[RequestRecord, int]]:
        """What is planned of requests, each with the number of its last step before."""
        for request_id, record in self._records.items():
            yield record, self._steps_before[request_id]

    # --- planning ---

    def put_identity(self, identity: LedgerIdentity) -> None:
        self.identity = identity

    def put(self, record: RequestRecord) -> None:
        if record.request_id not in self._records:
            known = self._ledger.record(record.request_id)
            self._steps_before[record.request_id] = known.steps[-1].number if known else 0
        self._records[record.request_id] = record
        if record.shadow or record.request_id in self._cluster.shadows:
            self._shaded.add(record.request_id)
            self._cluster.set_shadow(record.request_id, shadow_of(record))

    def put_lease(self, name: str, lease: Lease | None) -> None:
        """`name` is a placer or LEADER; None gives it up."""
        self._leases[name] = lease

    def reserve(self, record: RequestRecord, replicas: Iterable[int] | None = None) -> None:
        """Add the reservations of these replicas (all of them where None), which have a place, to their nodes."""
        chosen = None if replicas is None else set(replicas)
        for each in holders(record):
            if each.node is not None and (chosen is None or each.replica in chosen):
                come, held = reservation_of(record, each), list(self.reservations(each.node))
                self._reserved[come.which] = come
                insort(held, come, key=which_of)
                self._nodes[each.node] = now = tuple(held)
                self._cluster.set_reservations(each.node, now, come)

    def reserved(self, record: RequestRecord, replica: ReplicaRecord) -> Reservation | None:
        """What this batch has reserved for this placement of it."""
        return self._reserved.get((record.request_id, replica.replica, replica.generation))

    def free(self, record: RequestRecord, replicas: Iterable[int] | None = None) -> None:
        """Take the reservations of these replicas (all of them where None) from their nodes."""
        chosen = None if replicas is None else set(replicas)
        for each in holders(record):
            if each.node is not None and (chosen is None or each.replica in chosen):
                held = (record.request_id, each.replica, each.generation)
                left = tuple(r for r in self.reservations(each.node) if r.container or r.which != held)
                self.set_reservations(each.node, left)

    def replace(self, record: RequestRecord, changed: RequestRecord, replicas: Collection[int]) -> None:
        """The changed record, and what these of its replicas have reserved now instead of what they had."""
        self.free(record, replicas)
        self.put(changed)
        self.reserve(changed, replicas)

    def set_reservations(self, node: str, reservations: tuple[Reservation, ...]) -> None:
        """In one order, so that what is taken and given back is as it was."""
        self._nodes[node] = tuple(sorted(reservations, key=which_of))
        self._cluster.set_reservations(node, self._nodes[node])

    # --- the batch ---

    def writes(self) -> tuple[Write, ...]:
        """Every key that would change. What came back to what it was is not written."""
        made = self.identity is not self._ledger.identity
        writes = [self._write(IDENTITY_KEY, self.identity)] if made else []
        for request_id, record in self._records.items():
            ttl_s = self._final_ttl_s if record.state.final else None
            writes.append(self._write(request_key(request_id), record, ttl_s))
        for node, reservations in self._nodes.items():
            if reservations != self._ledger.reservations(node):
                writes.append(self._write(node_key(node), NodeReservations(node=node, reservations=reservations)))
        for name, lease in self._leases.items():
            writes.append(self._write(lease_key(name), lease))
        if len(writes) > MOST_KEYS:
            # A gang on as many nodes as a batch can hold: its own key is fence enough.
            writes = [write for write in writes if write.key != lease_key(LEADER)]
        return tuple(writes)

    def _write(self, key: str, value: Message | None, ttl_s: int | None = None) -> Write:
        assert value is None or not _contradicts(value), f"planned what nobody may write: {key} {value}"
        expected = self._ledger.revision(parse_key(key))
        if value is None:
            return Write(key, None, expected, ttl_s)
        body = value.to_json()
        self._written[key] = body, value
        return Write(key, body, expected, ttl_s)

    def ours(self, change: KeyChanged) -> Message | None:
        """What a key says now, where that is what this batch was to write."""
        body, value = self._written.get(change.key, (None, None))
        return value if body is not None and body == change.value else None

    def abandon(self) -> None:
        """Put the cluster back to what the view says, whether the batch failed or is in the view by now."""
        for node in self._nodes:
            self._cluster.set_reservations(node, self._ledger.reservations(node))
        for request_id in self._shaded:
            stored = self._ledger.records.get(request_id)
            self._cluster.set_shadow(request_id, shadow_of(stored.value) if stored and stored.value else {})


def _gave_up(before: Iterable[Reservation], after: Iterable[Reservation]) -> bool:
    """Whether somebody left, or has less of the node's CPU or memory: all that can change of a reservation."""
    here = set(map(id, after))
    changed = [each for each in before if id(each) not in here]
    sizes = {each.which: (each.cpu_milli, each.memory_mib) for each in after} if changed else {}
    for each in changed:
        cpu, memory = sizes.get(each.which, (-1, -1))
        if cpu < each.cpu_milli or memory < each.memory_mib:
            return True
    return False

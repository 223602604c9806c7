"""The records of the ledger: who holds what on which node, and where each request is in its life."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from operator import attrgetter

from pydantic import Field
from pydantic_core import to_json

from shared.messages.base import Message, Name, Own
from shared.messages.place import Kind, PlaceRequest, Pod, Realtime, Reason, State

SHARE_WHOLE_MICRO = 1_000_000


class LedgerIdentity(Message):
    """Key ``ledger``: which ledger this is, and which former ones an operator accepted as our own."""

    ledger_id: str
    former: tuple[str, ...] = ()
    created_at_us: int


class Lease(Message):
    """Key ``lease.<holder>``: renewed by counting on; others judge its age by their own clock since they saw it."""

    holder: Name
    """Which placer process: unique to one start."""
    counter: int
    ttl_us: int
    """0: given up."""
    told: int = 0
    """Every step that this placer wrote up to this revision of the ledger is in the stream of events."""
    stream_seq: int | None = None
    """Of a tracker's partition: all that its nodes said up to here is in their checkpoints."""
    partitions: int | None = None
    """Key ``lease.deadline-tracker`` alone: into how many partitions the nodes are divided."""


Which = tuple[str, int, int]
"""Request id, replica, generation: one placement of one replica, and so its container."""
which_of = attrgetter("request_id", "replica", "generation")
"""Of a Reservation: as its `which`, and quicker where there are many."""


class Reservation(Own):
    """What one replica holds on one node, all of it, so that it can be rebuilt from a container's labels."""

    __slots__ = ("_said",)

    request_id: Name
    replica: int
    generation: int
    devices: tuple[str, ...]
    share_micro: int
    """Of each device, in millionths."""
    device_memory_mib: int
    """On each device."""
    cpu_milli: int
    memory_mib: int
    realtime: Realtime | None = None
    priority: int = 0
    container: str | None = None
    """Set where it was rebuilt from the labels of a container that no key explains; gone when the container is."""

    @property
    def kind(self) -> Kind | None:
        return self.realtime.kind if self.realtime else None

    @property
    def which(self) -> Which:
        return (self.request_id, self.replica, self.generation)

    def to_json(self) -> bytes:
        """Written once: its node's key is written again whenever another comes or goes."""
        said: bytes | None = getattr(self, "_said", None)
        if said is None:
            object.__setattr__(self, "_said", said := super().to_json())
        return said


class NodeReservations(Own):
    """Key ``node.<node>``: that node's reservations, from all placers."""

    node: Name
    reservations: tuple[Reservation, ...] = ()

    def to_json(self) -> bytes:
        held = b",".join([each.to_json() for each in self.reservations])
        return b'{"node":%b,"reservations":[%b]}' % (to_json(self.node), held)


class Step(Own):
    """One thing that happened to a request; its event's id is (ledger id, request, number)."""

    number: int
    state: str
    at_us: int
    generation: int
    detail: str | None = None


class Size(Message):
    """What one replica has of its node's CPU and memory; 0 is no limit."""

    cpu_milli: int
    memory_mib: int


class Site(Message):
    """The second place that one replica has: while it moves, or where it was on a node that was lost."""

    generation: int
    node: Name
    devices: tuple[str, ...] = ()
    size: Size | None = None
    """What is reserved there, where that is not what the replica has."""


class ReplicaRecord(Own):
    """One replica of a request. ``state`` is one of State; ``node`` None where it holds nothing."""

    replica: int
    state: State
    generation: int = 0
    node: str | None = None
    devices: tuple[str, ...] = ()
    exit_code: int | None = None
    end_reason: str | None = None
    """Of what it ended: OOMKilled, Evicted, SIGSEGV, …; None where no more than the exit code is known."""
    size: Size | None = None
    """What it has, where that is not what the body says."""
    resizing: Size | None = None
    """What its owner is giving it; until that is known to be so, the larger of both is reserved."""
    to: Site | None = None
    """Where it moves: reserved, and being started there; until that is seen to run it is where it was."""
    leaving: Site | None = None
    """Where it was, or was to move: reserved until it was seen to be gone from there."""
    used: int = 0
    """The newest generation that a move was given: the next one is newer, also where that move came to nothing."""


class ShadowPlace(Message):
    """A place that is kept for one replica of a request that waits; it holds nothing there yet."""

    replica: int
    node: Name
    devices: tuple[str, ...] = ()


class RoomMade(Message):
    """What others do for a request that waits: they move, one after another."""

    left: int = 0
    """How many moves may still be begun."""
    mover: str | None = None
    """The request of which a replica moved last."""


class RequestRecord(Own):
    """Key ``request.<request id>``."""

    request_id: Name
    body: PlaceRequest | None
    """None only for a release of an id that nobody had asked for yet."""
    body_hash: str
    state: State
    owner: str
    """The placer process that carries it on; when its lease runs out the leader takes it over."""
    replicas: tuple[ReplicaRecord, ...] = ()
    steps: tuple[Step, ...] = ()
    final: bool = False
    """True where nothing follows; an expired hold is expired and not final."""
    tries: int = 0
    """Starts that failed since the last one that did not."""
    restarts: int = 0
    """New generations after a container that ended."""
    backoff_us: int = 0
    """Waiting: how long after this revision was first seen it may be placed again."""
    set_aside: tuple[str, ...] = ()
    """Nodes that failed to start it."""
    reasons: tuple[Reason, ...] = ()
    exit_code: int | None = None
    end_reason: str | None = None
    unproven: bool = False
    measured: str | None = None
    """By which measured response times a firm one is placed."""
    arrived_at_us: int = 0
    """Order of arrival among waiting requests of the same priority."""
    confirmed: bool = Field(default=False)
    ends_as: State | None = None
    """Stopping: the final state once nothing of it runs; None is released."""
    size: Size | None = None
    """What its next start gets, where that is not what the body says."""
    shadow: tuple[ShadowPlace, ...] = ()
    """While it waits: where whoever comes after it in the queue leaves room for it. The leader chooses."""
    room: RoomMade | None = None
    """While it waits: the moves of others that make room for it."""


@lru_cache(maxsize=4096)
def container_name(ledger_id: str, request_id: str, replica: int, generation: int) -> str:
    """The one name of a start, for container, pod or lock file: a repeat of the start finds the first one."""
    text = "\x00".join((ledger_id, request_id, str(replica), str(generation)))
    return f"laxity-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


class ContainerLabels(Own):
    """What a container carries: enough to rebuild its reservation, and to judge its tasks, without the ledger."""

    container: Name
    ledger_id: str
    node: Name
    reservation: Reservation
    name: str | None = None
    pod: Pod | None = None
    """Written by the monitor into what it read of a kubelet's folder; no backend sets it."""

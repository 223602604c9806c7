"""What can be said of one request's record, and how it takes a step: pure functions, no view and no writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from services.placer.core.demand import Demand
from services.placer.core.outcome import Assignment, Move
from services.placer.core.question import Tenant
from shared.messages import (
    ContainerLabels,
    PlaceEvent,
    Placement,
    PlaceReply,
    PlaceRequest,
    PlannedMove,
    ReplicaRecord,
    RequestRecord,
    Reservation,
    Site,
    Size,
    State,
    Step,
    container_name,
)

MOST_STEPS = 64
"""Steps kept in a record; their numbers go on. A container that ends again and again must not outgrow its key."""

HOLDING = frozenset({State.HELD, State.PLACED, State.STARTED, State.STOPPING})
"""Replicas in these states have a reservation on their node, all others have none."""
RUNNABLE = frozenset({State.PLACED, State.STARTED})
UNPLACED = frozenset({State.QUEUED, State.WAITING})
_GOING_ON = (State.QUEUED, State.WAITING, State.HELD, State.PLACED, State.STARTED)
"""The first of these that a replica is in is the request's."""
_REASONED = frozenset({State.QUEUED, State.REJECTED, State.WAITING, State.FAILED})
"""Steps into these say why."""

ACCEPTED, RESIZING, RESIZED, RESIZE_FAILED = "accepted", "resizing", "resized", "resize_failed"
MOVING, MOVED, MOVE_FAILED = "moving", "moved", "move_failed"
NO_STATES = frozenset({ACCEPTED, RESIZING, RESIZED, RESIZE_FAILED, MOVING, MOVED, MOVE_FAILED})
"""What steps say that changes no state."""


def new_record(request: PlaceRequest, owner: str, wall_us: int) -> RequestRecord:
    """The record of a request that was just taken: step 1, `accepted`; it gets its state with its next step."""
    replicas = [ReplicaRecord(replica=number, state=State.QUEUED, generation=0) for number in range(request.replicas)]
    return _taken(request, owner, wall_us, State.QUEUED, replicas)


def placed_record(
    request: PlaceRequest, owner: str, wall_us: int, to: Iterable[Assignment], state: State, generation: int
) -> RequestRecord:
    """The same where each of its replicas has a place at once: step 2."""
    replicas = [
        ReplicaRecord(replica=each.replica, state=state, generation=generation, node=each.node, devices=each.devices)
        for each in to
    ]
    return _taken(request, owner, wall_us, state, replicas, _step(2, state, wall_us, generation))


def _taken(
    request: PlaceRequest, owner: str, wall_us: int, state: State, replicas: Iterable[ReplicaRecord], *steps: Step
) -> RequestRecord:
    assert request.request_id is not None
    return RequestRecord(
        request_id=request.request_id,
        body=request,
        body_hash=request.body_hash(),
        state=state,
        owner=owner,
        replicas=tuple(replicas),
        steps=(_step(1, ACCEPTED, wall_us, 0), *steps),
        arrived_at_us=wall_us,
    )


def never_asked(request_id: str, owner: str, wall_us: int) -> RequestRecord:
    """The record of a release that came before its request: a copy still under way finds it released."""
    step = _step(1, State.RELEASED, wall_us, 0)
    return RequestRecord(
        request_id=request_id,
        body=None,
        body_hash="",
        state=State.RELEASED,
        owner=owner,
        steps=(step,),
        final=True,
    )


def generation(record: RequestRecord) -> int:
    """Which placement the request as a whole is in: the newest of its replicas."""
    return _newest(record.replicas)


def _newest(replicas: Iterable[ReplicaRecord]) -> int:
    return max([each.generation for each in replicas], default=0)


def stepped(
    record: RequestRecord, state: State, wall_us: int, *, detail: str | None = None, **changes: Any
) -> RequestRecord:
    """The record after one more step; what is final follows from the state, unless `changes` says otherwise."""
    return noted(record, state, wall_us, detail, **{"state": state, "final": state.final} | changes)


def noted(record: RequestRecord, word: str, wall_us: int, detail: str | None, **changes: Any) -> RequestRecord:
    """The record after one more step, which by itself changes nothing else."""
    number = record.steps[-1].number + 1 if record.steps else 1
    present = _newest(changes.get("replicas", record.replicas))
    step = _step(number, word, wall_us, present, detail=detail)
    return record.model_copy(update=changes | {"steps": (*record.steps, step)[-MOST_STEPS:]})


@lru_cache(maxsize=256)
def _step(number: int, word: str, wall_us: int, generation: int, **detail: str | None) -> Step:
    """Requests that are planned together take the same steps at the same time."""
    return Step(number=number, state=word, at_us=wall_us, generation=generation, **detail)


def settled(
    record: RequestRecord,
    replicas: Sequence[ReplicaRecord],
    wall_us: int,
    *,
    detail: str | None = None,
    **changes: Any,
) -> RequestRecord:
    """The record with these replicas, in the state that follows from them; a step only where that state is new."""
    changes = changes | {"replicas": tuple(replicas)}
    state = overall(record, replicas)
    if state == record.state and _newest(replicas) == generation(record):
        return record.model_copy(update=changes)
    if state == State.EXITED:
        changes |= _ended_as(replicas)
    elif state == State.STOPPING:
        changes |= {"ends_as": State.EXITED}
    return stepped(record, state, wall_us, detail=detail, **changes)


def overall(record: RequestRecord, replicas: Sequence[ReplicaRecord]) -> State:
    """A request is stopping while any replica is, placed when all are, started when all are, exited when all have and
    nothing of them can be left where they were before.
    """
    states = {each.state for each in replicas}
    if record.state == State.STOPPING:
        return State.STOPPING if _remains(replicas) or states & HOLDING else record.ends_as or State.RELEASED
    for state in _GOING_ON:
        if state in states:
            return state
    return State.STOPPING if _remains(replicas) else State.EXITED


def _remains(replicas: Iterable[ReplicaRecord]) -> bool:
    return any(each.leaving is not None for each in replicas)


def _ended_as(replicas: Sequence[ReplicaRecord]) -> dict[str, Any]:
    """Exit code 0 where all ended with 0, else that of the first other one, None where it is unknown; and the reason
    of the same one.
    """
    told = next((each for each in replicas if each.exit_code != 0), replicas[0])
    return {"exit_code": told.exit_code, "end_reason": told.end_reason}


def replica_of(record: RequestRecord, number: int) -> ReplicaRecord | None:
    for each in record.replicas:
        if each.replica == number:
            return each
    return None


def with_replica(record: RequestRecord, changed: ReplicaRecord) -> tuple[ReplicaRecord, ...]:
    return tuple(changed if each.replica == changed.replica else each for each in record.replicas)


def freed(
    replica: ReplicaRecord, state: State, exit_code: int | None = None, end_reason: str | None = None
) -> ReplicaRecord:
    """The replica without its place, in a state that holds none; what it leaves elsewhere stays counted."""
    number, used, leaving = replica.generation, replica.used, replica.leaving
    if leaving is not None and leaving.size is None:
        leaving = leaving.model_copy(update={"size": replica.size})
    return ReplicaRecord(
        replica=replica.replica,
        state=state,
        generation=number,
        used=used,
        exit_code=exit_code,
        end_reason=end_reason,
        leaving=leaving,
    )


def assigned(
    replica: ReplicaRecord, to: Assignment, state: State, first_generation: int, size: Size | None
) -> ReplicaRecord:
    """The replica at a new place: its next generation, at least `first_generation`; `size` is the record's."""
    number = max(newest(replica) + 1, first_generation)
    made = ReplicaRecord(
        replica=replica.replica,
        state=state,
        generation=number,
        node=to.node,
        devices=to.devices,
        leaving=replica.leaving,
    )
    return made if size is None else made.model_copy(update={"size": size})


def newest(replica: ReplicaRecord) -> int:
    """The newest generation that it was given."""
    return max(replica.generation, replica.used)


def sites(replica: ReplicaRecord) -> Iterator[ReplicaRecord]:
    """The replica at each place that it has: where it is, where it moves to (placed), where it was before (stopping).

    Each has a reservation and a container of its own.
    """
    if replica.state in HOLDING:
        yield replica
    for site, state in ((replica.to, State.PLACED), (replica.leaving, State.STOPPING)):
        if site is not None:
            its_own = {} if site.size is None else {"size": site.size, "resizing": None}
            yield replica.model_copy(update={"state": state, "to": None, "leaving": None} | place_of(site) | its_own)


def place_of(site: Site | ReplicaRecord) -> dict[str, Any]:
    """Generation, node and devices."""
    return {"generation": site.generation, "node": site.node, "devices": site.devices}


def site_of(record: RequestRecord, number: int, generation: int) -> ReplicaRecord | None:
    """The replica at the place of this generation."""
    replica = replica_of(record, number)
    return next((each for each in sites(replica) if each.generation == generation), None) if replica else None


def moving(record: RequestRecord) -> bool:
    """Whether one of its replicas has two places."""
    return any(each.to is not None or each.leaving is not None for each in record.replicas)


def starts_elsewhere(record: RequestRecord) -> bool:
    """Whether one of them is being started at a second place."""
    return any(each.to is not None for each in record.replicas)


def moved_us(record: RequestRecord, wall_us: int) -> int:
    """How long ago one of it was last moved, by the clock of the placer that wrote it down; for ever where never."""
    moves = (step.at_us for step in reversed(record.steps) if step.state == MOVING)
    return wall_us - next(moves, -(1 << 62))


def holders(record: RequestRecord) -> list[ReplicaRecord]:
    """Replicas with a reservation; one that moves at both of its places."""
    return [site for each in record.replicas for site in sites(each)]


def nodes_of(record: RequestRecord) -> set[str]:
    return {each.node for each in holders(record) if each.node is not None}


def size_of(record: RequestRecord) -> Size:
    """What its next start gets."""
    return record.size or _asked(record)


def said(size: Size) -> str:
    """`cpu 500 milli, memory 64 MiB`."""
    cpu = f"{size.cpu_milli} milli" if size.cpu_milli else "without limit"
    memory = f"{size.memory_mib} MiB" if size.memory_mib else "without limit"
    return f"cpu {cpu}, memory {memory}"


def sized(record: RequestRecord, body: PlaceRequest) -> PlaceRequest:
    """The body as it is to be decided on: with the size that the record has by now."""
    return body if record.size is None else body.model_copy(update=dict(record.size))


def size_held(record: RequestRecord, replica: ReplicaRecord) -> Size:
    """What is reserved for a replica: while it is resized, of each quantity the larger one."""
    has, gets = size_had(record, replica), replica.resizing
    if gets is None:
        return has
    return Size(cpu_milli=max(has.cpu_milli, gets.cpu_milli), memory_mib=max(has.memory_mib, gets.memory_mib))


def size_had(record: RequestRecord, replica: ReplicaRecord) -> Size:
    """What its container has, or starts with: until a resize was seen to be done, what it had before."""
    return replica.size or _asked(record)


def _asked(record: RequestRecord) -> Size:
    assert record.body is not None
    return Size(cpu_milli=record.body.cpu_milli, memory_mib=record.body.memory_mib)


def reservation_of(record: RequestRecord, replica: ReplicaRecord) -> Reservation:
    """What a replica holds: exactly what was decided on (case P23)."""
    return _reservation(record, replica, size_held(record, replica) if replica.size or replica.resizing else None)


def _reservation(record: RequestRecord, replica: ReplicaRecord, size: Size | None) -> Reservation:
    """With the size that was asked for where none is given."""
    assert record.body is not None
    held = Demand.of(record.body).reservation(record.request_id, replica.replica, replica.generation, replica.devices)
    return held if size is None else held.model_copy(update=dict(size))


def tenant_of(record: RequestRecord, held: Reservation) -> Tenant | None:
    """Who could be moved: what has started and is neither resized nor stopped, and is where the ledger says.

    Of a request one replica moves at a time. Pods that were bound stay: they cannot be started a second time.
    """
    replica, body = replica_of(record, held.replica), record.body
    if body is None or body.pods is not None or held.container or replica is None:
        return None
    if record.state != State.STARTED or moving(record):
        return None
    at_rest = replica.state == State.STARTED and replica.resizing is None
    if not at_rest or (replica.generation, replica.devices) != (held.generation, held.devices):
        return None
    others = (each for each in holders(record) if each.replica != held.replica and each.node is not None)
    return Tenant(sized(record, body), tuple(Assignment(o.replica, o.node, o.devices) for o in others if o.node))


def labels_of(
    record: RequestRecord, replica: ReplicaRecord, ledger_id: str, held: Reservation | None = None
) -> ContainerLabels:
    """Of a start: with the size that it has before any resize, so that one that fails leaves what it says it leaves.

    `held`: what is reserved for it, where that was just made.
    """
    assert record.body is not None
    assert replica.node is not None
    return ContainerLabels(
        container=container_name(ledger_id, record.request_id, replica.replica, replica.generation),
        ledger_id=ledger_id,
        node=replica.node,
        reservation=_reservation(record, replica, replica.size) if held is None or replica.resizing else held,
        name=record.body.name,
    )


def placements(record: RequestRecord, ledger_id: str) -> tuple[Placement, ...]:
    """Where the replicas are, not where they move; empty where none has a place."""
    gpu = record.body.gpu if record.body else None
    return tuple(
        [
            Placement(
                replica=each.replica,
                node=each.node,
                devices=each.devices,
                share=gpu.share if gpu else None,
                generation=each.generation,
                state=each.state,
                container=container_name(ledger_id, record.request_id, each.replica, each.generation),
            )
            for each in record.replicas
            if each.node is not None
        ]
    )


def reply_of(record: RequestRecord, ledger_id: str, **more: Any) -> PlaceReply:
    """The answer that says where the request stands now."""
    said: dict[str, Any] = {
        "outcome": record.state,
        "request_id": record.request_id,
        "duplicate": False,
        "placements": placements(record, ledger_id),
        "generation": generation(record) or None,
        "reasons": record.reasons,
        "exit_code": record.exit_code,
        "end_reason": record.end_reason,
        "unproven": record.unproven or None,
        "measured": record.measured,
    }
    return PlaceReply(**_said(said | more))


def _said(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what there is nothing to say of, so that it stays out of the message."""
    return {name: value for name, value in fields.items() if value is not None and value != ()}


def told_move(move: Move) -> PlannedMove:
    """As a reply says it."""
    return PlannedMove(
        request_id=move.request_id,
        replica=move.to.replica,
        from_node=move.node,
        from_devices=move.devices,
        node=move.to.node,
        devices=move.to.devices,
    )


def event_of(record: RequestRecord, step: Step, ledger_id: str) -> PlaceEvent:
    """The event of one step. Only the last step can say where and why: the record shows how things are now."""
    more: dict[str, Any] = {"name": record.body.name if record.body else None, "detail": step.detail}
    if step is record.steps[-1]:
        more |= {"placements": placements(record, ledger_id)} | _end_of(record)
        if step.state in _REASONED:
            more["reasons"] = record.reasons
        if step.state in {MOVING, MOVED}:
            more["moves"] = tuple(_under_way(record))
    return PlaceEvent(
        at_us=step.at_us,
        request_id=record.request_id,
        state=step.state,
        generation=step.generation,
        step=step.number,
        **_said(more),
    )


def _end_of(record: RequestRecord) -> dict[str, Any]:
    """How it ended; of one that waits to be started again how that did which ended."""
    if record.state == State.WAITING:
        ended = [each for each in record.replicas if each.exit_code is not None or each.end_reason]
        return _ended_as(ended) if ended else {}
    return {"exit_code": record.exit_code, "end_reason": record.end_reason}


def _under_way(record: RequestRecord) -> Iterator[PlannedMove]:
    """Of each replica with two places, from where it goes to where."""
    for each in record.replicas:
        old, new = (each, each.to) if each.to is not None else (each.leaving, each)
        if old is not None and old.node is not None and new.node is not None:
            move = Move(record.request_id, old.node, old.devices, Assignment(each.replica, new.node, new.devices))
            yield told_move(move)


def event_id(record: RequestRecord, step: Step, ledger_id: str) -> str:
    return f"{ledger_id}/{record.request_id}/{step.number}"


def shadow_of(record: RequestRecord) -> dict[str, tuple[Reservation, ...]]:
    """By node, what is kept for it: what it would hold there. Nothing for one that does not wait (any more)."""
    if not record.shadow or record.state not in UNPLACED or record.body is None:
        return {}
    demand = Demand.of(sized(record, record.body))
    kept: defaultdict[str, tuple[Reservation, ...]] = defaultdict(tuple)
    for place in record.shadow:
        kept[place.node] += (demand.reservation(record.request_id, place.replica, 0, place.devices),)
    return dict(kept)


Order = tuple[int, int, int, str]


def order(record: RequestRecord, wall_us: int, age_us: int) -> Order:
    """Smallest first: by priority and what waiting adds to it, by how soon they must be placed, then as they came."""
    body = record.body
    place_by_us = body.place_by_us if body and body.place_by_us is not None else 1 << 62
    priority = (body.priority if body else 0) + gained(waited_us(record, wall_us), age_us)
    return (-priority, place_by_us, record.arrived_at_us, record.request_id)


def waited_us(record: RequestRecord, wall_us: int) -> int:
    """Since it came or, where it had a place in between, since it lost that. By the clock of the placer that wrote it
    down; less than no time counts as none.
    """
    lost = (step.at_us for step in reversed(record.steps) if step.state == State.WAITING)
    since_us = next(lost, record.arrived_at_us) if record.state == State.WAITING else record.arrived_at_us
    return max(0, wall_us - since_us)


_DOUBLINGS = 22
"""After so many the gain is more than any two priorities are apart."""


def gained(waited_us: int, age_us: int) -> int:
    """The priority that waiting adds: 1, 3, 7, 15 … after 1, 2, 3, 4 … times `age_us`; from the 22nd on the steps stay
    as large, larger than any difference of priorities.
    """
    times = waited_us // age_us
    return (max(1, times - _DOUBLINGS + 1) << min(times, _DOUBLINGS)) - 1

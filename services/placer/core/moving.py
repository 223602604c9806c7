"""How one replica moves: it starts at its new place, then stops at the old one; the steps of that, decided elsewhere.

A replica that moves has two places, each with its reservation and its container. Whatever comes between, a start that
fails, an end or a release: the second place is given up, and the rest follows as if it had never been.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.placer.core.containers import Start
from services.placer.core.intents import Scope
from services.placer.core.outcome import Move
from services.placer.core.records import (
    MOVE_FAILED,
    MOVED,
    MOVING,
    labels_of,
    newest,
    noted,
    place_of,
    replica_of,
    settled,
    site_of,
    with_replica,
)
from shared.effects import Effect
from shared.messages import ReplicaRecord, RequestRecord, Site


def begin(scope: Scope, move: Move, why: str) -> tuple[Effect, ...]:
    """The new place is reserved and started, by this placer from now on; the replica is where it was."""
    record = scope.draft.record(move.request_id)
    replica = replica_of(record, move.to.replica) if record else None
    assert record is not None
    assert replica is not None, "who can be moved has a record"
    generation = max(newest(replica), scope.draft.rebuilt_generation(move.request_id)) + 1
    to = Site(generation=generation, node=move.to.node, devices=move.to.devices)
    changed = _with(record, replica.model_copy(update={"to": to, "used": generation}))
    changed = changed.model_copy(update={"owner": scope.me})
    changed = noted(changed, MOVING, scope.wall_us, f"{_said(replica, to)}, {why}")
    scope.draft.replace(record, changed, [replica.replica])
    there = site_of(changed, replica.replica, generation)
    assert there is not None
    assert changed.body is not None
    return (Start(labels_of(changed, there, scope.draft.ledger_id), changed.body),)


def arrived(scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
    """It runs at its new place and is there from now on; the old one is to be stopped."""
    assert replica.to is not None
    old = Site(**place_of(replica))
    now = replica.model_copy(update={"to": None, "leaving": old} | place_of(replica.to))
    scope.draft.put(noted(_with(record, now), MOVED, scope.wall_us, _said(replica, replica.to)))


def failed(scope: Scope, record: RequestRecord, replica: ReplicaRecord, reason: str) -> None:
    """Nothing of it runs at the new place: that is given back, and the replica stays where it is."""
    changed = _with(record, replica.model_copy(update={"to": None}))
    scope.draft.replace(record, _not_moved(scope, changed, replica, reason), [replica.replica])


def call_off(scope: Scope, record: RequestRecord, replica: ReplicaRecord, reason: str) -> RequestRecord:
    """Something may run at the new place: it is reserved until that was stopped."""
    return _not_moved(scope, _with(record, called_off(replica)), replica, reason)


def called_off(replica: ReplicaRecord) -> ReplicaRecord:
    """The replica as it leaves the place to which it was moving, if it was."""
    return replica if replica.to is None else replica.model_copy(update={"to": None, "leaving": replica.to})


def left(scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
    """Nothing of it runs at the place that it left."""
    replicas = with_replica(record, replica.model_copy(update={"leaving": None}))
    scope.draft.replace(record, settled(record, replicas, scope.wall_us), [replica.replica])


def _with(record: RequestRecord, replica: ReplicaRecord) -> RequestRecord:
    return record.model_copy(update={"replicas": with_replica(record, replica)})


def _not_moved(scope: Scope, changed: RequestRecord, replica: ReplicaRecord, reason: str) -> RequestRecord:
    assert replica.to is not None
    return noted(changed, MOVE_FAILED, scope.wall_us, f"{_said(replica, replica.to)}: {reason}")


def _said(replica: ReplicaRecord, to: Site) -> str:
    """`replica 0 from node-1 (GPU-1) to node-2 (GPU-2)`."""
    where = (_place(node, devices) for node, devices in ((replica.node, replica.devices), (to.node, to.devices)))
    return f"replica {replica.replica} from {' to '.join(where)}"


def _place(node: str | None, devices: Iterable[str]) -> str:
    return f"{node} ({', '.join(devices)})" if devices else f"{node}"

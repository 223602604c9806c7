"""Transitions that let others move: what an operator asks for, and the moves that the leader begins."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from services.placer.core.intents import Intent, Scope
from services.placer.core.intents_life import Asked
from services.placer.core.moving import begin
from services.placer.core.outcome import Assignment, Fits, Move
from services.placer.core.question import Tenants
from services.placer.core.records import (
    UNPLACED,
    holders,
    moving,
    replica_of,
    reply_of,
    reservation_of,
    sized,
    told_move,
)
from services.placer.core.risk import at_risk
from shared.effects import Effect, Reply
from shared.errors import FieldError
from shared.messages import ReplicaRecord, RequestRecord, RoomMade


@dataclass(frozen=True)
class Defragment(Asked):
    """Lets as many others move as the plan of now names; the leader begins them, one after another."""

    request_id: str
    reply: str

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        if record is None:
            return self._unknown()
        if record.body is None or record.state not in UNPLACED:
            raise FieldError("request_id", f"{self.request_id}, which is {record.state}", "one that waits for room")
        more: dict[str, Any] = {"position": scope.draft.waiting_before(record, scope.order) + 1}
        room = record.room or RoomMade()
        if _moves_still(scope, room):
            more["warnings"] = (f"{room.mover} moves for it already",)
        elif found := _moves(scope, record, scope.tenant):
            scope.draft.put(record.model_copy(update={"room": RoomMade(left=len(found))}))
            more |= {"moves": tuple(map(told_move, found)), "reasons": ()}
        else:
            asked = sized(record, record.body)
            decision = scope.chooser.decide(asked, scope.now_us, advise=False, **rest(scope, record))
            more["reasons"] = () if isinstance(decision, Fits) else decision.reasons
        return (Reply(self.reply, reply_of(record, scope.draft.ledger_id, **more)),)


@dataclass(frozen=True)
class MakeRoom(Intent):
    """The next move of a plan for one that waits, planned anew: what was moved before is done (leader)."""

    request_id: str
    by_policy: bool = False
    """Nobody asked for it: who moved lately stays."""

    @property
    def key(self) -> Hashable:
        return ("room", self.request_id)

    @property
    def weight(self) -> int:
        return 4

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        if record is None or record.body is None or record.state not in UNPLACED or not scope.leads():
            return ()
        room = record.room or RoomMade()
        if not (room.left or self.by_policy) or _moves_still(scope, room) or not scope.may_move():
            return ()
        found = _moves(scope, record, scope.rested if self.by_policy else scope.tenant)
        if not found and not room.left:
            return ()
        scope.as_leader()
        made = RoomMade(left=max(0, min(room.left, len(found)) - 1), mover=found[0].request_id) if found else None
        scope.draft.put(record.model_copy(update={"room": made}))
        return begin(scope, found[0], f"so that {self.request_id} fits") if found else ()


@dataclass(frozen=True)
class Widen(Intent):
    """The next move of a plan after which a larger block of devices is free, while nobody waits (leader)."""

    @property
    def key(self) -> Hashable:
        return ("widen",)

    @property
    def weight(self) -> int:
        return 4

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        if not scope.leads() or not scope.may_move() or not (found := scope.chooser.widening(scope.rested)):
            return ()
        scope.as_leader()
        return begin(scope, found[0], "so that more devices of one node are free together")


@dataclass(frozen=True)
class Leave(Intent):
    """A replica leaves its place for another one, where there is a reason and one that takes it (leader)."""

    request_id: str
    replica: int

    @property
    def weight(self) -> int:
        return 3

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        replica = replica_of(record, self.replica) if record else None
        if record is None or replica is None or replica.node is None or not scope.leads():
            return ()
        found = self.found(scope, record, replica, replica.node)
        if found is None:
            return ()
        scope.as_leader()
        return begin(scope, *found)

    def found(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord, node: str) -> tuple[Move, str] | None:
        """The move from that node, and why."""
        raise NotImplementedError


@dataclass(frozen=True)
class MoveAway(Leave):
    """One that wants it leaves a device on which somebody misses a guarantee."""

    @property
    def key(self) -> Hashable:
        return ("away", self.request_id)

    def found(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord, node: str) -> tuple[Move, str] | None:
        """See Leave."""
        if not scope.may_move():
            return None
        bad, held = at_risk(scope.chooser.cluster), reservation_of(record, replica)
        tenant = scope.rested(held) if set(bad.get(node, ())) & set(held.devices) else None
        if tenant is None or tenant.request.on_risk != "move":
            return None
        move = scope.chooser.move_away(tenant.request, node, held, bad, scope.rested)
        return (move, "since a guarantee is missed where it is") if move else None


def _moves_still(scope: Scope, room: RoomMade) -> bool:
    """Whether the one who moved for it last is not done: what that frees is not to be made twice."""
    mover = scope.draft.known(room.mover) if room.mover else None
    return mover is not None and moving(mover)


def _moves(scope: Scope, record: RequestRecord, tenants: Tenants) -> tuple[Move, ...]:
    assert record.body is not None, "what waits has a body"
    return scope.chooser.moves(sized(record, record.body), tenants, **rest(scope, record))


def rest(scope: Scope, record: RequestRecord) -> dict[str, Any]:
    """What of it waits, and where the others of it are."""
    only = tuple(each.replica for each in record.replicas if each.state in UNPLACED)
    others = tuple(Assignment(r.replica, r.node, r.devices) for r in holders(record) if r.node is not None)
    return {"only": only, "others": others, "ahead_of": scope.ahead_of(record)}

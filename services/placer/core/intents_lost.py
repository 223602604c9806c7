"""Transitions of who is on a node or a device that was lost: placed again (leader), or ended by an operator's word."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from services.placer.core.containers import Cause
from services.placer.core.intents import Intent, Scope
from services.placer.core.intents_life import MarkExited
from services.placer.core.intents_moves import Leave, rest
from services.placer.core.lost import is_lost, leaves_unwatched, lost_device, moving_to, stranded
from services.placer.core.moving import call_off
from services.placer.core.outcome import Fits, Move
from services.placer.core.records import (
    MOVE_FAILED,
    freed,
    overall,
    place_of,
    reservation_of,
    site_of,
    size_held,
    sized,
    stepped,
)
from shared.effects import Effect, Reply
from shared.errors import FieldError
from shared.messages import NodeState, PlaceReply, Reason, ReplicaRecord, RequestRecord, Reservation, Site, State


@dataclass(frozen=True)
class GiveUp(Intent):
    """placed, started → waiting, since its node is lost and does not answer: the queue places it again (leader).

    What it has there stays reserved, as the place that it leaves, until it was seen to be gone. A move to there is off.
    """

    request_id: str
    node: str

    @property
    def key(self) -> Hashable:
        return ("lost", self.request_id, self.node)

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        if record is None or not scope.leads() or not is_lost(scope.chooser.cluster, self.node):
            return ()
        here, coming = stranded(record, self.node), moving_to(record, self.node)
        changed = record.model_copy(update={"owner": scope.me})
        for each in coming:
            changed = call_off(scope, changed, each, f"{self.node} is lost")
        if here:
            changed = self._waits(scope, changed, here)
        if here or coming:
            scope.as_leader()
            scope.draft.replace(record, changed, [each.replica for each in (*here, *coming)])
        return ()

    def _waits(self, scope: Scope, record: RequestRecord, here: Sequence[ReplicaRecord]) -> RequestRecord:
        left = {each.replica: _left(record, each) for each in here}
        replicas = tuple(left.get(each.replica, each) for each in record.replicas)
        which = ", ".join(f"replica {number}" for number in left)
        detail = f"{self.node} is lost: {which} goes elsewhere, and is stopped there once that answers"
        waits = stepped(
            record, overall(record, replicas), scope.wall_us, detail=detail, replicas=replicas, backoff_us=0
        )
        return waits.model_copy(update={"reasons": _reasons(scope, waits)})


def _left(record: RequestRecord, replica: ReplicaRecord) -> ReplicaRecord:
    """Without a place, and with all that it had as what it leaves."""
    behind = Site(**place_of(replica), size=size_held(record, replica))
    return freed(replica.model_copy(update={"leaving": behind}), State.WAITING)


def _reasons(scope: Scope, record: RequestRecord) -> tuple[Reason, ...]:
    """Why it fits nowhere else now; none where it does."""
    assert record.body is not None, "what was placed has a body"
    decision = scope.chooser.decide(sized(record, record.body), scope.now_us, advise=False, **rest(scope, record))
    return () if isinstance(decision, Fits) else decision.reasons


@dataclass(frozen=True)
class MoveOff(Leave):
    """Away from what is lost, where its backend still answers: it starts elsewhere, then stops here.

    So it goes on running while it fits nowhere else. From a lost device only who asked for that, also hard ones.
    """

    @property
    def key(self) -> Hashable:
        return ("off", self.request_id, self.replica)

    def found(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord, node: str) -> tuple[Move, str] | None:
        """See Leave."""
        why = _why(scope, record, node, replica.devices)
        if why is None or _failed_lately(scope, record) or scope.draft.elsewhere() >= scope.rules.lost_at_once:
            return None
        move = _move(scope, reservation_of(record, replica), node)
        return (move, f"since {why}") if move else None


def _why(scope: Scope, record: RequestRecord, node: str, devices: Sequence[str]) -> str | None:
    """Why it should leave its place; None where it should not, or may not."""
    if is_lost(scope.chooser.cluster, node):
        return f"{node} is lost" if leaves_unwatched(record) else None
    asked = record.body is not None and record.body.on_risk == "move"
    return lost_device(scope.chooser.cluster, node, devices) if asked else None


def _failed_lately(scope: Scope, record: RequestRecord) -> bool:
    failed = (step.at_us for step in reversed(record.steps) if step.state == MOVE_FAILED)
    return scope.wall_us - next(failed, -(1 << 62)) < scope.rules.move_rest_us


def _move(scope: Scope, held: Reservation, node: str) -> Move | None:
    """As it would be placed now, beside what it has; what is lost is free for nobody."""
    tenant = scope.tenant(held)
    if tenant is None:
        return None
    decision = scope.chooser.decide(
        tenant.request, scope.now_us, only=(held.replica,), others=tenant.others, advise=False
    )
    return Move(held.request_id, node, held.devices, decision.assignments[0]) if isinstance(decision, Fits) else None


NODE_LOST: Final = Cause("NodeLost")


@dataclass(frozen=True)
class Vanished(MarkExited):
    """It ended with its node: the operator's word stands for that of a backend."""

    def _code(self) -> str:
        return "its node, which is gone, an operator says"


@dataclass(frozen=True)
class NodeGone(Intent):
    """All that is on a node has ended, an operator says: its reservations are given back. A hold runs out by itself.

    Should the node come back, what runs there is of a generation that nobody knows any more, and is stopped.
    """

    node: str
    reply: str
    reservations: int = 0

    @property
    def weight(self) -> int:
        return 2 + self.reservations

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        facts = scope.chooser.cluster.facts(self.node)
        if facts is not None and facts.state not in {NodeState.UNREACHABLE, NodeState.LOST}:
            raise FieldError("node", f"{self.node}, which is {facts.state}", "one that is unreachable or lost")
        before = scope.draft.reservations(self.node)
        for held in before:
            if held.container is None:
                self._end(scope, held)
        explained = tuple(each for each in scope.draft.reservations(self.node) if each.container is None)
        scope.draft.set_reservations(self.node, explained)
        said = PlaceReply(outcome="gone", request_id=None, freed=len(before) - len(explained))
        return (Reply(self.reply, said),)

    def _end(self, scope: Scope, held: Reservation) -> None:
        """By this placer from now on: who observes something of a container owns it."""
        record = scope.draft.known(held.request_id)
        site = site_of(record, held.replica, held.generation) if record else None
        if record is not None and site is not None and site.state != State.HELD:
            scope.draft.put(record.model_copy(update={"owner": scope.me}))
            Vanished(*held.which, None, NODE_LOST).plan(scope)

    def refused(self, code: int, field: str, found: str, allowed: str) -> tuple[Effect, ...]:
        fault = FieldError(field, found, allowed)
        return (Reply(self.reply, PlaceReply.of_error(fault), (code, str(fault))),)

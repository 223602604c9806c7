"""Transitions of the leader alone, those of leases, and those that keep account of containers no key explains."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from services.placer.core.containers import ListNode
from services.placer.core.intents import Intent, Scope
from services.placer.core.ledger import LEADER
from services.placer.core.records import UNPLACED, freed, generation, nodes_of, stepped
from shared.effects import Effect
from shared.messages import Lease, LedgerIdentity, Reservation, ShadowPlace, State


@dataclass(frozen=True)
class CreateLedger(Intent):
    """The ledger gets its identity, unless it has one."""

    ledger_id: str

    @property
    def key(self) -> Hashable:
        return "create"

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        if scope.draft.identity is None:
            scope.draft.put_identity(LedgerIdentity(ledger_id=self.ledger_id, former=(), created_at_us=scope.wall_us))
        return ()


@dataclass(frozen=True)
class RenewLease(Intent):
    """This placer is alive: its own lease counts on, and says up to which revision all that it wrote has been told."""

    told: Callable[[], int]
    """Asked when it is planned: the ledger may have gone back since."""

    @property
    def key(self) -> Hashable:
        return "renew"

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        lease = scope.draft.lease(scope.me)
        counter = lease.counter + 1 if lease else 1
        ttl_us = scope.rules.lease_ttl_us
        scope.draft.put_lease(scope.me, Lease(holder=scope.me, counter=counter, ttl_us=ttl_us, told=self.told()))
        if scope.leads():
            scope.as_leader()
        return ()


@dataclass(frozen=True)
class Lead(Intent):
    """Take the leader's lease where nobody holds it any more."""

    @property
    def key(self) -> Hashable:
        return "lead"

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        if not scope.leads() and (scope.draft.lease(LEADER) is None or not scope.leases.alive(LEADER, scope.now_us)):
            scope.as_leader()
        return ()


@dataclass(frozen=True)
class Resign(Intent):
    """A placer stops on purpose: its leases are given up, so nobody has to wait for them. Its own one stays, since what
    it says last may not arrive any more.
    """

    @property
    def key(self) -> Hashable:
        return "resign"

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        if scope.leads():
            scope.draft.put_lease(LEADER, None)
        if (lease := scope.draft.lease(scope.me)) is not None:
            scope.draft.put_lease(scope.me, lease.model_copy(update={"ttl_us": 0}))
        return ()


@dataclass(frozen=True)
class TakeOver(Intent):
    """Same state, another owner: the leader, since the owner's lease ran out."""

    request_id: str

    @property
    def key(self) -> Hashable:
        return ("take", self.request_id)

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        if record is None or record.state.final or record.owner == scope.me or not scope.leads():
            return ()
        nodes = nodes_of(record)
        if scope.leases.alive(record.owner, scope.now_us) or not all(map(scope.chooser.reaches, nodes)):
            return ()
        scope.as_leader()
        scope.draft.put(record.model_copy(update={"owner": scope.me}))
        return tuple(ListNode(node) for node in sorted(nodes))


@dataclass(frozen=True)
class DropLease(Intent):
    """The lease of a placer that is gone, once all that it owned is taken over and all that it wrote is told."""

    holder: str

    @property
    def key(self) -> Hashable:
        return ("drop", self.holder)

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        if scope.leads() and scope.draft.lease(self.holder) and not scope.leases.alive(self.holder, scope.now_us):
            scope.as_leader()
            scope.draft.put_lease(self.holder, None)
        return ()


@dataclass(frozen=True)
class ExpireHold(Intent):
    """held → expired, not final: a repeat makes a new hold."""

    request_id: str
    generation: int
    replicas: int

    @property
    def key(self) -> Hashable:
        return ("expire", self.request_id, self.generation)

    @property
    def weight(self) -> int:
        return 2 + self.replicas

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        if record is None or record.state != State.HELD or not scope.leads():
            return ()
        if generation(record) != self.generation:
            return ()
        scope.as_leader()
        scope.draft.free(record)
        replicas = tuple(freed(each, State.EXPIRED) for each in record.replicas)
        detail = "the hold was not confirmed in time"
        scope.draft.put(stepped(record, State.EXPIRED, scope.wall_us, detail=detail, final=False, replicas=replicas))
        return ()


@dataclass(frozen=True)
class SetShadow(Intent):
    """What is kept for a request that waits; nothing any more where empty. No step: it is where it was."""

    request_id: str
    places: tuple[ShadowPlace, ...]

    @property
    def key(self) -> Hashable:
        return ("shadow", self.request_id)

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        if record is None or record.state not in UNPLACED or record.shadow == self.places or not scope.leads():
            return ()
        scope.as_leader()
        scope.draft.put(record.model_copy(update={"shadow": self.places}))
        return ()


@dataclass(frozen=True)
class Account(Intent):
    """The reservations of a node's containers that no key explains, as its labels have them now."""

    node: str
    rebuilt: tuple[Reservation, ...]

    @property
    def key(self) -> Hashable:
        return ("account", self.node)

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        known = scope.draft.reservations(self.node)
        ours = tuple(each for each in known if not each.container)
        if set(_names(known)) != set(_names(self.rebuilt)):
            scope.draft.set_reservations(self.node, (*ours, *self.rebuilt))
        return ()


def _names(reservations: tuple[Reservation, ...]) -> list[str]:
    return [each.container for each in reservations if each.container]

"""What a transition is and what it may look at; the transitions themselves live in the intents_* files beside it.

Every change of the ledger is an Intent. Its `plan` looks at the draft (the view and what the batch has planned so
far), writes the change into it and returns the effects to carry out once the batch is in the ledger; or it finds
that nothing is to be done any more. So a conflict costs nothing but planning again, and two placers that carry out
the same transition do it once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from services.placer.core.capabilities import OTHERS, Capabilities
from services.placer.core.cluster import Cluster
from services.placer.core.containers import Start
from services.placer.core.leases import Leases
from services.placer.core.ledger import LEADER, Draft
from services.placer.core.outcome import Assignment, Decision, Move
from services.placer.core.pipeline import decide, fits_more, moves
from services.placer.core.question import Tenant, Tenants, nobody
from services.placer.core.records import labels_of, tenant_of
from shared.effects import Effect
from shared.messages import Lease, PlaceRequest, RequestRecord, Reservation, State

SECOND_US = 1_000_000


@dataclass(frozen=True)
class Rules:
    """Numbers of the placer's life; what each is for stands beside its setting."""

    lease_ttl_us: int = 3 * SECOND_US
    grace_us: int = 5 * SECOND_US
    most_tries: int = 5
    backoff_first_us: int = SECOND_US
    backoff_most_us: int = 60 * SECOND_US
    final_ttl_s: int = 86_400
    batch: int = 64

    def backoff_us(self, times: int) -> int:
        """first * 2^(times - 1), at most `backoff_most_us`; `times` from 1."""
        return min(self.backoff_most_us, self.backoff_first_us << min(times - 1, 32))


@dataclass(frozen=True)
class Chooser:
    """The decide half, with what this placer can reach."""

    cluster: Cluster
    capabilities: Mapping[str, Capabilities]
    tie: str

    def reaches(self, node: str) -> bool:
        """Whether a backend of this placer runs the node's containers."""
        return node in self.capabilities or OTHERS in self.capabilities

    def decide(
        self,
        request: PlaceRequest,
        now_us: int,
        *,
        set_aside: frozenset[str] = frozenset(),
        only: tuple[int, ...] | None = None,
        others: tuple[Assignment, ...] = (),
        advise: bool = True,
        tenants: Tenants = nobody,
    ) -> Decision:
        """Raises FieldError for a strategy that does not exist."""
        return decide(
            self.cluster,
            request,
            now_us,
            capabilities=self.capabilities,
            set_aside=set_aside,
            only_replicas=only,
            tie=self.tie,
            others_of_request=others,
            advise=advise,
            tenants=tenants,
        )

    def moves(self, request: PlaceRequest, tenants: Tenants) -> tuple[Move, ...]:
        """Moves of others after which it would fit."""
        return moves(self.cluster, request, capabilities=self.capabilities, tie=self.tie, tenants=tenants)

    def fits_more(self, request: PlaceRequest, now_us: int) -> int:
        return fits_more(self.cluster, request, now_us, capabilities=self.capabilities)


@dataclass(frozen=True)
class Scope:
    """What one planning looks at: the draft, the time, and who plans."""

    me: str
    rules: Rules
    draft: Draft
    leases: Leases
    chooser: Chooser
    now_us: int
    wall_us: int

    def leads(self) -> bool:
        lease = self.draft.lease(LEADER)
        return lease is not None and lease.holder == self.me

    def as_leader(self) -> None:
        """The batch carries the leader's key from now on: it fails for a placer that was deposed, and renews."""
        lease = self.draft.lease(LEADER)
        counter = lease.counter if lease else 0
        self.draft.put_lease(LEADER, Lease(holder=self.me, counter=counter + 1, ttl_us=self.rules.lease_ttl_us))

    def tenant(self, held: Reservation) -> Tenant | None:
        """Whether who holds this could be moved, and what it asked for."""
        stored = self.draft.known(held.request_id)
        return tenant_of(stored, held) if stored else None

    def starts(self, record: RequestRecord, only: frozenset[int] | None = None) -> tuple[Effect, ...]:
        """The starts that follow from a record whose replicas were just placed (only these where given)."""
        if record.owner != self.me or record.state not in {State.PLACED, State.WAITING, State.STARTED}:
            return ()
        assert record.body is not None
        return tuple(
            Start(labels_of(record, each, self.draft.ledger_id), record.body)
            for each in record.replicas
            if each.state == State.PLACED and (only is None or each.replica in only)
        )


class Intent:
    """One transition. Subclasses are frozen dataclasses."""

    @property
    def key(self) -> Hashable | None:
        """Equal keys are the same transition, queued once; None where each one counts (a request wants its answer)."""
        return None

    @property
    def weight(self) -> int:
        """The most keys that it can write."""
        return 2

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        """Write the change into the draft; effects for once it is in the ledger. Raises FieldError for the asker."""
        raise NotImplementedError

    def refused(self, code: int, field: str, found: str, allowed: str) -> tuple[Effect, ...]:  # noqa: ARG002
        """The answer where it cannot be carried out at all; nothing where nobody waits for one."""
        return ()

"""What a transition is and what it may look at; the transitions themselves live in the intents_* files beside it.

Every change of the ledger is an Intent. Its `plan` looks at the draft (the view and what the batch has planned so
far), writes the change into it and returns the effects to carry out once the batch is in the ledger; or it finds
that nothing is to be done any more. So a conflict costs nothing but planning again, and two placers that carry out
the same transition do it once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from services.placer.core.capabilities import Capabilities, capabilities_of
from services.placer.core.cluster import Cluster
from services.placer.core.containers import Start
from services.placer.core.leases import Leases
from services.placer.core.ledger import LEADER, Draft
from services.placer.core.outcome import Assignment, Decision, Fits, Move, NotNow
from services.placer.core.outlooks import Learned
from services.placer.core.pipeline import answer, fits_by_size, fits_more
from services.placer.core.planners.defrag import BLOCK, MOST_MOVES, move_away, moves_for, moves_to_widen
from services.placer.core.question import Question, Tenant, Tenants, nobody
from services.placer.core.records import Order, labels_of, moved_us, order, tenant_of
from services.placer.core.strategies import STRATEGIES, Strategy
from shared.admission import EXPLORED
from shared.effects import Effect
from shared.messages import Lease, PlaceRequest, Reason, RequestRecord, Reservation, State

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
    age_us: int = 600 * SECOND_US
    heads: int = 4
    patience_us: int = 600 * SECOND_US
    defragment: Literal["off", "waiting", "widen"] = "off"
    explored_ratio: float = EXPLORED
    """For whom others move although nobody asks for it: for no one, or for the first that waits."""
    moves_at_once: int = 1
    """Containers that are being started elsewhere at a time."""
    move_rest_us: int = 600 * SECOND_US
    """So long who has moved is not moved again, unless an operator asks for it."""
    lost_grace_us: int = 60 * SECOND_US
    """So long a node or a device is lost before who is there is placed again."""
    lost_at_once: int = 10
    """So many at one beat; of those that move also so many at a time."""
    lost_most_ratio: float = 0.5
    """Where a larger part of all nodes cannot be reached, nobody is placed again."""
    strategies: Mapping[str, Strategy] = field(default_factory=lambda: STRATEGIES)
    """By the names that requests say."""

    def backoff_us(self, times: int) -> int:
        """first * 2^(times - 1), at most `backoff_most_us`; `times` from 1."""
        return min(self.backoff_most_us, self.backoff_first_us << min(times - 1, 32))


@dataclass(frozen=True)
class Chooser:
    """The decide half, with what this placer can reach."""

    cluster: Cluster
    capabilities: Mapping[str, Capabilities]
    tie: str
    learned: Learned = field(default_factory=Learned)

    def reaches(self, node: str) -> bool:
        """Whether a backend of this placer runs the node's containers."""
        return capabilities_of(node, self.capabilities) is not None

    def decide(  # noqa: PLR0913  # what a decision depends on, by name
        self,
        request: PlaceRequest,
        now_us: int,  # noqa: ARG002  # part of the interface: strategies that look at time come later
        *,
        set_aside: frozenset[str] = frozenset(),
        only: tuple[int, ...] | None = None,
        others: tuple[Assignment, ...] = (),
        advise: bool = True,
        ahead_of: frozenset[str] = frozenset(),
        tenants: Tenants = nobody,
    ) -> Decision:
        """`ahead_of`: waiting requests that come after this one, so that what is kept for them is free.

        Raises FieldError for a strategy that does not exist.
        """
        question = self._question(request, set_aside, only, others, tenants)
        decision = self._answer(question, ahead_of, advise=advise)
        if advise and isinstance(decision, NotNow):
            return self._kept(decision, question, ahead_of)
        return decision

    def _question(
        self,
        request: PlaceRequest,
        set_aside: frozenset[str] = frozenset(),
        only: tuple[int, ...] | None = None,
        others: tuple[Assignment, ...] = (),
        tenants: Tenants = nobody,
    ) -> Question:
        return Question.about(
            self.cluster,
            request,
            capabilities=self.capabilities,
            strategies=self.learned.strategies,
            only=only,
            set_aside=set_aside,
            others=others,
            tie=self.tie,
            tenants=tenants,
        )

    def _answer(self, question: Question, unkept: Collection[str], *, advise: bool = False) -> Decision:
        if not unkept:
            return answer(question, advise=advise)
        with self.cluster.without_shadows(unkept):
            return answer(question, advise=advise)

    def _kept(self, refused: NotNow, question: Question, ahead_of: frozenset[str]) -> NotNow:
        """The same with one more reason where it would fit, were nothing kept for others."""
        kept_for = sorted(self.cluster.shadows - ahead_of)
        for waiting in ([each] for each in kept_for) if len(kept_for) > 1 else ():
            would_be = self._answer(question, {*ahead_of, *waiting})
            if isinstance(would_be, Fits):
                return _kept_reason(refused, would_be, waiting)
        would_be = self._answer(question, {*ahead_of, *kept_for}) if kept_for else refused
        return _kept_reason(refused, would_be, kept_for) if isinstance(would_be, Fits) else refused

    def moves(
        self,
        request: PlaceRequest,
        tenants: Tenants,
        *,
        only: tuple[int, ...] | None = None,
        others: tuple[Assignment, ...] = (),
        ahead_of: frozenset[str] = frozenset(),
    ) -> tuple[Move, ...]:
        """Moves of others after which it would fit."""
        with self.cluster.without_shadows(ahead_of):
            return moves_for(self._question(request, only=only, others=others, tenants=tenants), MOST_MOVES)

    def widening(self, tenants: Tenants) -> tuple[Move, ...]:
        """Moves of others after which the largest block of free devices on one node is larger; room kept counts."""
        return moves_to_widen(self._question(BLOCK, tenants=tenants))

    def move_away(
        self, request: PlaceRequest, node: str, held: Reservation, bad: Mapping[str, tuple[str, ...]], tenants: Tenants
    ) -> Move | None:
        """Whither this one of the request goes from these devices, named by node."""
        return move_away(self._question(request, only=(held.replica,), tenants=tenants), node, held, bad)

    def note(self, request: PlaceRequest) -> None:
        """A new request: strategies that look ahead learn from it. One that is planned again is counted again."""
        self.learned.note(self.cluster, request)

    def room(self, request: PlaceRequest, now_us: int, *, ahead_of: frozenset[str] = frozenset()) -> dict[str, Any]:
        """What a dry run tells of it: how many more such requests would fit, and of each fixed size."""
        asked: Any = {"capabilities": self.capabilities, "strategies": self.learned.strategies}
        with self.cluster.without_shadows(ahead_of):
            return {
                "fits_more": fits_more(self.cluster, request, now_us, **asked),
                "fits_by_size": fits_by_size(self.cluster, request, now_us, **asked),
            }


def _kept_reason(refused: NotNow, would_be: Fits, kept_for: Collection[str]) -> NotNow:
    nodes = list(dict.fromkeys(each.node for each in would_be.assignments))
    text = f"{nodes[0]} has room that is kept for {', '.join(kept_for)}, which waits and comes first"
    reason = Reason(code="not_now.kept", count=len(nodes), message=text)
    return replace(refused, reasons=(reason, *refused.reasons))


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

    def order(self, record: RequestRecord) -> Order:
        """Its place among those that wait."""
        return order(record, self.wall_us, self.rules.age_us)

    def ahead_of(self, record: RequestRecord) -> frozenset[str]:
        """Requests that room is kept for and that come after this one; itself among them."""
        if not self.chooser.cluster.shadows:
            return frozenset()
        mine = self.order(record)
        return frozenset(
            request_id
            for request_id in self.chooser.cluster.shadows
            if (other := self.draft.record(request_id)) is None or self.order(other) >= mine
        )

    def as_leader(self) -> None:
        """The batch carries the leader's key from now on: it fails for a placer that was deposed, and renews."""
        lease = self.draft.lease(LEADER)
        counter = lease.counter if lease else 0
        self.draft.put_lease(LEADER, Lease(holder=self.me, counter=counter + 1, ttl_us=self.rules.lease_ttl_us))

    def tenant(self, held: Reservation) -> Tenant | None:
        """Whether who holds this could be moved, and what it asked for."""
        stored = self.draft.known(held.request_id)
        return tenant_of(stored, held) if stored else None

    def rested(self, held: Reservation) -> Tenant | None:
        """The same, and nobody who moved lately."""
        stored = self.draft.known(held.request_id)
        rests = stored is not None and moved_us(stored, self.wall_us) < self.rules.move_rest_us
        return tenant_of(stored, held) if stored and not rests else None

    def may_move(self) -> bool:
        """Whether one more may be started elsewhere now."""
        return self.draft.elsewhere() < self.rules.moves_at_once

    def starts(self, record: RequestRecord, only: frozenset[int] | None = None) -> tuple[Effect, ...]:
        """The starts that follow from a record whose replicas were just placed (only these where given)."""
        if record.owner != self.me or record.state not in {State.PLACED, State.WAITING, State.STARTED}:
            return ()
        body, ledger_id, reserved = record.body, self.draft.ledger_id, self.draft.reserved
        assert body is not None
        return tuple(
            [
                Start(labels_of(record, each, ledger_id, reserved(record, each)), body)
                for each in record.replicas
                if each.state == State.PLACED and (only is None or each.replica in only)
            ]
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

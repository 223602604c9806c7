"""Transitions that begin with a place: a new request, a repeat, a new hold, and the leader's try of a waiting one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from services.placer.core.intents import Intent, Scope
from services.placer.core.outcome import Assignment, Fits, Never, NotNow
from services.placer.core.records import (
    UNPLACED,
    assigned,
    holders,
    new_record,
    placed_record,
    reply_of,
    settled,
    sized,
    stepped,
    told_move,
)
from shared.effects import Ack, Effect, Reply
from shared.errors import FieldError
from shared.messages import PlaceReply, PlaceRequest, RequestRecord, State


@dataclass(frozen=True)
class Decide(Intent):
    """A request, live (with `reply`) or from the stored copies (with `acks`)."""

    request: PlaceRequest
    reply: str = ""
    acks: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def weight(self) -> int:
        return 1 + self.request.replicas

    @property
    def request_id(self) -> str:
        assert self.request.request_id is not None, "an id is made up before a request is taken"
        return self.request.request_id

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        if record is None:
            return self._first(scope)
        if record.body is not None and record.body_hash != self.request.body_hash():
            raise FieldError("request_id", self.request_id, "an id of its own: it was used with another body")
        if self.request.hold_us and (record.state == State.HELD or _hold_is_over(record)):
            return self._hold_again(scope, record)
        return self._answer(self._says(scope, record, duplicate=True))

    def refused(self, code: int, field: str, found: str, allowed: str) -> tuple[Effect, ...]:
        fault = FieldError(field, found, allowed)
        body = PlaceReply.of_error(fault, self.request_id)
        return (Reply(self.reply, body, (code, str(fault))), *self._acks())

    # --- a new one ---

    def _first(self, scope: Scope) -> tuple[Effect, ...]:
        if _too_late(self.request, scope.wall_us):
            return self._settle_without(scope, State.EXPIRED, detail="place_by_us has passed")
        if not self.request.dry_run:
            scope.chooser.note(self.request)
        ahead_of = self._ahead_of(scope)
        decision = scope.chooser.decide(self.request, scope.now_us, ahead_of=ahead_of, tenants=scope.tenant)
        match decision:
            case Fits():
                return self._placed(scope, decision)
            case NotNow(reasons, would_fit_if) if self.request.queue:
                return self._settle_without(scope, State.QUEUED, reasons=reasons, would_fit_if=would_fit_if)
            case NotNow(reasons, would_fit_if) | Never(reasons, would_fit_if):
                return self._settle_without(scope, State.REJECTED, reasons=reasons, would_fit_if=would_fit_if)

    def _ahead_of(self, scope: Scope) -> frozenset[str]:
        """As in Scope. Mostly nothing is kept for anybody, and there is no record yet."""
        if not scope.chooser.cluster.shadows:
            return frozenset()
        return scope.ahead_of(new_record(self.request, scope.me, scope.wall_us))

    def _placed(self, scope: Scope, fits: Fits) -> tuple[Effect, ...]:
        state = State.HELD if self.request.hold_us else State.PLACED
        generation = scope.draft.rebuilt_generation(self.request_id) + 1
        record = placed_record(self.request, scope.me, scope.wall_us, fits.assignments, state, generation)
        if fits.unproven or fits.measured:
            record = record.model_copy(update={"unproven": fits.unproven, "measured": fits.measured})
        if self.request.dry_run:
            return self._would_be(scope, record, score=fits.score, runner_up=fits.runner_up)
        scope.draft.put(record)
        scope.draft.reserve(record)
        said = self._says(scope, record, score=fits.score, runner_up=fits.runner_up)
        return (*self._answer(said), *scope.starts(record))

    def _settle_without(
        self, scope: Scope, state: State, *, would_fit_if: tuple[str, ...] = (), **changes: Any
    ) -> tuple[Effect, ...]:
        """Queued, rejected or expired: no place. Only a hold that waits, and no dry run, leaves a key."""
        record = new_record(self.request, scope.me, scope.wall_us)
        record = stepped(record, state, scope.wall_us, **changes)
        if self.request.dry_run:
            return self._would_be(scope, record, would_fit_if=would_fit_if)
        if state == State.QUEUED or not self.request.hold_us:
            scope.draft.put(record)
        return self._answer(self._says(scope, record, would_fit_if=would_fit_if))

    def _would_be(self, scope: Scope, record: RequestRecord, **more: Any) -> tuple[Effect, ...]:
        ahead_of = scope.ahead_of(record)
        more |= scope.chooser.room(self.request, scope.now_us, ahead_of=ahead_of)
        if record.state in {State.QUEUED, State.REJECTED}:
            found = scope.chooser.moves(self.request, scope.tenant, ahead_of=ahead_of)
            more["moves"] = tuple(map(told_move, found))
        return self._answer(self._says(scope, record, dry_run=True, **more))

    # --- a hold once more ---

    def _hold_again(self, scope: Scope, record: RequestRecord) -> tuple[Effect, ...]:
        """A new hold, judged as if the old one had left. Refused, it changes nothing: the old one runs out."""
        scope.draft.free(record)
        fits = scope.chooser.decide(sized(record, self.request), scope.now_us, ahead_of=scope.ahead_of(record))
        if not isinstance(fits, Fits):
            scope.draft.reserve(record)
            said = PlaceReply(
                outcome=State.REJECTED,
                request_id=self.request_id,
                duplicate=False,
                reasons=fits.reasons,
                would_fit_if=fits.would_fit_if,
            )
            return self._answer(said)
        fresh = record.model_copy(update={"body": self.request, "owner": scope.me})
        held = _place(scope, fresh, fits)
        return self._answer(self._says(scope, held, score=fits.score, runner_up=fits.runner_up))

    # --- the answer ---

    def _says(self, scope: Scope, record: RequestRecord, **more: Any) -> PlaceReply:
        if record.state in UNPLACED:
            more["position"] = scope.draft.waiting_before(record, scope.order) + 1
        return reply_of(record, scope.draft.ledger_id, warnings=self.warnings, **more)

    def _answer(self, said: PlaceReply) -> tuple[Effect, ...]:
        return (Reply(self.reply, said), *self._acks())

    def _acks(self) -> tuple[Effect, ...]:
        return tuple(map(Ack, self.acks))


@dataclass(frozen=True)
class TryWaiting(Intent):
    """queued, waiting → placed or held, where it fits now (leader)."""

    request_id: str
    replicas: int

    @property
    def key(self) -> Hashable:
        return ("try", self.request_id)

    @property
    def weight(self) -> int:
        return 2 + self.replicas

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        if record is None or record.body is None or record.state not in UNPLACED or not scope.leads():
            return ()
        if record.state == State.QUEUED and _too_late(record.body, scope.wall_us):
            scope.as_leader()
            scope.draft.put(stepped(record, State.EXPIRED, scope.wall_us, detail="place_by_us has passed"))
            return ()
        fits = self._fits(scope, record, record.body)
        if fits is None:
            return ()
        scope.as_leader()
        placed = _place(scope, record.model_copy(update={"owner": scope.me}), fits)
        return scope.starts(placed, frozenset(each.replica for each in fits.assignments))

    def _fits(self, scope: Scope, record: RequestRecord, body: PlaceRequest) -> Fits | None:
        """Where it goes now; a node where its start failed is taken only where no other will do."""
        only = tuple(each.replica for each in record.replicas if each.state in UNPLACED)
        others = tuple(Assignment(r.replica, r.node, r.devices) for r in holders(record) if r.node is not None)
        asked: dict[str, Any] = {"only": only, "others": others, "ahead_of": scope.ahead_of(record)}
        for set_aside in dict.fromkeys((frozenset(record.set_aside), frozenset[str]())):
            decision = scope.chooser.decide(
                sized(record, body), scope.now_us, set_aside=set_aside, advise=False, **asked
            )
            if isinstance(decision, Fits):
                return decision
        return None


def _place(scope: Scope, record: RequestRecord, fits: Fits) -> RequestRecord:
    """The record with its replicas at their places, and the reservations, in the draft."""
    placed = _placed(scope, record, fits)
    scope.draft.replace(record, placed, [each.replica for each in fits.assignments])
    return placed


def _placed(scope: Scope, record: RequestRecord, fits: Fits) -> RequestRecord:
    """held where a hold was asked for and not confirmed yet, else placed."""
    assert record.body is not None
    state = State.HELD if record.body.hold_us and not record.confirmed else State.PLACED
    first = scope.draft.rebuilt_generation(record.request_id) + 1
    to = {each.replica: each for each in fits.assignments}
    replicas = [
        assigned(each, to[each.replica], state, first, record.size) if each.replica in to else each
        for each in record.replicas
    ]
    record = record.model_copy(update={"state": State.QUEUED} if record.state == State.EXPIRED else {})
    return settled(
        record,
        replicas,
        scope.wall_us,
        final=False,
        reasons=(),
        shadow=(),
        room=None,
        unproven=fits.unproven,
        measured=fits.measured,
        backoff_us=0,
    )


def _hold_is_over(record: RequestRecord) -> bool:
    return record.state == State.EXPIRED and not record.final


def _too_late(request: PlaceRequest, wall_us: int) -> bool:
    return request.place_by_us is not None and wall_us > request.place_by_us

"""What the leader wants done next: whom to take over from, which holds are over, which waiting requests to try."""

from __future__ import annotations

from services.placer.core.intents import Intent, Rules
from services.placer.core.intents_decide import TryWaiting
from services.placer.core.intents_leader import DropLease, ExpireHold, TakeOver
from services.placer.core.leases import Leases
from services.placer.core.ledger import LEADER, Ledger, Stored
from services.placer.core.records import UNPLACED, generation, order
from shared.messages import RequestRecord, State

SLOW_EVERY = 10
"""Beats after which every waiting request is tried again, whatever has changed."""


class Leader:
    """Only looks; the intents it returns look again when they are planned, and fail with a leader that was deposed.

    A waiting request is tried when it is new or changed, when something changed that can help, and now and then;
    never again and again without reason (case P2).
    """

    def __init__(self, me: str, ledger: Ledger, leases: Leases, rules: Rules) -> None:
        self._me = me
        self._ledger = ledger
        self._leases = leases
        self._rules = rules
        self._changes = 0
        self._beats = 0
        self._tried: dict[str, tuple[int, int]] = {}
        """By request: the state of affairs, and the revision of its record, when it was tried last."""

    @property
    def leads(self) -> bool:
        return self._ledger.leader() == self._me

    def vacant(self, now_us: int) -> bool:
        """Nobody leads: the lease is absent, was given up or ran out."""
        return self._ledger.leader() is None or not self._leases.alive(LEADER, now_us)

    def something_changed(self) -> None:
        """A node did: waiting requests may fit now."""
        self._changes += 1

    def _affairs(self) -> int:
        """Another number whenever something changed that can help who waits."""
        return self._changes + self._ledger.freed

    def beat(self, now_us: int) -> list[Intent]:
        """Once per beat: take over what nobody carries on, and give up leases behind which nothing is left."""
        self._beats += 1
        if self._beats % SLOW_EVERY == 0:
            self.something_changed()
            self._tried = {name: tried for name, tried in self._tried.items() if name in self._ledger.live}
        owners = {record.owner for record in self._ledger.live_records() if not record.state.final}
        gone = {owner for owner in owners - {self._me} if not self._leases.alive(owner, now_us)}
        orphans: list[Intent] = [
            TakeOver(record.request_id) for record in self._ledger.live_records() if record.owner in gone
        ]
        expired = set(self._leases.expired(now_us)) - {self._me}
        empty: list[Intent] = [DropLease(name) for name in sorted(expired) if name not in owners]
        return orphans + empty

    def soon(self, now_us: int, wall_us: int) -> list[Intent]:
        """Several times a second: holds whose time is over, and the next few waiting requests in order."""
        over: list[Intent] = []
        waiting: list[Stored[RequestRecord]] = []
        for request_id in self._ledger.live:
            stored = self._ledger.records[request_id]
            record = stored.value
            if record is None or record.body is None:
                continue
            if record.state == State.HELD and now_us - stored.seen_us >= (record.body.hold_us or 0):
                over.append(ExpireHold(request_id, generation(record), len(record.replicas)))
            elif record.state in UNPLACED and self._worth_it(stored, record, now_us, wall_us):
                waiting.append(stored)
        return over + self._next(waiting)

    def _worth_it(self, stored: Stored[RequestRecord], record: RequestRecord, now_us: int, wall_us: int) -> bool:
        if now_us - stored.seen_us < record.backoff_us:
            return False
        place_by_us = record.body.place_by_us if record.body else None
        too_late = record.state == State.QUEUED and place_by_us is not None and wall_us > place_by_us
        return too_late or self._tried.get(record.request_id) != (self._affairs(), stored.revision)

    def _next(self, waiting: list[Stored[RequestRecord]]) -> list[Intent]:
        chosen = sorted(((order(each.value), each) for each in waiting if each.value), key=lambda pair: pair[0])
        intents: list[Intent] = []
        for (*_, request_id), stored in chosen[: self._rules.batch]:
            self._tried[request_id] = (self._affairs(), stored.revision)
            intents.append(TryWaiting(request_id, len(stored.value.replicas) if stored.value else 0))
        return intents

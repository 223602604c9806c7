"""What the leader wants done next: whom to take over from, which holds are over, who is tried, moves, was lost."""

from __future__ import annotations

from services.placer.core.intents import Intent
from services.placer.core.intents_leader import ExpireHold, TakeOver
from services.placer.core.leases import Leases
from services.placer.core.ledger import LEADER, Ledger
from services.placer.core.losses import Losses
from services.placer.core.moves import Moves
from services.placer.core.queue import Queue
from services.placer.core.records import generation


class Leader:
    """Only looks; the intents it returns look again when they are planned, and fail with a leader that was deposed."""

    def __init__(self, me: str, ledger: Ledger, leases: Leases, queue: Queue, moves: Moves, losses: Losses) -> None:
        self._me = me
        self._ledger = ledger
        self._leases = leases
        self.queue = queue
        self._moves = moves
        self.losses = losses

    @property
    def leads(self) -> bool:
        return self._ledger.leader() == self._me

    def vacant(self, now_us: int) -> bool:
        """Nobody leads: the lease is absent, was given up or ran out."""
        return self._ledger.leader() is None or not self._leases.alive(LEADER, now_us)

    def beat(self, now_us: int) -> list[Intent]:
        """Once per beat: take over what nobody carries on, place again who was lost, let one leave a bad device."""
        self.queue.review()
        owned = self._ledger.owned
        gone = [owner for owner in sorted(owned.keys() - {self._me}) if not self._leases.alive(owner, now_us)]
        orphans = [TakeOver(request_id) for owner in gone for request_id in sorted(owned[owner])]
        return [*orphans, *self.losses.next(now_us), *self._moves.away(now_us)]

    def gone(self, now_us: int) -> tuple[str, ...]:
        """Placers that are no more and own nothing that goes on: what they left untold is all that is left of them."""
        return tuple(sorted(set(self._leases.expired(now_us)) - {self._me} - self._ledger.owned.keys()))

    def soon(self, now_us: int, wall_us: int) -> list[Intent]:
        """Several times a second: holds whose time is over, the queue, moves. Who does not lead forgets the queue."""
        if not self.leads:
            self.queue.forget()
            return []
        return [*self._over(now_us), *self.queue.next(now_us, wall_us), *self._moves.next(now_us)]

    def _over(self, now_us: int) -> list[Intent]:
        over: list[Intent] = []
        for request_id in self._ledger.held:
            stored = self._ledger.records[request_id]
            record = stored.value
            if record is None or record.body is None:
                continue
            if now_us - stored.seen_us >= (record.body.hold_us or 0):
                over.append(ExpireHold(request_id, generation(record), len(record.replicas)))
        return over

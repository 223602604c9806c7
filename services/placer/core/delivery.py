"""Has it made sure that the stream of events has every step, also those of placers that are gone; sends nothing itself.

What a placer knows to be in the stream stands in its lease (decision 0036): a revision of the ledger, up to which all
that it wrote is told. Of one that is gone the leader tells what came after it, then drops its lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.placer.core.intents_leader import DropLease
from services.placer.core.telling import Deliver, Delivered
from shared.effects import Effect

if TYPE_CHECKING:
    from services.placer.core.core import Core


class Delivery:
    """One question to the stream at a time, with each beat."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.told = 0
        """Revision of the ledger up to which the stream of events has all that this placer wrote."""
        self._begun = 0
        """Revision that the watch had shown when the last batch was begun: what is in flight comes after it."""
        self._asked = self._late = False

    def begins(self) -> None:
        """The ledger is said anew: an answer that is under way is of a revision from before."""
        self._late = self._asked

    def begun(self) -> None:
        """A batch is begun."""
        self._begun = self._core.following.revision

    def starts(self) -> None:
        """The ledger was read: what was there before this placer's first commit is not its own. Where it has gone back,
        what comes now has revisions that were told of before."""
        now = self._core.following.revision
        self.told = min(self.told, now) if self.told else now
        self._begun = min(self._begun, self.told)

    def starts_anew(self) -> None:
        """The ledger is another."""
        self.told = self._core.following.revision

    def beat(self) -> list[Effect]:
        """The last words of those that are gone, then the question whether the stream has all."""
        if self._asked:
            return []
        self._asked = True
        core = self._core
        gone = core.leader.gone(core.now_us) if self._sees_the_last() else ()
        words = [effect for holder in gone for effect in self._last_words_of(holder)]
        return [*words, Deliver(self._begun if core.commits.in_flight else core.following.revision, gone)]

    def delivered(self, event: Delivered) -> None:
        """The stream has all."""
        late, self._asked, self._late = self._late, False, False
        if self._core.following.alarm is None and not late:  # else it was another ledger's revision
            self.told = event.revision
            for holder in event.gone:
                self._core.add(DropLease(holder))

    def _sees_the_last(self) -> bool:
        """The leader, where its watch has come past its own last beat, so past all that the dead wrote."""
        lease = self._core.ledger.leases.get(self._core.me)
        return self._core.leader.leads and lease is not None and self._core.following.revision >= lease.revision

    def _last_words_of(self, holder: str) -> list[Effect]:
        """Whose record it is does not matter: a placer writes steps in records of others too."""
        lease, ledger_id = self._core.ledger.lease(holder), self._core.following.ledger_id
        assert lease is not None, "who is gone has one"
        assert ledger_id is not None, "a ledger that is followed has its identity"
        stored = self._core.ledger.records.values()
        late = [one.value for one in stored if one.value is not None and one.revision > lease.told]
        return [effect for record in late for effect in self._core.telling.steps(record, ledger_id)]

"""Whether the ledger that this placer follows is still the one it knows: lost, restored, rewound or another's.

The order of a stream never goes back, so a ledger that shows a key older than it was seen before, or lacks one that
nobody may delete, is not the same any more. Replays of the watch tell, and a read of the keys in question confirms:
between the two a commit of our own may have overtaken the watch.
"""

from __future__ import annotations

from services.placer.core.ledger import IDENTITY_KEY, Ledger, Stored, parse_key
from shared.effects import KeyChanged, WatchReplayed
from shared.messages import Message, RequestRecord

MOST_READS = 16
"""Keys that are read to confirm a suspicion: one would do, a few make the alarm's text better."""


class Following:
    """`ok` while the placer may decide: the watch has shown everything and nothing is wrong with it."""

    def __init__(self) -> None:
        self.ok = False
        self.ledger_id: str | None = None
        self.former: tuple[str, ...] = ()
        self.alarm: str | None = None
        """Why this placer has stopped deciding, until an operator accepts the ledger as it is."""
        self.revision = 0
        """The newest that the watch has shown."""
        self._heard: dict[str, KeyChanged] = {}
        self._asked: dict[str, int] = {}
        self._whole = False
        """Whether the watch has shown everything."""
        self._identity_revision = 0

    @property
    def own_ids(self) -> tuple[str, ...]:
        return (*((self.ledger_id,) if self.ledger_id else ()), *self.former)

    def begins(self) -> None:
        """The ledger is said anew: until all is heard it may be another."""
        self.lost()
        self.revision = 0

    def heard(self, change: KeyChanged) -> None:
        """The watch delivered a key."""
        self._heard[change.key] = change
        self.revision = change.revision

    def lost(self) -> None:
        """Nothing is heard any more: what happens to the ledger now is not seen, nor is what is being read of it."""
        self.ok = self._whole = False
        self._asked = {}

    def replayed(self, event: WatchReplayed, ledger: Ledger) -> tuple[str, ...]:
        """The watch has delivered everything. Returns the keys to read where something does not fit."""
        self._whole = True
        for key in self._heard.keys() - event.keys:
            if self._heard[key].value is not None:
                del self._heard[key]
        self._asked = {
            key: stored.revision
            for key, stored in ledger.written()
            if _must_stay(key, stored) and self._heard_revision(key) < stored.revision
        }
        self.ok = not self._asked and self.alarm is None
        return tuple(self._asked)[:MOST_READS]

    def _heard_revision(self, key: str) -> int:
        heard = self._heard.get(key)
        return heard.revision if heard else 0

    def read(self, current: tuple[KeyChanged, ...]) -> str | None:
        """The keys as the server has them; what is wrong with the ledger, None where nothing is."""
        asked, self._asked = self._asked, {}
        older = [change for change in current if change.revision < asked.get(change.key, 0)]
        if older:
            first = older[0]
            return f"the ledger was lost or rewound: {first.key} is at revision {first.revision}, which was newer"
        self.ok = self.ok or (bool(asked) and self.alarm is None)
        return None

    def identity(self, ledger: Ledger) -> str | None:
        """The ledger's identity was (re)written; what is wrong with it. An operator's acceptance ends an alarm."""
        found, revision = ledger.identity, ledger.revision(parse_key(IDENTITY_KEY))
        if found is None:
            return "the ledger has no identity any more"
        if self.ledger_id not in {None, found.ledger_id, *found.former}:
            return f"the ledger is {found.ledger_id} and was {self.ledger_id}"
        accepted = self.alarm is not None and revision > self._identity_revision
        self.ledger_id, self.former, self._identity_revision = found.ledger_id, found.former, revision
        if accepted:
            self.alarm, self.ok = None, self._whole
        return None

    def stop(self, alarm: str, ledger: Ledger) -> list[KeyChanged]:
        """Decide nothing from now on. Returns what the ledger holds by the watch, newer knowledge being void."""
        self.alarm, self.ok = alarm, False
        heard = self._heard.get(IDENTITY_KEY)
        self._identity_revision = heard.revision if heard else 0
        ledger.clear()
        return list(self._heard.values())


def _must_stay(key: str, stored: Stored[Message]) -> bool:
    """Final records run out by themselves, and leases are given up; nothing else is ever deleted."""
    if parse_key(key).kind == "lease":
        return False
    return not (isinstance(stored.value, RequestRecord) and stored.value.state.final)

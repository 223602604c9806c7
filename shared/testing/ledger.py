"""A ledger in memory: what a JetStream bucket with atomic batches promises of commits, reads and watches, no more."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.effects import Commit, CommitDone, CommitOutcome, KeyChanged
from shared.subjects import LEDGER

MOST_KEYS = 1000


@dataclass
class MemoryLedger:
    """Keys with revisions; the sequence is that of the whole stream. A deleted key keeps the revision of its end."""

    values: dict[str, tuple[bytes | None, int]] = field(default_factory=dict)
    log: list[KeyChanged] = field(default_factory=list)
    """Every change in order: what a watch delivers."""
    seq: int = 0

    def commit(self, commit: Commit) -> CommitDone:
        """All writes where every key has the revision expected of it, else none; a conflict does not say which."""
        writes = commit.writes
        if not 0 < len(writes) <= MOST_KEYS:
            return CommitDone(commit.commit, CommitOutcome.REFUSED, detail=f"{len(writes)} keys")
        assert len({write.key for write in writes}) == len(writes), "a key carries an expectation once per batch"
        if any(self.revision(write.key) != write.expected for write in writes):
            return CommitDone(commit.commit, CommitOutcome.CONFLICT, current=self.read([w.key for w in writes]))
        return CommitDone(commit.commit, CommitOutcome.WRITTEN, {w.key: self.put(w.key, w.value) for w in writes})

    def unknown(self, commit: Commit, *, written: bool) -> CommitDone:
        """The answer got lost: it was `written` (where it could be) or not, and only a read tells."""
        if written:
            self.commit(commit)
        current = self.read([write.key for write in commit.writes])
        return CommitDone(commit.commit, CommitOutcome.UNKNOWN, current=current)

    def put(self, key: str, value: bytes | None) -> int:
        """Write one key, whatever it holds; None deletes it."""
        self.seq += 1
        self.values[key] = (value, self.seq)
        self.log.append(KeyChanged(LEDGER, key, value, self.seq))
        return self.seq

    def expire(self, key: str) -> None:
        """Its time to live is over: it is as if it had never been, and no watch says so."""
        del self.values[key]

    def rewind_leases(self, most: int) -> None:
        """The server lost its last writes, but none of other keys than leases; it gives their revisions again."""
        while most and self.log and self.log[-1].key.startswith("lease."):
            key, most = self.log.pop().key, most - 1
            before = next((change for change in reversed(self.log) if change.key == key), None)
            if before is None:
                self.values.pop(key, None)
            else:
                self.values[key] = (before.value, before.revision)
        self.seq = self.log[-1].revision if self.log else 0

    def revision(self, key: str) -> int:
        return self.values.get(key, (None, 0))[1]

    def read(self, keys: list[str]) -> tuple[KeyChanged, ...]:
        return tuple(KeyChanged(LEDGER, key, *self.values.get(key, (None, 0))) for key in keys)

    def replay(self) -> list[KeyChanged]:
        """What a new watch delivers first: every key once, in the order of its last change."""
        last = [KeyChanged(LEDGER, key, value, revision) for key, (value, revision) in self.values.items()]
        return sorted(last, key=lambda change: change.revision)

    def keys(self) -> frozenset[str]:
        return frozenset(key for key, (value, _) in self.values.items() if value is not None)

"""Group commit: which intents wait, which batch is in flight, and what its end means; it plans nothing itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from services.placer.core.intents import Intent
from services.placer.core.ledger import MOST_KEYS, Draft, parse_key
from shared.effects import Commit, CommitDone, CommitOutcome, Effect, KeyChanged, Write
from shared.errors import FieldError
from shared.messages import RequestRecord
from shared.subjects import LEDGER, request_key

MOST_CONFLICTS = 8
"""In a row, before the next try waits for a tick: a key that cannot be agreed on must not make a loop at full speed."""

PATIENCE = 4
"""Conflicts in a row after which a batch is split. All its keys were read after the first, so it goes through unless
others wrote once more meanwhile: where many placers want few nodes, each success must carry all that waits.
"""


@dataclass(frozen=True, slots=True)
class PlanNext:
    """Slow effect that comes back as an event: who was answered hears so before the next batch is planned."""


@dataclass(frozen=True)
class Batch:
    """What is in flight: the intents, what they planned, and what follows once it is written."""

    commit: Commit
    intents: tuple[Intent, ...]
    draft: Draft
    effects: tuple[Effect, ...]
    seen: list[KeyChanged] = field(default_factory=list)
    """What the watch has shown of it before its end."""


class GroupCommit:
    """One batch in flight; the rest gathers.

    A conflict does not name its key, and one stale key fails all: after several in a row the next batch is half as
    large, as it is at once where the server refuses; each one that is written doubles it again, up to `most`.
    """

    def __init__(self, most: int) -> None:
        self.in_flight: Batch | None = None
        self._most = most
        self._limit = most
        self._number = 0
        self._conflicts = 0
        self._in_a_row = 0
        self._waiting: deque[Intent] = deque()
        self._keys: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, intent: Intent, *, first: bool = False) -> None:
        """Queue it, at the front where a lease hangs on it; a transition that waits already is not queued again."""
        if (key := intent.key) is not None:
            if key in self._keys:
                return
            self._keys.add(key)
        (self._waiting.appendleft if first else self._waiting.append)(intent)

    @property
    def ready(self) -> bool:
        """Whether there is something to plan."""
        return self._may_take(0)

    def take(self) -> tuple[Intent, ...]:
        """The next intents to plan together: none while a batch is in flight or after too many conflicts."""
        taken: list[Intent] = []
        weight = 1  # the leader's key
        while self._may_take(len(taken)):
            intent = self._waiting[0]
            weight += intent.weight
            if taken and weight > MOST_KEYS:
                break
            taken.append(self._waiting.popleft())
            if (key := intent.key) is not None:
                self._keys.discard(key)
        return tuple(taken)

    def _may_take(self, taken: int) -> bool:
        if not self._waiting:
            return False
        blocked = self.in_flight is not None or self._conflicts >= MOST_CONFLICTS
        return taken < self._limit and not blocked

    def begin(
        self, intents: tuple[Intent, ...], draft: Draft, writes: tuple[Write, ...], effects: list[Effect]
    ) -> Commit:
        """The batch is on its way."""
        self._number += 1
        commit = Commit(self._number, LEDGER, writes)
        self.in_flight = Batch(commit, intents, draft, tuple(effects))
        return commit

    def end(self, done: CommitDone) -> Batch | None:
        """The batch that has ended; None for a number that is not in flight."""
        batch = self.in_flight
        if batch is None or batch.commit.commit != done.commit:
            return None
        self.in_flight = None
        return batch

    def begins(self) -> None:
        """The watch says everything anew: what it has shown of the batch in flight may be lost by now."""
        if self.in_flight is not None:
            self.in_flight.seen.clear()

    def await_end(self, change: KeyChanged) -> bool:
        """Whether the watch shows what the batch in flight writes: its end, which is near, says so too."""
        if self.in_flight is None or self.in_flight.draft.ours(change) is None:
            return False
        self.in_flight.seen.append(change)
        return True

    def written(self) -> None:
        self._conflicts = self._in_a_row = 0
        self._limit = min(self._most, self._limit * 2)

    def again(self, batch: Batch, *, split: bool = False) -> None:
        """It was not written: plan all of it again, in smaller batches where that helps."""
        self._conflicts += 1
        self._in_a_row += 1
        if split or self._in_a_row >= PATIENCE:
            self._limit = max(1, min(self._limit, len(batch.intents)) // 2)
        for intent in reversed(batch.intents):
            self.add(intent, first=True)

    def drop(self) -> list[Intent]:
        """Nothing of what waits may be done any more."""
        dropped = list(self._waiting)
        self._waiting.clear()
        self._keys.clear()
        return dropped

    def breathe(self) -> None:
        """Time has passed: conflicts before are forgotten."""
        self._conflicts = 0


def was_written(batch: Batch, done: CommitDone) -> bool:
    """Whether a batch is in the ledger. After an unknown outcome the keys tell: all of it is there or nothing.

    Only keys that nobody else can have written alike are evidence: leases, and records that hold a step of this batch.
    """
    if done.outcome != CommitOutcome.UNKNOWN:
        return done.outcome == CommitOutcome.WRITTEN
    current = {change.key: change for change in done.current}
    steps = {request_key(record.request_id): before for record, before in batch.draft.records()}
    known = (write for write in batch.commit.writes if write.key in current)
    return any(_is_ours(write, current[write.key], steps.get(write.key, 0)) for write in known)


def _is_ours(write: Write, current: KeyChanged, steps_before: int) -> bool:
    if write.value is None or current.value is None or current.revision <= write.expected:
        return False
    kind = parse_key(write.key).kind
    if kind != "request" or write.value == current.value:
        return kind in {"request", "lease"} and write.value == current.value
    try:
        ours, theirs = RequestRecord.trusted(write.value), RequestRecord.trusted(current.value)
    except FieldError:
        return False
    last = ours.steps[-1]
    return last.number > steps_before and ours.owner == theirs.owner and last in theirs.steps


def after_write(writes: tuple[Write, ...], done: CommitDone) -> list[KeyChanged]:
    """What a written batch left in the ledger, in the order in which it is to be taken in."""
    if done.outcome == CommitOutcome.WRITTEN:
        return [KeyChanged(LEDGER, write.key, write.value, done.revisions[write.key]) for write in writes]
    return list(done.current)

"""One instance's view of the lease that makes it the writer of a bucket, or a standby; no I/O and no clock.

The lease is a key of the bucket itself. It names no time: an observer counts from when it last saw it change, by its
own monotonic clock. Each write of the holder carries ``renewal`` in the same batch, so that of a deposed one fails.
"""

from __future__ import annotations

from shared.effects import KeyChanged, Write
from shared.messages import Lease


class Tenure:
    """``holder`` names this process, unique to one start; ``ttl_us`` is how long the lease lasts once we hold it."""

    def __init__(self, key: str, holder: str, ttl_us: int) -> None:
        self.key, self.holder, self.ttl_us = key, holder, ttl_us
        self.active = False
        """Whether we hold it, as far as we have seen."""
        self.lease: Lease | None = None
        """As we have seen it last, and its revision."""
        self.revision = 0
        self._seen_us: int | None = None
        self._former = 0
        """The revision from before the watch began, until it has brought the key."""

    @property
    def ours(self) -> bool:
        """Whether we wrote it last, as far as we have seen: nobody else has written since."""
        return self.lease is not None and self.lease.holder == self.holder

    @property
    def stream_seq(self) -> int:
        """What the last holder's other keys include, as far as it has said so."""
        return (self.lease.stream_seq or 0) if self.lease else 0

    def begins(self) -> None:
        """The watch begins: the bucket may have gone back, and its revisions with it."""
        self._former, self.revision = max(self.revision, self._former), 0

    def changed(self, change: KeyChanged, now_us: int) -> None:
        """The key as the bucket has it now; raises FieldError where it is no lease. Where the bucket has gone back,
        what we wrote last is lost, so we do not hold it until we have taken it anew.
        """
        if change.revision < self.revision:
            return
        rewound, self._former = change.revision < self._former, 0
        self.revision = change.revision
        self._seen_us = now_us if change.value else None
        self.lease = Lease.trusted(change.value) if change.value else None
        self.active = self.active and self.ours and not rewound

    def absent(self) -> None:
        """A replay of the bucket did not name the key."""
        self.revision, self._seen_us, self.lease, self.active = 0, None, None, False
        self._former = 0

    def doubt(self) -> None:
        """A write of ours may be there, or still come: once the lease is renewed it is there or never will be."""
        self.active = False

    def rebase(self, gap_us: int) -> None:
        """We heard nothing for ``gap_us``, so that time says nothing about the holder."""
        if self._seen_us is not None:
            self._seen_us += gap_us

    def may_write(self, now_us: int) -> bool:
        """It is ours or free: absent, or not renewed for its time since we saw it."""
        if self.active or self.lease is None or self._seen_us is None or self.ours:
            return True
        return now_us - self._seen_us > self.lease.ttl_us

    def due(self, now_us: int) -> bool:
        """A third of its time has passed, or it is not ours yet."""
        return not self.active or self._seen_us is None or now_us - self._seen_us >= self.ttl_us // 3

    def renewal(self, stream_seq: int | None = None) -> Write:
        """Takes the lease or keeps it: goes into each batch. ``stream_seq`` is what the batch's other keys include."""
        return Write(self.key, self._next(stream_seq).to_json(), self.revision)

    def renewed(self, revision: int, now_us: int) -> bool:
        """The batch with ``renewal`` was written; True where that made us the holder.

        The answer may come late: whoever took the lease meanwhile keeps it.
        """
        if revision < self.revision:
            return False
        became, self.active = not self.active, True
        self.lease, self.revision, self._seen_us = self._next(), revision, now_us
        return became

    def give_back(self) -> Write:
        """Last words: a standby need not wait for the lease to run out."""
        self.active = False
        return Write(self.key, None, self.revision)

    def hand_over(self, stream_seq: int) -> Write:
        """As ``give_back``, where the next holder needs to know how far this one came."""
        self.active = False
        return Write(self.key, self.given_up(stream_seq).to_json(), self.revision)

    def given_up(self, stream_seq: int) -> Lease:
        """A lease that nobody holds."""
        return self._next(stream_seq).model_copy(update={"ttl_us": 0})

    def _next(self, stream_seq: int | None = None) -> Lease:
        counter = self.lease.counter + 1 if self.lease else 1
        return Lease(holder=self.holder, counter=counter, ttl_us=self.ttl_us, stream_seq=stream_seq)

"""Which partitions of the nodes this tracker holds, should take and should give back; no I/O, no clock, no records.

Each partition has a lease of its own in rt_deadlines, and each tracker a key that says that it lives. A tracker that
knows of n trackers, itself among them, holds P/n partitions, rounded by its place among their names; so all who know
of the same trackers agree. Another key says what P is: the same that held the only lease before there were partitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from shared.effects import KeyChanged, Write
from shared.lease import Tenure
from shared.messages import Lease
from shared.subjects import encode, lease_key

LAYOUT: Final = lease_key("deadline-tracker")
FOREVER_US: Final = 10**15
"""The layout is a lease that a tracker from before there were partitions finds taken."""
LEASES: Final = LAYOUT + "-"
LIVES: Final = "tracker."


def partition_of(token: str, partitions: int) -> int:
    """Of a node, by its token in subjects; the same in every process and version."""
    return int.from_bytes(blake2b(token.encode(), digest_size=8).digest()) % partitions


def partition_lease(number: int) -> str:
    return lease_key(f"deadline-tracker-{number}")


@dataclass(slots=True)
class Partition:
    """One of P. First its lease is ours; then all is known that others wrote before; then its nodes are followed."""

    number: int
    lease: Tenure
    counted_seq: int = 0
    """All that its nodes said up to here is in their checkpoints."""
    taken: int | None = None
    """Revision of the write that made it ours, until the watch has shown all that was written before."""
    awaited: bool = False
    """The stream is to be read from ``counted_seq`` on, and is not yet."""
    followed: bool = False
    speaks: bool = False
    """Its verdicts are said: those that the stream shows already were heard."""

    @property
    def heard(self) -> bool:
        return self.followed or self.awaited

    def leave(self) -> None:
        self.counted_seq, self.taken = 0, None
        self.awaited = self.followed = self.speaks = False


@dataclass(slots=True)
class Shares:
    """``wanted`` is how many partitions there are where nobody has said it yet, or nobody else lives."""

    wanted: int
    holder: str
    lease_us: int
    parts: list[Partition] = field(default_factory=list)
    """Empty while the layout is not known."""
    _others: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of other trackers' keys: when they were last seen to change, and how long that lasts."""
    _beyond: dict[str, int] = field(default_factory=dict)
    """Revisions of the leases that are of no partition: there were more before, or will be."""
    _layout: Tenure = field(init=False)
    _lives: Tenure = field(init=False)

    def __post_init__(self) -> None:
        self._layout = Tenure(LAYOUT, self.holder, FOREVER_US)
        self._lives = Tenure(LIVES + encode(self.holder, "holder"), self.holder, self.lease_us)

    # --- what is heard ---

    def changed(self, change: KeyChanged, now_us: int) -> bool:
        """A key of the bucket; True where it told how many partitions there are anew. Raises FieldError."""
        if change.key == LAYOUT:
            return self._laid_out(change, now_us)
        if change.key.startswith(LIVES) and change.key != self._lives.key:
            self._other(change, now_us)
        leases = {lease.key: lease for lease in (self._lives, *(part.lease for part in self.parts))}
        if (lease := leases.get(change.key)) is None:
            if change.key.startswith(LEASES):
                self._beyond[change.key] = change.revision
        elif change.value is None and not change.revision:
            lease.absent()
        else:
            lease.changed(change, now_us)
        return False

    def begins(self) -> None:
        """The bucket is said anew, be it older than before."""
        self._beyond.clear()
        for lease in (self._layout, self._lives, *(part.lease for part in self.parts)):
            lease.begins()

    def replayed(self, keys: frozenset[str]) -> bool:
        """Keys that are not named are gone; True where there is no layout any more."""
        self._others = {key: seen for key, seen in self._others.items() if key in keys}
        for lease in (self._layout, self._lives, *(part.lease for part in self.parts)):
            if lease.key not in keys:
                lease.absent()
        return bool(self.parts) and LAYOUT not in keys

    def rebase(self, gap_us: int) -> None:
        for lease in (self._layout, self._lives, *(part.lease for part in self.parts)):
            lease.rebase(gap_us)
        self._others = {key: (seen_us + gap_us, ttl_us) for key, (seen_us, ttl_us) in self._others.items()}

    def _laid_out(self, change: KeyChanged, now_us: int) -> bool:
        if change.value is None and not change.revision:
            self._layout.absent()
        else:
            self._layout.changed(change, now_us)
        return self.partitions != len(self.parts)

    def begin_anew(self) -> None:
        """With as many partitions as the layout says, none of which is known yet."""
        self.parts = [Partition(number, self._lease(number)) for number in range(self.partitions)]

    def _lease(self, number: int) -> Tenure:
        lease = Tenure(partition_lease(number), self.holder, self.lease_us)
        lease.revision = self._beyond.get(lease.key, 0)
        return lease

    def _other(self, change: KeyChanged, now_us: int) -> None:
        if change.value is None:
            self._others.pop(change.key, None)
            return
        self._others[change.key] = (now_us, Lease.trusted(change.value).ttl_us)

    # --- the layout ---

    @property
    def partitions(self) -> int:
        """As the bucket has it; 0: not said."""
        layout = self._layout.lease
        return (layout.partitions or 0) if layout else 0

    def layout_due(self, now_us: int) -> bool:
        """Nobody has said how many there are, and no tracker from before is at work; or we are alone and say else."""
        if not self.partitions:
            return self._layout.may_write(now_us)
        return self.partitions != self.wanted and not self._alive(now_us)

    def layout(self, counted_seq: int) -> tuple[Write, ...]:
        """Says it anew. All leases are written too, so that nobody who holds one by an older layout can write."""
        layout = self._layout.renewal()._replace(value=self._layout_value())
        return (layout, *self._free_leases(counted_seq))

    def _layout_value(self) -> bytes:
        return Lease(holder=self.holder, counter=1, ttl_us=FOREVER_US, partitions=self.wanted).to_json()

    def _free_leases(self, counted_seq: int) -> Iterator[Write]:
        known = {part.number: part.lease for part in self.parts}
        for number in range(max(self.wanted, len(known))):
            lease = known.get(number) or self._lease(number)
            value = lease.given_up(counted_seq).to_json() if number < self.wanted else None
            if value is not None or lease.revision:
                yield Write(lease.key, value, lease.revision)

    # --- the shares ---

    @property
    def held(self) -> list[Partition]:
        return [part for part in self.parts if part.lease.active]

    def surplus(self, now_us: int) -> list[Partition]:
        """What we hold beyond our share, to be given back."""
        share, _ = self._share(now_us)
        return self.held[share:]

    def free(self, now_us: int) -> list[Partition]:
        """What we lack for our share and may take. Each tracker begins elsewhere, so that two seldom want the same."""
        share, place = self._share(now_us)
        lacking = max(0, share - len(self.held))
        free = (part for part in self.parts[place:] + self.parts[:place] if not part.lease.active)
        return [part for part in free if part.lease.may_write(now_us)][:lacking]

    def due(self, now_us: int) -> bool:
        return self._lives.due(now_us) or any(part.lease.due(now_us) for part in self.held)

    def _alive(self, now_us: int) -> list[str]:
        return [key for key, (seen_us, ttl_us) in self._others.items() if now_us - seen_us <= ttl_us]

    def _share(self, now_us: int) -> tuple[int, int]:
        """How many partitions are ours to hold, and the first of them where all trackers hold theirs in order."""
        names = sorted([*self._alive(now_us), self._lives.key])
        rank, count = names.index(self._lives.key), len(self.parts)
        first, beyond = (count * place // len(names) for place in (rank, rank + 1))
        return beyond - first, first

    # --- that we live ---

    def lives(self) -> Write:
        """Goes into each batch; the server deletes it when we have said nothing for long."""
        return self._lives.renewal()._replace(ttl_s=2 + 2 * self.lease_us // 1_000_000)

    def lived(self, revision: int, now_us: int) -> None:
        self._lives.renewed(revision, now_us)

    def ends(self) -> Write:
        return self._lives.give_back()

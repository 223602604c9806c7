"""The lists as rt_nodes says them, one per class, and what each write changes in them, numbered; no I/O.

A list follows from the facts in rt_nodes alone, so all instances have the same. The change of each list is worked out
before the write that makes it and goes into it, in a record: what was written was numbered once. A write of one node
has the record inside its key, any other in the lists' own key; the newest counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from services.node_list.ranking import Ranking, key_of
from shared.lists import Device
from shared.messages import ClassStanding, DeviceFacts, ListChange, ListDelta, ListsRecord, NodeFacts

MOST_UNSAID = 500
"""Devices' changes kept until they are heard, since each write carries them: whoever misses others reads again."""
MOST_INSIDE = 50
"""Devices' changes in a node's key, since others who read it have to skip them (about 10 KiB)."""


@dataclass(frozen=True, slots=True)
class Move:
    """One device's change in one list."""

    device: Device
    was: ClassStanding | None
    now: ClassStanding | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a write changes in the lists."""

    record: ListsRecord
    deltas: tuple[ListDelta, ...]

    @property
    def fits_a_node(self) -> bool:
        return sum(len(delta.changes) for delta in self.record.unsaid) <= MOST_INSIDE


class Lists:
    """``foreign``: somebody else changed rt_nodes, which no message tells. A revision is left out, so that whoever
    follows reads the list again."""

    def __init__(self, classes: Iterable[str]) -> None:
        self.rankings = {name: Ranking() for name in classes}
        self.devices: dict[str, dict[str, DeviceFacts]] = {}
        """Per node, per uuid."""
        self.record: ListsRecord | None = None
        self.record_revision = self.key_revision = 0
        """Of the key that has the record, and of the lists' own, which may have an older one."""
        self.foreign = False
        self._revisions: dict[str, int] = {}
        self._partly: dict[str, NodeFacts | None] = {}
        """What the watch has brought of a write whose end is still to come."""
        self._heard: dict[tuple[str, str], int] = {}
        """Per numbering and class: the last revision that stands in the stream of events."""

    # --- as rt_nodes is ---

    def found(self, node: str, facts: NodeFacts | None, revision: int) -> bool:
        """The watch brings a node's key; False for what is known. It stands in the lists once its write is whole."""
        if revision <= self._revisions.get(node, 0):
            return False
        self._revisions[node], self._partly[node] = revision, facts
        return True

    def found_key(self, record: ListsRecord | None, revision: int) -> None:
        """The watch brings the lists' own key, which a write has behind those of its nodes."""
        self.key_revision = max(revision, self.key_revision)
        self.found_record(record, revision)

    def found_record(self, record: ListsRecord | None, revision: int) -> None:
        """The watch brings a record, be it in a node's key: it is the last of its write."""
        self.whole()
        if revision > self.record_revision:
            self.record, self.record_revision = record, revision

    def lost(self) -> None:
        """A replay of rt_nodes did not name the lists' own key, which is there once there is a record."""
        self.whole()
        self.record, self.record_revision, self.key_revision = None, 0, 0

    def whole(self) -> None:
        """The watch has brought all of a write."""
        for node, facts in self._partly.items():
            self._put(node, facts)
        self._partly.clear()

    def absent(self, node: str) -> None:
        """A replay of rt_nodes did not name the node."""
        self.foreign = self.foreign or bool(self.devices.get(node))
        self._revisions[node] = 0
        self.written(node, None, 0)

    def written(self, node: str, facts: NodeFacts | None, revision: int) -> None:
        """Our own write of a node is there; nothing where its answer comes after another's write."""
        if revision >= self._revisions.get(node, 0):
            self._partly.pop(node, None)
            self._revisions[node] = revision
            self._put(node, facts)

    def written_record(self, plan: Plan, revision: int, *, inside: bool) -> None:
        """A record was written as planned, inside a node's key or as the lists' own; the same holds."""
        if revision >= self.record_revision:
            self.record, self.record_revision, self.foreign = plan.record, revision, False
        if not inside:
            self.key_revision = max(revision, self.key_revision)

    def _put(self, node: str, facts: NodeFacts | None) -> None:
        for wanted, ranking in self.rankings.items():
            for move in list(self._moves(wanted, node, facts)):
                if move.now is None:
                    ranking.drop(move.device)
                else:
                    ranking.put(move.device, move.now)
        self.devices[node] = {device.uuid: device for device in facts.devices} if facts else {}

    def heard(self, delta: ListDelta) -> None:
        """It stands in the stream of events, and with it those before."""
        of = (delta.start_id, delta.deadline_class)
        self._heard[of] = max(delta.revision, self._heard.get(of, 0))

    def unsaid(self) -> tuple[ListDelta, ...]:
        """The changes that were written and not heard yet."""
        known = self.record.unsaid if self.record else ()
        return tuple(d for d in known if d.revision > self._heard.get((d.start_id, d.deadline_class), 0))

    def revision(self, wanted: str) -> int:
        return self.record.revisions.get(wanted, 0) if self.record else 0

    # --- as a write will make it ---

    def plan(self, writes: Mapping[str, NodeFacts], at_us: int, new_id: str) -> Plan | None:
        """What the record and the messages say of it; None where there is none. ``new_id`` names a new numbering.

        The record goes into each write of a node, whose key may have the one that counted so far.
        """
        start_id = self.record.start_id if self.record else new_id
        deltas = tuple(self._deltas(writes, at_us, start_id))
        if not deltas and not (writes and self.record):
            return None
        known = self.record.revisions if self.record else {}
        revisions = known | {delta.deadline_class: delta.revision for delta in deltas}
        unsaid = _newest((*self.unsaid(), *deltas))
        return Plan(ListsRecord(start_id=start_id, revisions=revisions, unsaid=unsaid), deltas)

    def _deltas(self, writes: Mapping[str, NodeFacts], at_us: int, start_id: str) -> Iterator[ListDelta]:
        for wanted, ranking in self.rankings.items():
            moves = [move for node, facts in writes.items() for move in self._moves(wanted, node, facts)]
            if moves or self.foreign:
                yield ListDelta(
                    at_us=at_us,
                    deadline_class=wanted,
                    start_id=start_id,
                    revision=self.revision(wanted) + 1 + self.foreign,
                    changes=tuple(_changes(ranking, moves)),
                )

    def _moves(self, wanted: str, node: str, facts: NodeFacts | None) -> Iterator[Move]:
        ranking = self.rankings[wanted]
        new = {device.uuid: device.classes.get(wanted) for device in facts.devices} if facts else {}
        for uuid in self.devices.get(node, {}).keys() | new.keys():
            was, now = ranking.of((node, uuid)), new.get(uuid)
            if was is not now and was != now:
                yield Move((node, uuid), was, now)


def _changes(ranking: Ranking, moves: Iterable[Move]) -> Iterator[ListChange]:
    """The best first, those that leave last."""
    leaving = sorted(key_of(move.device, move.was) for move in moves if move.was)
    coming = sorted((key_of(move.device, move.now), move) for move in moves if move.now)
    keys = [key for key, _ in coming]
    for key, move in coming:
        yield _change(move, ranking.place(key, leaving, keys))
    yield from (_change(move, None) for move in moves if not move.now)


def _change(move: Move, place: int | None) -> ListChange:
    (node, uuid), was, now = move.device, move.was, move.now
    return ListChange(
        node=node,
        uuid=uuid,
        was=was.standing if was else None,
        standing=now.standing if now else None,
        slack_us=now.slack_us if now else None,
        reason=now.reason if now else None,
        unproven=bool(now and now.unproven),
        place=place,
    )


def _newest(deltas: tuple[ListDelta, ...]) -> tuple[ListDelta, ...]:
    """As many of the newest as may be kept."""
    kept, room = 0, MOST_UNSAID
    for delta in reversed(deltas):
        room -= 1 + len(delta.changes)
        if room < 0:
            break
        kept += 1
    return deltas[len(deltas) - kept :]

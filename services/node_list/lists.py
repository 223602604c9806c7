"""The lists as rt_nodes says them, one per class, and what each write changes in them, numbered; no I/O.

A list follows from the facts in rt_nodes alone, so all instances have the same. The change of each list is worked out
before the write that makes it and goes into it, in a record: what was written was numbered once. A write of one node
has the record inside its key, any other in the lists' own key; the newest counts. A key that is written again before
the watch comes to it is brought once, later: the sums in a record say whether all that it is of is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from zlib import crc32

from services.node_list.ranking import Ranking, key_of
from shared.lists import Device
from shared.messages import ClassStanding, DeviceFacts, ListChange, ListDelta, ListsRecord, NodeFacts

MOST_UNSAID = 500
"""Devices' changes kept until they are heard, since each write carries them: whoever misses others reads again."""
MOST_INSIDE = 50
"""Devices' changes in a node's key, since others who read it have to skip them (about 10 KiB)."""


Devices = Mapping[str, DeviceFacts]
"""By uuid."""


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
        self.devices: dict[str, Devices] = {}
        """Per node, per uuid."""
        self.record: ListsRecord | None = None
        self.newest: ListsRecord | None = None
        """Other than the record while the watch has not brought all that it is of."""
        self.newest_revision = self.key_revision = 0
        """Of the key that has the newest, and of the lists' own, which may have an older one."""
        self.foreign = False
        self._revisions: dict[str, int] = {}
        self._highest = 0
        """Of these."""
        self._partly: dict[str, Devices] = {}
        """What the watch has brought and the lists have not taken yet."""
        self._sums = dict.fromkeys(self.rankings, 0)
        """Per class, of all that was brought: of the devices' checksums, in whatever order they came."""
        self._former: ListsRecord | None = None
        """The newest from before the watch began, until it has brought all anew."""
        self._ended = ""
        """A numbering of which revisions were given that rt_nodes does not know of any more."""
        self._heard: dict[tuple[str, str], int] = {}
        """Per numbering and class: the last revision that stands in the stream of events."""

    # --- as rt_nodes is ---

    def begins(self) -> None:
        """The watch brings all anew, be it older than before."""
        self._former = self._former or self.newest
        self.newest_revision = self.key_revision = self._highest = 0
        self._revisions.clear()

    def replayed(self) -> None:
        """It has. Where rt_nodes has gone back so have the lists' revisions, and they are not given twice."""
        former, self._former = self._former, None
        if former:
            self._given(former.start_id, former.revisions)
        self.whole()

    def _given(self, start_id: str, revisions: Mapping[str, int]) -> None:
        """These were, so that rt_nodes has gone back if it does not know of them."""
        if self.newest and self.newest.start_id == start_id:
            now = self.newest.revisions
            if any(now.get(wanted, 0) < revision for wanted, revision in revisions.items()):
                self._ended = start_id

    def found(self, node: str, facts: NodeFacts | None, revision: int) -> bool:
        """The watch brings a node's key; False for what is known. It stands in the lists once its write is whole."""
        if revision <= self._revisions.get(node, 0):
            return False
        self._bring(node, facts, revision)
        return True

    def _bring(self, node: str, facts: NodeFacts | None, revision: int) -> None:
        devices = _by_uuid(facts)
        for wanted in self.rankings:
            self._sums[wanted] += self._more(wanted, node, devices)
        self._revisions[node], self._partly[node] = revision, devices
        self._highest = max(revision, self._highest)

    def found_key(self, record: ListsRecord | None, revision: int) -> None:
        """The watch brings the lists' own key, which a write has behind those of its nodes."""
        self.key_revision = max(revision, self.key_revision)
        self.found_record(record, revision)

    def found_record(self, record: ListsRecord | None, revision: int) -> None:
        """The watch brings a record, be it in a node's key: it is the last of its write."""
        if revision > self.newest_revision:
            self.newest, self.newest_revision = record, revision
        self.whole()

    def lost(self) -> None:
        """A replay of rt_nodes did not name the lists' own key, which is there once there is a record."""
        self.newest, self.newest_revision, self.key_revision, self._highest = None, 0, 0, 0

    def whole(self) -> None:
        """The watch has brought the last of a write: it is taken with all before it, if that is there."""
        if self._is_all():
            self._take()

    def take_over(self) -> None:
        """Nobody else can write any more and the watch has brought all: what no record tells of, somebody else did."""
        self.foreign = self.foreign or not self._is_all()
        for (start_id, wanted), revision in self._heard.items():
            self._given(start_id, {wanted: revision})
        self._take()

    def _is_all(self) -> bool:
        sums = self.newest.sums if self.newest else {}
        return all(self._sums[wanted] == sums[wanted] for wanted in self._sums.keys() & sums.keys())

    def _take(self) -> None:
        for node, devices in self._partly.items():
            self._put(node, devices)
        self._partly.clear()
        self.record = self.newest

    def absent(self, node: str) -> None:
        """A replay of rt_nodes did not name the node."""
        self.foreign = self.foreign or bool(self.devices.get(node))
        self._revisions[node] = 0
        self.written(node, None, 0)

    def written(self, node: str, facts: NodeFacts | None, revision: int) -> None:
        """Our own write of a node is there; nothing where its answer comes after another's write."""
        if revision >= self._revisions.get(node, 0):
            self._bring(node, facts, revision)

    def written_record(self, plan: Plan, revision: int, *, inside: bool) -> None:
        """A record was written as planned, inside a node's key or as the lists' own; the same holds."""
        if revision >= self.newest_revision:
            self.newest, self.newest_revision, self.foreign = plan.record, revision, False
        if revision >= self._highest:
            self._take()
        if not inside:
            self.key_revision = max(revision, self.key_revision)

    def _put(self, node: str, devices: Devices) -> None:
        for wanted, ranking in self.rankings.items():
            for move in list(self._moves(wanted, node, devices)):
                if move.now is None:
                    ranking.drop(move.device)
                else:
                    ranking.put(move.device, move.now)
        self.devices[node] = devices

    def heard(self, delta: ListDelta) -> None:
        """It stands in the stream of events, and with it those before."""
        of = (delta.start_id, delta.deadline_class)
        self._heard[of] = max(delta.revision, self._heard.get(of, 0))

    def unsaid(self) -> tuple[ListDelta, ...]:
        """The changes that were written and not heard yet."""
        known = self.newest.unsaid if self.newest else ()
        return tuple(d for d in known if d.revision > self._heard.get((d.start_id, d.deadline_class), 0))

    def revision(self, wanted: str) -> int:
        return self.record.revisions.get(wanted, 0) if self.record else 0

    # --- as a write will make it ---

    def plan(self, writes: Mapping[str, NodeFacts], at_us: int, new_id: str) -> Plan | None:
        """What the record and the messages say of it; None where there is none. ``new_id`` names a new numbering.

        The record goes into each write of a node, whose key may have the one that counted so far.
        """
        ended = self.newest is None or self.newest.start_id == self._ended
        known = ListsRecord(start_id=new_id, revisions={}) if self.newest is None or ended else self.newest
        nodes = {node: _by_uuid(facts) for node, facts in writes.items()}
        deltas = tuple(self._deltas(nodes, at_us, known, all_of_them=self.newest is not None and ended))
        if not deltas and not (writes and self.newest):
            return None
        revisions = known.revisions | {delta.deadline_class: delta.revision for delta in deltas}
        unsaid = _newest((*self.unsaid(), *deltas))
        more = {wanted: sum(self._more(wanted, *each) for each in nodes.items()) for wanted in self.rankings}
        sums = {wanted: of_all + more[wanted] for wanted, of_all in self._sums.items()}
        return Plan(ListsRecord(start_id=known.start_id, revisions=revisions, unsaid=unsaid, sums=sums), deltas)

    def _deltas(
        self, nodes: Mapping[str, Devices], at_us: int, known: ListsRecord, *, all_of_them: bool
    ) -> Iterator[ListDelta]:
        for wanted, ranking in self.rankings.items():
            moves = [move for node, devices in nodes.items() for move in self._moves(wanted, node, devices)]
            if moves or self.foreign or all_of_them:
                yield ListDelta(
                    at_us=at_us,
                    deadline_class=wanted,
                    start_id=known.start_id,
                    revision=known.revisions.get(wanted, 0) + 1 + self.foreign,
                    changes=tuple(_changes(ranking, moves)),
                )

    def _more(self, wanted: str, node: str, devices: Devices) -> int:
        """By how much it makes the sum of what was brought larger."""
        moves = _moves(wanted, node, self._partly.get(node, self.devices.get(node, {})), devices)
        return sum(_checksum(move.device, move.now) - _checksum(move.device, move.was) for move in moves)

    def _moves(self, wanted: str, node: str, devices: Devices) -> Iterator[Move]:
        return _moves(wanted, node, self.devices.get(node, {}), devices)


def _by_uuid(facts: NodeFacts | None) -> Devices:
    return {device.uuid: device for device in facts.devices} if facts else {}


def _moves(wanted: str, node: str, before: Devices, after: Devices) -> Iterator[Move]:
    for uuid in before.keys() | after.keys():
        was = before[uuid].classes.get(wanted) if uuid in before else None
        now = after[uuid].classes.get(wanted) if uuid in after else None
        if was is not now and was != now:
            yield Move((node, uuid), was, now)


def _checksum(device: Device, said: ClassStanding | None) -> int:
    """0 for what is not listed."""
    if said is None:
        return 0
    return crc32(f"{device} {said.standing} {said.slack_us} {said.unproven} {said.reason}".encode())


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

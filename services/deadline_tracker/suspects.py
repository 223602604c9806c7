"""What is kept of each node to name who caused a miss: who shares which device, and its tasks of late; no verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from services.deadline_tracker.culprits import Resident, Scene, causes
from services.deadline_tracker.device_time import OPEN, Ints, Tasks
from shared.admission import RtTask, Sharing
from shared.effects import Effect, Publish
from shared.errors import FieldError
from shared.messages import (
    Cause,
    CauseKind,
    DeadlineEvent,
    Device,
    NodeFacts,
    NodeReservations,
    Reservation,
    RingInfo,
    TaskBatch,
)
from shared.subjects import LEDGER, Subjects, decode

KEPT_TASKS: Final = 8_192
"""Ended tasks kept per node, the newest."""
MOST_CHUNKS: Final = 64
KEPT_US: Final = 10_000_000
MOST_CONTAINERS: Final = 4_096
"""Of one node; beyond it everything kept of the node is forgotten."""
MOST_LOOKS: Final = 50
"""Misses explained between two ticks, of all nodes: each takes about a millisecond."""

MatchedTask = tuple[str, int, int, int | None, int]
"""Ring, sequence of the begin in it, begin, end (None: overdue and running), and the deadline relative to the begin."""
Replica = tuple[str, int, int]
"""Request id, replica, generation."""
Times = dict[tuple[str | None, int | None], tuple[int, int | None]]
"""Begin and end of tasks, by ring and sequence of the begin."""
OpenTask = tuple[str, int, int]
"""Container, begin, and deadline relative to it."""


@dataclass(frozen=True, slots=True)
class Place:
    """One device: how it is shared, why it is ill, and what those who reserved a part of it declared."""

    sharing: Sharing
    trouble: str | None
    declared: dict[Replica, RtTask | None]


@dataclass(slots=True)
class Kept:
    """Of one node. ``facts`` and ``reservations`` are what its keys have; ``places`` is None until these are read."""

    facts: bytes | None = None
    reservations: bytes | None = None
    places: tuple[Place, ...] | None = None
    codes: dict[str, int] = field(default_factory=dict)
    """A number for each container, in the order in which they were seen."""
    of: dict[str, Replica] = field(default_factory=dict)
    first_us: list[int | None] = field(default_factory=list)
    chunks: list[Ints] = field(default_factory=list)
    """Container, begin, end, due: a row each, a column per ended task."""
    since_us: int | None = None

    def take(self, rings: Sequence[RingInfo], matched: Sequence[MatchedTask]) -> None:
        """Keeps the tasks that ended."""
        codes = {info.ring: self._code(info) for info in rings}
        ended = [
            (codes[ring], begin, end, begin + due)
            for ring, _, begin, end, due in matched
            if end and _sane(begin, end, due)
        ]
        if not ended:
            return
        rows = np.array(ended, np.int64).T
        self.since_us = int(rows[1].min()) if self.since_us is None else self.since_us
        for code in np.unique(rows[0]).tolist():
            if self.first_us[code] is None:
                self.first_us[code] = int(rows[1][rows[0] == code].min())
        self.chunks.append(rows)
        if len(self.chunks) > MOST_CHUNKS:
            self.tasks()

    def _code(self, info: RingInfo) -> int:
        name = info.container
        if name not in self.of and info.request_id is not None:
            self.of[name] = (info.request_id, info.replica or 0, info.generation or 0)
        if name not in self.codes:
            self.codes[name] = len(self.codes)
            self.first_us.append(None)
        return self.codes[name]

    def tasks(self) -> Ints:
        """All that is kept, in one piece."""
        rows = np.concatenate(self.chunks, axis=1) if self.chunks else np.empty((4, 0), np.int64)
        if rows.size:
            rows = rows[:, -KEPT_TASKS:]
            rows = rows[:, rows[2] > rows[2].max() - KEPT_US]
        self.chunks = [rows] if rows.size else []
        return rows

    def place_of(self, container: str) -> Place | None:
        replica = self.of.get(container)
        return next((place for place in self._places() if replica in place.declared), None)

    def _places(self) -> tuple[Place, ...]:
        if self.places is None:
            self.places = _read(self.facts, self.reservations)
        return self.places

    def scene(self, place: Place, open_tasks: Sequence[OpenTask]) -> Scene:
        """A device with those of its containers of which tasks are known."""
        names = [name for name, replica in self.of.items() if replica in place.declared]
        number = {name: at for at, name in enumerate(names)}
        local = np.full(len(self.codes), -1)
        local[[self.codes[name] for name in names]] = np.arange(len(names))
        rows = self.tasks()
        rows = np.vstack([local[rows[0]], rows[1:]])[:, local[rows[0]] >= 0]
        open_tasks = [each for each in open_tasks if each[0] in number and _sane(each[1], each[1], each[2])]
        begun = [(number[name], at, OPEN, at + due) for name, at, due in open_tasks]
        rows = np.hstack([rows, np.array(begun, np.int64).reshape(-1, 4).T])
        for code, at_us in ((self.codes[name], at) for name, at, _ in open_tasks):
            if self.first_us[code] is None:
                self.first_us[code] = at_us
        residents = tuple(Resident(name, place.declared[self.of[name]], self._arrival_us(name)) for name in names)
        return Scene(place.sharing, residents, Tasks(len(names), *rows).sorted(), place.trouble)

    def _arrival_us(self, name: str) -> int | None:
        """None for who was there when the node was first seen."""
        first_us = self.first_us[self.codes[name]]
        return first_us if first_us and self.since_us and first_us > self.since_us + KEPT_US // 10 else None


class Suspects:
    """All nodes. Fed with what the ledger and rt_nodes say and with each batch's ended tasks; asked about misses."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._nodes: dict[str, Kept] = {}
        self._left = MOST_LOOKS

    def heard(self, bucket: str, key: str, value: bytes | None) -> None:
        """A key of the ledger or of rt_nodes; only those of nodes matter."""
        if not key.startswith("node."):
            return
        try:
            kept = self._kept(decode(key.removeprefix("node.")))
        except FieldError:  # not written by us
            return
        kept.places = None
        if bucket == LEDGER:
            kept.reservations = value
        else:
            kept.facts = value

    def tick(self) -> None:
        self._left = MOST_LOOKS

    def explained(
        self,
        batch: TaskBatch,
        matched: Sequence[MatchedTask],
        effects: Sequence[Effect],
        running: Callable[[], Iterable[OpenTask]],
    ) -> list[Effect]:
        """Takes what one batch matched, and says the causes of the misses that are to be published.

        `running` are the tasks of the node that are open after the batch.
        """
        kept = self._kept(batch.node)
        if kept.facts is None or kept.reservations is None:
            return list(effects)
        if len(kept.codes) > MOST_CONTAINERS:
            kept = self._nodes[batch.node] = Kept(kept.facts, kept.reservations)
        kept.take(batch.rings, matched)
        times: Times = {(ring, seq): (begin, end) for ring, seq, begin, end, _ in matched} if effects else {}
        return [self._with_causes(kept, batch, effect, times, running) for effect in effects]

    def _with_causes(
        self,
        kept: Kept,
        batch: TaskBatch,
        effect: Effect,
        times: Times,
        running: Callable[[], Iterable[OpenTask]],
    ) -> Effect:
        if not isinstance(effect, Publish) or not isinstance(event := effect.body, DeadlineEvent):
            return effect
        late = times.get((event.ring, event.seq))
        if late is None or not self._left:
            return effect
        begin_us, end_us = late
        at_us = batch.watermark_us if end_us is None else end_us
        if not _sane(begin_us, at_us, 0):
            return effect
        because = self._because(kept, event.container, begin_us, at_us, running())
        return replace(effect, body=event.model_copy(update={"because": because}))

    def _because(
        self, kept: Kept, container: str, begin_us: int, at_us: int, running: Iterable[OpenTask]
    ) -> tuple[Cause, ...]:
        self._left -= 1
        place = kept.place_of(container)
        if place is None:
            text = "it holds no device in the ledger, or nothing was said of that device"
            return (Cause(cause=CauseKind.UNKNOWN, container=None, amount_us=None, detail=text),)
        scene = kept.scene(place, list(running))
        names = [resident.name for resident in scene.residents]
        return causes(scene, names.index(container), begin_us, at_us)

    def _kept(self, node: str) -> Kept:
        return self._nodes.setdefault(node, Kept())


def _read(facts: bytes | None, reservations: bytes | None) -> tuple[Place, ...]:
    """Nothing where a key is not there or was not written by us."""
    if facts is None or reservations is None:
        return ()
    try:
        devices, held = NodeFacts.trusted(facts).devices, NodeReservations.trusted(reservations).reservations
        return tuple(_place(device, held) for device in devices)
    except (FieldError, ValueError):
        return ()


def _place(device: Device, held: Iterable[Reservation]) -> Place:
    own = [one for one in held if device.uuid in one.devices]
    declared = {
        (one.request_id, one.replica, one.generation): RtTask.of(one.request_id, one.realtime) if one.realtime else None
        for one in own
    }
    sharing = Sharing(device.regime, device.slice_us, device.switch_us, device.handover_us or 0)
    return Place(sharing, None if device.healthy else device.reason or "not healthy", declared)


def _sane(begin_us: int, end_us: int, deadline_us: int) -> bool:
    """Whether these can be the times of a task; what is no time at all was counted by whoever judged it."""
    return 0 <= begin_us <= end_us < OPEN and 0 <= deadline_us < OPEN - begin_us

"""What is kept of each node to say who disturbed whom: who shares which device, and its tasks of late; no causes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from services.deadline_tracker.clocks import Clock, Clocks
from services.deadline_tracker.culprits import Resident, Scene
from services.deadline_tracker.device_time import OPEN, Ints, Tasks
from services.deadline_tracker.matched import MatchedTask
from services.deadline_tracker.neighbours import Neighbours
from shared.admission import RtTask, Sharing
from shared.errors import FieldError
from shared.messages import Device, NodeFacts, NodeReservations, Reservation, RingInfo, Which

KEPT_TASKS: Final = 8_192
"""Ended tasks kept per node, the newest."""
KEPT_US: Final = 10_000_000
MOST_CHUNKS: Final = 64
KNOWN_US: Final = 1_000_000
"""Who comes sooner after a node is first seen may have been there before."""

OpenTask = tuple[str, int, int]
"""Container, begin, and deadline relative to it."""
Running = Callable[[Collection[str]], Iterable[OpenTask]]
"""Those of these containers that are open now."""


@dataclass(frozen=True, slots=True)
class Place:
    """One device: how it is shared, why it is ill, and what those who reserved a part of it declared."""

    uuid: str
    sharing: Sharing
    trouble: str | None
    declared: dict[Which, RtTask | None]


@dataclass(slots=True)
class Kept:
    """Of one node. ``facts`` and ``reservations`` are what its keys have; ``places`` is None until these are read."""

    facts: bytes | None = None
    reservations: bytes | None = None
    boot_id: str = ""
    """Whose stamps the tasks have."""
    places: tuple[Place, ...] | None = None
    codes: dict[str, int] = field(default_factory=dict)
    """A number for each container, in the order in which they were seen."""
    of: dict[str, Which] = field(default_factory=dict)
    first_us: list[int | None] = field(default_factory=list)
    chunks: list[Ints] = field(default_factory=list)
    """Container, begin, end, due: a row each, a column per ended task."""
    since_us: int | None = None
    looked_us: int = 0
    """Up to when it was looked for noisy neighbours."""
    tests: dict[str, Neighbours] = field(default_factory=dict)
    clocks: Clocks = field(default_factory=Clocks)

    def anew(self, boot_id: str = "") -> Kept:
        """With nothing of its tasks."""
        return Kept(self.facts, self.reservations, boot_id, clocks=self.clocks)

    def take(self, rings: Sequence[RingInfo], matched: Sequence[MatchedTask]) -> None:
        """Keeps the tasks that ended."""
        codes = {info.ring: self._code(info) for info in rings}
        ended = [
            (codes[ring], begin, end, begin + due)
            for ring, _, begin, end, due in matched
            if end and sane(begin, end, due)
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
        if len(self.chunks) > 1:
            rows = np.concatenate(self.chunks, axis=1)[:, -KEPT_TASKS:]
            old = rows[2] <= rows[2].max() - KEPT_US
            self.chunks = [rows[:, ~old] if old.any() else rows]
        return self.chunks[0] if self.chunks else np.empty((4, 0), np.int64)

    def place_of(self, container: str) -> Place | None:
        replica = self.of.get(container)
        return next((place for place in self.shared() if replica in place.declared), None)

    def shared(self) -> tuple[Place, ...]:
        """The devices of the node."""
        if self.places is None:
            self.places = _read(self.facts, self.reservations)
        return self.places

    def scene(self, place: Place, running: Running, since_us: int = 0, clock: Clock | None = None) -> Scene:
        """A device with those of its containers of which tasks are known, and the tasks that did not end before."""
        names = [name for name, replica in self.of.items() if replica in place.declared]
        number = {name: at for at, name in enumerate(names)}
        local = np.full(len(self.codes), -1)
        local[[self.codes[name] for name in names]] = np.arange(len(names))
        kept = self.tasks()
        rows = kept[:, (local[kept[0]] >= 0) & (kept[2] >= since_us)]
        rows[0] = local[rows[0]]
        open_tasks = [each for each in running(number) if sane(each[1], each[1], each[2])]
        begun = [(number[name], at, OPEN, at + due) for name, at, due in open_tasks]
        rows = np.hstack([rows, np.array(begun, np.int64).reshape(-1, 4).T])
        for code, at_us in ((self.codes[name], at) for name, at, _ in open_tasks):
            if self.first_us[code] is None:
                self.first_us[code] = at_us
        residents = tuple(Resident(name, place.declared[self.of[name]], self._arrival_us(name)) for name in names)
        return Scene(place.sharing, residents, Tasks(len(names), *rows).sorted(), place.trouble, clock)

    def _arrival_us(self, name: str) -> int | None:
        """None for who was there when the node was first seen."""
        first_us = self.first_us[self.codes[name]]
        return first_us if first_us and self.since_us and first_us > self.since_us + KNOWN_US else None


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
    declared = {one.which: RtTask.of(one.request_id, one.realtime) if one.realtime else None for one in own}
    trouble = None if device.healthy else device.reason or "not healthy"
    return Place(device.uuid, Sharing.of(device), trouble, declared)


def sane(begin_us: int, end_us: int, deadline_us: int) -> bool:
    """Whether these can be the times of a task; what is no time at all was counted by whoever judged it."""
    return 0 <= begin_us <= end_us < OPEN and 0 <= deadline_us < OPEN - begin_us

"""Puts task events into batches of bounded size, in columns; what becomes an event is decided elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.monitor.open_tasks import Row
from shared.messages import RingInfo

MAX_ROWS: Final = 1_000
MAX_RINGS: Final = 128
MAX_NAMES: Final = 256
"""Together below the 256 KiB of a body, also with the longest names and the largest numbers that a ring can hold:
1,000 rows of 100 bytes, 128 rings of 700 and 256 names of 140."""


_PIECE: Final = MAX_NAMES
"""Rows are added in pieces of so many, each to one batch: a piece cannot have more names than a batch."""


@dataclass(slots=True)
class Pile:
    """Rows that one batch will carry, in the order in which they were taken."""

    rings: dict[str, RingInfo] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    ring_of: list[int] = field(default_factory=list)
    name_of: list[int] = field(default_factory=list)
    """Of the rows that were looked at for their names: the first ones."""
    lost_records: Counter[str] = field(default_factory=Counter)
    _index: dict[str, int] = field(default_factory=dict)

    def takes(self, info: RingInfo, rows: Sequence[Row]) -> bool:
        """Whether all these rows still fit."""
        size = len(self.rows) + len(rows)
        if size > MAX_ROWS or (len(self.rings) >= MAX_RINGS and info.ring not in self.rings):
            return False
        return size <= MAX_NAMES or self._names_with(rows) <= MAX_NAMES

    def add(self, info: RingInfo, rows: Sequence[Row]) -> None:
        """Append rows of one ring; a ring that got its labels meanwhile carries the newer ones."""
        index = self._index.setdefault(info.ring, len(self._index))
        self.rings[info.ring] = info
        self.rows += rows
        self.ring_of += [index] * len(rows)

    def _names_with(self, rows: Sequence[Row]) -> int:
        self._name_all()
        return len(self.names) + len({row.name for row in rows} - self.names.keys())

    def _name_all(self) -> None:
        """Late, for many rings at once: most batches are far from having too many names."""
        names = self.names
        self.name_of += [names.setdefault(row.name, len(names)) for row in self.rows[len(self.name_of) :]]

    def fields(self) -> dict[str, Any]:
        """What the pile adds to a TaskBatch."""
        self._name_all()
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(Row._fields)
        return {
            "rings": tuple(self.rings.values()),
            "names": tuple(self.names),
            "lost_records": dict(self.lost_records),
            **{field: list(column) for field, column in zip(Row._fields, columns, strict=True)},
            "ring": self.ring_of,
            "name": self.name_of,
        }


@dataclass(slots=True)
class Piles:
    """Rows not yet published: one pile, or more where one batch cannot carry them."""

    piles: list[Pile] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.piles)

    def add(self, info: RingInfo, rows: Sequence[Row], lost: int) -> None:
        """Append what one read of one ring gave; ``lost`` records of it were never seen."""
        if not self.piles:
            self.piles.append(Pile())
        for start in range(0, len(rows), _PIECE):
            piece = rows[start : start + _PIECE]
            if not self.piles[-1].takes(info, piece):
                self.piles.append(Pile())
            self.piles[-1].add(info, piece)
        if lost:
            self.piles[-1].lost_records[info.ring] += lost

    def take(self) -> list[Pile]:
        """All piles; nothing is left. A single empty one where there was none."""
        taken, self.piles = self.piles or [Pile()], []
        return taken

    @property
    def full(self) -> bool:
        """Whether one of them would not get any larger."""
        return len(self.piles) > 1

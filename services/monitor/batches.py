"""Puts task events into batches of bounded size, in columns; what becomes an event is decided elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, Final

from services.monitor.open_tasks import Fields, Row
from shared.messages import RingInfo

MAX_ROWS: Final = 1_000
MAX_RINGS: Final = 128
MAX_NAMES: Final = 256
"""Together below the 256 KiB of a body, also with the longest names and the largest numbers that a ring can hold:
1,000 rows of 100 bytes, 128 rings of 700 and 256 names of 140."""


_NAME: Final = itemgetter(Row._fields.index("name"))
_PIECE: Final = MAX_NAMES
"""Rows are added in pieces of so many, each to one batch: a piece cannot have more names than a batch."""


@dataclass(slots=True)
class Pile:
    """Rows that one batch will carry, in the order in which they were taken; columns are made of all at once."""

    rings: dict[str, RingInfo] = field(default_factory=dict)
    size: int = 0
    lost_records: Counter[str] = field(default_factory=Counter)
    _pieces: list[tuple[str, Sequence[Fields]]] = field(default_factory=list)
    """Ring ids, and rows of that ring."""
    _names: set[str] = field(default_factory=set)
    _named: int = 0
    """Pieces whose names are in there, and below their rows."""
    _named_rows: int = 0

    def takes(self, info: RingInfo, rows: Sequence[Fields]) -> bool:
        """Whether all these rows still fit."""
        size = self.size + len(rows)
        if size > MAX_ROWS or (len(self.rings) >= MAX_RINGS and info.ring not in self.rings):
            return False
        return len(self._names) + size - self._named_rows <= MAX_NAMES or self._names_with(rows) <= MAX_NAMES

    def add(self, info: RingInfo, rows: Sequence[Fields]) -> None:
        """Append rows of one ring; a ring that got its labels meanwhile carries the newer ones."""
        self.rings[info.ring] = info
        self._pieces.append((info.ring, rows))
        self.size += len(rows)

    def _names_with(self, rows: Sequence[Fields]) -> int:
        """Looked at for many rings at once, and only where each row could have a name of its own."""
        for _, piece in self._pieces[self._named :]:
            self._names.update(map(_NAME, piece))
        self._named, self._named_rows = len(self._pieces), self.size
        return len(self._names.union(map(_NAME, rows)))

    def fields(self) -> dict[str, Any]:
        """What the pile adds to a TaskBatch."""
        of_ring = {ring: index for index, ring in enumerate(self.rings)}
        rows = chain.from_iterable(piece for _, piece in self._pieces)
        columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in Row._fields]
        names = {name: index for index, name in enumerate(dict.fromkeys(columns[-1]))}
        return {
            "rings": tuple(self.rings.values()),
            "names": tuple(names),
            "lost_records": dict(self.lost_records),
            **dict(zip(Row._fields, columns, strict=True)),
            "ring": [of_ring[ring] for ring, piece in self._pieces for _ in piece],
            "name": [names[name] for name in columns[-1]],
        }


@dataclass(slots=True)
class Piles:
    """Rows not yet published: one pile, or more where one batch cannot carry them."""

    piles: list[Pile] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.piles)

    def add(self, info: RingInfo, rows: Sequence[Fields], lost: int) -> None:
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

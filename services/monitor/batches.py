"""Puts task events into batches of bounded size, in columns; what becomes an event is decided elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

_Piece = tuple[RingInfo, Sequence[Fields], int]
"""What one read of one ring gave: its rows, and how many of its records were never seen."""


@dataclass(slots=True)
class Pile:
    """Rows not yet published, in the order in which they were taken; batches are made of all at once."""

    rows: int = 0
    _pieces: list[_Piece] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, info: RingInfo, rows: Sequence[Fields], lost: int) -> None:
        """Append what one read of one ring gave; ``lost`` records of it were never seen."""
        self._pieces.append((info, rows, lost))
        self.rows += len(rows)

    def take(self) -> list[dict[str, Any]]:
        """Everything, as what it adds to each of as many TaskBatches as it needs; nothing is left."""
        pieces, count, self._pieces, self.rows = self._pieces, self.rows, [], 0
        return [_fields(pieces)] if _fits(pieces, count) else [_fields(part) for part in _parts(pieces)]


def _fits(pieces: Sequence[_Piece], count: int) -> bool:
    """Whether one batch can carry them, ``count`` rows in all."""
    return (
        count <= MAX_ROWS
        and (len(pieces) <= MAX_RINGS or len({info.ring for info, _, _ in pieces}) <= MAX_RINGS)
        and (count <= MAX_NAMES or len({_NAME(row) for _, rows, _ in pieces for row in rows}) <= MAX_NAMES)
    )


def _parts(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """As few as can be of those that fit. A piece is cut where it could have more names than a batch."""
    part: list[_Piece] = []
    size, rings, names = 0, set[str](), set[str]()
    for info, all_rows, lost in pieces:
        for start in range(0, max(1, len(all_rows)), MAX_NAMES):
            rows = all_rows[start : start + MAX_NAMES]
            size, rings, names = size + len(rows), rings | {info.ring}, names | set(map(_NAME, rows))
            if size > MAX_ROWS or len(rings) > MAX_RINGS or len(names) > MAX_NAMES:
                yield part
                part, size, rings, names = [], len(rows), {info.ring}, set(map(_NAME, rows))
            part.append((info, rows, 0 if start else lost))
    yield part


def _fields(pieces: Sequence[_Piece]) -> dict[str, Any]:
    """Columns; a ring that got its labels meanwhile carries the newer ones."""
    rings = {info.ring: info for info, rows, _ in pieces if rows}
    of_ring = {ring: index for index, ring in enumerate(rings)}
    columns = [list(column) for column in zip(*chain.from_iterable([rows for _, rows, _ in pieces]), strict=True)]
    columns = columns or [[] for _ in Row._fields]
    names = {name: index for index, name in enumerate(dict.fromkeys(columns[-1]))}
    lost: dict[str, int] = {}
    for info, _, count in pieces:
        if count:
            lost[info.ring] = lost.get(info.ring, 0) + count
    return {
        "rings": tuple(rings.values()),
        "names": tuple(names),
        "lost_records": lost,
        **dict(zip(Row._fields, columns, strict=True)),
        "ring": [of_ring[info.ring] for info, rows, _ in pieces for _ in rows],
        "name": [names[name] for name in columns[-1]],
    }

"""Puts task events into batches of bounded size, in columns; what becomes an event is decided elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from services.monitor.open_tasks import Row
from shared.messages import COLUMNS, RingInfo

MAX_ROWS: Final = 1_500
MAX_RINGS: Final = 64
MAX_NAMES: Final = 256
"""Together below the 256 KiB of a body, also with the longest names and the largest numbers that a ring can hold:
1,500 rows of 100 bytes, 64 rings of 700 and 256 names of 140."""


@dataclass(slots=True)
class Pile:
    """Rows that one batch will carry, in the order in which they were taken."""

    rings: dict[str, tuple[int, RingInfo]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    columns: dict[str, list[int]] = field(default_factory=lambda: {column: [] for column in COLUMNS})
    lost_records: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.columns["seq"])

    def takes(self, info: RingInfo, row: Row) -> bool:
        """Whether the row still fits."""
        return (
            len(self) < MAX_ROWS
            and (info.ring in self.rings or len(self.rings) < MAX_RINGS)
            and (row.name in self.names or len(self.names) < MAX_NAMES)
        )

    def add(self, info: RingInfo, row: Row) -> None:
        """Append one row; a ring that got its labels meanwhile carries the newer ones."""
        index = self.rings[info.ring][0] if info.ring in self.rings else len(self.rings)
        self.rings[info.ring] = (index, info)
        columns = self.columns
        columns["ring"].append(index)
        columns["kind"].append(row.kind)
        columns["seq"].append(row.seq)
        columns["begin_seq"].append(row.begin_seq)
        columns["task"].append(row.task)
        columns["stamp_us"].append(row.stamp_us)
        columns["deadline_us"].append(row.deadline_us)
        columns["name"].append(self.names.setdefault(row.name, len(self.names)))

    def fields(self) -> dict[str, Any]:
        """What the pile adds to a TaskBatch."""
        rings = tuple(info for _, info in self.rings.values())
        return {
            "rings": rings,
            "names": tuple(self.names),
            "lost_records": dict(self.lost_records),
            **self.columns,
        }


@dataclass(slots=True)
class Piles:
    """Rows not yet published: one pile, or more where one batch cannot carry them."""

    piles: list[Pile] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.piles)

    def add(self, info: RingInfo, rows: list[Row], lost: int) -> None:
        """Append what one read of one ring gave; ``lost`` records of it were never seen."""
        for row in rows:
            self._open_for(info, row).add(info, row)
        if lost:
            self._last().lost_records[info.ring] += lost

    def take(self) -> list[Pile]:
        """All piles; nothing is left. A single empty one where there was none."""
        taken, self.piles = self.piles or [Pile()], []
        return taken

    @property
    def full(self) -> bool:
        return len(self.piles) > 1 or bool(self.piles and len(self.piles[0]) >= MAX_ROWS)

    def _last(self) -> Pile:
        if not self.piles:
            self.piles.append(Pile())
        return self.piles[-1]

    def _open_for(self, info: RingInfo, row: Row) -> Pile:
        if not self._last().takes(info, row):
            self.piles.append(Pile())
        return self._last()

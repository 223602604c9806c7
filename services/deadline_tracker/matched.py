"""What the rows of one batch matched: a row per verdict, and as arrays for those who compute over many; no judging.

This is where others take over from the judge: who caused a miss, and how long tasks take, is found from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.deadline_tracker.record import DEADLINE_US, STAMP_US, Ring, Task

NOT_ENDED: Final = -1
"""In ``Columns.end_us`` where the verdict is OVERDUE: the task still runs."""
_MOST: Final = 2**63 - 1


class TaskVerdict(IntEnum):
    """Codes of ``Columns.verdict``."""

    MET = 1
    MISSED = 2
    INVALID = 3
    OVERDUE = 4
    """Missed while it still runs."""
    ENDED = 5
    """The end of a task that was OVERDUE before: its verdict stands, and now its duration is known."""


@dataclass(frozen=True, slots=True)
class Columns:
    """``Matched`` in arrays of one length, in stream order. Stamps are microseconds of the node's monotonic clock."""

    ring: NDArray[np.int64]
    """Indexes ``Matched.rings``: the ring, and its container's record."""
    seq: NDArray[np.int64]
    """Sequence of the task's begin in its ring."""
    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    deadline_us: NDArray[np.int64]
    """Relative to the begin."""
    verdict: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Matched:
    """The tasks of one batch of ``node`` that were decided or ended in it.

    A row is the place of its ring in ``rings``, the sequence of its begin, the task, when it ended (None: it still
    runs), and the verdict.
    """

    node: str
    rings: Sequence[Ring]
    rows: list[tuple[int, int, Task, int | None, TaskVerdict]] = field(default_factory=list)

    def columns(self) -> Columns:
        return Columns(
            ring=_array([row[0] for row in self.rows]),
            seq=_array([row[1] for row in self.rows]),
            begin_us=_array([row[2][STAMP_US] for row in self.rows]),
            end_us=_array([NOT_ENDED if row[3] is None else row[3] for row in self.rows]),
            deadline_us=_array([row[2][DEADLINE_US] for row in self.rows]),
            verdict=_array([row[4] for row in self.rows]),
        )


def _array(values: list[int]) -> NDArray[np.int64]:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:  # a container stamps its ring as it likes
        return np.array([min(max(value, -_MOST), _MOST) for value in values], dtype=np.int64)

"""What the rows of one batch matched: a row per verdict, for those who compute over many tasks; no judging.

This is where others take over from the judge: who caused a miss, and how long tasks take, is found from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from services.deadline_tracker.record import DEADLINE_US, STAMP_US, Ring, Task

MatchedTask = tuple[str, int, int, int | None, int]
"""Ring, sequence of the begin in it, begin, end (None: overdue and running), and the deadline relative to the begin."""


class TaskVerdict(IntEnum):
    """What was decided of a task."""

    MET = 1
    MISSED = 2
    INVALID = 3
    OVERDUE = 4
    """Missed while it still runs."""
    ENDED = 5
    """The end of a task that was OVERDUE before: its verdict stands, and now its duration is known."""


@dataclass(frozen=True, slots=True)
class Matched:
    """The tasks of one batch that were decided or ended in it, in stream order.

    A row is the place of its ring in ``rings``, the sequence of its begin, the task, when it ended (None: it still
    runs), and the verdict. Stamps are microseconds of the node's monotonic clock.
    """

    rings: Sequence[Ring]
    rows: list[tuple[int, int, Task, int | None, TaskVerdict]] = field(default_factory=list)

    def tasks(self) -> list[MatchedTask]:
        """A task that was overdue is there twice: when that was known, and when it ended."""
        rings = self.rings
        return [
            (rings[place].name, seq, task[STAMP_US], end_us, task[DEADLINE_US])
            for place, seq, task, end_us, _ in self.rows
        ]

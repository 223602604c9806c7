"""What monitors would write of many tasks, for the benches of the tracker; nothing is published here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from shared.messages import COLUMNS, RingInfo, TaskBatch, TaskEventKind

NODES, RINGS = 8, 8
MISSES = 0.001
DEADLINE_US = 50_000


@dataclass
class Ring:
    """One container's tasks, one after another; their begins and ends may fall into different batches."""

    info: RingInfo
    seq: int = 0
    clock_us: int = 1_000_000_000_000
    running: int = 0
    """Sequence of the begin of the task that runs; 0: none does."""

    def rows(self, chance: Random, place: int) -> Iterator[tuple[int, ...]]:
        """The next record; before the end of a task that misses, the monitor's word that it is overdue."""
        self.seq += 1
        if not self.running:
            self.running = self.seq
            yield (place, TaskEventKind.BEGIN, self.seq, self.seq, self.seq, self.clock_us, DEADLINE_US, 0)
            return
        begin, late = self.running, chance.random() < MISSES
        if late:
            stamp_us = self.clock_us + DEADLINE_US + 1_500
            yield (place, TaskEventKind.OVERDUE, begin, begin, begin, stamp_us, DEADLINE_US, 0)
        took_us = DEADLINE_US + 5_000 if late else chance.randrange(5_000, 40_000)
        self.clock_us += took_us
        self.running = 0
        yield (place, TaskEventKind.END, self.seq, begin, begin, self.clock_us, 0, 0)
        self.clock_us += chance.randrange(1_000)


class Node:
    """A monitor with its rings; ``batch`` is what it publishes next."""

    def __init__(self, name: str, chance: Random) -> None:
        self.name, self._chance, self._counter = name, chance, 0
        self._rings = [
            Ring(
                RingInfo(
                    ring=f"{name}-{place:02d}-0123456789abcdef",
                    container=f"{name}-container-{place}",
                    request_id=f"{name}-request-{place}",
                    replica=0,
                    generation=1,
                    guarantee=0.99,
                    window=(95, 100) if place % 2 else None,
                )
            )
            for place in range(RINGS)
        ]

    def batch(self, least_rows: int) -> TaskBatch:
        """A few records of each ring at each of its looks, until there are enough."""
        rows: list[tuple[int, ...]] = []
        while len(rows) < least_rows:
            place = self._chance.randrange(RINGS)
            for _ in range(self._chance.randrange(1, 9)):
                rows += self._rings[place].rows(self._chance, place)
        return self._of(rows)

    def mark(self, word: str) -> TaskBatch:
        """A task that missed its deadline on a container of its own: its verdict says that all before it was judged."""
        ring = Ring(RingInfo(ring=f"{self.name}-{word}", container=word))
        overdue = (0, TaskEventKind.OVERDUE, 1, 1, 1, 10**12, DEADLINE_US, 0)
        return self._of([*ring.rows(self._chance, 0), overdue], ring)

    def _of(self, rows: list[tuple[int, ...]], *rings: Ring) -> TaskBatch:
        self._counter += 1
        values = (list(map(int, column)) for column in zip(*rows, strict=True))
        columns: Any = dict(zip(COLUMNS, values, strict=True))
        return TaskBatch(
            node=self.name,
            start_id="0123456789ab",
            counter=self._counter,
            boot_id="01234567-89ab-cdef-0123-456789abcdef",
            at_us=time.time_ns() // 1000,
            watermark_us=max(ring.clock_us for ring in rings or self._rings),
            rings=tuple(ring.info for ring in rings or self._rings),
            names=("infer",),
            lost_records={},
            **columns,
        )

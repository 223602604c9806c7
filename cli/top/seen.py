"""What ``laxity top`` has heard so far, and how old it is; nothing is drawn here, nothing is asked."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from shared.effects import KeyChanged
from shared.messages import (
    ContainerMetrics,
    ContainerRecord,
    NodeDeadlines,
    NodeFacts,
    NodeMetrics,
    TaskBatch,
    TaskEventKind,
)
from shared.subjects import DEADLINES, NODES

RECENT_US: Final = 10_000_000
"""How far back the least laxity of a container looks."""
MOST_OPEN: Final = 10_000
"""Tasks whose end is waited for; the oldest go first."""
_DECIDED: Final = {TaskEventKind.END, TaskEventKind.OVERDUE}
_OVER: Final = _DECIDED | {TaskEventKind.ABORTED, TaskEventKind.LOST}

Of = tuple[str, str]
"""Node and container."""


@dataclass
class Seen:
    """Times are those of one monotonic clock, in microseconds."""

    metrics: dict[str, NodeMetrics] = field(default_factory=dict)
    heard_us: dict[str, int] = field(default_factory=dict)
    """Per node: its last heartbeat."""
    facts: dict[str, NodeFacts] = field(default_factory=dict)
    records: dict[Of, ContainerRecord] = field(default_factory=dict)
    away_us: int | None = None
    """Since when the bus is away."""
    _open: dict[tuple[str, str, int], tuple[int, int]] = field(default_factory=dict)
    _left: dict[Of, deque[tuple[int, int]]] = field(default_factory=dict)

    def heartbeat(self, metrics: NodeMetrics, now_us: int) -> None:
        self.metrics[metrics.node], self.heard_us[metrics.node] = metrics, now_us

    def key(self, change: KeyChanged) -> None:
        """A node's key in rt_nodes or rt_deadlines; all others say nothing here."""
        if not change.key.startswith("node.") or change.value is None:
            return
        if change.bucket == NODES:
            facts = NodeFacts.trusted(change.value)
            self.facts[facts.node] = facts
        elif change.bucket == DEADLINES:
            found = NodeDeadlines.trusted(change.value)
            gone = [of for of in self.records if of[0] == found.node]
            for of in gone:
                del self.records[of]
            self.records |= {(found.node, record.container): record for record in found.containers}

    def tasks(self, batch: TaskBatch, now_us: int) -> None:
        """How much time was left when tasks ended; one that is overdue had none."""
        columns = zip(
            batch.ring, batch.kind, batch.seq, batch.begin_seq, batch.stamp_us, batch.deadline_us, strict=True
        )
        for ring, kind, seq, begin_seq, stamp_us, deadline_us in columns:
            info = batch.rings[ring]
            if kind == TaskEventKind.BEGIN:
                self._open[batch.node, info.ring, seq] = (stamp_us, deadline_us)
                if len(self._open) > MOST_OPEN:
                    del self._open[next(iter(self._open))]
            elif kind in _OVER:
                at = seq if kind != TaskEventKind.END else begin_seq
                begun = self._open.pop((batch.node, info.ring, at), None)
                if begun is not None and kind in _DECIDED:
                    left_us = begun[0] + begun[1] - max(stamp_us, batch.watermark_us * (kind == TaskEventKind.OVERDUE))
                    self._left.setdefault((batch.node, info.container), deque(maxlen=1000)).append((now_us, left_us))

    def laxity_us(self, of: Of, now_us: int) -> int | None:
        """The least time that was left when a task of late ended; negative: it was too late. None: none ended."""
        left = self._left.get(of, deque())
        while left and now_us - left[0][0] > RECENT_US:
            left.popleft()
        return min((each for _, each in left), default=None)

    def container(self, of: Of) -> ContainerMetrics | None:
        """As its node saw it last."""
        node, name = of
        containers = self.metrics[node].containers if node in self.metrics else ()
        return next((each for each in containers if each.container == name), None)

    def age_us(self, node: str, now_us: int) -> int | None:
        """Of what the node said last; None where it was not heard."""
        heard_us = self.heard_us.get(node)
        return None if heard_us is None else now_us - heard_us

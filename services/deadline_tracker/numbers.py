"""The deadline-tracker's numbers for /metrics: tasks and guarantees per container, never per task.

Each tracker tells of the nodes whose partition it holds, so that sums count each task once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from services.deadline_tracker.core import Core
from services.deadline_tracker.nodes import Node
from services.deadline_tracker.record import Record
from shared.deadlines import Standing
from shared.metrics import Metric, Sample

_OF: Final = ("node", "container", "request")


def _gauge(name: str, about: str, *labels: str) -> Metric:
    return Metric(f"laxity_{name}", "gauge", about, (*_OF, *labels))


_PARTITIONS: Final = Metric(
    "laxity_tracker_partitions", "gauge", "Partitions of the nodes of which this tracker says verdicts."
)
_IN_ALL: Final = Metric("laxity_tracker_partitions_in_all", "gauge", "Partitions that there are.")
_TASKS: Final = Metric(
    "laxity_tasks_total",
    "counter",
    "Tasks that are over, by outcome: met, missed, or without a verdict: lost, aborted, invalid.",
    (*_OF, "outcome"),
)
_LATE: Final = Metric(
    "laxity_late_records_total", "counter", "Tasks judged missed while they ran whose end came in time after all.", _OF
)
_OPEN: Final = _gauge("tasks_open", "Tasks that run.")
_OVERDUE: Final = _gauge("tasks_overdue", "Tasks that run past their deadline.")
_RATIO: Final = _gauge("guarantee_ratio", "Share of met tasks in the container's window of verdicts.")
_LOWER: Final = _gauge("guarantee_ratio_lower", "Lower bound of the ratio, at 95 % confidence.")
_UPPER: Final = _gauge("guarantee_ratio_upper", "Upper bound of the ratio, at 95 % confidence.")
_SAMPLES: Final = _gauge("guarantee_samples", "Verdicts in the window that the ratio is made of.")
_WANTED: Final = _gauge("guarantee_wanted_ratio", "Share of met tasks that the container is to have.")
_DISTANCE: Final = _gauge("guarantee_distance_to_failure", "Misses in a row that break the container's (m,k).")
_STANDING: Final = _gauge("container_standing", "1 for what its record says, 0 for the others.", "standing")
METRICS: Final = (
    *(
        _PARTITIONS,
        _IN_ALL,
        _TASKS,
        _LATE,
        _OPEN,
        _OVERDUE,
        _RATIO,
        _LOWER,
        _UPPER,
        _SAMPLES,
        _WANTED,
        _DISTANCE,
        _STANDING,
    ),
)


def numbers(core: Core) -> Iterator[Sample]:
    speaking = {part.number for part in core.shares.parts if part.speaks}
    yield from _PARTITIONS.of(len(speaking))
    yield from _IN_ALL.of(core.shares.partitions or None)
    for node in core.nodes.values():
        if node.partition in speaking:
            yield from _node(node)


def _node(node: Node) -> Iterator[Sample]:
    running: Counter[str] = Counter()
    overdue: Counter[str] = Counter()
    for ring in node.rings.values():
        running[ring.container] += ring.running
        overdue[ring.container] += len(ring.overdue)
    for container, record in node.records.items():
        of = (node.name, container, record.request_id)
        yield from _OPEN.of(running[container], *of)
        yield from _OVERDUE.of(overdue[container], *of)
        yield from _record(record, of)


def _record(record: Record, of: tuple[str | None, ...]) -> Iterator[Sample]:
    for outcome, count in record.counts.items():
        yield from _LATE.of(count, *of) if outcome == "late_record" else _TASKS.of(count, *of, outcome)
    for metric, bound in zip((_RATIO, _LOWER, _UPPER), record.bounds, strict=True):
        yield from metric.of(bound, *of)
    yield from _SAMPLES.of(record.window.met + record.window.missed, *of)
    yield from _WANTED.of(record.guarantee, *of)
    yield from _DISTANCE.of(record.distance_to_failure, *of)
    now = Standing.AT_RISK if record.warned else record.standing
    for standing in Standing:
        yield from _STANDING.of(standing == now, *of, standing)

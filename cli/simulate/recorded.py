"""Traces and clusters from our own ledger, as `laxity ledger export` writes them; plays nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from cli.simulate.trace import Arrival
from services.placer.core.demand import Demand
from shared.errors import FieldError
from shared.messages import NodeFacts, RequestRecord, State

_RAN: Final = (State.STARTED, State.PLACED)

T = TypeVar("T")


def arrivals_of_records(path: Path) -> tuple[Arrival, ...]:
    """In the order in which they came; raises FieldError that names file and line.

    A request stayed from its first start until it ended; one that never ran, from its arrival until it was over. A
    release of what nobody had asked for is none.
    """
    found = _read(path, lambda line: _arrival(RequestRecord.trusted(line)))
    return tuple(sorted((each for each in found if each), key=lambda each: (each.at_us or 0, each.name)))


def nodes_of_records(path: Path) -> list[NodeFacts]:
    """As the node list saw them, with what others used of them; raises FieldError that names file and line."""
    return _read(path, NodeFacts.trusted)


def _read(path: Path, make: Callable[[bytes], T]) -> list[T]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise FieldError(str(path), error.strerror, "a file that can be read") from None
    return [_made(path, number, line, make) for number, line in enumerate(lines, 1)]


def _made(path: Path, number: int, line: bytes, make: Callable[[bytes], T]) -> T:
    try:
        return make(line)
    except FieldError as error:
        raise FieldError(f"{path}: line {number}: {error.field}", error.found, error.allowed) from None


def _arrival(record: RequestRecord) -> Arrival | None:
    body = record.body
    if body is None:
        return None
    at_us = record.arrived_at_us or (record.steps[0].at_us if record.steps else 0)
    ran_us = next((step.at_us for state in _RAN for step in record.steps if step.state == state), at_us)
    stay_us = max(0, record.steps[-1].at_us - ran_us) if record.final and record.steps else None
    return Arrival(record.request_id, body, Demand.of(body), at_us, stay_us)

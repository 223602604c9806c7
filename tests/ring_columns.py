"""The rows that a read of a ring took, with their names, and one field of all of them."""

from __future__ import annotations

from typing import Any

from services.monitor.open_tasks import RingRows, Row
from services.monitor.rings import RingRead


def named(read: RingRead | RingRows) -> list[Row]:
    return [Row._make(fields) for fields in read.rows]


def column(read: RingRead, field: str) -> list[Any]:
    return [getattr(row, field) for row in named(read)]

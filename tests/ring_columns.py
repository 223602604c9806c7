"""One field of all rows that a read of a ring took."""

from __future__ import annotations

from typing import Any

from services.monitor.rings import RingRead


def column(read: RingRead, field: str) -> list[Any]:
    return [getattr(row, field) for row in read.rows]

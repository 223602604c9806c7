"""What a service can tell in numbers: names, kinds and labels of metrics as data; who serves them lives elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Metric:
    """One name of Prometheus. A counter only grows within one start of its process."""

    name: str
    kind: Literal["counter", "gauge"]
    about: str
    labels: tuple[str, ...] = ()

    def of(self, value: float | None, *labels: str | None) -> Iterator[Sample]:
        """One sample; none where the value is unknown. A label that is None is left empty, as if it were not there."""
        if value is not None:
            yield self, tuple(label or "" for label in labels), float(value)


Sample = tuple[Metric, tuple[str, ...], float]
"""A metric, the values of its labels, and a number that is known."""

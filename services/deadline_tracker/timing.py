"""The newest response times of one container, for those who learn from them; pure state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

NEWEST: Final = 64
"""So many are kept: of a container that ends more tasks between two checkpoints the last ones are learned from."""


class Timing:
    """``count`` is how many there were; who saw it before knows how many of those kept are new."""

    def __init__(self, count: int = 0, newest_us: Iterable[int | None] = ()) -> None:
        self.count = count
        self._newest = deque(newest_us, maxlen=NEWEST)

    def add(self, response_us: int | None) -> None:
        """None: it was overdue and never ended. What ended before it began tells nothing."""
        if response_us is None or response_us >= 0:
            self.count += 1
            self._newest.append(response_us)

    def extend(self, responses_us: Sequence[int]) -> None:
        """All of them ended after they began."""
        self.count += len(responses_us)
        self._newest.extend(responses_us)

    @property
    def newest_us(self) -> tuple[int | None, ...]:
        return tuple(self._newest)

    def dump(self) -> list[Any]:
        return [self.count, list(self._newest)]

    @classmethod
    def load(cls, state: list[Any]) -> Self:
        return cls(*state)

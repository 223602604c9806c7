"""What is expected to arrive: kinds of request and how often each comes; neither learns nor scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from shared.messages import SHARE_WHOLE_MICRO

HEAD_PERCENT: Final = 95
"""The kinds that are looked at make up this part of all requests (Weng et al., ATC'23)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests of one kind ask of a node; `share_micro` is of each of `count` devices, no model is any."""

    cpu_milli: int
    count: int
    share_micro: int
    models: tuple[str, ...] = ()

    @property
    def partial(self) -> bool:
        """Part of one device."""
        return 0 < self.share_micro < SHARE_WHOLE_MICRO

    @property
    def gpu_micro(self) -> int:
        return self.count * self.share_micro

    def admits(self, model: str) -> bool:
        return not self.models or model in self.models


@dataclass(frozen=True, slots=True)
class Wanted:
    """A kind of request, how many of them came (or are expected), and the memory that they ask for in the mean."""

    shape: Shape
    number: int
    memory_mib: int = 0


@dataclass(frozen=True)
class Workload:
    """All kinds of a workload, those that come most first; equals by what they ask for, the largest first."""

    kinds: tuple[Wanted, ...] = ()

    @classmethod
    def of(cls, requests: Iterable[tuple[Shape, int]]) -> Workload:
        """From single requests, each a shape and its memory in MiB."""
        counted: dict[Shape, tuple[int, int]] = {}
        for shape, memory_mib in requests:
            number, memory = counted.get(shape, (0, 0))
            counted[shape] = number + 1, memory + memory_mib
        return cls.counted(counted)

    @classmethod
    def counted(cls, counted: Mapping[Shape, tuple[int, int]]) -> Workload:
        """From how many there were of each shape, and the sum of their memory."""
        kinds = (Wanted(shape, number, memory // number) for shape, (number, memory) in counted.items())
        return cls(tuple(sorted(kinds, key=_order, reverse=True)))

    @cached_property
    def head(self) -> tuple[Wanted, ...]:
        """The shortest run of the most frequent kinds that makes up 95 % of all requests."""
        total, found, taken = sum(kind.number for kind in self.kinds), 0, []
        for kind in self.kinds:
            if 100 * found >= HEAD_PERCENT * total:
                break
            found += kind.number
            taken.append(kind)
        return tuple(taken)


def _order(kind: Wanted) -> tuple[int, int, int, int, str]:
    shape = kind.shape
    return kind.number, shape.cpu_milli, shape.share_micro, shape.count, "|".join(shape.models)

"""What the strategies that look ahead know of what is expected and of the cluster, worked out once; learns nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from services.placer.core.strategies.float_sums import FloatSums
from services.placer.core.strategies.fragmentation import Usable
from services.placer.core.strategies.rests import Rests
from services.placer.core.strategies.workload import Shape, Wanted, Workload
from services.placer.core.strategies.worth import Worth
from shared.messages import SHARE_WHOLE_MICRO

CERTAIN: Final = 10**9
"""The sum of the weights of all kinds where they are scaled, so that weights are integers."""


@dataclass(frozen=True, slots=True)
class Room:
    """What like nodes have when they are empty, and how many such nodes there are."""

    model: str
    devices: int
    cpu_milli: int
    nodes: int = 1


@dataclass(frozen=True, eq=False)
class Outlook:
    """A workload on a cluster. `models` by the cluster's numbers, with "" for numbers that stand for something else.

    Compared by identity: it is long, and tables are remembered by it.
    """

    workload: Workload = field(default_factory=Workload)
    models: tuple[str, ...] = ()
    rooms: tuple[Room, ...] = ()

    @cached_property
    def plain(self) -> Usable:
        """Each kind weighs as often as it comes, as in FGD; memory does not count."""
        head = self.workload.head
        return Usable(head, [kind.number for kind in head], self.models)

    @cached_property
    def plain_total(self) -> int:
        return max(1, sum(kind.number for kind in self.workload.head))

    @cached_property
    def float_sums(self) -> FloatSums:
        """The same as its authors' simulator sums it up."""
        return FloatSums(self.workload, self.models)

    def worth(self, rest: int, cpu_per_device_milli: int) -> Worth:
        """Each kind weighs more the less of the cluster can serve it; the sum of weights is CERTAIN."""
        head = self.workload.head
        weights = scarce_weights(head, self.rooms)
        return Worth(head, weights, self.models, self.rests, rest=rest, cpu_per_device_milli=cpu_per_device_milli)

    @cached_property
    def rests(self) -> Rests:
        numbers: Counter[int] = Counter()
        for kind in self.workload.kinds:
            if kind.shape.partial:
                numbers[kind.shape.share_micro] += kind.number
        return Rests.of(numbers)


def scarce_weights(kinds: Sequence[Wanted], rooms: Sequence[Room]) -> tuple[int, ...]:
    """How often a kind comes over how much of the empty cluster could serve it; the sum is about CERTAIN.

    Kinds without gpu weigh as often as they come; the others together as much as if they did too.
    """
    total = sum(kind.number for kind in kinds)
    devices = sum(room.devices * room.nodes for room in rooms)
    often = [kind.number / total for kind in kinds]
    scarce = [part / (_served_milli(kind.shape, rooms) + devices or 1) for kind, part in zip(kinds, often, strict=True)]
    gpu = [bool(kind.shape.count) for kind in kinds]
    scale = sum(part for part, on in zip(often, gpu, strict=True) if on) / (
        sum(part for part, on in zip(scarce, gpu, strict=True) if on) or 1
    )
    return tuple(
        round(CERTAIN * (weight * scale if on else part)) for part, weight, on in zip(often, scarce, gpu, strict=True)
    )


def _served_milli(shape: Shape, rooms: Sequence[Room]) -> int:
    """Device time, in thousandths of a device, that requests of this shape could take of the empty cluster."""
    copies = sum(room.nodes * _copies(shape, room) for room in rooms if shape.admits(room.model))
    return copies * shape.gpu_micro // 1_000


def _copies(shape: Shape, room: Room) -> int:
    if not shape.count:
        return 0
    by_gpu = room.devices * (SHARE_WHOLE_MICRO // shape.share_micro) if shape.partial else room.devices // shape.count
    return min(by_gpu, room.cpu_milli // shape.cpu_milli) if shape.cpu_milli else by_gpu

"""What a node is worth to expected requests, and how much of it a placement takes; integers, and exact.

Each column of the tables is one amount: what a node's devices offer of it, added up, or what its CPU and memory let be
used of it, whichever is less. So one look at a table for each device and one division for each node answer it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from services.placer.core.columns import Array, Floats, Ints
from services.placer.core.strategies.nodes import Asked, Change, Nodes
from services.placer.core.strategies.rests import WORTH, Rests
from services.placer.core.strategies.workload import Wanted
from shared.messages import SHARE_WHOLE_MICRO

_UNIT_MICRO: Final = 1_000
"""Shares are looked at in thousandths of a device: what is asked rounded up, what is free rounded down."""
_WHOLE: Final = SHARE_WHOLE_MICRO // _UNIT_MICRO
_COPY: Final = 1_000
"""Copies are counted in thousandths."""
_SCALE: Final = 10**9
"""Of CPU and memory. Up to 9,000 cores and 8 TiB that stays below 2**53: floats are exact, and so is the quotient of
two of them, rounded down."""
_LEAST: Final = 1e-30
_NOTHING: Final = 1e-60
"""What counts as free where nothing is, and what as needed where nothing is: the latter goes often into the former."""
_MOST_DEVICES: Final = 1_024


class Worth:
    """Three sums for each node: usable, served and points.

    - usable: Σ over kinds of weight x millionths of devices that the kind could use, if CPU and memory let one in.
    - served: Σ over kinds of weight x millionths that copies of it could take, if at least one fits. Copies = the
      least of what the devices, the CPU and the memory suffice for; the last two in fractions.
    - points, `WORTH` a device: devices that have their CPU beside them, and `rest` x what rests of devices are worth.
    """

    def __init__(  # what the sums are made of
        self,
        kinds: Sequence[Wanted],
        weights: Sequence[int],
        models: Sequence[str],
        rests: Rests,
        *,
        rest: int,
        cpu_per_device_milli: int,
    ) -> None:
        """`models` by the cluster's numbers; kinds without gpu count for nothing."""
        pairs = [(kind, weight) for kind, weight in zip(kinds, weights, strict=True) if kind.shape.count]
        wanted, own = [kind for kind, _ in pairs], len(pairs)
        points = np.stack([np.arange(_WHOLE + 1) * (WORTH // _WHOLE), rest * rests.value], axis=1)
        single, several = _offers(wanted)
        self._of_device = np.hstack([single, points]).astype(np.float64)
        self._of_whole = np.pad(several, ((0, 0), (0, 2))).astype(np.float64) if several.any() else None
        self._needs = _needs(wanted, models, cpu_per_device_milli)
        self._one = np.array([_COPY] * own + [_SCALE] * own + [0, 0], np.float64)
        self._weights = np.zeros((2 * own + 2, 3), np.int64)
        self._weights[:own, 1] = [kind.shape.gpu_micro * weight // _COPY for kind, weight in pairs]
        self._weights[own:-2, 0] = [_UNIT_MICRO * weight for _, weight in pairs]
        self._weights[-2:, 2] = 1

    @property
    def tables(self) -> tuple[Array, ...]:
        """What a kernel looks at."""
        whole = np.zeros(0) if self._of_whole is None else self._of_whole
        return self._one, self._of_device, whole, self._needs, self._weights

    def gained(self, change: Change) -> Ints:
        """How much more of the three the node of each place has once the request is there."""
        nodes, asked = change.nodes, change.asked
        devices = self._of_device.take(nodes.share_free // _UNIT_MICRO, axis=0)
        offered: Floats = np.ones(devices.shape[1]) @ devices
        first: Ints | slice = slice(None)
        run, of, more = first, np.arange(len(offered)), -asked.count * self._of_device[_WHOLE]
        if asked.partial:
            first, run = _alike(nodes.of_row, change.device[0])
            before, after = self._of_device.take(change.device.take(first, axis=1) // _UNIT_MICRO, axis=0)
            of, more = nodes.of_row[first], after - before
        left: Floats = offered.take(of, axis=0) + more
        if self._of_whole is not None:
            offered += self._of_whole.take(np.minimum(nodes.whole, _MOST_DEVICES - 1), axis=0)
            left += self._of_whole.take(np.minimum(change.whole_after[first], _MOST_DEVICES - 1), axis=0)
        now, then = self._limits(nodes, asked)
        uses = np.minimum(left, then.take(of, axis=0)).astype(np.int64)
        uses -= np.minimum(offered, now).astype(np.int64).take(of, axis=0)
        gained: Ints = uses @ self._weights
        return gained[run]

    def _limits(self, nodes: Nodes, asked: Asked) -> Floats:
        """What CPU and memory let be used, now and then; 0 where not one fits or the model is another."""
        taken = np.array([[[0], [asked.cpu_milli]], [[0], [asked.memory_mib]]])
        free = (np.array([nodes.cpu_free, nodes.memory_free])[:, None] - taken) * _SCALE
        by = np.maximum(free, _LEAST)[..., None] / self._needs.take(nodes.model, axis=1, mode="clip")[:, None]
        limits: Floats = np.minimum(by[0], by[1])
        limits *= limits >= self._one
        return limits


def _alike(of: Ints, free: Ints) -> tuple[Ints, Ints]:
    """Rows of one node with as much free stand for each other: the first of each run of such, and each row's run."""
    new = np.ones(len(of), np.bool_)
    new[1:] = (of[1:] != of[:-1]) | (free[1:] != free[:-1])
    return new.nonzero()[0], new.cumsum() - 1


def _offers(kinds: Sequence[Wanted]) -> tuple[Ints, Ints]:
    """Copies of each kind and then what it could use: by the free thousandths of a device, and by whole devices."""
    size = np.array([max(1, -(-kind.shape.share_micro // _UNIT_MICRO)) for kind in kinds], np.int64)
    count = np.array([kind.shape.count for kind in kinds], np.int64)
    free, whole = np.arange(_WHOLE + 1)[:, None], np.arange(_MOST_DEVICES)[:, None]
    single = np.hstack([free // size * _COPY, free * (free >= size)]) * np.tile(count == 1, 2)
    several = np.hstack([whole // count * _COPY, whole * _WHOLE * (whole >= count)]) * np.tile(count > 1, 2)
    return single, several


def _needs(kinds: Sequence[Wanted], models: Sequence[str], cpu_per_device_milli: int) -> Floats:
    """What CPU and memory are divided by to give the limits, a line each: by model and column."""
    needs = np.full((2, len(models) + 1, 2 * len(kinds) + 2), _NOTHING)
    needs[0, :, -2] = cpu_per_device_milli
    for column, kind in enumerate(kinds):
        shape = kind.shape
        refused = [*(not shape.admits(model) for model in models), bool(shape.models)]
        for place, unit in ((column, _SCALE // _COPY), (column + len(kinds), 1)):
            needs[0, :, place] = np.where(refused, np.inf, shape.cpu_milli * unit or _NOTHING)
            needs[1, :, place] = kind.memory_mib * unit or _NOTHING
    return needs

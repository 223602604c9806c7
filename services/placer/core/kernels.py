"""The compiled way to keep a table of options (_kernels.c), where there was a compiler; numpy's is in table.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from services.placer.core.columns import Array, Floats, Ints
from services.placer.core.demand import Demand
from services.placer.core.strategies.base import Compiled
from shared.admission import NO_SLACK
from shared.messages import Kind

if TYPE_CHECKING:
    from services.placer.core.options import KeptTie
    from services.placer.core.sieve import Sieve

try:
    from services.placer.core import _kernels
except ImportError:
    HERE: bool = False
else:
    HERE = True

RANKED: Final = ("binpack", "spread", "slot", "deadline", "fgd", "laxity")
"""The strategies by their numbers."""


class Asked(NamedTuple):
    """What the kernel knows of a request and of a ranking; the same struct stands in _kernels.c."""

    ranked: int
    keys: int
    of_nodes: int
    parts: int
    devices: int
    share_micro: int
    device_memory_mib: int
    needs: tuple[int, ...]
    taken: tuple[int, ...]
    promises: bool
    deadline_us: int
    no_slack: int
    unproven: bool


class Kernel:
    """One kind of request by one strategy."""

    def __init__(self, sieve: Sieve, tie: KeptTie, compiled: Compiled) -> None:
        self._sieve, self._tie, self._cluster, self._demand = sieve, tie, sieve.ask.cluster, sieve.ask.demand
        self._tables = compiled.tables
        self._asked = np.array(np.hstack(_asked(compiled, self._demand, sieve)), np.int64)

    def refresh(self, slots: Ints, options: Floats) -> None:
        """Makes the options of these nodes anew, some of which may be named more than once."""
        cluster, (opened, settled) = self._cluster, self._sieve.standing()
        nodes, devices, missing = cluster.nodes.arrays, cluster.devices.arrays, slots[:0]
        while True:  # once more where a kind of load was met for the first time
            verdicts = cluster.verdicts(self._demand, missing)
            found = _kernels.refresh(
                self._asked,
                slots,
                nodes["held"],
                opened,
                settled,
                devices["load"],
                devices["memory_free"],
                devices["memory_capacity"],
                devices["promised"],
                devices["risk"],
                devices["group"],
                self._tie.all_devices(),
                *verdicts.all(),
                options,
                *self._tables,
            )
            if not found:
                return
            missing = np.frombuffer(found, np.int64)


def best(options: Floats, ties: Array, keys: int, device: int) -> tuple[int | None, int | None]:
    """The nodes of the best two options."""
    one, two = _kernels.best(options, ties, keys, device)
    return (None if one < 0 else one), (None if two < 0 else two)


def _asked(compiled: Compiled, demand: Demand, sieve: Sieve) -> Asked:
    realtime = demand.request.realtime
    return Asked(
        ranked=RANKED.index(compiled.ranked),
        keys=compiled.keys,
        of_nodes=compiled.of_nodes,
        parts=len(compiled.parts),
        devices=demand.count,
        share_micro=demand.share_micro,
        device_memory_mib=demand.device_memory_mib,
        needs=tuple(sieve.needs.tolist()),
        taken=tuple(sieve.ask.taken.tolist()),
        promises=demand.kind is not Kind.SOFT,
        deadline_us=realtime.deadline_us if realtime else 0,
        no_slack=NO_SLACK,
        unproven=demand.count > 0 and demand.task is not None,
    )

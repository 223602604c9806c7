"""What a strategy is told about the rows that can take a replica, each column worked out when it is asked for."""

from __future__ import annotations

import numpy as np

from services.placer.core.cluster import (
    CLASSES,
    CPU_FREE,
    MEMORY_FREE,
    RESOURCES,
    SHARE_FREE,
    SHARES,
    UNKNOWN,
    USED,
    WHOLE_FREE,
)
from services.placer.core.columns import Floats, Ints
from services.placer.core.rows import Rows
from services.placer.core.strategies.nodes import Asked, Nodes
from shared.admission import NO_SLACK
from shared.messages import SHARE_WHOLE_MICRO, Kind


class Prospects:
    """The Candidates of strategies.base; what each column says stands there."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._demand = rows, rows.ask.demand
        self._free: Ints | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def count(self) -> int:
        return self._demand.count

    @property
    def slot(self) -> Ints:
        return self._rows.of_node("slot")

    @property
    def promises(self) -> bool:
        return self._demand.kind is not Kind.SOFT

    @property
    def share_after(self) -> Floats:
        if not self._demand.count:
            return self._nothing
        left: Floats = (self._share_free - self._demand.share_micro) / SHARE_WHOLE_MICRO
        return left

    @property
    def memory_after(self) -> Floats:
        if not self._demand.count:
            return self._nothing
        free, capacity = self._rows.of_device("memory_free"), self._rows.of_device("memory_capacity")
        after = (free - self._demand.device_memory_mib) / np.maximum(capacity, 1)
        known: Floats = np.where(free == UNKNOWN, np.nan, np.minimum(np.maximum(after, 0), 1))
        return known

    @property
    def whole_after(self) -> Ints:
        if not self._demand.count:
            return self._zeros
        whole: Ints = self._rows.held[:, WHOLE_FREE] - (self._share_free == SHARE_WHOLE_MICRO) * self._demand.count
        return whole

    @property
    def slack(self) -> Floats:
        realtime = self._demand.request.realtime
        if not self._demand.count or realtime is None:
            return np.full(len(self), np.nan)
        slack = self._rows.verdict("slack")
        part: Floats = np.where(slack == NO_SLACK, np.nan, slack / realtime.deadline_us)
        return part

    @property
    def promised(self) -> Ints:
        return self._rows.of_device("promised") if self._demand.count else self._zeros

    @property
    def risk(self) -> Ints:
        return self._rows.of_device("risk") if self._demand.count else self._zeros

    @property
    def resources(self) -> tuple[str, ...]:
        return RESOURCES if self._demand.count else RESOURCES[:2]

    @property
    def capacity(self) -> Ints:
        found: Ints = self._rows.ask.cluster.nodes["capacity"].take(self._rows.node, axis=0)
        return found if self._demand.count else found[:, :2]

    @property
    def used_after(self) -> Ints:
        used: Ints = self._rows.held[:, USED] + self._rows.ask.taken
        return used if self._demand.count else used[:, :2]

    @property
    def asked(self) -> Asked:
        demand = self._demand
        return Asked(demand.count, demand.share_micro, demand.cpu_milli, demand.memory_mib)

    @property
    def nodes(self) -> Nodes:
        rows, nodes, devices = self._rows, self._rows.ask.cluster.nodes, self._rows.ask.cluster.devices
        new = rows.begins()
        starts, of_row = new.nonzero()[0], new.cumsum() - 1
        slots, held = rows.node[starts], rows.held.take(starts, axis=0)
        first = nodes["first_row"][slots]
        return Nodes(
            share_free=held[:, SHARES],
            idle=held[:, SHARE_FREE],
            whole=held[:, WHOLE_FREE],
            cpu_free=held[:, CPU_FREE],
            memory_free=held[:, MEMORY_FREE],
            model=devices["model"][first],
            devices=nodes["devices"][slots],
            classes=held[:, CLASSES],
            of_row=of_row,
            place=rows.index - first[of_row] if self._demand.count else self._zeros,
        )

    @property
    def _share_free(self) -> Ints:
        if self._free is None:
            self._free = self._rows.of_device("share_free")
        return self._free

    @property
    def _nothing(self) -> Floats:
        return np.zeros(len(self))

    @property
    def _zeros(self) -> Ints:
        return np.zeros(len(self), np.int64)

"""What a strategy is told about the rows that can take a replica, each column worked out when it is asked for."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from services.placer.core.cluster import RESOURCES, UNKNOWN
from services.placer.core.columns import Floats, Ints
from services.placer.core.rows import Rows
from services.placer.core.strategies.nodes import Asked, Nodes
from shared.admission import NO_SLACK
from shared.messages import SHARE_WHOLE_MICRO, Kind


class Prospects:
    """The Candidates of strategies.base; what each column says stands there."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._demand = rows, rows.ask.demand

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def count(self) -> int:
        return self._demand.count

    @cached_property
    def slot(self) -> Ints:
        return self._rows.of_node("slot")

    @property
    def promises(self) -> bool:
        return self._demand.kind is not Kind.SOFT

    @cached_property
    def share_after(self) -> Floats:
        if not self._demand.count:
            return self._nothing
        left: Floats = (self._share_free - self._demand.share_micro) / SHARE_WHOLE_MICRO
        return left

    @cached_property
    def memory_after(self) -> Floats:
        if not self._demand.count:
            return self._nothing
        free, capacity = self._rows.of_device("memory_free"), self._rows.of_device("memory_capacity")
        after = (free - self._demand.device_memory_mib) / np.maximum(capacity, 1)
        known: Floats = np.where(free == UNKNOWN, np.nan, np.minimum(np.maximum(after, 0), 1))
        return known

    @cached_property
    def whole_after(self) -> Ints:
        if not self._demand.count:
            return self._zeros
        whole: Ints = self._rows.of_node("whole_free") - (self._share_free == SHARE_WHOLE_MICRO) * self._demand.count
        return whole

    @cached_property
    def slack(self) -> Floats:
        realtime = self._demand.request.realtime
        if not self._demand.count or realtime is None:
            return np.full(len(self), np.nan)
        slack = self._rows.verdict("slack")
        part: Floats = np.where(slack == NO_SLACK, np.nan, slack / realtime.deadline_us)
        return part

    @cached_property
    def promised(self) -> Ints:
        return self._rows.of_device("promised") if self._demand.count else self._zeros

    @cached_property
    def risk(self) -> Ints:
        return self._rows.of_device("risk") if self._demand.count else self._zeros

    @property
    def resources(self) -> tuple[str, ...]:
        return RESOURCES if self._demand.count else RESOURCES[:2]

    @cached_property
    def capacity(self) -> Ints:
        found: Ints = self._rows.of_node("capacity")
        return found if self._demand.count else found[:, :2]

    @cached_property
    def used_after(self) -> Ints:
        demand = self._demand
        asked = np.array([demand.cpu_milli, demand.memory_mib, demand.count * demand.share_micro])
        used: Ints = self._rows.of_node("used") + asked
        return used if demand.count else used[:, :2]

    @property
    def asked(self) -> Asked:
        demand = self._demand
        return Asked(demand.count, demand.share_micro, demand.cpu_milli, demand.memory_mib)

    @cached_property
    def nodes(self) -> Nodes:
        rows, nodes, devices = self._rows, self._rows.ask.cluster.nodes, self._rows.ask.cluster.devices
        new = np.ones(len(rows), np.bool_)
        np.not_equal(rows.node[1:], rows.node[:-1], out=new[1:])
        slots, of_row = rows.node[new], new.cumsum() - 1
        first = nodes["first_row"][slots]
        return Nodes(
            share_free=nodes["shares"][slots],
            cpu_free=nodes["cpu_free"][slots],
            memory_free=nodes["memory_free"][slots],
            model=devices["model"][first],
            devices=nodes["devices"][slots],
            classes=nodes["classes"][slots],
            of_row=of_row,
            place=rows.index - first[of_row] if self._demand.count else self._zeros,
        )

    @cached_property
    def _share_free(self) -> Ints:
        free: Ints = self._rows.of_device("share_free")
        return free

    @cached_property
    def _nothing(self) -> Floats:
        return np.zeros(len(self))

    @cached_property
    def _zeros(self) -> Ints:
        return np.zeros(len(self), np.int64)

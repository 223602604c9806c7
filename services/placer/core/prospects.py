"""The rows that can take a replica and what a strategy is told about them, each column worked out when asked for."""

from __future__ import annotations

import numpy as np

from services.placer.core.cluster import (
    CAPACITY,
    CLASSES,
    CPU_FREE,
    DEVICES,
    FIRST_ROW,
    MEMORY_FREE,
    MODEL,
    SHARE_FREE,
    SHARES,
    SLOT,
    UNKNOWN,
    USED,
    WHOLE_FREE,
)
from services.placer.core.columns import Array, Floats, Ints
from services.placer.core.feasible import Verdicts
from services.placer.core.rows import Ask
from services.placer.core.strategies.nodes import Asked, Nodes
from shared.admission import NO_SLACK
from shared.messages import SHARE_WHOLE_MICRO, Kind


class Prospects:
    """The Candidates of strategies.base; what each column says stands there.

    `slots` are node rows and `held` their lines; `index` are the rows in question, `of_row` says which of these nodes
    each is on, and `tested` has the admission test of each and its kind of load.
    """

    def __init__(  # what was found out about the rows already
        self,
        ask: Ask,
        slots: Ints,
        held: Ints,
        index: Ints,
        of_row: Ints,
        tested: tuple[Verdicts, Ints] | None = None,
    ) -> None:
        self.ask, self.slots, self.held, self.index, self.of_row = ask, slots, held, index, of_row
        self._demand, self._tested = ask.demand, tested
        self._free: Ints | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def count(self) -> int:
        return self._demand.count

    @property
    def slot(self) -> Ints:
        return self.held[:, SLOT]

    @property
    def promises(self) -> bool:
        return self._demand.kind is not Kind.SOFT

    @property
    def share_free(self) -> Ints:
        """Of the device."""
        if self._free is None:
            self._free = self.of_device("share_free")
        return self._free

    @property
    def share_after(self) -> Floats:
        if not self._demand.count:
            return self._nothing
        left: Floats = (self.share_free - self._demand.share_micro) / SHARE_WHOLE_MICRO
        return left

    @property
    def memory_after(self) -> Floats:
        if not self._demand.count:
            return self._nothing
        free, capacity = self.of_device("memory_free"), self.of_device("memory_capacity")
        after = (free - self._demand.device_memory_mib) / np.maximum(capacity, 1)
        known: Floats = np.where(free == UNKNOWN, np.nan, np.minimum(np.maximum(after, 0), 1))
        return known

    @property
    def whole_after(self) -> Ints:
        if not self._demand.count:
            return self._zeros
        taken = (self.share_free == SHARE_WHOLE_MICRO) * self._demand.count
        whole: Ints = self.held[:, WHOLE_FREE].take(self.of_row) - taken
        return whole

    @property
    def slack(self) -> Floats | None:
        realtime = self._demand.request.realtime
        if not self._demand.count or realtime is None:
            return None
        slack = self.verdict("slack")
        part: Floats = np.where(slack == NO_SLACK, np.nan, slack / realtime.deadline_us)
        return part

    @property
    def promised(self) -> Ints:
        return self.of_device("promised") if self._demand.count else self._zeros

    @property
    def risk(self) -> Ints:
        return self.of_device("risk") if self._demand.count else self._zeros

    @property
    def resources(self) -> tuple[str, ...]:
        return self.ask.resources

    @property
    def capacity(self) -> Ints:
        found: Ints = self.held[:, CAPACITY]
        return found if self._demand.count else found[:, :2]

    @property
    def used_after(self) -> Ints:
        used: Ints = self.held[:, USED] + self.ask.taken
        return used if self._demand.count else used[:, :2]

    @property
    def asked(self) -> Asked:
        return self.ask.asked

    @property
    def nodes(self) -> Nodes:
        held = self.held
        return Nodes(
            share_free=held[:, SHARES],
            idle=held[:, SHARE_FREE],
            whole=held[:, WHOLE_FREE],
            cpu_free=held[:, CPU_FREE],
            memory_free=held[:, MEMORY_FREE],
            model=held[:, MODEL],
            devices=held[:, DEVICES],
            classes=held[:, CLASSES],
            of_row=self.of_row,
            place=self.index - held[:, FIRST_ROW].take(self.of_row) if self._demand.count else self._zeros,
        )

    def of_device(self, column: str) -> Array:
        return self.ask.cluster.devices[column].take(self.index)

    def verdict(self, column: str) -> Array:
        """A column of the admission test on each device: `slack` or `unproven`."""
        assert self._tested is not None, "a request for devices"
        verdicts, load = self._tested
        return verdicts.column(column, load)

    @property
    def unproven(self) -> bool:
        """Whether a deadline may have been admitted on its declaration."""
        return self._demand.count > 0 and self._demand.task is not None

    @property
    def _nothing(self) -> Floats:
        return np.zeros(len(self))

    @property
    def _zeros(self) -> Ints:
        return np.zeros(len(self), np.int64)

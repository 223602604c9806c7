"""What is left on each node after each step, and from it fragmentation over a whole run; judges nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cli.simulate.world import World
from services.placer.core.columns import Floats, Ints
from services.placer.core.strategies.fragmentation import fragments
from services.placer.core.strategies.nodes import Nodes
from shared.messages import SHARE_WHOLE_MICRO


class _State(NamedTuple):
    """A node's row, and what is left on it."""

    slot: int
    cpu: int
    shares: Ints


class Watch:
    """Keeps the nodes that each step has changed: fragments are worked out for all steps together, which is cheap."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._start = [self._state(slot) for slot in world.cluster.all_slots().tolist()]
        self._steps: list[list[_State]] = []

    def note(self, changed: Iterable[str]) -> None:
        """One step, and the nodes that it changed."""
        slots = [self._world.cluster.slot(node) for node in dict.fromkeys(changed)]
        self._steps.append([self._state(slot) for slot in slots if slot is not None])

    def fragments(self) -> Floats:
        """The fragment amount of the cluster after each step, in devices.

        Idle device time that the kinds of request which make up 95 % of the workload could not use, in the mean of
        those kinds as often as each comes: F of Weng et al., "Beware of Fragmentation" (ATC'23).
        """
        start = self._fragments(self._start).tolist()
        after = iter(self._fragments([state for step in self._steps for state in step]).tolist())
        now = dict(zip((state.slot for state in self._start), start, strict=True))
        total, found = sum(start), []
        for step in self._steps:
            for state in step:
                before, now[state.slot] = now[state.slot], next(after)
                total += now[state.slot] - before
            found.append(total)
        return np.array(found, np.float64) / self._world.outlook.plain_total / 1_000_000

    def _state(self, slot: int) -> _State:
        known = self._world.cluster.nodes
        return _State(slot, int(known["cpu_free"][slot]), known["shares"][slot].copy())

    def _fragments(self, states: list[_State]) -> Ints:
        if not states:
            return np.zeros(0, np.int64)
        cluster, outlook = self._world.cluster, self._world.outlook
        slots, nothing = np.array([state.slot for state in states]), np.zeros(len(states), np.int64)
        shares = np.array([state.shares for state in states])
        seen = Nodes(
            share_free=shares,
            idle=shares.sum(axis=1),
            whole=np.count_nonzero(shares == SHARE_WHOLE_MICRO, axis=1),
            cpu_free=np.array([state.cpu for state in states]),
            memory_free=nothing,
            model=cluster.devices["model"][cluster.nodes["first_row"][slots]],
            devices=nothing,
            classes=nothing,
            of_row=nothing,
            place=nothing,
        )
        return fragments(outlook.plain, seen, outlook.plain_total)


def curve(arrived_percent: Floats, values: Floats) -> dict[int, float]:
    """Published form: the mean of the rounded values over the steps whose arrived percent rounds to x, half to even."""
    levels, rounded = np.rint(arrived_percent).astype(int), np.round(values, 2)
    return {int(level): float(rounded[levels == level].mean()) for level in np.unique(levels)}

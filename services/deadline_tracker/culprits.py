"""Who caused a miss: what each container of the device did beyond what it declared, in numbers; pure, no state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from services.deadline_tracker.clocks import Clock
from services.deadline_tracker.device_time import (
    Bools,
    Floats,
    Ints,
    Tasks,
    Terms,
    device_time_us,
    slowdown_by_neighbour,
)
from shared.admission import RtTask, Sharing
from shared.messages import Cause, CauseKind, Kind, Regime
from shared.units import format_us

MOST_CAUSES: Final = 4
"""Said of one miss."""
BACK_DEADLINES: Final = 3
"""How far back an overrun is looked for, in the longest deadlines of the device: what it delays comes within these."""
ARRIVED_US: Final = 1_000_000
"""A container that came no longer ago is new."""
_ROUGH: Final = {Regime.MPS: 0.1, Regime.TIME_SLICED: 0.05}
"""By which part of the declared runtime the device time of a task may be overestimated."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A container on the device. ``task`` is what it declared, None where that is no runtime.

    ``first_us`` is when its first task was seen; None if it may have been there before anything was seen.
    """

    name: str
    task: RtTask | None
    first_us: int | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """A device around a miss. ``trouble`` is why it is not healthy, None where it is.

    ``clock`` is what it told of its clock, None where nothing did at that time.
    """

    sharing: Sharing
    residents: tuple[Resident, ...]
    tasks: Tasks
    trouble: str | None = None
    clock: Clock | None = None


def causes(scene: Scene, victim: int, begin_us: int, at_us: int) -> tuple[Cause, ...]:
    """Why the task of a resident that began then was late at ``at_us``, its end or the time it was found overdue.

    First what broke a declaration, by how much device time it cost; then who is new. ``unknown``, with what is known,
    where the numbers name nobody.
    """
    told = _Look(scene, victim, begin_us, at_us)
    broken = sorted([*told.held_back(), *told.broken()], key=_amount_us, reverse=True)
    found = [*told.throttled(), *broken, *told.arrived()]
    return tuple(found[:MOST_CAUSES]) or (told.unknown(),)


def _amount_us(cause: Cause) -> float:
    return inf if cause.amount_us is None else cause.amount_us


class _Look:
    """The device as it was when the task was late, from the beginning of the time in which it was busy."""

    def __init__(self, scene: Scene, victim: int, begin_us: int, at_us: int) -> None:
        self._scene, self._victim, self._at_us = scene, victim, at_us
        declared = [resident.task for resident in scene.residents]
        terms = Terms.of(declared)
        seen = scene.tasks.as_of(at_us, terms.host_us)
        used = device_time_us(scene.sharing, seen, at_us, terms, self._slowed(seen, begin_us))
        start_us = _busy_since(seen, begin_us, victim, terms.soft, declared)
        recent = (seen.end_us > start_us) & (seen.begin_us < at_us)
        self._tasks, self._used = seen[recent], used[recent]
        self._start_us = start_us
        self._speed = 1.0 if scene.clock is None or scene.clock.speed is None else scene.clock.speed
        self._excess = self._beyond_declared(declared)

    def _slowed(self, seen: Tasks, begin_us: int) -> Floats | None:
        """MPS: learned from what ended before the task began."""
        if self._scene.sharing.regime is not Regime.MPS:
            return None
        return slowdown_by_neighbour(seen[seen.end_us <= begin_us], begin_us)

    def _beyond_declared(self, declared: list[RtTask | None]) -> Floats:
        """Of each task the device time beyond its declared runtime, 0 where that may be the estimate's error.

        Less what a clock that was held back explains of it, as if all of the task's time went with the clock.
        """
        runtime = np.array([np.inf if task is None else task.runtime_us + task.host_us for task in declared])
        margin = np.array([0.0 if task is None else _margin_us(self._scene.sharing, task) for task in declared])
        over = np.nan_to_num(self._used * self._speed - runtime[self._tasks.who], nan=0.0, neginf=0.0)
        return np.where(over > margin[self._tasks.who], over, 0.0)

    # --- the causes ---

    def broken(self) -> Iterator[Cause]:
        """Who ran longer, and who began tasks sooner, than declared; to soft ones no period is promised."""
        for who, resident in enumerate(self._scene.residents):
            own = self._tasks.who == who
            if over_us := round(float(self._excess[own].sum())):
                kind = CauseKind.ITSELF if who == self._victim else CauseKind.OVERRAN
                yield Cause(cause=kind, container=resident.name, amount_us=over_us, detail=self._of_runtime(who))
            if resident.task is not None and resident.task.kind is not Kind.SOFT:
                yield from self._too_often(resident.task, resident.name, self._tasks.begin_us[own])

    def _too_often(self, task: RtTask, name: str, begin_us: Ints) -> Iterator[Cause]:
        if early_us := _early_us(begin_us, task.period_us):
            spent_us = round(early_us * task.runtime_us / task.period_us)
            text = (
                f"{len(begin_us)} tasks, up to {format_us(early_us)} ahead of a period of {format_us(task.period_us)}"
            )
            yield Cause(cause=CauseKind.TOO_OFTEN, container=name, amount_us=spent_us, detail=text)

    def held_back(self) -> Iterator[Cause]:
        """The device told that its clock was, with what the tasks lost by it if all of their time went with it."""
        clock = self._scene.clock
        if clock is None or not clock.reasons:
            return
        known = self._used[~np.isnan(self._used)]
        lost_us = round(float(known.sum()) * (1 - clock.speed)) if len(known) and clock.speed is not None else None
        task = self._scene.residents[self._victim].task
        if lost_us is None or lost_us > (0 if task is None else _margin_us(self._scene.sharing, task)):
            yield Cause(cause=CauseKind.THROTTLED, container=None, amount_us=lost_us, detail=clock.text)

    def throttled(self) -> Iterator[Cause]:
        """The device is ill; or, where it does not tell of its clock, all ran longer than declared, most tasks."""
        if self._scene.trouble:
            yield Cause(cause=CauseKind.THROTTLED, container=None, amount_us=None, detail=self._scene.trouble)
            return
        if self._scene.clock is not None:
            return
        here = np.unique(self._tasks.who)
        often = [np.count_nonzero(self._excess[self._tasks.who == who]) for who in here]
        many = [np.count_nonzero(self._tasks.who == who) for who in here]
        if len(here) > 1 and all(2 * o > m > 1 for o, m in zip(often, many, strict=True)):
            text = f"{sum(often)} of {sum(many)} tasks of {len(here)} containers ran longer than declared"
            amount_us = round(float(self._excess.sum()))
            yield Cause(cause=CauseKind.THROTTLED, container=None, amount_us=amount_us, detail=text)

    def arrived(self) -> Iterator[Cause]:
        """Who came to the device not long ago, with the device time that it has had since it was busy."""
        for who in np.unique(self._tasks.who).tolist():
            resident = self._scene.residents[who]
            ago_us = None if resident.first_us is None else self._at_us - resident.first_us
            if who != self._victim and ago_us is not None and ago_us <= ARRIVED_US:
                text, cost_us = f"its first task began {format_us(ago_us)} before", self._device_time_us(who)
                yield Cause(cause=CauseKind.ARRIVED, container=resident.name, amount_us=cost_us, detail=text)

    def unknown(self) -> Cause:
        """What is known all the same."""
        if np.isnan(self._used[self._tasks.who == self._victim]).any():
            text = "too few tasks were seen to tell what its neighbours take from it"
        else:
            names = [(who, self._scene.residents[who].name) for who in np.unique(self._tasks.who).tolist()]
            used = ", ".join(f"{name} {format_us(self._device_time_us(who))}" for who, name in names)
            busy_us = self._at_us - self._start_us
            text = f"nobody was seen beyond what it declared; of the last {format_us(busy_us)}: {used}"
        return Cause(cause=CauseKind.UNKNOWN, container=None, amount_us=None, detail=text)

    def _device_time_us(self, who: int) -> int:
        return round(float(np.nansum(self._used[self._tasks.who == who])))

    def _of_runtime(self, who: int) -> str:
        """Its longest task in those numbers that it declared."""
        longest_us = round(float(np.nanmax(self._used[self._tasks.who == who])))
        task = self._scene.residents[who].task
        return f"{format_us(longest_us)} of {format_us(task.runtime_us if task else None)}"


def _busy_since(tasks: Tasks, begin_us: int, victim: int, soft: Bools, declared: list[RtTask | None]) -> int:
    """Since when somebody wanted the device without a break, but not longer ago than an overrun can matter.

    Soft containers use what is left, so they do not count.
    """
    back_us = BACK_DEADLINES * max((task.deadline_us for task in declared if task is not None), default=0)
    counted = tasks[(~soft | (np.arange(len(soft)) == victim))[tasks.who] & (tasks.begin_us <= begin_us)]
    upto = np.maximum.accumulate(counted.end_us)
    breaks = np.flatnonzero(counted.begin_us[1:] > upto[:-1])
    start_us = int(counted.begin_us[breaks[-1] + 1 if len(breaks) else 0]) if len(counted) else begin_us
    return max(min(start_us, begin_us), begin_us - back_us)


def _margin_us(sharing: Sharing, task: RtTask) -> float:
    """What an estimate may be off by: the gate's margin, a turn of the ring, or a part of the runtime."""
    turn_us = sum(sharing.measured() or ()) if sharing.regime is Regime.TIME_SLICED else 0
    rough_us = _ROUGH.get(sharing.regime, 0) * task.runtime_us
    return sharing.handover_us + sharing.margin_us + max(turn_us, rough_us)


def _early_us(begin_us: Ints, period_us: int) -> int:
    """By how much a task began at most before its time, a period after the one before; 0 below half a period."""
    due_us, early_us = 0, 0
    for begun in begin_us.tolist():
        early_us = max(early_us, due_us - begun)
        due_us = max(due_us, begun) + period_us
    return early_us if 2 * early_us > period_us else 0

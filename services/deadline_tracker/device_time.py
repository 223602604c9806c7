"""How much of its device each task has had, from begins and ends alone and how the device is shared; no causes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shared.admission import RtTask, Sharing
from shared.messages import Kind, Regime

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

OPEN: Final = 1 << 62
"""The end of a task that has not been seen."""
_LEAST_SAMPLES: Final = 12
"""Tasks of a container from which it is learned how much its neighbours slow it down."""
_LEAST_BESIDE: Final = 3
_LEAST_RATE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks of one device, in the order of their begins; ``who`` numbers their containers, 0 to ``containers`` - 1.

    Stamps are microseconds of the node's monotonic clock. ``due_us`` is absolute.
    """

    containers: int
    who: Ints
    begin_us: Ints
    end_us: Ints
    due_us: Ints

    def __len__(self) -> int:
        return len(self.who)

    def __getitem__(self, rows: Any) -> Tasks:
        columns = (self.who, self.begin_us, self.end_us, self.due_us)
        return Tasks(self.containers, *(column[rows] for column in columns))

    def sorted(self) -> Tasks:
        return self[np.argsort(self.begin_us, kind="stable")]

    def as_of(self, at_us: int, host_us: Ints) -> Tasks:
        """What could be seen then: nothing begun later, and open what had the device later."""
        seen = self[self.begin_us < at_us]
        return Tasks(
            seen.containers,
            seen.who,
            seen.begin_us,
            np.where(seen.end_us > at_us + host_us[seen.who], OPEN, seen.end_us),
            seen.due_us,
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """Of each container what matters for whose turn it is."""

    soft: Bools
    host_us: Ints

    @classmethod
    def of(cls, declared: Iterable[RtTask | None]) -> Self:
        known = [(task is None or task.kind is Kind.SOFT, task.host_us if task else 0) for task in declared]
        soft, host_us = zip(*known, strict=True)
        return cls(np.array(soft, np.bool_), np.array(host_us, np.int64))


def device_time_us(sharing: Sharing, tasks: Tasks, now_us: int, terms: Terms, slowed: Floats | None = None) -> Floats:
    """Of each task the device time that it has had by now, host part included.

    Gated: between the end before its own and its own, or its begin if that is later; of the open ones the next by
    deadline holds the device, soft containers after all others. Time-sliced: each container with an open task has
    an equal part, less the switches. MPS: the time since its begin less what ``slowed`` says that neighbours take.
    Alone: the time since its begin.
    """
    match sharing.regime:
        case Regime.GATED:
            return _held(tasks, now_us, terms)
        case Regime.TIME_SLICED:
            return _equal_parts(sharing, tasks, now_us)
        case Regime.MPS if slowed is not None:
            beside = active_us(tasks, tasks.begin_us, _ends(tasks, now_us), now_us)
            lost = np.where(beside > 0, beside * slowed[tasks.who], 0).sum(1)
            passed = (_ends(tasks, now_us) - tasks.begin_us).astype(np.float64)
            return np.asarray(np.maximum(passed - lost, _LEAST_RATE * passed))
    return (_ends(tasks, now_us) - tasks.begin_us).astype(np.float64)


def active_us(tasks: Tasks, from_us: Ints, to_us: Ints, now_us: int) -> Floats:
    """A row for each of these times, a column for each container: how long it had an open task between them."""
    found = np.zeros((len(from_us), tasks.containers))
    ends = _ends(tasks, now_us)
    for container in range(tasks.containers):
        own = tasks.who == container
        times, total = _union(tasks.begin_us[own], ends[own])
        if len(times):
            found[:, container] = np.interp(to_us, times, total) - np.interp(from_us, times, total)
    return found


def slowdown_by_neighbour(tasks: Tasks, now_us: int) -> Floats:
    """Which part of its time beside each neighbour a container loses: a row for whom, a column for by whom.

    From its ended tasks by least squares: of a task that takes R, beside neighbour j for a part f_j of it,
    1 / R = (1 - sum q_j f_j) / C on average. What is far off this, as an overrun is, is left out the second time.
    NaN where too few of its tasks were seen, or too few beside that neighbour.
    """
    found = np.full((tasks.containers, tasks.containers), np.nan)
    ended = tasks[tasks.end_us != OPEN]
    parts = active_us(tasks, ended.begin_us, ended.end_us, now_us)
    took = np.maximum(1, ended.end_us - ended.begin_us)
    for container in range(tasks.containers):
        own = ended.who == container
        if own.sum() >= _LEAST_SAMPLES:
            beside = parts[own] / took[own, None]
            known = np.count_nonzero(beside, axis=0) >= _LEAST_BESIDE
            found[container] = np.where(known, _fitted(beside, took[own], container), np.nan)
    return found


def _fitted(beside: Floats, took: Ints, own: int) -> Floats:
    columns = beside.copy()
    columns[:, own] = -1  # the column of itself stands for being alone
    speed = np.median(took) / took
    kept = np.ones(len(took), np.bool_)
    weights: Floats = np.zeros(beside.shape[1])
    for _ in range(2):
        a, b = columns[kept], speed[kept]
        weights = np.asarray(np.linalg.solve(a.T @ a + 1e-3 * np.eye(a.shape[1]), -a.T @ b))
        off = np.abs(speed + columns @ weights)
        kept = off <= max(1e-9, 4 * float(np.median(off)))
    alone = weights[own]
    lost = np.clip(weights / alone if alone > 0 else weights * 0, 0, 1 - _LEAST_RATE)
    lost[own] = 0
    return lost


def _ends(tasks: Tasks, now_us: int) -> Ints:
    return np.where(tasks.end_us == OPEN, np.maximum(now_us, tasks.begin_us), tasks.end_us)


def _union(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Times, and how long until then any of these was open; begins are in order."""
    if not len(begin):
        return begin, begin
    upto = np.maximum.accumulate(end)
    starts = np.concatenate([[True], begin[1:] > upto[:-1]])
    first, last = begin[starts], upto[np.append(starts[1:], True)]
    total = np.cumsum(last - first)
    return np.stack([first, last], 1).ravel(), np.stack([total - (last - first), total], 1).ravel()


def _held(tasks: Tasks, now_us: int, terms: Terms) -> Floats:
    held = np.zeros(len(tasks))
    ended, free_us = np.flatnonzero(tasks.end_us != OPEN), -1
    if len(ended):
        # a host part behind the device part is over after the next one has begun to hold the device
        released = tasks.end_us[ended] - terms.host_us[tasks.who[ended]]
        ended = ended[np.argsort(released, kind="stable")]
        end = tasks.end_us[ended]
        upto = np.maximum.accumulate(end)
        held[ended] = np.maximum(0, end - np.maximum(tasks.begin_us[ended], np.concatenate([[-1], upto[:-1]])))
        free_us = int(upto[-1])
    holder = _holder(tasks, free_us, terms.soft)
    if holder is not None:
        held[holder] = max(0, now_us - max(free_us, int(tasks.begin_us[holder])))
    return held


def _holder(tasks: Tasks, free_us: int, soft: Bools) -> int | None:
    """Who has the gate since it was free: the next by deadline of those who waited, else who came first."""
    waiting = np.flatnonzero(tasks.end_us == OPEN)
    if not len(waiting):
        return None
    since = max(free_us, int(tasks.begin_us[waiting].min()))
    waiting = waiting[tasks.begin_us[waiting] <= since]
    order = np.lexsort((tasks.due_us[waiting], soft[tasks.who[waiting]]))
    return int(waiting[order[0]])


def _equal_parts(sharing: Sharing, tasks: Tasks, now_us: int) -> Floats:
    """The integral of 1 / n over the time in which its container's turn is its own, n being who wants the device."""
    begin, end = tasks.begin_us.copy(), _ends(tasks, now_us)
    for container in range(tasks.containers):  # a task waits for those before it in its container
        own = np.flatnonzero(tasks.who == container)
        before = np.maximum.accumulate(end[own])[:-1]
        begin[own[1:]] = np.maximum(begin[own[1:]], before)
    begin = np.minimum(begin, end)
    times = np.concatenate([begin, end])
    order = np.argsort(times, kind="stable")
    times, wanted = times[order], np.cumsum(np.concatenate([np.ones(len(begin)), -np.ones(len(end))])[order])
    slice_us, switch_us = sharing.measured() or (1, 0)
    shared = slice_us / (slice_us + switch_us) / np.maximum(wanted, 1)
    rate = np.where(wanted > 1, shared, 1.0)
    total = np.concatenate([[0.0], np.cumsum(np.diff(times) * rate[:-1])])
    return np.asarray(np.interp(end, times, total) - np.interp(begin, times, total))

"""Many small devices simulated side by side in arrays: only whether somebody was late, for gates and round robins.

Its rules are those of `policies`; a test runs both on the same sets. It is what makes a million sets a matter of
half an hour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FAR: Final = 1 << 60
"""No release, or due never."""
_CHUNK: Final = 2048  # rows whose numbers fit into a cache together


@dataclass(frozen=True, slots=True)
class Sets:
    """A row per simulated device, a column per container: runtime, period, deadline and first release.

    An empty place has its first release FAR away.
    """

    runtime: Ints
    period: Ints
    deadline: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.runtime)

    def __getitem__(self, rows: Any) -> Sets:
        return Sets(*(getattr(self, each.name)[rows] for each in fields(self)))


Gaps = Callable[[Ints, Ints], Ints]
"""By how much the next jobs of these rows and columns are released later than they could be."""


def gated_misses(sets: Sets, steps: int, until_idle: bool, gaps: Gaps | None = None) -> tuple[Bools, Bools]:
    """Which devices had a late job, and which were not seen to their end within so many jobs.

    With `until_idle` a device is at its end when nobody waits; a late one is at its end at once.
    """
    late, unseen = np.zeros(len(sets), np.bool_), np.zeros(len(sets), np.bool_)
    for start in range(0, len(sets), _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, len(sets)))
        unseen[_gated(sets[rows], rows, steps, until_idle, gaps, late)] = True
    return late, unseen


def _gated(sets: Sets, left: Ints, steps: int, until_idle: bool, gaps: Gaps | None, late: Bools) -> Ints:
    """Marks the late ones of these rows; those that were not seen to their end."""
    release, now, done = sets.first.copy(), sets.first.min(1), np.zeros(len(left), np.bool_)
    for step in range(steps):
        if step % 8 == 0:
            gone = done | late[left]
            left, sets, release, now, done = _without(gone, left, sets, release, now, done)
            rows = np.arange(len(left))
        if not len(left):
            break
        following = release.min(1)
        if until_idle:
            done |= following > now
        np.maximum(now, following, out=now)
        due = release + sets.deadline
        first = np.where(release <= now[:, None], due, FAR << 1).argmin(1)
        now += sets.runtime[rows, first]
        late[left[now > due[rows, first]]] = True
        release[rows, first] += sets.period[rows, first] + (gaps(left, first) if gaps else 0)
    return left[~done & ~late[left]]


def time_sliced_misses(sets: Sets, slice_us: Ints, switch_us: Ints, turns: int, gaps: Gaps | None = None) -> Bools:
    """Which devices had a late job within so many turns of the ring, which begins with the first container."""
    late, left = np.zeros(len(sets), np.bool_), np.arange(len(sets))
    release, now, work = sets.first.copy(), sets.first.min(1), sets.runtime.copy()
    last, ran = np.full(len(sets), sets.runtime.shape[1] - 1), np.zeros(len(sets), np.bool_)
    columns = np.arange(sets.runtime.shape[1])
    for turn in range(turns):
        if turn % 8 == 0:
            done = late[left]
            left, sets, release, now, work = _without(done, left, sets, release, now, work)
            last, ran, slice_us, switch_us = _without(done, last, ran, slice_us, switch_us)
        now = np.maximum(now, release.min(1))
        ahead = (columns - last[:, None] - 1) % len(columns)
        rows, following = np.arange(len(left)), np.where(release <= now[:, None], ahead, FAR).argmin(1)
        took = np.minimum(slice_us, work[rows, following])
        now = now + took + np.where(ran & (following == last), 0, switch_us)
        last, ran = following, np.ones(len(left), np.bool_)
        work[rows, following] -= took
        ended = (work[rows, following] == 0).nonzero()[0]
        who = following[ended]
        late[left[ended[now[ended] > (release + sets.deadline)[ended, who]]]] = True
        work[ended, who] = sets.runtime[ended, who]
        release[ended, who] += sets.period[ended, who] + (gaps(left[ended], who) if gaps else 0)
    return late


def _without(gone: Bools, *columns: Any) -> tuple[Any, ...]:
    """Without some rows, in each of these."""
    return columns if not gone.any() else tuple(column[~gone] for column in columns)

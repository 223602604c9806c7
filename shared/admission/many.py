"""The admission test asked of many loads at once: each is kept in arrays, and what these leave open is asked singly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Final, Protocol

import numpy as np

from shared.admission.gated_rows import MOST_US, NO_SLACK, Answers, Bools, GatedRows, Ints, Newcomer
from shared.admission.kinds import admit_kind
from shared.admission.tasks import RtTask, Sharing
from shared.admission.time_sliced import slices
from shared.messages import Kind, Regime

_REGIMES: Final = tuple(Regime)
_PLAIN, _AT_GATE, _IN_TURNS, _ODD = range(4)
"""By its form alone, in the arrays of the gated or of the time-sliced, or singly: without time for a device part, with
times beyond arrays, or in a case that seldom is."""


class Load(Protocol):
    """Who is on a device: `contexts` of them declared no runtime."""

    @property
    def sharing(self) -> Sharing: ...
    @property
    def residents(self) -> tuple[RtTask, ...]: ...
    @property
    def contexts(self) -> int: ...


class Loads:
    """Kinds of load by their numbers, in the order in which they came.

    A gated load keeps its jobs, a time-sliced one its response bounds. All else that a verdict looks at is in the form
    of a load, of which there are few, and one load of each form is tested for all.
    """

    def __init__(self) -> None:
        self._loads: list[Load] = []
        self._rows = np.zeros((0, 4), np.int64)
        """How a load is tested, its form, whether something is promised on it, and its row in the arrays."""
        self._gated, self._gates = GatedRows(), np.zeros((0, 2), np.int64)
        self._sliced = _SlicedRows()

    def __len__(self) -> int:
        return len(self._loads)

    def extend(self, loads: Sequence[Load]) -> None:
        """More loads, numbered on from the last one."""
        self._loads.extend(loads)
        rows = np.array([(*_form(load), -1) for load in loads], np.int64).reshape(-1, 4)
        for way, extend in ((_AT_GATE, self._extend_gated), (_IN_TURNS, self._sliced.extend)):
            places = (rows[:, 0] == way).nonzero()[0]
            rows[places, 3] = extend([loads[place] for place in places.tolist()])
        self._rows = np.concatenate([self._rows, rows])

    def keep(self, numbers: Ints) -> None:
        """Only these loads are left, numbered from 0 in this order."""
        self._loads = [self._loads[number] for number in numbers.tolist()]
        self._rows = self._rows[numbers]
        for way, keep in ((_AT_GATE, self._keep_gated), (_IN_TURNS, self._sliced.keep)):
            places = (self._rows[:, 0] == way).nonzero()[0]
            keep(self._rows[places, 3])
            self._rows[places, 3] = np.arange(len(places))

    def ask(self, kind: Kind, task: RtTask | None, numbers: Ints) -> Answers:
        """What `admit_kind` answers for each of these loads."""
        answers = Answers.none(len(numbers))
        way, form, promises, rows = self._rows[numbers].T
        singly = way == _ODD
        if task is not None and max(task.period_us, task.deadline_us, task.runtime_us) >= MOST_US:
            singly[:] = True
        for places, ask in self._in_arrays(kind, task, way, promises):
            chosen = (places & ~singly).nonzero()[0]
            form[chosen] = -1
            found, left_open = ask(rows[chosen], kind, task)
            answers.put(chosen, found)
            singly[chosen[left_open]] = True
        self._by_form(answers, kind, task, numbers, np.where(singly, -1, form))
        for place in singly.nonzero()[0].tolist():
            answers.put([place], self._singly(kind, task, int(numbers[place])))
        return answers

    def _in_arrays(self, kind: Kind, task: RtTask | None, way: Ints, promises: Ints) -> Iterable[tuple[Bools, Any]]:
        """Which loads the numbers decide, and how; the others' verdict follows from their form."""
        if task is None:
            return
        if task.gate and (kind is Kind.SOFT or min(task.period_us, task.deadline_us) > task.host_us):
            yield (way == _AT_GATE) & ((kind is not Kind.SOFT) | (promises > 0)), self._ask_gated
        if kind is Kind.FIRM and task.deadline_us <= task.period_us:
            yield way == _IN_TURNS, self._sliced.ask

    def _by_form(self, answers: Answers, kind: Kind, task: RtTask | None, numbers: Ints, form: Ints) -> None:
        for each in np.unique(form[form >= 0]).tolist():
            alike = (form == each).nonzero()[0]
            answers.put(alike, self._singly(kind, task, int(numbers[alike[0]])))

    def _singly(self, kind: Kind, task: RtTask | None, number: int) -> Answers:
        load = self._loads[number]
        verdict = admit_kind(kind, load.sharing, load.residents, task, load.contexts)
        slack = NO_SLACK if verdict.slack_us is None else verdict.slack_us
        breaks = verdict.late is not None and (task is None or verdict.late != task.name)
        return Answers(np.array([verdict.admitted]), np.array([slack]), np.array([breaks]))

    # ------------------------------------------------------------------------------------------- gated

    def _extend_gated(self, loads: Sequence[Load]) -> Ints:
        rows = self._gated.grow(len(loads))
        gates = [(load.sharing.handover_us, load.sharing.margin_us) for load in loads]
        self._gates = np.concatenate([self._gates, np.array(gates, np.int64).reshape(-1, 2)])
        for yields in (False, True):
            kept = [[task for task in load.residents if (task.kind is Kind.SOFT) is yields] for load in loads]
            for column in zip_longest(*kept):
                at = rows[[task is not None for task in column]]
                self._gated.add(at, self._jobs(at, [task for task in column if task], yields))
        return rows

    def _jobs(self, rows: Ints, tasks: Sequence[RtTask], yields: bool) -> Newcomer:
        """`job_of` in arrays: of one task for each row, or of one for all of them."""
        times = [(t.runtime_us, t.overrun_us, t.period_us, t.deadline_us, t.host_us) for t in tasks]
        runtime, overrun, period, deadline, host = np.array(times, np.int64).T
        handover, margin = self._gates[rows].T
        held = runtime + np.maximum(margin, overrun) + handover
        return Newcomer.of(len(rows), held, period - host, deadline - host, yields)

    def _keep_gated(self, rows: Ints) -> None:
        self._gated.keep(rows)
        self._gates = self._gates[rows]

    def _ask_gated(self, rows: Ints, kind: Kind, task: RtTask) -> tuple[Answers, Bools]:
        found, left_open = self._gated.ask(rows, self._jobs(rows, [task], yields=kind is Kind.SOFT))
        if kind is Kind.SOFT:
            found.slack_us[found.admitted] = NO_SLACK
        return found, left_open


class _SlicedRows:
    """Of each load: slice, switch cost and contexts, and the response bounds of those to whom something is promised.

    A bound stands as the room left alone (`room`, NO_SLACK for an empty place) and what each other context takes of it.
    """

    def __init__(self) -> None:
        self._device = np.zeros((0, 3), np.int64)
        self._room = np.zeros((0, 0), np.int64)
        self._each = np.zeros((0, 0), np.int64)

    def extend(self, loads: Sequence[Load]) -> Ints:
        first = len(self._device)
        kept = [[_bound(load.sharing, t) for t in load.residents if t.kind is not Kind.SOFT] for load in loads]
        device = [(*(load.sharing.measured() or (1, 0)), len(load.residents) + load.contexts) for load in loads]
        width = max(self._room.shape[1], max(map(len, kept), default=0))
        more = [bounds + [(NO_SLACK, 0)] * (width - len(bounds)) for bounds in kept]
        room, each = np.array(more, np.int64).reshape(len(loads), width, 2).transpose(2, 0, 1)
        self._device = np.concatenate([self._device, np.array(device, np.int64).reshape(-1, 3)])
        self._room = np.concatenate([_wide(self._room, width, NO_SLACK), room])
        self._each = np.concatenate([_wide(self._each, width, 0), each])
        return np.arange(first, len(self._device))

    def keep(self, rows: Ints) -> None:
        self._device, self._room, self._each = self._device[rows], self._room[rows], self._each[rows]

    def ask(self, rows: Ints, _kind: Kind, task: RtTask) -> tuple[Answers, Bools]:
        """The test of `time_sliced`; nothing is left open."""
        slice_us, switch_us, others = self._device[rows].T
        parts, over_us = task.parts(), task.overrun_us
        count = (over_us + min(len(parts), over_us) * (slice_us - 1)) // slice_us
        for part in parts:
            count = count - (-part // slice_us)
        alone = task.deadline_us - task.host_us - task.runtime_us - over_us - switch_us * count
        own = alone - (slice_us + switch_us) * others * count
        theirs = (self._room[rows] - self._each[rows] * others[:, None]).min(1, initial=NO_SLACK)
        slack = np.minimum(own, theirs)
        return Answers(slack >= 0, slack, (slack < 0) & (theirs <= own)), np.zeros(len(rows), np.bool_)


def _bound(sharing: Sharing, task: RtTask) -> tuple[int, int]:
    slice_us, switch_us = sharing.measured() or (1, 0)
    count = slices(task, slice_us)
    alone = task.deadline_us - task.host_us - task.runtime_us - task.overrun_us - switch_us * count
    return alone, (slice_us + switch_us) * count


def _wide(column: Ints, width: int, empty: int) -> Ints:
    return np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=empty)


# --------------------------------------------------------------------------------------------- forms


def _form(load: Load) -> tuple[int, int, bool]:
    """How it is tested where numbers decide; all else that a verdict looks at, as one number; whether it promises."""
    sharing, way = load.sharing, _PLAIN
    by_gate, odd, hard, promises, beyond = not load.contexts, False, False, False, False
    for task in load.residents:
        period_us, deadline_us = task.period_us, task.deadline_us
        by_gate &= task.gate
        hard |= task.kind is Kind.HARD
        promises |= task.kind is not Kind.SOFT
        beyond |= deadline_us > period_us and task.kind is not Kind.SOFT
        odd |= min(period_us, deadline_us) <= task.host_us or max(period_us, deadline_us, task.runtime_us) >= MOST_US
    measured = sharing.measured() is not None
    in_turns = sharing.regime is Regime.TIME_SLICED and measured
    if odd or (in_turns and hard):
        way = _ODD
    elif sharing.regime is Regime.GATED and by_gate:
        way = _AT_GATE
    elif in_turns and not beyond:
        way = _IN_TURNS
    flags = (measured, not load.residents and not load.contexts, hard, promises, by_gate, beyond)
    return way, _REGIMES.index(sharing.regime) << len(flags) | sum(flag << i for i, flag in enumerate(flags)), promises

"""The admission test of a request on every device, remembered by load; shared.admission has the test.

Many kinds of load are asked at once, in arrays that are kept for all demands; a few are asked one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from services.placer.core.accounts import Load
from services.placer.core.columns import Array, Columns, Ints
from services.placer.core.demand import NEWCOMER, Demand
from services.placer.core.measured import Measured
from shared.admission import NO_SLACK, Loads, Verdict, admit_kind, by_measure
from shared.messages import Kind

_FEW: Final = 16
"""Up to so many new kinds of load are asked one by one: arrays would take as long."""
_COLUMNS: Final[dict[str, Any]] = {
    "known": np.bool_,
    "admitted": np.bool_,
    "slack": np.int64,
    "unproven": np.bool_,
    "breaks": np.bool_,
}


def admit(demand: Demand, load: Load, measured: Measured, more: int = 0) -> Verdict:
    """Whether a device with this load, and `more` replicas like this one on it already, takes one more."""
    return _judged(demand, load, measured.found(demand, load, more), more)


def _judged(demand: Demand, load: Load, found: Verdict | None, more: int = 0) -> Verdict:
    """What was declared and what was found by measure, together."""
    residents, contexts = load.residents, load.contexts
    if demand.resident is None:
        contexts += more
    else:
        residents += (demand.resident,) * more
    declared = admit_kind(demand.kind, load.sharing, residents, demand.task, contexts)
    return by_measure(declared, found, load.sharing.regime, [task.kind for task in load.residents])


def explained(demand: Demand, load: Load, measured: Measured) -> str:
    """Why the device refuses, its residents by name."""
    named = tuple(replace(task, name=name) for task, name in zip(load.residents, load.names, strict=True))
    reason = admit(demand, replace(load, residents=named), measured).reason
    return f"{reason}; foreign use on the device counts as one of them" if load.foreign else reason


class Verdicts:
    """Admitted, slack, unproven and breaks of one kind of demand, for each kind of load by its number.

    `breaks`: it is refused because somebody who is there already would be late.
    """

    def __init__(self, demand: Demand, measured: Measured) -> None:
        self._demand, self._measured = demand, measured
        self._table = Columns(_COLUMNS)

    def refresh(self, numbers: Ints, loads: Sequence[Load], arrays: Loads) -> None:
        """Tests the kinds of load among `numbers` that it has not met yet; `loads` by number.

        `arrays` has some of the first of them, and gets the others when they are needed.
        """
        if (more := len(loads) - len(self._table)) > 0:
            self._table.take(more)
        if not len(numbers):
            return
        known = self._table["known"][numbers]
        if np.count_nonzero(known) == len(known):
            return
        missing = np.unique(numbers[~known])
        if many := len(missing) > _FEW:
            self._in_arrays(missing, loads, arrays)
            if not self._measured.key(self._demand):
                return
        for number in missing.tolist():
            found = self._measured.found(self._demand, loads[number])
            if many and found is None:
                continue
            verdict = _judged(self._demand, loads[number], found)
            slack = NO_SLACK if verdict.slack_us is None else verdict.slack_us
            breaks = verdict.late is not None and verdict.late != NEWCOMER
            self._write(number, verdict.admitted, slack, verdict.unproven, breaks)

    def _in_arrays(self, numbers: Ints, loads: Sequence[Load], arrays: Loads) -> None:
        """By declarations alone."""
        demand = self._demand
        arrays.extend(loads[len(arrays) :])
        answers = arrays.ask(demand.kind, demand.task, numbers)
        unproven = demand.kind is Kind.FIRM and demand.task is not None
        self._write(numbers, answers.admitted, answers.slack_us, unproven, answers.breaks)

    def _write(self, numbers: Any, admitted: Any, slack: Any, unproven: Any, breaks: Any) -> None:
        table = self._table
        table["known"][numbers] = True
        table["admitted"][numbers] = admitted
        table["slack"][numbers] = slack
        table["unproven"][numbers] = unproven
        table["breaks"][numbers] = breaks

    def keep(self, numbers: Ints) -> None:
        """Only these kinds of load are left, numbered from 0 in this order."""
        kept = Columns(self._table.kinds)
        met = numbers[numbers < len(self._table)]  # kinds are met in the order of their numbers
        kept.take(len(met))
        for name in self._table.kinds:
            kept[name][: len(met)] = self._table[name][met]
        self._table = kept

    def all(self) -> tuple[Array, Array, Array, Array]:
        """For all kinds of load whether it is known, admitted, its slack and unproven; of others than those known it
        says nothing.
        """
        table = self._table.arrays
        return table["known"], table["admitted"], table["slack"], table["unproven"]

    def column(self, name: str, numbers: Ints) -> Array:
        return self._table[name][numbers]

"""The admission test of a request on every device, remembered until a device changes; shared.admission has the test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from services.placer.core.accounts import Load
from services.placer.core.columns import Array, Columns, Ints
from services.placer.core.demand import Demand
from shared.admission import Sharing, Verdict, admit_kind

NO_SLACK: Final = np.iinfo(np.int64).max
"""Where nothing is promised and so nothing is left over."""

_LOADS_KEPT: Final = 100_000


def admit(demand: Demand, load: Load, more: int = 0) -> Verdict:
    """Whether a device with this load, and `more` replicas like this one on it already, takes one more."""
    residents, contexts = load.residents, load.contexts
    if demand.resident is None:
        contexts += more
    else:
        residents += (demand.resident,) * more
    return admit_kind(demand.kind, load.sharing, residents, demand.task, contexts)


def explained(demand: Demand, load: Load) -> str:
    """Why the device refuses, its residents by name."""
    named = tuple(replace(task, name=name) for task, name in zip(load.residents, load.names, strict=True))
    reason = admit_kind(demand.kind, load.sharing, named, demand.task, load.contexts).reason
    return f"{reason}; foreign use on the device counts as one of them" if load.foreign else reason


class Verdicts:
    """Admitted, slack and unproven of one kind of demand for each device row, as of the row's version."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._table = Columns({"version": np.int64, "admitted": np.bool_, "slack": np.int64, "unproven": np.bool_})
        self._of_load: dict[Load, Verdict] = {}

    def refresh(self, rows: Ints, versions: Ints, loads: Mapping[int, Load]) -> None:
        """Tests again the rows that have changed; `versions` and `loads` by row."""
        if (missing := int(rows.max(initial=-1)) + 1 - len(self._table)) > 0:
            self._table.take(missing)
        stale = rows[self._table["version"][rows] != versions[rows]]
        for row in stale.tolist():
            verdict = self.of_load(loads[row])
            slack = NO_SLACK if verdict.slack_us is None else verdict.slack_us
            self._table.write(range(row, row + 1), admitted=verdict.admitted, slack=slack, unproven=verdict.unproven)
        self._table["version"][stale] = versions[stale]

    def column(self, name: str, rows: Ints) -> Array:
        return self._table[name][rows]

    def of_load(self, load: Load) -> Verdict:
        """The test for a device with this load; the residents of the answer have no names."""
        if (known := self._of_load.get(load)) is not None:
            return known
        if len(self._of_load) >= _LOADS_KEPT:
            self._of_load.clear()
        return self._of_load.setdefault(load, admit(self._demand, load))

    def alone(self, sharing: Sharing) -> Verdict:
        """The test for an empty device."""
        return self.of_load(Load(sharing))

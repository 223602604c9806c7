"""The gated tests of many devices at once: one row per device, kept so that one more task is tested in O(n) a row.

Here are integers for what the exact test looks at and floats for the fluid demand; what these leave open is said to be
open, and `gated` decides it. So no answer depends on rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NO_SLACK: Final = np.iinfo(np.int64).max
"""Where nothing is promised and so nothing is left over."""
MOST_US: Final = 1 << 45
"""Times above it (a year) are left to the test of one device, which has no largest number."""
_ROUNDING: Final = 1e-13  # of sums of at most some hundred terms, relative to the largest
_CHUNK: Final = 4096  # rows whose numbers fit into a cache together
_KINDS: Final[dict[str, Any]] = {
    "runtime": np.int64,
    "period": np.int64,
    "deadline": np.int64,
    "rate": np.float64,
    "demand": np.float64,
    "bound": np.int64,
    "blocking": np.int64,
}


@dataclass(frozen=True, slots=True)
class Answers:
    """Of many devices: admitted, slack (NO_SLACK for none), and whether somebody who is there already would be late."""

    admitted: Bools
    slack_us: Ints
    breaks: Bools

    @classmethod
    def none(cls, count: int) -> Answers:
        return cls(np.zeros(count, np.bool_), np.full(count, NO_SLACK), np.zeros(count, np.bool_))

    def put(self, places: Any, other: Answers) -> None:
        self.admitted[places] = other.admitted
        self.slack_us[places] = other.slack_us
        self.breaks[places] = other.breaks


@dataclass(frozen=True, slots=True)
class Newcomer:
    """The device part of one more task for each of some rows, a column each; `yields`: it is soft and only blocks."""

    runtime: Ints
    period: Ints
    deadline: Ints
    yields: bool

    @classmethod
    def of(cls, count: int, runtime: Any, period: Any, deadline: Any, yields: bool = False) -> Newcomer:
        """From numbers or arrays of `count` numbers."""
        runtime, period, deadline = (
            np.broadcast_to(np.asarray(each, np.int64), count)[:, None] for each in (runtime, period, deadline)
        )
        return cls(runtime, period, deadline, yields)

    def __getitem__(self, places: Any) -> Newcomer:
        return Newcomer(self.runtime[places], self.period[places], self.deadline[places], self.yields)


class GatedRows:
    """The jobs on each device, in any order; an empty place has runtime 0.

    Each job has, at its own deadline: the fluid demand, the demand bound, and the longest that may block.
    """

    def __init__(self, rows: int = 0, width: int = 4) -> None:
        self.columns = {name: np.zeros((rows, width), kind) for name, kind in _KINDS.items()}
        self.columns["period"][:] = 1
        self.count = np.zeros(rows, np.int64)
        self.utilisation = np.zeros(rows)
        self.soft = np.zeros(rows, np.int64)

    def grow(self, rows: int) -> Ints:
        """So many more empty rows; their numbers."""
        first = len(self.count)
        for name, column in self.columns.items():
            more = np.full((rows, column.shape[1]), name == "period", column.dtype)
            self.columns[name] = np.concatenate([column, more])
        self.count = np.concatenate([self.count, np.zeros(rows, np.int64)])
        self.utilisation = np.concatenate([self.utilisation, np.zeros(rows)])
        self.soft = np.concatenate([self.soft, np.zeros(rows, np.int64)])
        return np.arange(first, first + rows)

    def keep(self, rows: Ints) -> None:
        """Only these rows are left, numbered from 0 in this order."""
        self.columns = {name: column[rows] for name, column in self.columns.items()}
        self.count, self.utilisation, self.soft = self.count[rows], self.utilisation[rows], self.soft[rows]

    def add(self, rows: Ints, new: Newcomer) -> None:
        """One task more on each of these rows, which differ from each other."""
        if new.yields:
            self.soft[rows] = np.maximum(self.soft[rows], new.runtime[:, 0])
            self.columns["blocking"][rows] = np.maximum(self.columns["blocking"][rows], new.runtime)
            return
        view = self._view(rows)
        own: dict[str, Any] = {"runtime": new.runtime, "period": new.period, "deadline": new.deadline}
        own["rate"] = new.runtime / new.period
        own["demand"], own["bound"] = (_own_demand(view, new, fluid) for fluid in (True, False))
        own["blocking"] = _own_blocking(view, new, self.soft[rows])
        due = view["deadline"] >= new.deadline
        view["demand"] = view["demand"] + np.where(due, _fluid(new, view["deadline"]), 0)
        view["bound"] = view["bound"] + np.where(due, _steps(new, view["deadline"]), 0)
        np.maximum(view["blocking"], np.where(due, 0, new.runtime), out=view["blocking"])
        for name in ("demand", "bound", "blocking"):
            self.columns[name][rows, : view[name].shape[1]] = view[name]
        self._widen(int(self.count[rows].max(initial=0)) + 1)
        for name, values in own.items():
            self.columns[name][rows, self.count[rows]] = values[:, 0]
        self.count[rows] += 1
        self.utilisation[rows] = self.utilisation[rows] + own["rate"][:, 0]

    def remove(self, row: int, place: int) -> None:
        """The job at this place of a row goes; the others are counted anew."""
        jobs = [self.columns[name][row, : self.count[row]].copy() for name in ("runtime", "period", "deadline")]
        soft = self.soft[row]
        self.clear(row)
        self.add(np.array([row]), Newcomer.of(1, soft, 1, 1, yields=True))
        for other in range(len(jobs[0])):
            if other != place:
                self.add(np.array([row]), Newcomer.of(1, *(column[other] for column in jobs)))

    def clear(self, row: int) -> None:
        """Nobody is on this device any more."""
        for name, column in self.columns.items():
            column[row] = name == "period"
        self.count[row] = self.soft[row] = self.utilisation[row] = 0

    def ask(self, rows: Ints, new: Newcomer) -> tuple[Answers, Bools]:
        """Whether each row takes one task more, and which rows that leaves open."""
        answers, is_open = Answers.none(len(rows)), np.zeros(len(rows), np.bool_)
        for start in range(0, len(rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            found, is_open[part] = self._ask(rows[part], new[part])
            answers.put(part, found)
        return answers, is_open

    def _ask(self, rows: Ints, new: Newcomer) -> tuple[Answers, Bools]:
        view, soft = self._view(rows), self.soft[rows]
        utilisation = self.utilisation[rows] + (0 if new.yields else (new.runtime / new.period)[:, 0])
        fluid = _slack(view, new, soft, fluid=True)
        longest = np.maximum(view["deadline"].max(1, initial=0), new.deadline[:, 0])
        rough = _ROUNDING * (longest + view["runtime"].sum(1) + soft + new.runtime[:, 0])
        answers = Answers.none(len(rows))
        full = utilisation > 1 + _ROUNDING * 100
        is_open = ~full & (utilisation > 1 - _ROUNDING * 100)
        np.greater_equal(fluid.least, rough, out=answers.admitted, where=~full & ~is_open)
        fits = answers.admitted
        answers.slack_us[fits] = np.floor(fluid.least + rough)[fits]
        rest = (~fits & ~full & ~is_open).nonzero()[0]
        exact = _slack({name: column[rest] for name, column in view.items()}, new[rest], soft[rest], fluid=False)
        late = exact.least < 0
        refused = rest[late]
        answers.slack_us[refused] = exact.least[late]
        answers.breaks[refused] = exact.breaks[late]
        is_open[rest[~late]] = True
        return answers, is_open

    def _view(self, rows: Ints) -> dict[str, Any]:
        width = int(self.count[rows].max(initial=0))
        return {name: column[rows, :width] for name, column in self.columns.items()}

    def _widen(self, width: int) -> None:
        for name, column in self.columns.items():
            if (more := width - column.shape[1]) > 0:
                padding = ((0, 0), (0, max(more, column.shape[1] // 2)))
                self.columns[name] = np.pad(column, padding, constant_values=name == "period")


@dataclass(frozen=True, slots=True)
class _Slack:
    least: Any
    breaks: Any


def _slack(view: dict[str, Any], new: Newcomer, soft: Ints, fluid: bool) -> _Slack:
    """The least slack over all deadlines, and whether it is at one of those who are there already."""
    deadline, grown = view["deadline"], _fluid if fluid else _steps
    blocking, held = view["blocking"], view["demand" if fluid else "bound"]
    if new.yields:
        theirs = deadline - held - np.maximum(blocking, new.runtime)
    else:
        due = deadline >= new.deadline
        more = np.where(due, grown(new, deadline), 0)
        theirs = deadline - held - more - np.maximum(blocking, np.where(due, 0, new.runtime))
    none = np.inf if fluid else NO_SLACK
    theirs = np.where(view["runtime"] > 0, theirs, none)
    least = theirs.min(1, initial=none)
    if new.yields:
        return _Slack(least, np.ones(len(least), np.bool_))
    own = (new.deadline - _own_demand(view, new, fluid) - _own_blocking(view, new, soft))[:, 0]
    first = ((theirs == own[:, None]) & (deadline <= new.deadline)).any(1)
    return _Slack(np.minimum(least, own), (least < own) | ((least == own) & first))


def _own_demand(view: dict[str, Any], new: Newcomer, fluid: bool) -> Any:
    """The demand of all by the deadline of the newcomer."""
    since = new.deadline - view["deadline"]
    grown = view["rate"] * since if fluid else since // view["period"] * view["runtime"]
    return new.runtime + np.where(since >= 0, view["runtime"] + grown, 0).sum(1, keepdims=True)


def _own_blocking(view: dict[str, Any], new: Newcomer, soft: Ints) -> Any:
    """The longest that may block at the deadline of the newcomer."""
    later = np.where(view["deadline"] > new.deadline, view["runtime"], 0)
    return np.maximum(later.max(1, initial=0, keepdims=True), soft[:, None])


def _fluid(new: Newcomer, until: Ints) -> Any:
    """C + u (t - D), the demand of the newcomer by each of some times from its deadline on."""
    return new.runtime + new.runtime / new.period * (until - new.deadline)


def _steps(new: Newcomer, until: Ints) -> Any:
    """Its demand bound by each of some times from its deadline on."""
    return ((until - new.deadline) // new.period + 1) * new.runtime

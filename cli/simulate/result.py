"""What came of a played trace, in figures; percent are of all device time of the cluster."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cli.simulate.play import EXPIRED, REFUSED, WAITING, Fate, Played
from cli.simulate.watch import curve
from services.placer.core.columns import Floats, Ints
from shared.messages import SHARE_WHOLE_MICRO

DIGITS: Final = 3


@dataclass(frozen=True)
class Curve:
    """By whole percent of arrived demand, which may be more than 100."""

    allocated: dict[int, float]
    fragmented: dict[int, float]


@dataclass(frozen=True)
class Result:
    """Percentages are None on a cluster without devices.

    With departures `allocated`, `fragmented` and `waiting_demand` are means over the time from the first to the last
    arrival, else as they are after the last one. `decisions_per_s` is of CPU time, and alone depends on the machine.
    """

    strategy: str
    arrived: float | None
    allocated: float | None
    fragmented: float | None
    waiting_demand: float | None
    placed: int
    refused: int
    expired: int
    waiting: int
    had_to_wait: int
    decisions: int
    decisions_per_s: int
    digest: str
    """The same for the same placements."""
    curve: Curve


def result(played: Played, *, over_time: bool) -> Result:
    """A trace without arrivals has no percentages either."""
    devices = sum(len(facts.devices) for facts in played.world.nodes)
    series = _Series(played, devices) if devices and played.steps else None
    fates = [fate if isinstance(fate, str) else "" for fate in played.fates]
    return Result(
        strategy=played.world.strategy,
        arrived=round(float(series.arrived[-1]), DIGITS) if series else None,
        allocated=series.told(series.held, over_time=over_time) if series else None,
        fragmented=series.told(series.fragments, over_time=over_time) if series else None,
        waiting_demand=series.told(series.waiting, over_time=over_time) if series else None,
        placed=fates.count(""),
        refused=fates.count(REFUSED),
        expired=fates.count(EXPIRED),
        waiting=fates.count(WAITING),
        had_to_wait=played.had_to_wait,
        decisions=played.decisions,
        decisions_per_s=round(played.decisions / (played.decisions_s or 1)),
        digest=_digest(played),
        curve=series.curve() if series else Curve({}, {}),
    )


class _Series:
    """The steps of a run as arrays, in percent of all device time."""

    def __init__(self, played: Played, devices: int) -> None:
        steps = played.steps
        percent_micro = devices * SHARE_WHOLE_MICRO / 100
        self._at_us: Ints = np.array([step.at_us for step in steps])
        self.arrived: Floats = np.array([step.arrived_micro for step in steps]) / percent_micro
        self.held: Floats = np.array([step.held_micro for step in steps]) / percent_micro
        self.waiting: Floats = np.array([step.waiting_micro for step in steps]) / percent_micro
        self.fragments: Floats = played.watch.fragments() * 100 / devices

    def told(self, values: Floats, *, over_time: bool) -> float:
        lasted = np.diff(self._at_us)
        if not over_time or not lasted.sum():
            return round(float(values[-1]), DIGITS)
        return round(float((values[:-1] * lasted).sum() / lasted.sum()), DIGITS)

    def curve(self) -> Curve:
        return Curve(_rounded(curve(self.arrived, self.held)), _rounded(curve(self.arrived, self.fragments)))


def _rounded(values: dict[int, float]) -> dict[int, float]:
    return {level: round(value, DIGITS) for level, value in values.items()}


def _digest(played: Played) -> str:
    lines = "\n".join(where(played, fate) for fate in played.fates)
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def where(played: Played, fate: Fate) -> str:
    """`node-1:0 node-2:4-7` by the devices' indices, or what became of it instead."""
    if isinstance(fate, str):
        return fate
    found = []
    for place in fate:
        facts = played.world.cluster.facts(place.node)
        index = {device.uuid: device.index for device in facts.devices} if facts else {}
        found.append(":".join(filter(None, (place.node, _ranges(sorted(index[uuid] for uuid in place.devices))))))
    return " ".join(found)


def _ranges(numbers: list[int]) -> str:
    """`0,4-7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def body_of(found: Result) -> dict[str, Any]:
    """As JSON has it."""
    percents = ("arrived", "allocated", "fragmented", "waiting_demand")
    percent = {f"{name}_percent": getattr(found, name) for name in percents}
    counts = ("placed", "refused", "expired", "waiting", "had_to_wait", "decisions", "decisions_per_s", "digest")
    levels = found.curve.allocated.items()
    points = [[level, allocated, found.curve.fragmented[level]] for level, allocated in levels]
    return {"strategy": found.strategy, **percent, **{name: getattr(found, name) for name in counts}, "curve": points}

"""When each request of a trace arrives and how long it stays, as the command line asks; places nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cli.simulate.trace import Arrival, Trace
from shared.errors import FieldError


@dataclass(frozen=True)
class Plan:
    """`shuffle` seeds the order of arrivals, None keeps that of the trace. `stretch` multiplies how long all stay."""

    shuffle: int | None = None
    departures: bool = False
    stretch: float = 1.0

    def of(self, trace: Trace) -> list[Arrival]:
        """In order of arrival, all with a time; without departures one after another, and nobody leaves or expires.

        With departures a shuffle keeps the times and changes who comes at which. Raises FieldError where the trace has
        no times.
        """
        if not self.departures:
            return [_timeless(each, number) for number, each in enumerate(self._shuffled(trace.arrivals))]
        if missing := next((each for each in trace.arrivals if each.at_us is None), None):
            raise FieldError(f"{missing.name}: creation_time", None, "a time, or no --departures")
        times = sorted(each.at_us for each in trace.arrivals if each.at_us is not None)
        by_time = sorted(trace.arrivals, key=lambda each: each.at_us or 0)
        return [self._timed(each, at_us) for each, at_us in zip(self._shuffled(by_time), times, strict=True)]

    def _shuffled(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        if self.shuffle is None:
            return arrivals
        return [arrivals[number] for number in np.random.default_rng(self.shuffle).permutation(len(arrivals)).tolist()]

    def _timed(self, each: Arrival, at_us: int) -> Arrival:
        stay_us = None if each.stay_us is None else round(each.stay_us * self.stretch)
        moved_us = at_us - (each.at_us or 0)
        return replace(_placed_by(each, moved_us) if moved_us else each, at_us=at_us, stay_us=stay_us)


def _placed_by(each: Arrival, moved_us: int) -> Arrival:
    """A request that must be placed by some time has as long for it as it had."""
    by_us = each.request.place_by_us
    if by_us is None:
        return each
    return replace(each, request=each.request.model_copy(update={"place_by_us": by_us + moved_us}))


def _timeless(each: Arrival, number: int) -> Arrival:
    request = each.request
    if request.place_by_us is not None:
        request = request.model_copy(update={"place_by_us": None})
    return replace(each, request=request, at_us=number, stay_us=None)

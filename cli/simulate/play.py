"""Plays arrivals on one world in virtual time: who is placed, who waits, who leaves; counts and draws no picture."""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cli.simulate.trace import Arrival
from cli.simulate.watch import Watch
from cli.simulate.world import World
from services.placer.core.intents import Rules
from services.placer.core.outcome import Assignment, Decision, Fits, NotNow
from services.placer.core.records import new_record, order
from shared.messages import PlaceRequest

REFUSED, EXPIRED, WAITING = "refused", "expired", "waiting"
_LEAVES, _EXPIRES = range(2)

Fate = tuple[Assignment, ...] | str
"""Where its replicas were placed, or in which of the three states it is at the end."""
_Order = tuple[int, int, int, str]


@dataclass(frozen=True)
class Step:
    """How things are once something has happened; sums in millionths of a device."""

    at_us: int
    arrived_micro: int
    held_micro: int
    waiting_micro: int


@dataclass(frozen=True)
class Played:
    """`fates` by the number of the arrival; a step for each change, and what it left on the nodes in `watch`."""

    world: World
    watch: Watch
    arrivals: Sequence[Arrival]
    fates: Sequence[Fate]
    had_to_wait: int
    steps: Sequence[Step]
    decisions: int
    decisions_s: float


class Play:
    """One run. As the placer does it: what does not fit now waits if it says `queue`, in the order of the ledger.

    Whenever somebody has left, all that wait are tried in that order, and each that fits is placed. Of events at the
    same time those who leave come first. The end is the last arrival.
    """

    def __init__(self, world: World, arrivals: Sequence[Arrival]) -> None:
        self._world, self._watch, self._arrivals = world, Watch(world), arrivals
        self._fates: dict[int, Fate] = {}
        self._due: list[tuple[int, int, int]] = []
        self._waiting: list[tuple[_Order, int]] = []
        self._late: set[int] = set()
        self._steps: list[Step] = []
        self._arrived = self._held = self._waits = 0
        self._now_us = self._decisions = 0
        self._decisions_s = 0.0

    def through(self) -> Played:
        for number, arrival in enumerate(self._arrivals):
            self._until(arrival.at_us or 0)
            self._arrive(number, arrival)
        return Played(
            self._world,
            self._watch,
            self._arrivals,
            [self._fates[number] for number in range(len(self._arrivals))],
            len(self._late),
            self._steps,
            self._decisions,
            self._decisions_s,
        )

    def _arrive(self, number: int, arrival: Arrival) -> None:
        self._arrived += arrival.gpu_micro
        self._world.expect(arrival.request)
        decision = self._try(number)
        if isinstance(decision, Fits):
            return
        if isinstance(decision, NotNow) and arrival.request.queue:
            self._wait(number, arrival)
        else:
            self._fates[number] = REFUSED
        self._note()

    def _try(self, number: int) -> Decision:
        arrival, started_s = self._arrivals[number], time.process_time()
        decision = self._world.place(arrival.request, _name(number))
        self._decisions_s += time.process_time() - started_s
        self._decisions += 1
        if isinstance(decision, Fits):
            if self._fates.get(number) == WAITING:
                self._waits -= arrival.gpu_micro
            self._fates[number] = decision.assignments
            self._held += arrival.gpu_micro
            if arrival.stay_us is not None:
                heapq.heappush(self._due, (self._now_us + arrival.stay_us, _LEAVES, number))
            self._note(place.node for place in decision.assignments)
        return decision

    def _wait(self, number: int, arrival: Arrival) -> None:
        self._fates[number] = WAITING
        self._late.add(number)
        self._waits += arrival.gpu_micro
        insort(self._waiting, (_order(arrival.request, self._now_us, number), number))
        if (by_us := arrival.request.place_by_us) is not None:
            heapq.heappush(self._due, (max(by_us + 1, self._now_us), _EXPIRES, number))

    def _until(self, at_us: int) -> None:
        while self._due and self._due[0][0] <= at_us:
            self._now_us = self._due[0][0]
            left = False
            while self._due and self._due[0][0] == self._now_us:
                _, what, number = heapq.heappop(self._due)
                left |= self._leave(number) if what == _LEAVES else self._expire(number)
            if left:
                self._again()
        self._now_us = at_us

    def _leave(self, number: int) -> bool:
        places = self._fates[number]
        assert not isinstance(places, str), "who leaves has been placed"
        self._world.leave(places, _name(number))
        self._held -= self._arrivals[number].gpu_micro
        self._note(place.node for place in places)
        return True

    def _expire(self, number: int) -> bool:
        if self._fates[number] == WAITING:
            self._waits -= self._arrivals[number].gpu_micro
            self._waiting = [each for each in self._waiting if each[1] != number]
            self._fates[number] = EXPIRED
            self._note()
        return False

    def _again(self) -> None:
        """Tries those that wait; of like ones none after one that does not fit: meanwhile there is not more room."""
        refused: set[int] = set()
        left: list[tuple[_Order, int]] = []
        for entry in self._waiting:
            kind = id(self._arrivals[entry[1]].request)
            if kind in refused or not isinstance(self._try(entry[1]), Fits):
                refused.add(kind)
                left.append(entry)
        self._waiting = left

    def _note(self, changed: Iterable[str] = ()) -> None:
        self._steps.append(Step(self._now_us, self._arrived, self._held, self._waits))
        self._watch.note(changed)


def _name(number: int) -> str:
    """Names sort as numbers do: the ledger's order ends with the name."""
    return f"{number:09d}"


def _order(request: PlaceRequest, at_us: int, number: int) -> _Order:
    """The ledger's order of waiting requests, but for what waiting adds to a priority, which is not played."""
    named = request.model_copy(update={"request_id": _name(number)})
    record = new_record(named, "", at_us).model_copy(update={"arrived_at_us": at_us})
    return order(record, at_us, Rules().age_us)

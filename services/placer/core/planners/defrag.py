"""Plans moves: a few containers go elsewhere so that a request fits, or one away from bad devices; carries nothing out.

Each move is a normal placement of its container, decided while it still holds what it has: it starts at its new place,
then stops at the old one, so it needs both for a while, and everybody beside it is admitted with it there. Hard
real-time containers stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from services.placer.core.demand import NEWCOMER, Demand
from services.placer.core.leaving import Held, Leaving, leaving, nearest, room_on, room_without
from services.placer.core.outcome import Assignment, Move
from services.placer.core.question import Question
from shared.messages import SHARE_WHOLE_MICRO, Gpu, Kind, PlaceRequest, Reservation

MOST_MOVES: Final = 3
TRIES: Final = 64
"""Sets of containers that are tried at most, of each size."""
_NODES: Final = 8
"""Nodes on which room is looked for: those nearest to having it."""


def moves_for(question: Question, most: int = MOST_MOVES, tries: int = TRIES) -> tuple[Move, ...]:
    """Moves, in their order, after which the request fits: of the sets that were tried a smallest one.

    Empty where none is needed or none was found within `most` moves and `tries` sets of each size. Leaves the cluster
    as it was.
    """
    with question.cluster.trial():
        return _Search(question, most, tries).run()


BLOCK: Final = PlaceRequest(name="a block of free devices", command=("none",))
"""Stands for whoever may come and want several devices of one node, whole."""


def moves_to_widen(question: Question, most: int = MOST_MOVES, tries: int = TRIES) -> tuple[Move, ...]:
    """Moves after which the largest block of free devices on one node is as large as `most` moves can make it.

    The block is what `question` asks for, in whole devices, whatever number of them it names.
    """
    best: tuple[Move, ...] = ()
    gpu = question.request.gpu or Gpu()
    largest = int(question.cluster.nodes["devices"].max(initial=0))
    for count in range(1, largest + 1):
        asked = question.request.model_copy(update={"gpu": gpu.model_copy(update={"count": count, "share": 1.0})})
        wider = replace(question, request=asked, replicas=(0,), kept=False)
        if wider.fits():
            continue
        found = moves_for(wider, most, tries)
        if not found:
            return best
        best = found
    return best


def move_away(question: Question, node: str, held: Reservation, bad: Mapping[str, tuple[str, ...]]) -> Move | None:
    """To devices that are none of these, named by node; None where no other would take it."""
    if held.kind is Kind.HARD:
        return None
    to = _place(question, held, {each: {"devices": devices} for each, devices in bad.items()})
    return Move(held.request_id, node, held.devices, to) if to else None


def apply(question: Question, move: Move) -> None:
    """Reserves the new place and gives back the old one, as if the move were done; for use in a trial."""
    cluster = question.cluster
    held = next(each for each in cluster.reservations(move.node) if _is(each, move))
    tenant = question.tenants(held)
    assert tenant is not None, "who moves is known"
    there = Demand.of(tenant.request).reservation(held.request_id, held.replica, held.generation + 1, move.to.devices)
    cluster.set_reservations(move.to.node, (*cluster.reservations(move.to.node), there))
    kept = tuple(each for each in cluster.reservations(move.node) if each is not held)
    cluster.set_reservations(move.node, kept)


class _Search:
    def __init__(self, question: Question, most: int, tries: int) -> None:
        self._question, self._most, self._tries = question, most, tries
        self._moved: set[tuple[str, int]] = set()

    def run(self) -> tuple[Move, ...]:
        """Replicas that have a place keep it; for each of the others room is made where there is none."""
        question, moves = self._question, list[Move]()
        placed = question.plan().assignments
        for assignment in placed:
            self._take(assignment)
        for replica in question.replicas[len(placed) :]:
            one = replace(question, replicas=(replica,))
            if not (found := one.plan()).complete:
                made = self._room(self._most - len(moves))
                if not made:
                    return ()
                moves += made
                for move in made:
                    self._done(move)
                found = one.plan()
            self._take(found.assignments[0])
        return tuple(moves)

    def _take(self, assignment: Assignment) -> None:
        cluster, demand = self._question.cluster, self._question.ask.demand
        name = demand.request.request_id or NEWCOMER
        taken = demand.reservation(name, assignment.replica, 0, assignment.devices)
        cluster.set_reservations(assignment.node, (*cluster.reservations(assignment.node), taken))

    def _done(self, move: Move) -> None:
        apply(self._question, move)
        self._moved.add((move.request_id, move.to.replica))

    def _room(self, most: int) -> tuple[Move, ...]:
        """As few moves as were found to make room for one replica."""
        ask = self._question.ask
        nodes = nearest(ask, _NODES)
        for size in range(1, most + 1):
            for chosen in leaving(ask, nodes, size, self._movable)[: self._tries]:
                if room_without(ask, chosen) and (moves := self._elsewhere(chosen)):
                    return moves
        return ()

    def _movable(self, reservations: Sequence[Reservation]) -> Iterator[Held]:
        """Each by itself. Who has moved once stays."""
        mine = self._question.request.request_id or NEWCOMER
        for held in reservations:
            known = (held.request_id, held.replica)
            if held.kind is Kind.HARD or held.request_id == mine or known in self._moved:
                continue
            if self._question.tenants(held) is not None:
                yield (held,)

    def _elsewhere(self, chosen: Leaving) -> tuple[Move, ...]:
        """Their moves one after another, where each finds a place and then there is room on the node."""
        moves: list[Move] = []
        with self._question.cluster.trial():
            for held in chosen.gone:
                move = self._move(chosen.node, held)
                if move is None:
                    return ()
                apply(self._question, move)
                moves.append(move)
            return tuple(moves) if room_on(self._question.ask, chosen.node) else ()

    def _move(self, node: str, held: Reservation) -> Move | None:
        """To another node, else to other devices of the same one."""
        to = _place(self._question, held, {node: self._whole(node)})
        if to is None and held.devices:
            to = _place(self._question, held, {node: {"devices": held.devices}})
        if to is None or (to.node == node and (not to.devices or set(to.devices) & set(held.devices))):
            return None
        return Move(held.request_id, node, held.devices, to)

    def _whole(self, node: str) -> dict[str, Any]:
        facts = self._question.cluster.facts(node)
        assert facts is not None, "a node that rows were found on"
        devices = tuple(device.uuid for device in facts.devices)
        return {"devices": devices, "cpu_milli": facts.cpu_milli, "memory_mib": facts.memory_mib}


def _place(question: Question, held: Reservation, full: Mapping[str, dict[str, Any]]) -> Assignment | None:
    """Where the container would go were this of these nodes full."""
    tenant = question.tenants(held)
    assert tenant is not None, "who may move is known"
    request = tenant.request
    strategy = question.strategies.get(request.strategy, question.strategy)
    asked = replace(question, request=request, strategy=strategy, replicas=(held.replica,), others=tenant.others)
    cluster = question.cluster
    with cluster.trial():
        for node, what in full.items():
            cluster.set_reservations(node, (*cluster.reservations(node), _NOTHING.model_copy(update=what)))
        plan = replace(asked, set_aside=frozenset()).plan()
    return plan.assignments[0] if plan.complete else None


_NOTHING: Final = Reservation(
    request_id="full",
    replica=0,
    generation=0,
    devices=(),
    share_micro=SHARE_WHOLE_MICRO,
    device_memory_mib=0,
    cpu_milli=0,
    memory_mib=0,
)
"""Stands for what is not to be used while a place is looked for."""


def _is(held: Reservation, move: Move) -> bool:
    return (held.request_id, held.replica, held.devices) == (move.request_id, move.to.replica, move.devices)


__all__ = ["BLOCK", "MOST_MOVES", "apply", "move_away", "moves_for", "moves_to_widen"]

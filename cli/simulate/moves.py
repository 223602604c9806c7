"""What the placer's defragmentation would do once a trace has been played: the moves after which the next one fits."""

from __future__ import annotations

from cli.simulate.play import WAITING, Played
from cli.simulate.result import where
from services.placer.core.outcome import Assignment
from services.placer.core.question import Tenant
from shared.messages import Reservation


def moves(played: Played) -> tuple[str, list[str]] | None:
    """The first request that waits at the end, and the moves of others that make room for it; none may be found.

    None where nobody waits.
    """
    number = next((number for number, fate in enumerate(played.fates) if fate == WAITING), None)
    if number is None:
        return None

    def tenant(held: Reservation) -> Tenant | None:
        places = played.fates[int(held.request_id)]
        assert not isinstance(places, str), "who holds something has been placed"
        others = tuple(place for place in places if place.replica != held.replica)
        return Tenant(played.arrivals[int(held.request_id)].request, others)

    found = played.world.moves(played.arrivals[number].request, tenant)
    lines = []
    for move in found:
        before = where(played, (Assignment(move.to.replica, move.node, move.devices),))
        name = played.arrivals[int(move.request_id)].name
        lines.append(f"{name} from {before} to {where(played, (move.to,))}")
    return played.arrivals[number].name, lines

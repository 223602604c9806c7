"""The cluster as arrays, one row per device, kept up to date node by node; decides nothing."""

from __future__ import annotations

from shared.messages import NodeFacts, Reservation


class Cluster:
    """What every node has, holds and has left."""

    def set_facts(self, node: str, facts: NodeFacts | None, now_us: int) -> None:
        """What the node list says about a node; None forgets it (its reservations stay)."""
        raise NotImplementedError

    def set_reservations(self, node: str, reservations: tuple[Reservation, ...]) -> None:
        """Replaces all reservations of a node, whether or not it is known."""
        raise NotImplementedError

    def reservations(self, node: str) -> tuple[Reservation, ...]:
        raise NotImplementedError

"""Whom the leader places again because a node or a device is lost, and when; only looks.

The node list says what is lost. How long that has been so is counted here, by this placer's own clock since it saw it
first; after a pause, a change of leader or a node's return it is counted anew. Where more nodes cannot be reached than
can have died at once, we may be the ones who are cut off: nothing is done and an alarm is raised.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass

from services.placer.core.cluster import Cluster
from services.placer.core.intents import Intent, Rules
from services.placer.core.intents_lost import GiveUp, MoveOff
from services.placer.core.ledger import Ledger
from services.placer.core.lost import leaves_unwatched, lost_nodes, moving_to, on_lost_devices, stranded, unreachable


@dataclass
class _Lost:
    """A node that is lost; `answers`: whether its backend did when it was asked last, None until then."""

    since_us: int
    answers: bool | None = None
    silent_us: int = 0
    """Since when its backend does not answer either."""


class Losses:
    """The intents it returns look again when they are planned, and fail with a leader that was deposed."""

    def __init__(self, ledger: Ledger, cluster: Cluster, rules: Rules) -> None:
        self._ledger, self._cluster, self._rules = ledger, cluster, rules
        self._nodes: dict[str, _Lost] = {}
        self._devices: dict[tuple[str, int, int], int] = {}
        """Since when who was seen to be on a lost device."""
        self._tried_us: dict[Hashable, int] = {}
        self._looked_us = 0
        self.too_many: str | None = None
        """Why nobody is placed again though nodes are lost."""

    # --- what backends say ---

    @property
    def unheard(self) -> list[str]:
        """Lost nodes whose backend was not asked since."""
        return [node for node, lost in self._nodes.items() if lost.answers is None]

    @property
    def lost(self) -> Collection[str]:
        """Nodes of which it matters whether their backends answer."""
        return self._nodes.keys()

    def answered(self, node: str) -> None:
        if (lost := self._nodes.get(node)) is not None:
            lost.answers = True

    def failed(self, node: str, now_us: int) -> None:
        lost = self._nodes.get(node)
        if lost is not None and lost.answers is not False:
            lost.answers, lost.silent_us = False, now_us

    # --- what follows ---

    def next(self, now_us: int) -> list[Intent]:
        """Once per beat: those whose time has come, each in turn, the most important first."""
        self._look(now_us)
        due = {intent.key: (priority, intent) for priority, intent in self._due(now_us)}
        tried = self._tried_us = {key: self._tried_us.get(key, -1) for key in due}
        chosen = sorted(due, key=lambda key: (tried[key], -due[key][0], str(key)))[: self._rules.lost_at_once]
        tried |= dict.fromkeys(chosen, now_us)
        return [due[key][1] for key in chosen]

    def _look(self, now_us: int) -> None:
        if now_us - self._looked_us > self._rules.lease_ttl_us:
            self._nodes, self._devices = {}, {}
        self._looked_us = now_us
        away, known = unreachable(self._cluster)
        lost = lost_nodes(self._cluster)
        self.too_many = None
        if away > self._rules.lost_most_ratio * known:
            self.too_many, lost = f"{away} of {known} nodes cannot be reached: nobody is placed again", []
        self._nodes = {node: self._nodes.get(node) or _Lost(now_us) for node in lost}
        seen = on_lost_devices(self._cluster, self._ledger)
        self._devices = {who: self._devices.get(who, now_us) for who in seen}

    def _due(self, now_us: int) -> Iterator[tuple[int, Intent]]:
        """With the priority of its request."""
        over_us = now_us - self._rules.lost_grace_us
        for node, lost in self._nodes.items():
            if lost.since_us <= over_us:
                yield from self._on_node(node, lost, over_us)
        for (request_id, replica, _), since_us in self._devices.items():
            if since_us <= over_us:
                yield self._priority(request_id), MoveOff(request_id, replica)

    def _on_node(self, node: str, lost: _Lost, over_us: int) -> Iterator[tuple[int, Intent]]:
        silent = lost.answers is False and lost.silent_us <= over_us
        for held in self._ledger.reservations(node):
            stored = self._ledger.records.get(held.request_id)
            record = stored.value if stored else None
            if record is None or record.body is None:
                continue
            if silent and (stranded(record, node) or moving_to(record, node)):
                yield record.body.priority, GiveUp(record.request_id, node)
            elif lost.answers and leaves_unwatched(record) and stranded(record, node):
                yield record.body.priority, MoveOff(record.request_id, held.replica)

    def _priority(self, request_id: str) -> int:
        record = self._ledger.records[request_id].value
        return record.body.priority if record and record.body else 0

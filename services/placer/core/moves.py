"""Whom the leader lets move next, and when; only looks."""

from __future__ import annotations

from services.placer.core.cluster import Cluster
from services.placer.core.intents import SECOND_US, Intent, Rules
from services.placer.core.intents_moves import MakeRoom, MoveAway, Widen
from services.placer.core.ledger import Ledger
from services.placer.core.queue import Queue
from services.placer.core.risk import who_wants_away

LOOK_AGAIN_US = 5 * SECOND_US
"""Between two plans that nobody asked for: one is many decisions, and what helps now may not be known at once."""
WIDEN_AGAIN_US = 30 * SECOND_US
"""The same where nobody waits: nobody is in a hurry, and the search has to look at several sizes."""


class Moves:
    """The intents it returns look again when they are planned, and fail with a leader that was deposed."""

    def __init__(self, ledger: Ledger, cluster: Cluster, queue: Queue, rules: Rules) -> None:
        self._ledger, self._cluster, self._queue, self._rules = ledger, cluster, queue, rules
        self._tried_us: dict[tuple[str, int], int] = {}
        self._looked_us = -LOOK_AGAIN_US

    def away(self, now_us: int) -> list[Intent]:
        """One of those who want to leave a device at risk, each in turn."""
        waits = {who: self._tried_us.get(who, -1) for who in who_wants_away(self._cluster, self._ledger)}
        self._tried_us = waits
        if not waits:
            return []
        first = min(waits, key=lambda who: (waits[who], who))
        waits[first] = now_us
        return [MoveAway(*first)]

    def next(self, now_us: int) -> list[Intent]:
        """For whom an operator asked; else, where that is the policy, for the first that waits or for who may come."""
        if asked := sorted(self._ledger.helped):
            return [MakeRoom(request_id) for request_id in asked]
        if self._rules.defragment == "off":
            return []
        head = self._queue.head
        if now_us - self._looked_us < (WIDEN_AGAIN_US if head is None else LOOK_AGAIN_US):
            return []
        self._looked_us = now_us
        if head is not None:
            return [MakeRoom(head, by_policy=True)]
        return [Widen()] if self._rules.defragment == "widen" else []

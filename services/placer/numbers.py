"""The placer's numbers for /metrics: requests by state, who waits, what is wrong with the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from services.placer.core.core import Core
from shared.messages import State
from shared.metrics import Metric, Sample

_LEADER: Final = Metric("laxity_placer_leader", "gauge", "1 for the placer that leads, 0 for the others.")
_ALARM: Final = Metric(
    "laxity_ledger_alarm", "gauge", "1 while this placer decides nothing: the ledger is another one."
)
_REBUILT: Final = Metric(
    "laxity_ledger_rebuilt_nodes", "gauge", "Nodes with reservations of containers that no key explains."
)
_REQUESTS: Final = Metric(
    "laxity_requests", "gauge", "Requests that are not over, by state; by the leader alone.", ("state",)
)
_WAITING: Final = Metric("laxity_requests_waiting", "gauge", "Requests that wait for a place; by the leader alone.")
_OWNED: Final = Metric("laxity_placer_owned_requests", "gauge", "Requests that this placer carries out.")
METRICS: Final = (_LEADER, _ALARM, _REBUILT, _REQUESTS, _WAITING, _OWNED)


def numbers(core: Core) -> Iterator[Sample]:
    leads = core.leader.leads
    yield from _LEADER.of(leads)
    yield from _ALARM.of(core.following.alarm is not None)
    yield from _OWNED.of(len(core.ledger.owned.get(core.me, ())))
    if not leads:
        return
    yield from _REBUILT.of(len(core.ledger.rebuilt))
    yield from _WAITING.of(len(core.ledger.waiting))
    states = Counter(record.state for record in core.ledger.live_records())
    for state in State:
        if states[state] or not state.final:
            yield from _REQUESTS.of(states[state], state)

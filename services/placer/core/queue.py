"""The queue, as the leader has it: whom to try, in which order and when, and for whom room is kept; only looks.

A waiting request sleeps until something happens that can help it: somebody leaves, shrinks or stops keeping room on
a node that could take it, or the facts of such a node change. docs/placement.md states the order and its bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from services.placer.core.columns import Bools, Ints
from services.placer.core.demand import Demand
from services.placer.core.intents import Chooser, Intent, Rules
from services.placer.core.intents_decide import TryWaiting
from services.placer.core.intents_leader import SetShadow
from services.placer.core.ledger import Ledger, Stored
from services.placer.core.records import UNPLACED, order, sized, waited_us
from services.placer.core.rows import Ask
from services.placer.core.shadow import Shadow, lacking, shadow
from services.placer.core.sieve import Sieve
from shared.admission import DeviceType
from shared.messages import RequestRecord, ShadowPlace, State


@dataclass
class _Waiter:
    """What the leader remembers of one waiting request; a new leader starts anew."""

    tried: int = -1
    """The number of its record's last step when it was tried; it sleeps while that is still the last one."""
    hopeless: bool = False
    """No healthy node could take it, were those gone who are there: it gets no shadow before something happens."""
    nearest: float = np.inf
    """The least that its shadow has lacked."""
    since_us: int = 0
    """When that was seen, or the shadow first."""
    rests_until_us: int = 0
    """Its shadow came no nearer for too long: others may have the room until then."""


@dataclass(frozen=True)
class _Waiting:
    stored: Stored[RequestRecord]
    record: RequestRecord
    waiter: _Waiter


class Queue:
    """The intents it returns look again when they are planned, and fail with a leader that was deposed."""

    def __init__(self, ledger: Ledger, chooser: Chooser, rules: Rules, counters: Counter[str]) -> None:
        self._ledger, self._chooser, self._rules, self._counters = ledger, chooser, rules, counters
        self._waiters: dict[str, _Waiter] = {}
        self._changed: set[str] = set()
        self._review = False
        self.head: str | None = None
        """Who was the first that waits."""

    def node_changed(self, node: str) -> None:
        """Something that the node list says of it did."""
        self._changed.add(node)

    def learned(self, device: DeviceType | None) -> None:
        """Something was, of devices of this type."""
        cluster = self._chooser.cluster
        for name in map(cluster.name, cluster.all_slots().tolist()) if device and self._ledger.waiting else ():
            facts = cluster.facts(name)
            if facts and any((each.model, each.regime) == device for each in facts.devices):
                self._changed.add(name)

    def review(self) -> None:
        """Next time, look at every shadow again: is it usable, does it come nearer, is there a better one?"""
        self._review = True

    def forget(self) -> None:
        """Another one leads, or the ledger is another: what is remembered here is void."""
        self._waiters.clear()
        self._changed.clear()
        self._ledger.freed.clear()

    def next(self, now_us: int, wall_us: int) -> list[Intent]:
        """The waiting requests to try now, in order, and the shadows to set or to drop."""
        waiting = self._in_order(now_us, wall_us)
        self.head = waiting[0].record.request_id if waiting else None
        self._wake(waiting)
        due = [each for each in waiting if self._is_due(each, wall_us)][: self._rules.batch]
        for each in due:
            each.waiter.tried = each.record.steps[-1].number
        self._counters["queue.tried"] += len(due)
        tries = [TryWaiting(each.record.request_id, len(each.record.replicas)) for each in due]
        return [*tries, *self._shadows(waiting, now_us, wall_us)]

    # --- whom to try ---

    def _in_order(self, now_us: int, wall_us: int) -> list[_Waiting]:
        """All that wait, but for those whose back-off is not over."""
        stored = [self._ledger.records[request_id] for request_id in self._ledger.waiting]
        here = {each.value.request_id: (each, each.value) for each in stored if each.value and each.value.body}
        for request_id in self._waiters.keys() - here.keys():
            del self._waiters[request_id]
        found = [
            _Waiting(each, record, self._waiters.setdefault(request_id, _Waiter()))
            for request_id, (each, record) in here.items()
            if now_us - each.seen_us >= record.backoff_us
        ]
        return sorted(found, key=lambda each: order(each.record, wall_us, self._rules.age_us))

    def _is_due(self, each: _Waiting, wall_us: int) -> bool:
        body = each.record.body
        too_late = body and body.place_by_us is not None and wall_us > body.place_by_us
        return bool(too_late and each.record.state == State.QUEUED) or not _asleep(each)

    def _wake(self, waiting: list[_Waiting]) -> None:
        """Those that one of the nodes on which something happened could take."""
        nodes = self._changed | self._ledger.freed
        self._changed.clear()
        self._ledger.freed.clear()
        slots = np.array([slot for slot in map(self._chooser.cluster.slot, nodes) if slot is not None], np.int64)
        if not len(slots):
            return
        could: dict[Hashable, bool] = {}
        sleeping = {each.record.request_id for each in waiting if _asleep(each)}
        for request_id, waiter in self._waiters.items():
            record = self._ledger.records[request_id].value
            assert record is not None, "only what waits is remembered"
            ask = self._ask(record)
            if ask.kind not in could:
                could[ask.kind] = bool(_could_take(ask)[slots].any())
            if could[ask.kind]:
                waiter.tried, waiter.hopeless = -1, False
                self._counters["queue.woken"] += request_id in sleeping

    def _ask(self, record: RequestRecord) -> Ask:
        assert record.body is not None, "what waits has a body"
        return Ask(self._chooser.cluster, Demand.of(sized(record, record.body)), self._chooser.capabilities)

    # --- for whom room is kept ---

    def _shadows(self, waiting: list[_Waiting], now_us: int, wall_us: int) -> Iterator[Intent]:
        """The first few that do not fit, and can one day, have shadows that are disjoint; all others have none.

        That of a request which is tried just now comes to nothing where it is placed.
        """
        review, self._review = self._review, False
        barred: list[ShadowPlace] = []
        heads = plans = 0
        for at, each in enumerate(waiting):
            if heads == self._rules.heads and not each.record.shadow:
                continue
            places = each.record.shadow
            if heads == self._rules.heads or now_us < each.waiter.rests_until_us:
                places = ()
            elif review if places else _asleep(each) and not each.waiter.hopeless and plans < 2 * self._rules.heads:
                plans += 1
                places = self._planned(waiting[at:], barred, now_us, wall_us)
            heads += bool(places)
            barred += places
            if places != each.record.shadow:
                yield SetShadow(each.record.request_id, places)

    def _planned(
        self, waiting: list[_Waiting], barred: list[ShadowPlace], now_us: int, wall_us: int
    ) -> tuple[ShadowPlace, ...]:
        """What is to be kept for the first of these: what is kept now, unless it is of no use or another place lacks at
        most half as much; those who are there came later, so for less it is not worth while.
        """
        each, ask = waiting[0], self._ask(waiting[0].record)
        replicas = [one.replica for one in each.record.replicas if one.state in UNPLACED]
        with self._chooser.cluster.without_shadows([other.record.request_id for other in waiting]):
            best = shadow(ask, replicas, barred)
            now = lacking(ask, each.record.shadow, barred) if each.record.shadow else None
        each.waiter.hopeless = best is None
        if best is None or (now is not None and (now <= best.lacks or now < 2 * best.lacks)):
            best = None if now is None else Shadow(each.record.shadow, now)
        if best is None or not self._comes_nearer(each, best.lacks, now_us, wall_us):
            return ()
        return best.places

    def _comes_nearer(self, each: _Waiting, lacks: float, now_us: int, wall_us: int) -> bool:
        """False once it has not for as long as the request had waited before, at least `patience_us`. Then others may
        have the room for as long as it was kept in vain.
        """
        waiter = each.waiter
        if not each.record.shadow or lacks < waiter.nearest:
            waiter.nearest, waiter.since_us = lacks, now_us
        kept_us = now_us - waiter.since_us
        waited = waited_us(each.record, wall_us) - kept_us
        if kept_us <= max(self._rules.patience_us, waited):
            return True
        waiter.rests_until_us = now_us + kept_us
        return False


def _asleep(each: _Waiting) -> bool:
    return each.waiter.tried == each.record.steps[-1].number


def _could_take(ask: Ask) -> Bools:
    """The nodes that could take a replica one day, as far as is known."""
    could = np.zeros(len(ask.cluster.nodes), np.bool_)
    slots: Ints = Sieve.of(ask).sifted().possible.slots
    could[slots] = True
    return could

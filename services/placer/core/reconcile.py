"""Judges what a backend lists on a node against the ledger: what to note, to start again, to stop, to leave alone.

Containers may outlive everything else: the placer that started them, the ledger that placed them. So nothing is
removed unless its own key proves that it should not run. A key that is absent proves nothing, nor does a container
of another ledger, or one that is newer than its key: those are left alone, accounted for, and an alarm is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from services.placer.core.containers import Found, Listed, ListNode, Remove, Start, Stop
from services.placer.core.intents import Intent
from services.placer.core.intents_leader import Account
from services.placer.core.intents_life import MarkExited, MarkGone, MarkStarted
from services.placer.core.ledger import Ledger
from services.placer.core.records import RUNNABLE, labels_of, newest, replica_of, site_of
from shared.effects import Effect
from shared.errors import FieldError
from shared.messages import ContainerLabels, ReplicaRecord, RequestRecord, Reservation, State


@dataclass(frozen=True, slots=True)
class Alarm:
    """A container that nobody may touch, and why."""

    kind: str
    found: Found


@dataclass
class Judgement:
    intents: list[Intent] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)


@dataclass(frozen=True)
class Judge:
    """One placer's eyes: what it owns, which ledger ids are its own, and what it has in hand right now."""

    ledger: Ledger
    me: str
    ledger_id: str
    own_ids: Collection[str]
    busy: Callable[[str], bool]
    """By container: a start or stop of it is under way, or ended after the list was asked for."""

    def judge(self, listed: Listed, asked_us: int) -> Judgement:
        """`asked_us`: when the list was asked for; what is younger may rightly be missing in it.

        Where something would follow from what is missing in a glance, that is looked at properly and nothing else done.
        """
        result = self._missing(listed, asked_us)
        if not listed.complete and (result.intents or result.effects or listed.node in self.ledger.rebuilt):
            return Judgement(effects=[ListNode(listed.node)])
        rebuilt: list[Reservation] = []
        for found in listed.found:
            if not self._runs_as_it_should(found):
                self._one(found, result, rebuilt)
        if rebuilt or listed.node in self.ledger.rebuilt:
            result.intents.append(Account(listed.node, tuple(rebuilt)))
        return result

    def doubtful(self, listed: Listed) -> list[str]:
        """Requests whose containers run under a ledger id of our own and are not explained by the view."""
        held = {
            found.labels.reservation.request_id
            for found in listed.found
            if found.running
            and not self._runs_as_it_should(found)
            and found.labels is not None
            and self._unexplained(found.labels) not in {None, "foreign"}
        }
        return sorted(held)

    # --- what is there ---

    def _runs_as_it_should(self, found: Found) -> bool:
        """As nearly all do, so that there is nothing to say: its replica has started, in this generation, here."""
        labels = found.labels
        if not found.running or labels is None or labels.ledger_id != self.ledger_id:
            return False
        held = labels.reservation
        stored = self.ledger.records.get(held.request_id)
        if stored is None or stored.value is None or stored.value.state != State.STARTED:
            return False
        replica = replica_of(stored.value, held.replica)
        if replica is None or replica.state != State.STARTED:
            return False
        return replica.generation == held.generation and replica.node == labels.node

    def _one(self, found: Found, result: Judgement, rebuilt: list[Reservation]) -> None:
        if found.labels is None:
            result.alarms.append(Alarm("unlabelled", found))
            return
        unexplained = self._unexplained(found.labels)
        if unexplained is None:
            self._known(found, found.labels.reservation, result)
        elif found.running:
            result.alarms.append(Alarm(unexplained, found))
            rebuilt.extend(self._rebuilt(found, found.labels))

    def _unexplained(self, labels: ContainerLabels) -> str | None:
        """Why the ledger cannot say whether this container should run; None where it can."""
        if labels.ledger_id not in self.own_ids:
            return "foreign"
        try:
            record = self.ledger.record(labels.reservation.request_id)
        except FieldError:
            return "unreadable"
        if record is None:
            return "absent"
        replica = replica_of(record, labels.reservation.replica)
        if record.final:
            return None
        if replica is None or labels.reservation.generation > newest(replica):
            return "newer"
        site = site_of(record, labels.reservation.replica, labels.reservation.generation)
        if site is None:
            return None
        if site.state == State.HELD:
            return "newer"  # a hold starts nothing: the key is from before its confirmation
        return "elsewhere" if site.node != labels.node else None

    def _known(self, found: Found, held: Reservation, result: Judgement) -> None:
        record = self.ledger.record(held.request_id)
        assert record is not None
        site = site_of(record, held.replica, held.generation)
        if site is None or record.final:
            result.effects.append(_end(found))
        elif site.state in RUNNABLE:
            result.intents.extend(self._observed(found, site, held))
        elif site.state == State.STOPPING:
            if not found.running:
                result.intents.append(MarkGone(*held.which))
        else:
            result.effects.append(_end(found))

    def _observed(self, found: Found, replica: ReplicaRecord, held: Reservation) -> list[Intent]:
        if not found.running:
            return [MarkExited(*held.which, found.exit_code, found.cause)]
        if replica.state == State.PLACED:
            return [MarkStarted(*held.which, found.node)]
        return []

    def _rebuilt(self, found: Found, labels: ContainerLabels) -> list[Reservation]:
        """What an unexplained container holds, unless a reservation of its own stands for it already."""
        held = labels.reservation
        present = {each.which for each in self.ledger.reservations(found.node) if not each.container}
        if held.which in present and labels.ledger_id in self.own_ids:
            return []
        return [held.model_copy(update={"container": found.container})]

    # --- what is not ---

    def _missing(self, listed: Listed, asked_us: int) -> Judgement:
        result = Judgement()
        there = {found.labels.reservation.which for found in listed.found if found.labels}
        for held in self.ledger.reservations(listed.node):
            if held.which in there:
                continue
            stored = self.ledger.records.get(held.request_id)
            record = stored.value if stored else None
            if record is None or stored is None or stored.seen_us >= asked_us or record.owner != self.me:
                continue
            if site := site_of(record, held.replica, held.generation):
                self._gone(record, site, result)
        return result

    def _gone(self, record: RequestRecord, replica: ReplicaRecord, result: Judgement) -> None:
        """Never seen: start it (again). Started and vanished without trace: ended, with an unknown exit code."""
        which = (record.request_id, replica.replica, replica.generation)
        if replica.state == State.STARTED:
            result.intents.append(MarkExited(*which, None))
            return
        labels = labels_of(record, replica, self.ledger_id)
        if self.busy(labels.container):
            return
        if replica.state == State.STOPPING:
            result.intents.append(MarkGone(*which))
        elif replica.state == State.PLACED and record.body is not None:
            result.effects.append(Start(labels, record.body))


def _end(found: Found) -> Effect:
    return (Stop if found.running else Remove)(found.node, found.container)

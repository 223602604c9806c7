"""What this placer tells the world: the steps of records as events, alarms once each, and stories for people.

Who writes a step publishes it, and the owner of a record publishes all of its steps. A writer's lease says up to where
the stream has everything; what it wrote after that is told once more by the leader when the writer is gone, and its
lease is dropped only then: so a step is told whoever dies. What comes twice has the same id.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from services.placer.core.containers import Progress
from services.placer.core.reconcile import Alarm
from services.placer.core.records import event_id, event_of
from shared.effects import Publish
from shared.messages import PULLING, BusEvent, PlaceEvent, RequestRecord, Reservation
from shared.subjects import Subjects

MOST_NOTES = 32
"""Remembered of one request, beyond the steps in its record."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Slow effect: wait until the stream has every event that was said so far."""

    revision: int
    """All that this placer wrote up to it was said."""
    gone: tuple[str, ...] = ()
    """Placers that are no more: all that they left untold was said."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """How a Deliver ends."""

    revision: int
    gone: tuple[str, ...]


class Telling:
    """Remembers what was said, so that it is said once by this process."""

    def __init__(self, subjects: Subjects, me: str) -> None:
        self._subjects = subjects
        self._me = me
        self._said: defaultdict[str, set[int]] = defaultdict(set)
        self._alarmed: set[tuple[str, str]] = set()
        self._progress = 0
        self._notes: defaultdict[str, list[tuple[int, int, int, str]]] = defaultdict(list)
        """Of a request: when, of which replica and generation, and what."""

    def steps(self, record: RequestRecord, ledger_id: str, after: int = 0) -> list[Publish]:
        """Events of the steps after number `after` that were not said yet."""
        said = self._said[record.request_id]
        new = [step for step in record.steps if step.number > after and step.number not in said]
        if not new:
            return []
        said.update(step.number for step in new)
        subject = self._subjects.place_event(record.request_id)
        return [
            Publish(
                subject,
                event_of(record, step, ledger_id),
                event_id(record, step, ledger_id),
                f"laxity.place.{step.state}",
            )
            for step in new
        ]

    def alarm(self, alarm: Alarm, ledger_id: str, wall_us: int) -> list[Publish]:
        """A container that nobody may touch: told once."""
        container = alarm.found.container
        if (alarm.kind, container) in self._alarmed:
            return []
        self._alarmed.add((alarm.kind, container))
        detail = f"{container} on {alarm.found.node} is left alone: {_WHY[alarm.kind]}"
        return [
            self._bus_event(f"container_{alarm.kind}", detail, f"{ledger_id}/alarm/{alarm.kind}/{container}", wall_us)
        ]

    def progress(self, event: Progress, ledger_id: str, wall_us: int) -> Publish:
        """What a start waits for. No step of the record, so it has no number, and an id that no step has."""
        self._progress += 1
        held = event.labels.reservation
        body = PlaceEvent(
            at_us=wall_us,
            request_id=held.request_id,
            state=PULLING,
            generation=held.generation,
            step=0,
            name=event.labels.name,
            detail=event.text,
        )
        event_id = f"{ledger_id}/{held.request_id}/{PULLING}/{self._me}/{self._progress}"
        return Publish(self._subjects.place_event(held.request_id), body, event_id, f"laxity.place.{PULLING}")

    def ledger(self, kind: str, detail: str, wall_us: int) -> Publish:
        """The ledger is not the one that this placer knew (`ledger_foreign`), or was accepted (`ledger_accepted`); too
        many nodes are lost at once (`nodes_lost`).
        """
        return self._bus_event(kind, detail, f"placer/{self._me}/{kind}/{wall_us}", wall_us)

    def _bus_event(self, kind: str, detail: str, event_id: str, wall_us: int) -> Publish:
        body = BusEvent(at_us=wall_us, service="placer", instance=self._me, kind=kind, detail=detail)
        return Publish(self._subjects.bus_event("placer"), body, event_id, f"laxity.bus.{kind}")

    def note(self, held: Reservation, text: str, now_us: int) -> None:
        notes = self._notes[held.request_id]
        notes.append((now_us, held.replica, held.generation, text))
        del notes[:-MOST_NOTES]

    def story(self, request_id: str, record: RequestRecord | None) -> list[str]:
        """The steps in the record, then what this placer did for it, with its own monotonic clock."""
        steps = [
            f"step {step.number}: {step.state}, generation {step.generation}{f', {step.detail}' if step.detail else ''}"
            for step in (record.steps if record else ())
        ]
        notes = self._notes.get(request_id, ())
        return steps + [f"{at_us} replica {number} generation {gen}: {text}" for at_us, number, gen, text in notes]

    def forget(self, request_id: str) -> None:
        self._said.pop(request_id, None)
        self._notes.pop(request_id, None)


_WHY = {
    "unlabelled": "its labels cannot be read",
    "foreign": "it belongs to another ledger; if that was ours, `laxity ledger accept` says so",
    "absent": "the ledger has no key for its request, which proves nothing; `laxity ledger forget` removes it",
    "unreadable": "the key of its request cannot be read",
    "newer": "it is newer than the key of its request: the ledger is older than the container",
    "elsewhere": "the key of its request has it on another node",
}

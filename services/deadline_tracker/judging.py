"""The rows of one batch against what is open: verdicts in stream order, and what they matched; nothing is sent here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from services.deadline_tracker.matched import Matched, TaskVerdict
from services.deadline_tracker.record import DEADLINE_US, STAMP_US, Record, Ring, Task
from shared.deadlines import Outcome, tardiness_us, verdict
from shared.messages import COLUMNS, TaskBatch, TaskEventKind

BEGIN: Final = TaskEventKind.BEGIN.value
END: Final = TaskEventKind.END.value
MET: Final = TaskVerdict.MET
MOST_MET: Final = 1_000
"""Met tasks of a record that are counted at once: as many as that at most wait for somebody who asks."""

Say = Callable[[Record, str, str, dict[str, Any]], None]
"""Told of a verdict that the world should hear: the record as it is now, the kind, the event's id, what is special."""

_VERDICTS: Final = {
    Outcome.MET: TaskVerdict.MET,
    Outcome.MISSED: TaskVerdict.MISSED,
    Outcome.INVALID: TaskVerdict.INVALID,
}


class Judge:
    """For one batch. ``rings`` is in the order of the batch's; ``rings_closed`` says whether one of them was closed."""

    def __init__(self, batch: TaskBatch, rings: Sequence[Ring], counters: Counter[str], say: Say) -> None:
        self.batch, self.rings, self.counters, self.say = batch, rings, counters, say
        self.rings_closed = False
        self.matched = Matched(rings)

    def rows(self) -> None:
        """Judges all rows; the batch must be ``well_formed``.

        Nearly all of them are begins and ends without a gap whose tasks met their deadlines: those are dealt with
        here, with as little as can be. Every other row is judged by ``_row``, which alone knows all the rules.
        """
        if not self.batch.ring:
            return
        add, last, names = self.matched.rows.append, self.batch.ring[0], self.batch.names
        ring = self.rings[last]
        begun, high, met_us = ring.open, ring.high, ring.record.met_us
        for place, kind, seq, begin_seq, number, stamp_us, deadline_us, name in _rows(self.batch):
            if place != last:
                self._put_back(ring, high)
                last, ring = place, self.rings[place]
                begun, high, met_us = ring.open, ring.high, ring.record.met_us
            if seq == high + 1:
                if kind == BEGIN:
                    begun[seq], high = (number, stamp_us, deadline_us, names[name]), seq
                    continue
                task = begun.get(begin_seq) if kind == END else None
                if task and 0 <= (took_us := stamp_us - task[STAMP_US]) <= task[DEADLINE_US]:
                    del begun[begin_seq]
                    add((place, begin_seq, task, stamp_us, MET))
                    met_us.append(took_us)
                    high = seq
                    continue
            self._put_back(ring, high)
            self._row(place, kind, seq, begin_seq, (number, stamp_us, deadline_us, names[name]))
            high = ring.high
        self._put_back(ring, high)

    def _put_back(self, ring: Ring, high: int) -> None:
        ring.high, record = high, ring.record
        if (record.warned or record.asks_anew) and record.crosses:
            for _ in range(record.take_met()):
                self._cross(record, record.judge(Outcome.MET))
        elif len(record.met_us) > MOST_MET:
            record.count_met()

    def _row(self, place: int, kind: int, seq: int, begin_seq: int, row: Task) -> None:
        ring = self.rings[place]
        if kind in (BEGIN, END):
            if seq <= ring.high:
                self.counters["records_again"] += 1
                return
            if seq > ring.high + 1:  # records never seen: the ends of open tasks may be among them
                ring.lose_open()
            ring.high = seq
        match kind:
            case TaskEventKind.BEGIN:
                ring.open[seq] = row
            case TaskEventKind.END:
                self._end(place, begin_seq, row[STAMP_US])
            case TaskEventKind.OVERDUE:
                self._overdue(place, seq)
            case TaskEventKind.ABORTED | TaskEventKind.LOST:
                self._without_end(ring, seq, kind)
            case TaskEventKind.CLOSED:
                ring.lose_open()
                ring.closed = self.rings_closed = True
            case _:
                self.counters["rows_malformed"] += 1

    def _end(self, place: int, begin_seq: int, end_us: int) -> None:
        ring = self.rings[place]
        overdue = ring.overdue.pop(begin_seq, None)
        task = overdue or ring.open.pop(begin_seq, None)
        if task is None:
            self.counters["ends_without_begin"] += 1
            return
        _, begin_us, deadline_us, _ = task
        ring.record.times.add(end_us - begin_us)
        outcome = verdict(begin_us, end_us, deadline_us)
        self.matched.rows.append((place, begin_seq, task, end_us, TaskVerdict.ENDED if overdue else _VERDICTS[outcome]))
        if overdue:
            ring.record.counts["late_record"] += outcome == Outcome.MET
        else:
            self._judge(ring, begin_seq, task, outcome, tardiness_us(begin_us, end_us, deadline_us))

    def _overdue(self, place: int, begin_seq: int) -> None:
        ring = self.rings[place]
        task = ring.open.pop(begin_seq, None)
        if task is None:
            self.counters["records_again"] += 1
            return
        ring.overdue[begin_seq] = task
        self.matched.rows.append((place, begin_seq, task, None, TaskVerdict.OVERDUE))
        self._judge(ring, begin_seq, task, Outcome.MISSED, None)

    def _without_end(self, ring: Ring, begin_seq: int, kind: int) -> None:
        """Aborted is a count of its own, also where overdue was written before; lost only where nothing was."""
        overdue = ring.overdue.pop(begin_seq, None)
        if overdue is None and ring.open.pop(begin_seq, None) is None:
            self.counters["records_again"] += 1
        elif kind == TaskEventKind.ABORTED:
            ring.record.counts["aborted"] += 1
            if overdue:
                ring.record.times.add(None)
        else:
            ring.record.counts["lost"] += overdue is None

    def _judge(self, ring: Ring, seq: int, task: Task, outcome: Outcome, tardy: int | None) -> None:
        record, node = ring.record, self.batch.node
        number, _, deadline_us, name = task
        self._cross(record, record.judge(outcome))  # first: the list of nodes waits for it, and for no single miss
        if outcome == Outcome.MISSED:
            said = {"task": number, "deadline_us": deadline_us, "ring": ring.name, "seq": seq}
            event_id = f"{node}/{ring.name}/{seq}/missed"
            self.say(record, "missed", event_id, {**said, "name": name, "tardiness_us": tardy})

    def _cross(self, record: Record, crossed: str | None) -> None:
        if crossed:
            event_id = f"{self.batch.node}/{record.container}/{record.judged}/{crossed}"
            self.say(record, crossed, event_id, {"task": None, "deadline_us": None})


def well_formed(batch: TaskBatch) -> bool:
    """Whether each row names a ring and a task name that the batch lists."""
    rings, names = set(range(len(batch.rings))), set(range(len(batch.names)))
    return rings.issuperset(batch.ring) and names.issuperset(batch.name)


def _rows(batch: TaskBatch) -> Iterator[tuple[int, ...]]:
    return zip(*map(batch.__dict__.__getitem__, COLUMNS), strict=True)

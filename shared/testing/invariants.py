"""What must hold of a cluster (DESIGN 8), checked from outside: from the ledger's stream and the events alone.

It shares no code with the services that it checks but the messages: fed with everything that was stored, in order,
it collects faults in words. Used by the demo and by tests that kill processes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from shared.messages import (
    PULLING,
    SHARE_WHOLE_MICRO,
    DeadlineEvent,
    NodeReservations,
    PlaceEvent,
    ReplicaRecord,
    RequestRecord,
    Site,
    State,
    TaskBatch,
    TaskEventKind,
)

_FINAL: Final = frozenset(str(state) for state in State if state.final) - {State.EXPIRED}
"""States that nothing follows; an expired hold may be held again."""
_HOLDING: Final = frozenset({State.HELD, State.PLACED, State.STARTED, State.STOPPING})


Held = tuple[str, int, int, str, tuple[str, ...]]
"""Request, replica, generation, node, devices."""


class LedgerChecker:
    """The ledger as its stream tells it, commit by commit."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.commits = 0
        self.records: dict[str, RequestRecord] = {}
        self.nodes: dict[str, NodeReservations] = {}

    def feed(self, key: str, value: bytes | None, headers: Mapping[str, str], pending: int) -> None:
        """One stored write. ``pending``: how many more there are; both sides are compared only where there are none,

        since a key that was written again before it was read is delivered once, in its newest form.
        """
        if key.startswith("node."):
            self._node(key, value)
        elif key.startswith("request."):
            self._request(key, value)
        if "Nats-Batch-Id" in headers and "Nats-Batch-Commit" not in headers:
            return
        self.commits += 1
        if pending == 0:
            self.faults += _difference(self._held(), self._reserved())

    def _node(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.faults.append(f"{key} was deleted")
            return
        found = self.nodes[key] = NodeReservations.trusted(value)
        shares: Counter[str] = Counter()
        for each in found.reservations:
            shares.update(dict.fromkeys(each.devices, each.share_micro))
        self.faults += [
            f"{found.node}: {device} promises {share} of {SHARE_WHOLE_MICRO} millionths"
            for device, share in shares.items()
            if share > SHARE_WHOLE_MICRO
        ]

    def _request(self, key: str, value: bytes | None) -> None:
        if value is None:  # its time is over
            self.records.pop(key, None)
            return
        found, before = RequestRecord.trusted(value), self.records.get(key)
        self.records[key] = found
        if before is not None:
            self.faults += _unsound_change(before, found)
        self.faults += [
            f"{found.request_id} is final, and replica {each.replica} is {each.state}"
            for each in found.replicas
            if found.final and (each.state in _HOLDING or each.leaving)
        ]

    def _held(self) -> Counter[Held]:
        return Counter(
            (record.request_id, each.replica, site.generation, site.node, site.devices)
            for record in self.records.values()
            for each in record.replicas
            for site in _sites(each)
            if site.node is not None
        )

    def _reserved(self) -> Counter[Held]:
        return Counter(
            (each.request_id, each.replica, each.generation, found.node, each.devices)
            for found in self.nodes.values()
            for each in found.reservations
            if each.container is None
        )


def _sites(replica: ReplicaRecord) -> list[ReplicaRecord | Site]:
    """Where it is, and where it moves to or was before."""
    sites = (replica if replica.state in _HOLDING else None, replica.to, replica.leaving)
    return [each for each in sites if each is not None]


def _difference(held: Counter[Held], reserved: Counter[Held]) -> Iterator[str]:
    yield from (f"{each} is held and not reserved" for each in held - reserved)
    yield from (f"{each} is reserved and not held" for each in reserved - held)


def _unsound_change(before: RequestRecord, after: RequestRecord) -> Iterator[str]:
    name = after.request_id
    if before.final and (after.state, after.final) != (before.state, True):
        yield f"{name} was {before.state}, which is final, and became {after.state}"
    if before.steps and (not after.steps or after.steps[-1].number < before.steps[-1].number):
        yield f"{name}: steps went back from {before.steps[-1].number}"
    was = {each.replica: each for each in before.replicas}
    yield from (
        f"{name}/{each.replica}: generation went from {was[each.replica].generation} to {each.generation}"
        for each in after.replicas
        if each.replica in was and not _generation_follows(was[each.replica], each)
    )


def _generation_follows(before: ReplicaRecord, after: ReplicaRecord) -> bool:
    """The same, or the next one for a new placement or a move."""
    was, now = (max(each.generation, each.used) for each in (before, after))
    step = now - was
    follows = step == 0 or (step == 1 and after.node is not None) or (was == 0 and step > 0)
    return follows and before.generation <= after.generation


@dataclass
class _Task:
    begin_us: int
    deadline_us: int
    verdict: str = ""


@dataclass
class _Ring:
    container: str
    open: dict[int, _Task] = field(default_factory=dict)


class EventChecker:
    """The events as the stream has them: what is told twice, what contradicts itself, and all verdicts recounted."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.events = 0
        self.repeated = 0
        """Events that came again with the same id: harmless."""
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Per container: met, missed, lost, aborted, recounted from the batches."""
        self.due_us: dict[tuple[str, int], int] = {}
        """Per (ring, sequence of its begin): when its deadline was, by the node's monotonic clock."""
        self.missed: dict[tuple[str, int], DeadlineEvent] = {}
        """As the tracker said them."""
        self.states: defaultdict[str, dict[int, PlaceEvent]] = defaultdict(dict)
        """Per request: its steps."""
        self._rings: dict[str, _Ring] = {}
        self._seen: set[str] = set()
        self._recounted: set[tuple[str, int]] = set()
        self._high: Counter[str] = Counter()

    def feed(self, subject: str, body: bytes, headers: Mapping[str, str]) -> bool:
        """One stored event; False where its id was there before."""
        event_id = headers.get("ce-id", "")
        if not event_id:
            self.faults.append(f"{subject}: an event without ce-id")
        if event_id in self._seen:
            self.repeated += 1
            return False
        self._seen.add(event_id)
        self.events += 1
        match subject.split(".")[2]:
            case "place":
                self._place(PlaceEvent.trusted(body))
            case "task":
                self._batch(TaskBatch.trusted(body))
            case "deadline":
                self._deadline(DeadlineEvent.trusted(body))
        return True

    def _place(self, event: PlaceEvent) -> None:
        if event.state == PULLING:  # no step
            return
        steps = self.states[event.request_id]
        if event.step in steps:
            self.faults.append(f"{event.request_id}: step {event.step} is told twice under two ids")
        steps[event.step] = event

    def _deadline(self, event: DeadlineEvent) -> None:
        if event.kind != "missed":
            return
        of = (event.ring or "", event.seq or 0)
        if of in self.missed:
            self.faults.append(f"{event.container}: task {event.task} has two verdicts")
        self.missed[of] = event

    # --- the verdicts once more ---

    def _batch(self, batch: TaskBatch) -> None:
        for place, kind in enumerate(batch.kind):
            info = batch.rings[batch.ring[place]]
            ring = self._rings.setdefault(info.ring, _Ring(info.container))
            seq = batch.seq[place]
            if kind in {TaskEventKind.BEGIN, TaskEventKind.END} and seq <= self._high[info.ring]:
                continue  # a monitor that started again tells what it cannot know to be told
            match kind:
                case TaskEventKind.BEGIN:
                    ring.open[seq] = _Task(batch.stamp_us[place], batch.deadline_us[place])
                    self.due_us[info.ring, seq] = batch.stamp_us[place] + batch.deadline_us[place]
                case TaskEventKind.END:
                    self._end(info.ring, batch.begin_seq[place], batch.stamp_us[place])
                case TaskEventKind.OVERDUE:
                    self._judge(info.ring, seq, "missed")
                case TaskEventKind.ABORTED | TaskEventKind.LOST:
                    self._without_end(info.ring, seq, TaskEventKind(kind).name.lower())
            self._high[info.ring] = max(self._high[info.ring], seq)

    def _end(self, ring: str, begin_seq: int, stamp_us: int) -> None:
        task = self._rings[ring].open.get(begin_seq)
        if task is not None:
            self._judge(ring, begin_seq, "met" if stamp_us <= task.begin_us + task.deadline_us else "missed")
            self._rings[ring].open.pop(begin_seq, None)

    def _judge(self, ring: str, seq: int, verdict: str) -> None:
        """The first of end and overdue decides."""
        task = self._rings[ring].open.get(seq)
        if task is None or task.verdict:
            return
        task.verdict = verdict
        self.counts[self._rings[ring].container][verdict] += 1
        if verdict == "missed":
            self._recounted.add((ring, seq))

    def _without_end(self, ring: str, seq: int, verdict: str) -> None:
        task = self._rings[ring].open.pop(seq, None)
        if task is not None and not (task.verdict and verdict == "lost"):
            self.counts[self._rings[ring].container][verdict] += 1

    # --- at the end ---

    def finish(self) -> list[str]:
        """All faults, those included that only the whole shows."""
        said, counted = set(self.missed), self._recounted
        faults = [f"missed by recount and not told: {each}" for each in sorted(counted - said)]
        faults += [f"told as missed and met by recount: {each}" for each in sorted(said - counted)]
        for request_id, steps in self.states.items():
            faults += _unsound_life(request_id, [steps[number] for number in sorted(steps)])
        rings = Counter(ring.container for ring in self._rings.values())
        faults += [f"{container} was started {times} times" for container, times in rings.items() if times > 1]
        return self.faults + faults


def _unsound_life(request_id: str, steps: list[PlaceEvent]) -> Iterator[str]:
    """Steps of one request in their order."""
    numbers = [event.step for event in steps]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"{request_id}: steps {numbers} are not told without a gap"
    for before, after in pairwise(steps):
        if before.state in _FINAL:
            yield f"{request_id}: {after.state} after {before.state}, which is final"
        if after.generation < before.generation:
            yield f"{request_id}: generation {after.generation} after {before.generation}"

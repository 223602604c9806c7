"""The monitor's decisions: which task events to publish and when, what to tell of the node; no file, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from services.monitor.batches import MAX_ROWS, Pile
from services.monitor.container_use import use_of
from services.monitor.devices import Devices, checked, coverage, whole
from services.monitor.gates import Gates
from services.monitor.given import Given, KubeletSaid
from services.monitor.open_tasks import Fields, OpenTasks, RingRows
from services.monitor.probes.base import STALE, Capacity, ContainerReading, Reading, Snapshot
from shared.effects import Draining, Effect, Emit, Publish, Tick
from shared.messages import ContainerMetrics, DeviceMetrics, Measured, NodeMetrics, TaskBatch, TaskEventKind
from shared.subjects import Subjects

BATCH_TYPE: Final = "laxity.task.batch"
METRICS: Final = "metrics"
"""Name of the timer of the heartbeat."""
MAX_PID: Final = 1 << 22
"""The largest pid that Linux gives out."""


@dataclass(frozen=True, slots=True)
class RingsRead:
    """The rings were read. ``clock_us`` is CLOCK_MONOTONIC, read before the first of them.

    ``reads``: of rings that are new or have something new. All others were looked at as well, and had nothing.
    ``vanished``: rings that cannot be read any more, by ring id. ``counts``: what the reader refused, by reason.
    """

    clock_us: int
    wall_us: int
    reads: tuple[RingRows, ...] = ()
    vanished: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probed:
    """A cycle of the probe ended well."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """A cycle of the probe gave nothing: it raised (``error``) or it is still running after its deadline (``hung``)."""

    reason: str


@dataclass(frozen=True, slots=True)
class GateSaid:
    """A line of the gate's process (``gates.Gates`` knows what may stand there); None: there is no gate."""

    told: Mapping[str, Any] | None
    wall_us: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Effect: the core wants a RingsRead by ``at_us``, also when no ring has news.

    ``due_us``: by ring, when the first of its open tasks becomes overdue.
    """

    at_us: int
    due_us: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Forget:
    """Effect: the ring is done with. Its file may go once batch ``counter`` is stored, and not before."""

    ring: str
    counter: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in microseconds; the reasons stand in the settings."""

    batch_us: int = 50_000
    watermark_us: int = 1_000_000
    period_us: int = 1_000_000
    stale_after_us: int = 3_000_000
    gate_margin_us: int | None = None
    """None: no process serves gates on this node."""
    kubelet: bool = False
    """Whether there is one that is asked for what its device plugins gave away."""


class Core:
    """One node. Nothing is kept over a restart: rings are read again under a new start id, the tracker counts once."""

    def __init__(
        self,
        node: str,
        start_id: str,
        boot_id: str,
        capacity: Capacity,
        *,
        subjects: Subjects | None = None,
        labels: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.node, self.start_id, self.boot_id = node, start_id, boot_id
        self.limits = limits or Limits()
        self._capacity = capacity
        self._subjects = subjects or Subjects()
        self._labels = dict(labels or {})
        self._rings: dict[str, OpenTasks] = {}
        self._due_us: dict[str, int] = {}
        """By ring, of those with an undecided open task: when the first one becomes overdue."""
        self._pile = Pile()
        self._counter = 0
        self._watermark_us = 0
        self._told_us: int | None = None
        self._heartbeats = 0
        self._devices = Devices(self.limits.stale_after_us)
        margin_us = self.limits.gate_margin_us
        self._gates = None if margin_us is None else Gates(margin_us)
        self._given = Given() if self.limits.kubelet else None
        self._snapshot: Snapshot | None = None
        self._snapshot_us = 0
        self._last = RingsRead(0, 0)
        self._counts: Counter[str] = Counter()
        self._counts_of_closed: Counter[int] = Counter()
        self.told: NodeMetrics | None = None
        """The last heartbeat."""
        self._lost_of_closed = 0
        self._busy_of_closed: Counter[str] = Counter()

    def handle(self, event: object, now_us: int) -> list[Effect]:
        """What to do about one event. Others than the monitor's own concern nothing here."""
        match event:
            case RingsRead():
                return self._take(event)
            case Tick() if event.name == METRICS:
                return [self._heartbeat(now_us, event.wall_us, draining=False)]
            case Probed():
                self._devices.take(event.snapshot, now_us)
                self._snapshot, self._snapshot_us = event.snapshot, now_us
            case ProbeFailed():
                self._counts[f"probe.{event.reason}"] += 1
                self._devices.miss()
            case GateSaid():
                if self._gates is not None and self._gates.take(event.told):
                    return [self._heartbeat(now_us, event.wall_us, draining=False)]
            case KubeletSaid():
                if self._given is not None:
                    self._given.take(event, now_us)
            case Draining():
                return [*self._flush(self._last), self._heartbeat(now_us, self._last.wall_us, draining=True)]
        return []

    def check(self) -> None:
        """Assert the invariants of the task protocol and of the devices."""
        for ring, tasks in self._rings.items():
            tasks.check()
            assert ring == tasks.info.ring, "a ring under the id of another"
            assert not tasks.closed, "a closed ring is kept after its batch"
        assert self._watermark_us <= self._last.clock_us, "a watermark beyond the last reading of the clock"
        due_us = {ring: due_us for ring, tasks in self._rings.items() if (due_us := tasks.next_due_us) is not None}
        assert self._due_us == due_us, "an open task that nobody waits for"
        self._devices.check()

    def story(self, id: str) -> list[str]:  # noqa: A002 - the name that every core gives it
        """What is known of a ring, of all rings of a container, or of one open task (``<ring>/<begin seq>``)."""
        return [
            line
            for ring, tasks in self._rings.items()
            if id.partition("/")[0] in (ring, tasks.info.container)
            for line in _told(ring, tasks, id.partition("/")[2])
        ]

    def _take(self, event: RingsRead) -> list[Effect]:
        """One reading of all rings. Decisions and late ends are published at once, others may gather."""
        self._last = event
        decided = False
        for read in event.reads:
            decided |= self._take_ring(read, event.clock_us)
        for ring in event.vanished:
            decided |= self._take_vanished(ring, event.clock_us)
        decided |= self._pass_quiet(event)
        flushed = self._flush(event) if decided or self._is_time(event.clock_us) else []
        forget = [Forget(ring, self._counter) for ring in self._drop_closed()]
        return [*flushed, *forget, Wake(self._wake_us(event.clock_us), dict(self._due_us))]

    def _take_ring(self, read: RingRows, clock_us: int) -> bool:
        """Add what one read gave to the next batch; True if there is a decision in it."""
        ring = read.info.ring
        tasks = self._rings.get(ring)
        if tasks is None:
            tasks = self._rings[ring] = OpenTasks(read.info)
        lost_before = tasks.lost_records
        rows = tasks.take(read, clock_us)
        self._keep(ring, tasks, rows, tasks.lost_records - lost_before)
        return tasks.ended_late or len(rows) > len(read.rows)

    def _pass_quiet(self, event: RingsRead) -> bool:
        """Rings that had nothing new, but whose open tasks may have become overdue."""
        late = [ring for ring, due_us in self._due_us.items() if due_us < event.clock_us]
        quiet = set(late).difference(read.info.ring for read in event.reads) if late else ()
        for ring in quiet:
            tasks = self._rings[ring]
            self._keep(ring, tasks, tasks.pass_quiet(event.clock_us), 0)
        return bool(quiet)

    def _take_vanished(self, ring: str, clock_us: int) -> bool:
        tasks = self._rings.get(ring)
        if tasks is None or tasks.closed:
            return False
        self._keep(ring, tasks, tasks.vanish(clock_us), 0)
        return True

    def _keep(self, ring: str, tasks: OpenTasks, rows: Sequence[Fields], lost: int) -> None:
        if tasks.next_due_us is not None:
            self._due_us[ring] = tasks.next_due_us
        else:
            self._due_us.pop(ring, None)
        if rows or lost:
            self._pile.add(tasks.info, rows, lost)

    def _drop_closed(self) -> list[str]:
        """Rings that were closed by this reading: nothing more is known of them but their counts."""
        closed = [ring for ring, tasks in self._rings.items() if tasks.closed]
        for ring in closed:
            tasks = self._rings.pop(ring)
            self._counts_of_closed.update(tasks.counts)
            self._lost_of_closed += tasks.lost_records
            self._busy_of_closed[tasks.info.container] += tasks.busy_us
        return closed

    def _is_time(self, clock_us: int) -> bool:
        """Whether a batch is due although nothing was decided: rows have gathered, or a watermark is wanted.

        Rather a fifth of the time too early, with a reading that came for another reason, than by one for it alone.
        """
        if self._told_us is None or self._pile.rows > MAX_ROWS:
            return True
        early_us = self.limits.batch_us // 5 if self._pile else 0
        return clock_us >= self._next_batch_us(self._told_us) - early_us

    def _next_batch_us(self, told_us: int) -> int:
        return told_us + (self.limits.batch_us if self._pile else self.limits.watermark_us)

    def _wake_us(self, clock_us: int) -> int:
        """When the rings must be read again although none has news."""
        batch_us = self._next_batch_us(clock_us if self._told_us is None else self._told_us)
        return min(batch_us, 1 + min(self._due_us.values(), default=batch_us))

    def _flush(self, event: RingsRead) -> list[Effect]:
        """Everything gathered, in order. Only the last batch may say that all up to this reading has been taken."""
        *before, last = self._pile.take()
        self._told_us = event.clock_us
        publishes: list[Effect] = [self._publish(fields, event.wall_us) for fields in before]
        self._watermark_us = max(self._watermark_us, event.clock_us)
        return [*publishes, self._publish(last, event.wall_us)]

    def _publish(self, fields: dict[str, Any], wall_us: int) -> Publish:
        self._counter += 1
        batch = TaskBatch(
            node=self.node,
            start_id=self.start_id,
            counter=self._counter,
            boot_id=self.boot_id,
            at_us=wall_us,
            watermark_us=self._watermark_us,
            **fields,
        )
        return Publish(self._subjects.task_events(self.node), batch, batch.batch_id, BATCH_TYPE, chained=True)

    def _heartbeat(self, now_us: int, wall_us: int, *, draining: bool) -> Emit:
        self._heartbeats += 1
        devices = self._devices.metrics(now_us, wall_us)
        if self._gates is not None:
            devices = tuple(map(self._gates.judged, devices))
        if self._given is not None:
            devices = self._given.marked(devices)
        self.told = NodeMetrics(
            node=self.node,
            start_id=self.start_id,
            counter=self._heartbeats,
            at_us=wall_us,
            mono_us=now_us,
            period_us=self.limits.period_us,
            devices=devices,
            containers=self._containers(now_us),
            labels=self._labels,
            cpu_milli=self._capacity.cpu_milli,
            memory_mib=self._capacity.memory_mib,
            foreign_cpu_milli=whole(self._node_value("foreign_cpu_milli", now_us)),
            foreign_memory_mib=whole(self._node_value("foreign_memory_mib", now_us)),
            counters=self._counters(devices),
            draining=draining,
            **(self._given.told(now_us) if self._given is not None else {}),
        )
        return Emit(self._subjects.metrics(self.node), self.told)

    def _fresh(self, now_us: int) -> Snapshot | None:
        """The last snapshot unless it is too old to be told as the present."""
        return self._snapshot if now_us - self._snapshot_us <= self.limits.stale_after_us else None

    def _node_value(self, field: str, now_us: int) -> Measured:
        snapshot = self._fresh(now_us)
        reading: Reading = getattr(snapshot, field) if snapshot else Reading(None, STALE)
        return checked(field, reading, self._counts)

    def _containers(self, now_us: int) -> tuple[ContainerMetrics, ...]:
        """What the probe saw, and containers that it did not see but whose rings are read."""
        snapshot, tasks_us = self._fresh(now_us), self._tasks_us(now_us)
        found = {
            reading.container: self._container(reading, tasks_us)
            for reading in (snapshot.containers if snapshot else ())
        }
        for tasks in self._rings.values():
            if (name := tasks.info.container) not in found:
                pids = (tasks.pid,) if tasks.pid else ()
                found[name] = _by_rings(name, tasks.info.request_id, pids, tasks_us[name])
        self._busy_of_closed = Counter({name: us for name, us in self._busy_of_closed.items() if name in found})
        return tuple(found[container] for container in sorted(found))

    def _tasks_us(self, now_us: int) -> dict[str, int]:
        """Of each container of which rings are or were read."""
        found = dict(self._busy_of_closed)
        for tasks in self._rings.values():
            name = tasks.info.container
            found[name] = found.get(name, 0) + tasks.busy_us_at(now_us)
        return found

    def _container(self, reading: ContainerReading, tasks_us: Mapping[str, int]) -> ContainerMetrics:
        name, pod = reading.container, reading.pod
        said: dict[str, Any] = {"tasks_us": tasks_us[name]} if name in tasks_us else {}
        if pod is not None:
            said |= {"pod": pod.name, "namespace": pod.namespace}
        return ContainerMetrics(
            container=name,
            request_id=reading.request_id,
            pids=tuple(pid for pid in reading.pids if 0 < pid <= MAX_PID),
            cpu_ratio=checked("cpu_ratio", reading.cpu_ratio, self._counts),
            memory_mib=checked("memory_mib", reading.memory_mib, self._counts),
            use=use_of(reading.use, self._counts),
            **said,
        )

    def _counters(self, devices: Sequence[DeviceMetrics]) -> dict[str, int]:
        fields, known = coverage(devices)
        kinds, lost = self._counts_of_closed.copy(), self._lost_of_closed
        for ring in self._rings.values():
            lost += ring.lost_records
            for kind, count in ring.counts.items():  # Counter.update costs five times as much
                kinds[kind] += count
        tasks = {f"tasks.{kind.name.lower()}": kinds[kind] for kind in TaskEventKind} | {"tasks.lost_records": lost}
        rings = {f"rings.{reason}": count for reason, count in self._last.counts.items()}
        probe = {f"probe.{name}": count for name, count in (self._snapshot.counts if self._snapshot else {}).items()}
        gate = {f"gate.{name}": count for name, count in (self._gates.counts if self._gates else {}).items()}
        given = self._given.counts if self._given else {}
        now = {"probe.fields": fields, "probe.fields_known": known, "rings.open": len(self._rings)}
        return {**self._counts, **self._devices.counts, **tasks, **rings, **probe, **gate, **given, **now}


@lru_cache(maxsize=256)
def _by_rings(name: str, request_id: str | None, pids: tuple[int, ...], tasks_us: int) -> ContainerMetrics:
    """What is known of a container by its rings alone; where no task ran it is what it was at the last heartbeat."""
    return ContainerMetrics(container=name, request_id=request_id, pids=pids, tasks_us=tasks_us)


def _told(ring: str, tasks: OpenTasks, seq: str) -> list[str]:
    """The lines of a story about one ring; only those of one task where ``seq`` names one."""
    counts = ", ".join(f"{TaskEventKind(kind).name.lower()} {count}" for kind, count in sorted(tasks.counts.items()))
    lines = [f"ring {ring} of {tasks.info.container}: read to {tasks.last_seq}; {counts or 'nothing'}"]
    for begin, overdue in tasks.open_tasks():
        if seq in ("", str(begin.seq)):
            due_us = begin.stamp_us + begin.deadline_us
            state = "written overdue, still open" if overdue else "open"
            lines.append(f"task {begin.seq} {begin.name}: begun at {begin.stamp_us} us, due at {due_us} us, {state}")
    return lines

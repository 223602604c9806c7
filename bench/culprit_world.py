"""A simulated device whose tasks a real tracker judges: overruns on demand, and what the tracker says of each miss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.shared_devices import declared
from services.deadline_tracker.core import Core
from services.deadline_tracker.shares import Shares
from services.deadline_tracker.suspects import Rest
from services.monitor.batches import Pile
from services.monitor.open_tasks import BEGIN, END, OpenTasks, RingRows, Row
from shared.admission import Sharing
from shared.effects import (
    Commit,
    CommitDone,
    CommitOutcome,
    Effect,
    KeyChanged,
    Publish,
    ReadFrom,
    ReadingFrom,
    Received,
    Tick,
    Unread,
    WatchReplayed,
)
from shared.messages import (
    DeadlineEvent,
    DeviceFacts,
    DeviceMetrics,
    Measured,
    NodeFacts,
    NodeMetrics,
    NodeReservations,
    NodeState,
    Regime,
    Reservation,
    RingInfo,
    TaskBatch,
)
from shared.subjects import DEADLINES, LEDGER, NODES, Subjects, node_key
from shared.testing.devices import Container, Device, Job, What
from shared.testing.devices.policies import Policy

NODE: Final = "n1"
UUID: Final = "GPU-1"
POLL_US: Final = 5_000
"""How often the rings are read."""
TICK_US: Final = 250_000
BEAT_US: Final = 1_000_000
FULL_MHZ: Final = 2_000
POWER_CAP: Final = 0x04


class World:
    """One device, its monitor and a tracker that holds the lease, in one virtual time."""

    def __init__(self, sharing: Sharing, containers: Sequence[Container], policy: Policy | None = None) -> None:
        self.device = Device(sharing, policy)
        self.core = Core(Subjects(), guarantee=0.99, window=1000, shares=Shares(1, "t", 2_000_000))
        self.said: list[DeadlineEvent] = []
        self.jobs: dict[tuple[str, int], Job] = {}
        """By ring and sequence of the begin."""
        self._sharing = sharing
        self._held: list[Reservation] = []
        self._rings: dict[str, OpenTasks] = {}
        self._seqs: dict[str, int] = {}
        self._begun: dict[int, int] = {}
        self._batches = self._revision = 0
        self.speed: float | None = None
        """Of the device's clock, as its driver tells; None: it tells nothing."""
        self._do(WatchReplayed(DEADLINES, frozenset()))
        self._tell_facts()
        for container in containers:
            self.add(container)

    def add(self, container: Container) -> None:
        """Its reservation is in the ledger before its first task begins."""
        self._held.append(_reservation(container))
        body = NodeReservations(node=NODE, reservations=tuple(self._held)).to_json()
        self._do(KeyChanged(LEDGER, node_key(NODE), body, len(self._held)))
        info = RingInfo(ring=f"ring-{container.name}", container=container.name)
        info = info.model_copy(update={"request_id": f"q-{container.name}", "replica": 0, "generation": 1})
        self._rings[container.name] = OpenTasks(info)
        self._seqs[container.name] = 0
        self.device.add(container)

    def advance(self, to_us: int) -> list[DeadlineEvent]:
        """What the tracker said meanwhile."""
        before = len(self.said)
        while self.device.now_us < to_us:
            now_us = min(to_us, self.device.now_us - self.device.now_us % POLL_US + POLL_US)
            self._poll(now_us)
        return self.said[before:]

    def _poll(self, now_us: int) -> None:
        rows: dict[str, list[Row]] = {name: [] for name in self._rings}
        for event in self.device.advance(now_us):
            rows[event.job.container].append(self._row(event.job, event.what, event.at_us))
        pile, due = Pile(), now_us % TICK_US == 0
        for name, own in rows.items():  # one that has nothing to tell may still have become overdue
            ring, head = self._rings[name], self._seqs[name]
            pile.add(ring.info, ring.take(RingRows(ring.info, tuple(own), taken=head, head=head), now_us), 0)
        for fields in pile.take() if pile or due else ():
            self._batches += 1
            batch = TaskBatch(
                node=NODE,
                start_id="s",
                counter=self._batches,
                boot_id="b",
                at_us=now_us,
                watermark_us=now_us,
                **fields,
            )
            self._do(Received(f"rt.events.task.{NODE}", batch, seq=self._batches))
        if due:
            self._do(Tick("", now_us))
        if self.speed is not None and now_us % BEAT_US == 0:
            self._do(Unread(f"rt.metrics.{NODE}", _heartbeat(now_us, self.speed)))

    def _row(self, job: Job, what: What, at_us: int) -> Row:
        seq = self._seqs[job.container] = self._seqs[job.container] + 1
        if what is What.RELEASED:
            self._begun[id(job)] = seq
            self.jobs[f"ring-{job.container}", seq] = job
            return Row(BEGIN, seq, seq, job.number, at_us, job.due_us - job.release_us, "infer")
        return Row(END, seq, self._begun[id(job)], job.number, at_us, 0, "")

    def _tell_facts(self) -> None:
        sharing = self._sharing
        device = DeviceFacts(
            uuid=UUID,
            index=0,
            model="sim",
            regime=sharing.regime,
            slice_us=sharing.slice_us,
            switch_us=sharing.switch_us,
            handover_us=sharing.handover_us,
            healthy=True,
            memory_mib=None,
        )
        facts = NodeFacts(node=NODE, state=NodeState.READY, at_us=0, devices=(device,), cpu_milli=1, memory_mib=1)
        self._do(KeyChanged(NODES, node_key(NODE), facts.to_json(), 1))

    def _do(self, event: object) -> None:
        effects: list[Effect] = self.core.handle(event, self.device.now_us)
        for effect in effects:
            if isinstance(effect, Publish) and isinstance(effect.body, DeadlineEvent):
                self.said.append(DeadlineEvent.from_json(effect.body.to_json()))
            elif isinstance(effect, Commit):
                self._write(effect)
            elif isinstance(effect, Rest):
                self._do(effect)
            elif isinstance(effect, ReadFrom):
                self._do(ReadingFrom(effect.subject, effect.start_seq))

    def _write(self, commit: Commit) -> None:
        """The bucket takes all that it is given, and shows it."""
        self._revision += 1
        self._do(CommitDone(commit.commit, CommitOutcome.WRITTEN, {w.key: self._revision for w in commit.writes}))
        for write in commit.writes:
            self._do(KeyChanged(DEADLINES, write.key, write.value, self._revision))


def _heartbeat(now_us: int, speed: float) -> bytes:
    told = {
        "throttle_reasons": POWER_CAP * (speed < 1),
        "sm_clock_mhz": int(speed * FULL_MHZ),
        "sm_clock_max_mhz": FULL_MHZ,
    }
    unknown = Measured(value=None, reason="not_supported")
    device = DeviceMetrics(
        uuid=UUID,
        index=0,
        model="sim",
        regime=Regime.EXCLUSIVE,
        healthy=True,
        memory_mib=None,
        utilisation_ratio=unknown,
        memory_used_mib=unknown,
        age_us=0,
        health={name: Measured(value=value) for name, value in told.items()},
    )
    return NodeMetrics(
        node=NODE,
        start_id="s",
        counter=1,
        at_us=now_us,
        mono_us=now_us,
        period_us=BEAT_US,
        devices=(device,),
        cpu_milli=1,
        memory_mib=1,
    ).to_json()


def _reservation(container: Container) -> Reservation:
    return Reservation(
        request_id=f"q-{container.name}",
        replica=0,
        generation=1,
        devices=(UUID,),
        share_micro=1,
        device_memory_mib=1,
        cpu_milli=1,
        memory_mib=1,
        realtime=declared(container.task, container.task.kind),
    )

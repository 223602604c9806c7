"""Any order of begins, ends, readings, overwritten records, deaths and restarts: what the stream then says is true."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.monitor.core import Core, Forget, Limits, RingsRead
from services.monitor.open_tasks import GUARD_US, RingRows, Row
from services.monitor.probes.base import Capacity
from shared.effects import Publish
from shared.messages import RingInfo, TaskBatch, TaskEventKind

BEGIN, END, OVERDUE, ABORTED, LOST, CLOSED = TaskEventKind
CAPACITY = 4
RINGS = ("r0", "r1")


@dataclass
class Ring:
    """A writer and its ring: every record that it ever wrote, of which the last CAPACITY can still be read."""

    records: list[Row] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    dead: bool = False
    taken: int = 0


@dataclass(frozen=True)
class Told:
    """One row of the stream."""

    ring: str
    kind: int
    seq: int
    begin_seq: int
    stamp_us: int


class Protocol(RuleBasedStateMachine):
    @initialize()
    def begin_all(self) -> None:
        self.now_us = 1_000_000
        self.rings = {ring: Ring() for ring in RINGS}
        self.told: list[Told] = []
        self.decisions: Counter[tuple[str, int, int]] = Counter()
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.core = Core("n", f"s{self.starts}", "b", Capacity(1, 1), limits=Limits(batch_us=5_000))
        self.done: set[str] = set()
        self.watermark_us = 0
        for ring in self.rings.values():
            ring.taken = 0

    @rule(by_us=st.integers(0, 30_000))
    def time_passes(self, by_us: int) -> None:
        self.now_us += by_us

    @rule(
        ring=st.sampled_from(RINGS), deadline_us=st.sampled_from([1, 5_000, 20_000, 10**9]), by_us=st.integers(0, 100)
    )
    def a_task_begins(self, ring: str, deadline_us: int, by_us: int) -> None:
        writer = self.rings[ring]
        if writer.dead:
            return
        self.now_us += by_us
        seq = len(writer.records) + 1
        writer.records.append(Row(BEGIN, seq, seq, seq, self.now_us, deadline_us, f"t{deadline_us}"))
        writer.open.append(seq)

    @rule(ring=st.sampled_from(RINGS), which=st.integers(0, 20))
    def a_task_ends(self, ring: str, which: int) -> None:
        writer = self.rings[ring]
        if writer.dead or not writer.open:
            return
        begun = writer.records[writer.open.pop(which % len(writer.open)) - 1]
        seq = len(writer.records) + 1
        writer.records.append(begun._replace(kind=END, seq=seq, stamp_us=self.now_us))

    @rule(ring=st.sampled_from(RINGS))
    def a_writer_dies(self, ring: str) -> None:
        self.rings[ring].dead = True

    @rule(behind=st.integers(0, 1), after_us=st.integers(0, 200), all_told=st.booleans())
    def the_monitor_reads(self, behind: int, after_us: int, all_told: bool = True) -> None:
        """``behind``: the last record of a ring is not visible yet. ``after_us`` pass between clock and rings.
        Rings without news are left out unless ``all_told``."""
        clock_us = self.now_us
        self.now_us += after_us
        reads = [self.read(ring, behind) for ring in RINGS if ring not in self.done]
        told = [read for read in reads if all_told or read.rows or read.taken < read.head or read.writer_gone]
        event = RingsRead(clock_us, clock_us, tuple(told))
        for effect in self.core.handle(event, clock_us):
            match effect:
                case Publish(body=TaskBatch() as batch):
                    self.hear(batch)
                case Forget(ring=ring):
                    self.done.add(ring)

    @precondition(lambda self: self.starts < 4)
    @rule()
    def the_monitor_is_killed_and_started(self) -> None:
        self.start()

    def read(self, name: str, behind: int) -> RingRows:
        ring = self.rings[name]
        head = len(ring.records)
        first = max(ring.taken, head - CAPACITY)
        until = max(first, head - behind)
        lost = first - ring.taken
        inherited = self.starts > 1
        rows = tuple(ring.records[first:until])
        ring.taken = until
        return RingRows(RingInfo(ring=name, container="c"), rows, lost, until, head, ring.dead, 1, inherited)

    def hear(self, batch: TaskBatch) -> None:
        assert batch.watermark_us >= self.watermark_us
        self.watermark_us = batch.watermark_us
        rings = [info.ring for info in batch.rings]
        for ring, kind, seq, begin_seq, stamp_us, deadline_us, name in zip(
            batch.ring,
            batch.kind,
            batch.seq,
            batch.begin_seq,
            batch.stamp_us,
            batch.deadline_us,
            batch.name,
            strict=True,
        ):
            assert kind == CLOSED or batch.names[name] == f"t{deadline_us}"
            told = Told(rings[ring], kind, seq, begin_seq, stamp_us)
            self.told.append(told)
            self.prove(told)

    def prove(self, told: Told) -> None:
        """What is told was written, and no task that ended in time is overdue, nor any before its time."""
        records = self.rings[told.ring].records
        if told.kind in (BEGIN, END):
            row = records[told.seq - 1]
            assert (row.kind, row.begin_seq, row.stamp_us) == (told.kind, told.begin_seq, told.stamp_us)
            return
        self.decisions[told.ring, told.kind, told.seq] += 1
        assert self.decisions[told.ring, told.kind, told.seq] <= self.starts, "a decision is told once per start"
        if told.kind == OVERDUE:
            begun = records[told.seq - 1]
            due_us = begun.stamp_us + begun.deadline_us
            assert told.stamp_us > due_us + GUARD_US
            assert all(row.stamp_us > due_us for row in records if row.kind == END and row.begin_seq == told.seq)

    @invariant()
    def the_core_is_sound(self) -> None:
        self.core.check()

    def teardown(self) -> None:
        """Let the monitor look at leisure: then every task has an outcome that is true."""
        if not hasattr(self, "core"):
            return
        for _ in range(2):
            self.now_us += 1_000_000
            self.the_monitor_reads(0, 0)
        for name, ring in self.rings.items():
            self.judge(name, ring)

    def judge(self, name: str, ring: Ring) -> None:
        kinds: dict[int, set[int]] = {}
        for told in self.told:
            if told.ring == name:
                kinds.setdefault(told.begin_seq if told.kind == END else told.seq, set()).add(told.kind)
        if ring.dead:
            assert name in self.done
        for row in ring.records:
            if row.kind != BEGIN or BEGIN not in kinds.get(row.seq, set()):
                continue
            outcome = kinds[row.seq]
            if row.seq not in ring.open:
                assert outcome & {END, LOST, OVERDUE}
            elif ring.dead:
                assert outcome & {ABORTED, LOST, OVERDUE}
            elif row.deadline_us < 10**9:
                assert outcome & {OVERDUE, LOST}


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=100, stateful_step_count=40)

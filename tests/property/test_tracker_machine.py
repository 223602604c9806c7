"""A state machine over the tracker's core: two writers, a monitor that repeats itself, crashes, checkpoints."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.deadline_tracker.core import CHECKPOINT_US, TASKS
from shared.effects import Commit, CommitDone, CommitOutcome, KeyChanged, Publish, Received, Tick, Write
from shared.messages import TaskBatch, TaskEventKind
from shared.subjects import DEADLINES
from tests.property.test_tracker_recount import DEADLINE, recount
from tests.tracker_server import led, tracker
from tests.unit.test_tracker_core import batch, row

RINGS = st.sampled_from([0, 1])


class TrackerMachine(RuleBasedStateMachine):
    """The stream is the truth: whatever happens to the tracker, at its end it agrees with a recount of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: list[TaskBatch] = []
        self.pending: list[tuple[int, ...]] = []
        self.seqs = [0, 0]
        self.open: list[list[int]] = [[], []]
        self.saved: tuple[bytes, int] | None = None
        self.missed: set[str] = set()
        self.core, self.next, self.now_us = led(tracker(500)).core, 1, 0

    # --- what the monitor writes ---

    @rule(ring=RINGS)
    def begins(self, ring: int) -> None:
        self.seqs[ring] += 1
        self.open[ring].append(self.seqs[ring])
        self.pending.append(row(TaskEventKind.BEGIN, self.seqs[ring], stamp_us=self.seqs[ring], ring=ring))

    @rule(ring=RINGS, which=st.integers(0, 9), took=st.sampled_from([-1, 0, DEADLINE, DEADLINE + 1]))
    def ends(self, ring: int, which: int, took: int) -> None:
        if self.open[ring]:
            begin = self.open[ring].pop(which % len(self.open[ring]))
            self.seqs[ring] += 1
            self.pending.append(row(TaskEventKind.END, self.seqs[ring], begin, stamp_us=begin + took, ring=ring))

    @rule(ring=RINGS, which=st.integers(0, 9), kind=st.sampled_from(["OVERDUE", "ABORTED", "LOST"]))
    def says_of_an_open_task(self, ring: int, which: int, kind: str) -> None:
        if self.open[ring]:
            begin = self.open[ring][which % len(self.open[ring])]
            self.pending.append(row(TaskEventKind[kind], begin, ring=ring))

    @rule(ring=RINGS)
    def loses_records(self, ring: int) -> None:
        self.seqs[ring] += 3
        self.open[ring].clear()

    @precondition(lambda self: self.pending)
    @rule()
    def writes_its_batch(self) -> None:
        self.stream.append(batch(self.pending))
        self.pending = []

    @precondition(lambda self: self.stream)
    @rule(which=st.integers(0, 99))
    def starts_again_and_repeats(self, which: int) -> None:
        self.stream.append(self.stream[which % len(self.stream)])

    # --- what happens to the tracker ---

    @rule(most=st.integers(1, 5))
    def reads(self, most: int) -> None:
        for one in self.stream[self.next - 1 : self.next - 1 + most]:
            for effect in self.core.handle(Received("rt.events.task.n1", one, seq=self.next), 0):
                if isinstance(effect, Publish) and effect.body.kind == "missed":
                    self.missed.add(effect.event_id)
            self.next += 1

    @rule(arrives=st.booleans())
    def writes_a_checkpoint(self, arrives: bool) -> None:
        self.now_us += CHECKPOINT_US
        for effect in self.core.handle(Tick("checkpoint", 0), self.now_us):
            assert isinstance(effect, Commit)
            self._ends(effect, [write for write in effect.writes if write.key == "node.n1"], arrives)

    def _ends(self, effect: Commit, written: list[Write], arrives: bool) -> None:
        outcome, revision, current = CommitOutcome.WRITTEN if arrives else CommitOutcome.UNKNOWN, 0, ()
        for write in written:
            revision = self.saved[1] if self.saved else 0
            assert write.value is not None
            if write.expected == revision:
                self.saved = (write.value, revision + 1)
            else:
                outcome = CommitOutcome.CONFLICT
            current = (KeyChanged(DEADLINES, write.key, *self.saved),) if self.saved else ()
        revisions = {write.key: revision + 1 for write in effect.writes}
        self.core.handle(CommitDone(effect.commit, outcome, revisions, current), self.now_us)

    @rule()
    def is_killed_and_started_again(self) -> None:
        it = led(tracker(500), self.saved[0] if self.saved else None)
        self.core, self.next, self.saved = it.core, it.next[TASKS], (self.saved[0], 1) if self.saved else None

    @invariant()
    def holds(self) -> None:
        self.core.check()

    def teardown(self) -> None:
        self.reads(len(self.stream))
        for ring in (0, 1):
            mine = [batch(rows) for one in self.stream if (rows := _rows_of(one, ring))]
            expected, missed = recount(mine)
            record = self.core.nodes["n1"].records.get(f"c{ring}") if self.stream else None
            assert (record.counts if record else expected) == expected
            assert {m for m in self.missed if f"/r{ring}/" in m} == {f"n1/r{ring}/{begin}/missed" for begin in missed}


def _rows_of(one: TaskBatch, ring: int) -> list[tuple[int, ...]]:
    columns = (one.ring, one.kind, one.seq, one.begin_seq, one.task, one.stamp_us, one.deadline_us, one.name)
    return [each for each in zip(*columns, strict=True) if each[0] == ring]


TestTracker = TrackerMachine.TestCase
TestTracker.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)

"""The monitor judges time by its own clock and by what the rings hold, and says each thing once."""

from __future__ import annotations

from collections.abc import Sequence

from services.monitor.batches import MAX_NAMES, MAX_RINGS, MAX_ROWS
from services.monitor.core import BATCH_TYPE, Core, Forget, Limits, ProbeFailed, RingsRead, Wake
from services.monitor.open_tasks import GUARD_US, MAX_OPEN, RingRows, Row
from services.monitor.probes.base import Capacity
from shared.effects import Draining, Effect, Emit, Publish, Tick
from shared.messages import MAX_BODY_BYTES, NodeMetrics, RingInfo, TaskBatch, TaskEventKind

BEGIN, END, OVERDUE, ABORTED, LOST, CLOSED = TaskEventKind
D = 50_000
RING = "r0"


def begin(seq: int, stamp_us: int = 0, deadline_us: int = D, name: str = "infer") -> Row:
    return Row(BEGIN, seq, seq, seq, stamp_us, deadline_us, name)


def end(seq: int, begin_seq: int, stamp_us: int = 0, name: str = "infer") -> Row:
    return Row(END, seq, begin_seq, begin_seq, stamp_us, D, name)


class Monitor:
    """A core, the clock readings that it is given, and all that it said."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.core = Core("n1", "start", "boot", Capacity(2000, 4096), limits=limits or Limits(batch_us=0))
        self.effects: list[Effect] = []
        self.taken: dict[str, int] = {}

    def read(self, clock_us: int, *rows: Row, ring: str = RING, lost: int = 0, **more: object) -> list[Effect]:
        """One reading of one ring; ``taken`` and ``head`` follow from the rows unless given."""
        taken = max(self.taken.get(ring, 0) + lost, rows[-1].seq if rows else 0)
        self.taken[ring] = taken
        known: dict[str, object] = {"lost": lost, "taken": taken, "head": taken} | more
        info = RingInfo(ring=ring, container="c")
        return self.take(RingsRead(clock_us, clock_us, (RingRows(info, rows, **known),)))  # type: ignore[arg-type]

    def take(self, event: RingsRead) -> list[Effect]:
        said = self.core.handle(event, event.clock_us)
        self.core.check()
        self.effects += said
        return said

    @property
    def batches(self) -> list[TaskBatch]:
        return [e.body for e in self.effects if isinstance(e, Publish) and isinstance(e.body, TaskBatch)]

    @property
    def told(self) -> list[tuple[TaskEventKind, int]]:
        """Kind and sequence of every row that was published, in order."""
        return [(TaskEventKind(k), s) for b in self.batches for k, s in zip(b.kind, b.seq, strict=True)]


def wake_us(effects: Sequence[Effect]) -> int:
    return next(effect.at_us for effect in effects if isinstance(effect, Wake))


def test_begins_and_ends_are_forwarded_in_order_with_their_columns() -> None:
    monitor = Monitor()
    monitor.read(100, begin(1, 10), begin(2, 20, name="other"), end(3, 1, 60))
    (batch,) = monitor.batches
    assert ([1, 1, 2], [1, 2, 3], [1, 2, 1], [10, 20, 60], [0, 1, 0]) == (
        batch.kind,
        batch.seq,
        batch.begin_seq,
        batch.stamp_us,
        batch.name,
    )
    assert ("infer", "other") == batch.names
    assert [RING] == [info.ring for info in batch.rings]
    assert 100 == batch.watermark_us


def test_a_batch_is_named_after_node_start_and_counter_and_chained() -> None:
    monitor = Monitor()
    monitor.read(100, begin(1))
    monitor.read(200, end(2, 1))
    publishes = [effect for effect in monitor.effects if isinstance(effect, Publish)]
    assert ["n1/start/1", "n1/start/2"] == [publish.event_id for publish in publishes]
    assert [(BATCH_TYPE, True)] * 2 == [(publish.event_type, publish.chained) for publish in publishes]
    assert {"rt.events.task.n1"} == {publish.subject for publish in publishes}


def test_a_task_is_overdue_once_deadline_and_guard_lie_before_the_reading_and_not_earlier() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0))
    monitor.read(D + GUARD_US)
    assert [(BEGIN, 1)] == monitor.told
    monitor.read(D + GUARD_US + 1)
    monitor.read(D + GUARD_US + 9)
    assert [(BEGIN, 1), (OVERDUE, 1)] == monitor.told


def test_a_task_is_overdue_in_a_reading_that_found_nothing_new_in_its_ring() -> None:
    monitor = Monitor()
    said = monitor.read(0, begin(1, 0))
    assert {RING: D + GUARD_US} == next(effect for effect in said if isinstance(effect, Wake)).due_us
    monitor.take(RingsRead(D + GUARD_US, 0))
    assert [(BEGIN, 1)] == monitor.told
    said = monitor.take(RingsRead(D + GUARD_US + 1, 0))
    assert [(BEGIN, 1), (OVERDUE, 1)] == monitor.told
    assert {} == next(effect for effect in said if isinstance(effect, Wake)).due_us


def test_a_ring_that_cannot_be_judged_is_not_passed_as_quiet() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0))
    monitor.read(10 * D, head=2)
    monitor.take(RingsRead(10 * D + 1, 0, vanished=(RING,)))
    assert [(BEGIN, 1), (LOST, 1), (CLOSED, 1)] == monitor.told


def test_a_task_whose_end_is_in_the_same_reading_is_not_overdue() -> None:
    monitor = Monitor()
    monitor.read(10 * D, begin(1, 0), end(2, 1, D))
    assert [(BEGIN, 1), (END, 2)] == monitor.told


def test_a_task_is_not_overdue_while_a_record_up_to_the_head_is_still_to_come() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0))
    monitor.read(10 * D, head=2)
    assert [(BEGIN, 1)] == monitor.told
    monitor.read(10 * D + 1, end(2, 1, D))
    assert [(BEGIN, 1), (END, 2)] == monitor.told


def test_an_end_after_overdue_is_still_forwarded() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0))
    monitor.read(2 * D)
    monitor.read(2 * D + 1, end(2, 1, D - 1))
    assert [(BEGIN, 1), (OVERDUE, 1), (END, 2)] == monitor.told


def test_open_tasks_of_an_overwritten_ring_are_lost_once_and_never_overdue() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0), begin(2, 0))
    monitor.read(10 * D, begin(13, 9 * D), lost=10)
    monitor.read(10 * D + 1)
    assert [(BEGIN, 1), (BEGIN, 2), (LOST, 1), (LOST, 2), (BEGIN, 13)] == monitor.told
    assert [{RING: 10}] == [batch.lost_records for batch in monitor.batches if batch.lost_records]


def test_a_task_begun_after_the_gap_is_not_lost() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0))
    monitor.read(10, begin(5, 5), lost=3)
    monitor.read(20, end(6, 5, 15))
    assert [(BEGIN, 1), (LOST, 1), (BEGIN, 5), (END, 6)] == monitor.told


def test_a_gap_at_the_very_end_of_a_reading_loses_what_is_open() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0))
    monitor.read(10, lost=1)
    assert [(BEGIN, 1), (LOST, 1)] == monitor.told


def test_a_task_that_is_overdue_already_is_not_lost_on_top() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0))
    monitor.read(2 * D)
    monitor.read(3 * D, lost=4)
    assert [(BEGIN, 1), (OVERDUE, 1)] == monitor.told


def test_an_end_of_a_lost_task_is_still_forwarded() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0))
    monitor.read(10, end(9, 1, 5), lost=7)
    assert [(BEGIN, 1), (LOST, 1), (END, 9)] == monitor.told


def test_what_was_overwritten_before_this_monitor_began_is_not_counted_as_lost() -> None:
    monitor = Monitor()
    monitor.read(0, begin(101, 0), lost=100, inherited=True)
    assert [(BEGIN, 101)] == monitor.told
    assert [{}] == [batch.lost_records for batch in monitor.batches]
    monitor.read(1, begin(112, 0), lost=10, inherited=True)
    assert {RING: 10} == monitor.batches[-1].lost_records


def test_a_dead_writer_leaves_the_rest_aborted_tasks_and_a_closed_ring() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0), begin(2, 0))
    said = monitor.read(10, end(3, 1, 5), writer_gone=True)
    assert [(BEGIN, 1), (BEGIN, 2), (END, 3), (ABORTED, 2), (CLOSED, 3)] == monitor.told
    assert [Forget(RING, 2)] == [effect for effect in said if isinstance(effect, Forget)]


def test_a_dead_writers_task_past_its_deadline_is_aborted_and_missed_only_if_overdue_stood_before() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0))
    monitor.read(2 * D)
    monitor.read(2 * D + 1, begin(2, 0), writer_gone=True)
    assert [(BEGIN, 1), (OVERDUE, 1), (BEGIN, 2), (ABORTED, 1), (ABORTED, 2), (CLOSED, 2)] == monitor.told


def test_a_dead_writers_ring_is_not_closed_before_everything_is_taken() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0), writer_gone=True, head=2)
    assert [(BEGIN, 1)] == monitor.told
    monitor.read(1, end(2, 1, 1), writer_gone=True)
    assert [(BEGIN, 1), (END, 2), (CLOSED, 2)] == monitor.told


def test_a_ring_that_vanished_has_lost_its_open_tasks_and_is_closed() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 0))
    monitor.take(RingsRead(5, 5, vanished=(RING, "never seen")))
    assert [(BEGIN, 1), (LOST, 1), (CLOSED, 1)] == monitor.told


def test_a_ring_file_may_go_only_after_the_batch_that_closes_it() -> None:
    monitor = Monitor()
    said = monitor.read(0, *(begin(seq) for seq in range(1, 2 * MAX_ROWS)), writer_gone=True)
    last = max(batch.counter for batch in monitor.batches)
    assert [Forget(RING, last)] == [effect for effect in said if isinstance(effect, Forget)]
    assert CLOSED == monitor.batches[-1].kind[-1]


def test_only_the_last_of_several_batches_says_that_everything_was_taken() -> None:
    monitor = Monitor()
    monitor.read(7)
    monitor.read(1_000_007, *(begin(seq, 1_000_000) for seq in range(1, 2 * MAX_ROWS + 2)))
    assert [7, 7, 7, 1_000_007] == [batch.watermark_us for batch in monitor.batches]


def test_the_largest_batch_fits_a_body() -> None:
    monitor = Monitor()
    for index in range(2 * MAX_RINGS):
        rows = [
            Row(
                BEGIN,
                (1 << 62) - 2_000 + i,
                (1 << 62) - 2_000 + i,
                (1 << 64) - 1,
                9 * 10**15,
                86_400_000_000,
                "\x01" * 20 + f"{i:02}",
            )
            for i in range(30)
        ]
        info = RingInfo(
            ring=f"{index:032x}",
            container="c" * 253,
            request_id="q" * 253,
            replica=1000,
            generation=1 << 31,
            guarantee=0.9999999999,
            window=(9999, 10_000),
        )
        monitor.take(RingsRead(index + 1, index, (RingRows(info, tuple(rows), taken=rows[-1].seq, head=rows[-1].seq),)))
    assert MAX_BODY_BYTES >= max(len(batch.to_json()) for batch in monitor.batches)
    assert 30 * 2 * MAX_RINGS == sum(len(batch.seq) for batch in monitor.batches)


def test_a_batch_with_nothing_but_a_watermark_goes_out_at_most_once_a_second() -> None:
    monitor = Monitor()
    for clock_us in range(0, 3_000_001, 5_000):
        monitor.read(clock_us)
    assert [0, 1_000_000, 2_000_000, 3_000_000] == [batch.watermark_us for batch in monitor.batches]


def test_begins_and_ends_gather_but_a_decision_is_published_at_once() -> None:
    monitor = Monitor(Limits(batch_us=20_000))
    monitor.read(0)
    monitor.read(5_000, begin(1, 4_000, deadline_us=10_000))
    assert [] == monitor.told
    monitor.read(15_001)
    assert [(BEGIN, 1), (OVERDUE, 1)] == monitor.told
    monitor.read(17_000, end(2, 1, 16_000))
    monitor.read(31_000)
    assert 2 == len(monitor.told)
    monitor.read(31_001)
    assert (END, 2) == monitor.told[-1]


def test_a_reading_that_comes_anyway_takes_a_batch_along_rather_than_be_followed_by_another() -> None:
    monitor = Monitor(Limits(batch_us=20_000))
    monitor.read(0)
    monitor.read(15_999, begin(1, 4_000))
    assert [] == monitor.told
    assert 1_016_000 == wake_us(monitor.read(16_000, end(2, 1, 15_999)))
    assert [(BEGIN, 1), (END, 2)] == monitor.told


def test_rings_names_and_rows_beyond_a_batch_fill_as_few_as_can_be() -> None:
    monitor = Monitor(Limits(batch_us=20_000))
    monitor.read(0)
    rings = [f"r{index}" for index in range(MAX_RINGS + 1)]
    reads = tuple(
        RingRows(RingInfo(ring=ring, container="c"), (begin(1, 1), end(2, 1, 2)), lost=1, taken=2, head=2)
        for ring in rings
    )
    monitor.take(RingsRead(20_000, 20_000, reads))
    assert [MAX_RINGS, 1] == [len(batch.rings) for batch in monitor.batches[1:]]
    assert dict.fromkeys(rings, 1) == monitor.batches[1].lost_records | monitor.batches[2].lost_records
    named = [begin(seq, 20_000, name=f"n{seq}") for seq in range(3, MAX_NAMES + 4)]
    monitor.read(40_000, *named, ring="r0")
    assert [MAX_NAMES, 1] == [len(batch.names) for batch in monitor.batches[3:]]
    assert [20_000, 40_000] == [batch.watermark_us for batch in monitor.batches[3:]]


def test_an_end_after_its_deadline_is_published_at_once() -> None:
    monitor = Monitor(Limits(batch_us=20_000))
    monitor.read(0)
    monitor.read(5_000, begin(1, 4_000, deadline_us=1_000), end(2, 1, 5_001))
    assert [(BEGIN, 1), (END, 2)] == monitor.told
    monitor.read(6_000, begin(3, 5_500, deadline_us=1_000), end(4, 3, 6_500))
    assert 2 == len(monitor.told)


def test_the_core_wakes_for_the_next_deadline_the_gathered_rows_and_the_watermark() -> None:
    monitor = Monitor(Limits(batch_us=20_000))
    assert 1_000_000 == wake_us(monitor.read(0))
    assert 20_000 == wake_us(monitor.read(5_000, begin(1, 4_000)))
    assert 4_000 + D + GUARD_US + 1 == wake_us(monitor.read(24_000))
    assert 44_000 == wake_us(monitor.read(26_000, end(2, 1, 25_500)))
    assert 1_046_000 == wake_us(monitor.read(46_000))


def test_open_tasks_are_bounded_and_the_oldest_are_lost() -> None:
    monitor = Monitor()
    monitor.read(0, *(begin(seq, 0) for seq in range(1, MAX_OPEN + 3)))
    assert [(LOST, 1), (LOST, 2)] == monitor.told[-2:]


def test_a_draining_monitor_says_what_it_gathered_and_that_it_stops() -> None:
    monitor = Monitor(Limits(batch_us=20_000))
    monitor.read(0)
    monitor.read(5, begin(1, 0))
    said = monitor.core.handle(Draining(), 6)
    assert [1] == [len(e.body.seq) for e in said if isinstance(e, Publish) and isinstance(e.body, TaskBatch)]
    assert [True] == [e.body.draining for e in said if isinstance(e, Emit) and isinstance(e.body, NodeMetrics)]


def test_the_heartbeat_does_not_wait_for_the_probe_and_counts_what_happened() -> None:
    monitor = Monitor()
    monitor.core.handle(ProbeFailed("error"), 1)
    monitor.read(1, begin(1, 0), lost=0, pid=77)
    (emit,) = monitor.core.handle(Tick("metrics", 5), 2)
    body = emit.body
    assert ("n1", 1, 2000, 4096, None) == (
        body.node,
        body.counter,
        body.cpu_milli,
        body.memory_mib,
        body.foreign_memory_mib,
    )
    assert (1, 1, 1) == (body.counters["probe.error"], body.counters["tasks.begin"], body.counters["rings.open"])
    assert [("c", (77,))] == [(container.container, container.pids) for container in body.containers]


def test_refused_rings_are_counted_in_the_heartbeat() -> None:
    monitor = Monitor()
    monitor.take(RingsRead(1, 1, counts={"corrupt": 3}))
    (emit,) = monitor.core.handle(Tick("metrics", 5), 2)
    assert 3 == emit.body.counters["rings.corrupt"]


def test_the_story_of_a_ring_and_of_a_task_tells_what_is_open() -> None:
    monitor = Monitor()
    monitor.read(0, begin(1, 10), begin(2, 20))
    monitor.read(2 * D, end(3, 1, 40))
    assert 1 == len([line for line in monitor.core.story(f"{RING}/2") if "written overdue" in line])
    assert monitor.core.story(RING) == monitor.core.story("c")
    assert [] == monitor.core.story("unknown")

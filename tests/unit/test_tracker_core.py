"""The tracker judges by stamps and by stream order, once, and survives being told again."""

from __future__ import annotations

from collections.abc import Iterable

from services.deadline_tracker.core import TASKS, VERDICTS
from services.deadline_tracker.shares import partition_lease
from shared.effects import Commit, CommitDone, CommitOutcome, Draining, Effect, KeyChanged, Publish, Received, Tick
from shared.messages import DeadlineEvent, Lease, NodeDeadlines, RingInfo, TaskBatch, TaskEventKind
from shared.subjects import DEADLINES, LEDGER, NODES
from tests.tracker_server import lead, led, tracker

BEGIN, END, OVERDUE, ABORTED, LOST, CLOSED = TaskEventKind
D = 50_000


def row(kind: TaskEventKind, seq: int, begin_seq: int = 0, stamp_us: int = 0, ring: int = 0) -> tuple[int, ...]:
    """ring, kind, seq, begin_seq, task, stamp_us, deadline_us, name"""
    return (ring, kind, seq, begin_seq or seq, begin_seq or seq, stamp_us, D if kind == BEGIN else 0, 0)


def batch(rows: Iterable[tuple[int, ...]], counter: int = 1, **info: object) -> TaskBatch:
    ring, kind, seq, begin_seq, task, stamp, deadline, name = (list(c) for c in zip(*rows, strict=True))
    return TaskBatch(
        node="n1",
        start_id="s",
        counter=counter,
        boot_id="b",
        at_us=1,
        watermark_us=10**9,
        rings=(
            RingInfo.model_validate({"ring": "r0", "container": "c0", "request_id": "q", "guarantee": 0.9} | info),
            RingInfo(ring="r1", container="c1"),
        ),
        names=("infer",),
        ring=ring,
        kind=kind,
        seq=seq,
        begin_seq=begin_seq,
        task=task,
        stamp_us=stamp,
        deadline_us=deadline,
        name=name,
    )


class Told:
    """A tracker that holds the lease, and all that it said."""

    def __init__(self, window: int = 1000) -> None:
        self.core = tracker(window)
        lead(self.core)
        self.seq = 0
        self.effects: list[Effect] = []

    def hear(self, *rows: tuple[int, ...], seq: int | None = None) -> None:
        self.seq = seq or self.seq + 1
        said = self.core.handle(Received("rt.events.task.n1", batch(rows), seq=self.seq), 0)
        self.core.check()
        self.effects += said

    @property
    def kinds(self) -> list[str]:
        return [e.body.kind for e in self.effects if isinstance(e, Publish) and isinstance(e.body, DeadlineEvent)]

    @property
    def ids(self) -> list[str]:
        return [e.event_id for e in self.effects if isinstance(e, Publish)]

    def counts(self, container: str = "c0") -> dict[str, int]:
        return {k: v for k, v in self.core.nodes["n1"].records[container].counts.items() if v}

    def saved(self) -> bytes:
        (commit,) = self.core.handle(Tick("checkpoint", 7), 0)
        assert isinstance(commit, Commit)
        assert commit.writes[0].value is not None
        revisions = {write.key: 500 + place for place, write in enumerate(commit.writes)}
        self.core.handle(CommitDone(commit.commit, CommitOutcome.WRITTEN, revisions), 0)
        return commit.writes[0].value


def test_a_task_that_ends_by_its_deadline_is_met_and_one_microsecond_later_missed() -> None:
    told = Told()
    told.hear(row(BEGIN, 1, stamp_us=0), row(END, 2, 1, stamp_us=D))
    told.hear(row(BEGIN, 3, stamp_us=0), row(END, 4, 3, stamp_us=D + 1))
    assert (told.counts(), told.kinds) == ({"met": 1, "missed": 1}, ["missed"])


def test_a_task_past_its_deadline_is_missed_while_it_still_runs() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(OVERDUE, 1))
    missed = told.effects[1].body
    assert (missed.kind, missed.task, missed.tardiness_us, missed.deadline_us) == ("missed", 1, None, D)


def test_the_first_of_end_and_overdue_in_stream_order_decides() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(OVERDUE, 1))
    told.hear(row(END, 2, 1, stamp_us=D))
    told.hear(row(BEGIN, 3), row(END, 4, 3, stamp_us=D))
    told.hear(row(OVERDUE, 3))
    assert told.counts() == {"met": 1, "missed": 1, "late_record": 1}


def test_an_end_after_its_overdue_that_was_late_anyway_is_counted_once() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(OVERDUE, 1), row(END, 2, 1, stamp_us=D + 9))
    assert (told.counts(), told.kinds) == ({"missed": 1}, ["at_risk", "missed"])


def test_T9_an_end_before_its_begin_is_invalid_and_neither_met_nor_missed() -> None:
    told = Told()
    told.hear(row(BEGIN, 1, stamp_us=100), row(END, 2, 1, stamp_us=99))
    assert told.counts() == {"invalid": 1}


def test_a_batch_that_comes_again_changes_nothing() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(END, 2, 1, stamp_us=D + 1), seq=7)
    told.hear(row(BEGIN, 1), row(END, 2, 1, stamp_us=D + 1), seq=7)
    assert (told.counts(), told.kinds) == ({"missed": 1}, ["at_risk", "missed"])


def test_records_that_a_restarted_monitor_reads_again_count_once() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(END, 2, 1, stamp_us=5), row(BEGIN, 3), row(OVERDUE, 3))
    told.hear(row(BEGIN, 1), row(END, 2, 1, stamp_us=5), row(BEGIN, 3), row(OVERDUE, 3), row(END, 4, 3, stamp_us=10**6))
    assert told.counts() == {"met": 1, "missed": 1}


def test_open_tasks_of_a_ring_with_a_gap_are_lost_and_neither_met_nor_missed() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(BEGIN, 9))
    assert (told.counts(), list(told.core.nodes["n1"].rings["r0"].open)) == ({"lost": 1}, [9])


def test_what_the_monitor_calls_lost_is_lost_and_its_late_end_is_no_verdict() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(LOST, 1), row(END, 2, 1, stamp_us=5))
    assert (told.counts(), told.core.counters["ends_without_begin"]) == ({"lost": 1}, 1)


def test_aborted_tasks_have_a_count_of_their_own_and_are_missed_only_if_overdue_stood_before() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(BEGIN, 2), row(OVERDUE, 1), row(ABORTED, 1), row(ABORTED, 2), row(CLOSED, 0))
    assert told.counts() == {"missed": 1, "aborted": 2}


def test_tasks_left_open_in_a_closed_ring_are_lost() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(CLOSED, 0))
    assert told.counts() == {"lost": 1}


def test_at_risk_is_said_once_and_recovered_only_when_the_lower_bound_is_back() -> None:
    told = Told(window=60)
    for n in range(12):
        late = D + 1 if n < 8 else 5
        told.hear(row(BEGIN, 2 * n + 1), row(END, 2 * n + 2, 2 * n + 1, stamp_us=late))
    for n in range(12, 80):
        told.hear(row(BEGIN, 2 * n + 1), row(END, 2 * n + 2, 2 * n + 1, stamp_us=5))
    assert [kind for kind in told.kinds if kind != "missed"] == ["at_risk", "recovered"]


def test_an_unknown_ratio_is_null_and_not_zero() -> None:
    told = Told()
    told.hear(row(BEGIN, 1, ring=1))
    record = NodeDeadlines.trusted(told.saved()).containers[1]
    assert (record.container, record.ratio, record.lower, record.upper, record.open) == ("c1", None, None, None, 1)


def test_a_restart_from_the_checkpoint_counts_nothing_twice_and_forgets_nothing() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(END, 2, 1, stamp_us=D + 1), row(BEGIN, 3), row(OVERDUE, 3))
    saved = told.saved()
    told.hear(row(END, 4, 3, stamp_us=D), row(BEGIN, 5))
    again = Told()
    it = led(tracker(), saved)
    again.core = it.core
    assert it.next[TASKS] == 2
    again.hear(row(BEGIN, 1), row(END, 2, 1, stamp_us=D + 1), seq=1)
    again.hear(row(END, 4, 3, stamp_us=D), row(BEGIN, 5), seq=2)
    assert (again.counts(), again.kinds) == (told.counts(), [])


def test_events_after_a_crash_have_the_ids_of_those_before_it() -> None:
    rows = (row(BEGIN, 1), row(OVERDUE, 1))
    one, other = Told(), Told()
    one.hear(*rows)
    other.hear(*rows)
    assert one.ids == other.ids == ["n1/c0/1/at_risk", "n1/r0/1/missed"]


def test_a_checkpoint_that_lost_its_race_is_written_again_over_the_newer_one() -> None:
    told = Told()
    told.hear(row(BEGIN, 1))
    (commit,) = told.core.handle(Tick("checkpoint", 7), 0)
    current = KeyChanged(DEADLINES, "node.n1", NodeDeadlines(node="n1", at_us=0, stream_seq=0).to_json(), 9)
    told.core.handle(CommitDone(commit.commit, CommitOutcome.CONFLICT, current=(current,)), 0)
    (again,) = told.core.handle(Tick("checkpoint", 8), 1)
    assert (commit.writes[0].expected, again.writes[0].expected) == (0, 9)


def test_a_row_that_names_a_ring_which_its_batch_does_not_list_is_counted_and_skipped() -> None:
    told = Told()
    told.hear(row(BEGIN, 1, ring=5))
    told.hear(row(BEGIN, 1), row(END, 2, 1, stamp_us=1))
    assert (told.core.counters["batches_malformed"], told.counts()) == (1, {"met": 1})


def test_a_stream_that_was_lost_and_made_anew_is_counted_from_its_beginning() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(END, 2, 1, stamp_us=5), seq=900)
    told.hear(row(BEGIN, 3), row(END, 4, 3, stamp_us=5), seq=1)
    assert (told.counts(), told.core.counters["streams_made_anew"]) == ({"met": 2}, 1)


def test_a_batch_on_the_subject_of_another_node_is_counted_and_ignored() -> None:
    told = Told()
    told.core.handle(Received("rt.events.task.n2", batch([row(BEGIN, 1)]), seq=1), 0)
    assert (told.core.nodes, told.core.counters["batches_of_another_node"]) == ({}, 1)


def verdict(told: Told, place: int = 0) -> Received:
    """What the stream shows once a verdict of ``told`` is stored."""
    said = [effect for effect in told.effects if isinstance(effect, Publish)][place]
    told.seq += 1
    return Received(said.subject, said.body, seq=told.seq, headers={"ce-id": said.event_id})


def next_of(told: Told) -> Told:
    """Whoever takes over from the last checkpoint."""
    saved, again = told.saved(), Told()
    again.core = tracker()
    again.effects = lead(again.core, saved)
    return again


def test_a_partition_that_is_taken_over_says_what_the_stream_lacks() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(OVERDUE, 1), row(BEGIN, 2), row(OVERDUE, 2))
    assert ["n1/c0/1/at_risk", "n1/r0/1/missed", "n1/r0/2/missed"] == told.ids
    told.core.handle(verdict(told), 0)
    assert ["n1/r0/1/missed", "n1/r0/2/missed"] == next_of(told).ids


def test_verdicts_are_read_from_the_batch_on_that_led_to_the_first_unsaid_one() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), row(OVERDUE, 1), seq=4)
    told.hear(row(BEGIN, 2), seq=9)
    assert {TASKS: 10, VERDICTS: 4} == led(tracker(), told.saved()).next


def test_a_verdict_that_is_heard_before_its_batch_is_not_said_again() -> None:
    told, again = Told(), Told()
    told.hear(row(BEGIN, 1), row(OVERDUE, 1))
    again.core.handle(verdict(told), 0)
    again.hear(row(BEGIN, 1), row(OVERDUE, 1), seq=1)
    assert ["n1/r0/1/missed"] == again.ids


def test_a_warning_that_the_stream_lacks_is_said_although_its_miss_was_said_before_it() -> None:
    """As a release did that said them in the other order."""
    told = Told()
    told.hear(row(BEGIN, 1), row(OVERDUE, 1))
    told.core.handle(verdict(told, place=1), 0)
    assert ["n1/c0/1/at_risk"] == next_of(told).ids
    told.hear(row(BEGIN, 2), row(OVERDUE, 2))
    told.core.handle(verdict(told, place=2), 0)
    assert 0 == told.core.nodes["n1"].unsaid


def test_a_warning_goes_out_before_causes_are_looked_for_and_its_misses_before_those_of_later_batches() -> None:
    told, again = Told(), Told()
    for one in (told, again):
        for bucket in (LEDGER, NODES):  # what it cannot read names nobody
            one.core.handle(KeyChanged(bucket, "node.n1", b"{}", 1), 0)
        one.hear(row(BEGIN, 1), row(OVERDUE, 1))
        assert ["n1/c0/1/at_risk"] == one.ids
    rest = told.effects[-1]
    told.effects += told.core.handle(rest, 0)
    assert [] == told.core.handle(rest, 0)
    assert ["unknown"] == [cause.cause for cause in told.effects[-1].body.because]
    again.hear(row(BEGIN, 2), row(OVERDUE, 2))
    assert ["n1/c0/1/at_risk", "n1/r0/1/missed", "n1/r0/2/missed"] == again.ids


def test_a_deposed_tracker_follows_its_nodes_no_more_and_writes_nothing_of_them() -> None:
    told = Told()
    told.hear(row(BEGIN, 1))
    other = Lease(holder="other", counter=7, ttl_us=2_000_000).to_json()
    told.core.handle(KeyChanged(DEADLINES, partition_lease(0), other, 800), 0)
    told.hear(row(BEGIN, 2), row(OVERDUE, 2))
    (commit,) = told.core.handle(Tick("checkpoint", 0), 10**6)
    assert ([], {}, ["tracker.t"]) == (told.ids, told.core.nodes, [write.key for write in commit.writes])


def test_a_tracker_that_stops_writes_what_changed_and_gives_its_partitions_back() -> None:
    told = Told()
    told.hear(row(BEGIN, 1), seq=7)
    (commit,) = told.core.handle(Draining(), 0)
    node, lease, lives = commit.writes
    assert ("node.n1", partition_lease(0), "tracker.t", None) == (node.key, lease.key, lives.key, lives.value)
    given = Lease.trusted(lease.value or b"")
    assert (0, 7) == (given.ttl_us, given.stream_seq)

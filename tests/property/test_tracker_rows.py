"""The quick judge and the one that goes row by row agree on every stream, whatever was lost, repeated or reordered."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from services.deadline_tracker.core import Core
from services.deadline_tracker.judging import Judge
from services.deadline_tracker.matched import Matched
from services.deadline_tracker.record import Ring
from shared.effects import Publish, Received
from shared.messages import DeadlineEvent, RingInfo, TaskBatch
from tests.row_by_row import COLUMNS, RowByRow, heard
from tests.tracker_server import lead, led, tracker

GUARANTEE, WINDOW, DEADLINE = 0.5, 8, 50
BEGIN, END, OVERDUE, ABORTED, LOST, CLOSED, UNKNOWN = range(1, 8)
RINGS = (
    RingInfo(ring="r0", container="c0", guarantee=0.5, window=(2, 3)),
    RingInfo(ring="r1", container="c1", guarantee=0.6),
    RingInfo(ring="r2", container="c0", guarantee=0.5, window=(2, 3)),
)
OTHER = (
    RingInfo(ring="r0", container="c0", guarantee=0.7, window=(1, 4)),
    RingInfo(ring="r1", container="c1", guarantee=0.85),
    RingInfo(ring="r2", container="c0", guarantee=0.7, window=(1, 4)),
)
"""What the same containers may ask for later."""

Acts = list[tuple[str, int, int, int]]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "end", "task", "task", "late", "overdue", "aborted", "lost", "closed", "gap"]),
        st.integers(0, len(RINGS) - 1),
        st.integers(0, 3),
        st.sampled_from([0, 10, DEADLINE, DEADLINE, DEADLINE + 1, -1]),
    ),
    max_size=150,
)
HARM = st.lists(st.tuples(st.sampled_from(["drop", "repeat", "swap", "nonsense"]), st.integers(0, 400)), max_size=5)


class Monitor:
    """Writes what it is told to, as rows of three rings."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.seqs, self.open, self.time_us = [0] * len(RINGS), [list[tuple[int, int]]() for _ in RINGS], 0

    def act(self, act: str, ring: int, which: int, took_us: int) -> None:
        self.time_us += 7
        if act in ("begin", "task", "late"):
            self.record(ring, BEGIN, self.seqs[ring] + 1, self.time_us)
            self.open[ring].append((self.seqs[ring], self.time_us))
        if act in ("end", "task", "late") and self.open[ring]:
            begin_seq, begin_us = self.open[ring].pop(which % len(self.open[ring]) if act == "end" else -1)
            self.record(ring, END, begin_seq, begin_us + (DEADLINE + 9 if act == "late" else took_us))
        elif act in ("overdue", "aborted", "lost") and self.open[ring]:
            begin_seq, _ = self.open[ring][which % len(self.open[ring])]
            kind = {"overdue": OVERDUE, "aborted": ABORTED, "lost": LOST}[act]
            self.rows.append((ring, kind, begin_seq, begin_seq, begin_seq, self.time_us, DEADLINE, 0))
        elif act == "closed":
            self.rows.append((ring, CLOSED, self.seqs[ring], 0, 0, self.time_us, 0, 0))
        elif act == "gap":
            self.seqs[ring] += 2

    def record(self, ring: int, kind: int, begin_seq: int, stamp_us: int) -> None:
        self.seqs[ring] += 1
        self.rows.append((ring, kind, self.seqs[ring], begin_seq, begin_seq, stamp_us, DEADLINE, kind % 2))


def harmed(rows: list[tuple[int, ...]], harm: list[tuple[str, int]]) -> list[tuple[int, ...]]:
    for what, where in harm if rows else ():
        place = where % len(rows)
        match what:
            case "drop" if len(rows) > 1:
                del rows[place]
            case "repeat":
                rows.insert(where * 7 % len(rows), rows[place])
            case "swap":
                rows[place], rows[place - 1] = rows[place - 1], rows[place]
            case "nonsense":
                rows.insert(place, (0, UNKNOWN, 1, 1, 1, 0, 0, 0))
    return rows


def batches(
    rows: list[tuple[int, ...]], cuts: set[int], again: list[int], *, wrong: bool, node: str = "n1"
) -> list[TaskBatch]:
    """The rows in pieces, some of which come again; one of them names a ring that is not listed."""
    ends = [*sorted(cut for cut in cuts if 0 < cut < len(rows)), len(rows)]
    pieces = [rows[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    pieces += [pieces[place % len(pieces)] for place in again]
    pieces.insert(len(pieces) // 2, [(9, BEGIN, 1, 1, 1, 0, 0, 0)]) if wrong else None
    return [_batch(piece, node) for piece in pieces]


def _batch(rows: list[tuple[int, ...]], node: str) -> TaskBatch:
    columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
    named = {name: list(column) for name, column in zip(COLUMNS, columns, strict=True)}
    fixed = {"node": node, "start_id": "s", "counter": 1, "boot_id": "b", "at_us": 1, "watermark_us": 1}
    return TaskBatch(**fixed, rings=RINGS, names=("infer", "train"), **named)  # type: ignore[arg-type]  # plain columns


@given(
    ACTS,
    HARM,
    st.sets(st.integers(1, 300), max_size=8),
    st.lists(st.integers(0, 9), max_size=2),
    st.booleans(),
    st.sets(st.integers(0, 11)),
)
@settings(max_examples=150, deadline=None)
def test_verdicts_counts_and_open_tasks_are_those_of_the_judge_that_goes_row_by_row(
    acts: Acts, harm: list[tuple[str, int]], cuts: set[int], again: list[int], wrong: bool, others: set[int]
) -> None:
    monitor = Monitor()
    for act in acts:
        monitor.act(*act)
    stream = batches(harmed(monitor.rows, harm), cuts, again, wrong=wrong)
    for place in others & set(range(len(stream))):
        stream[place] = stream[place].model_copy(update={"rings": OTHER})
    core = tracker(WINDOW)
    core.guarantee = GUARANTEE
    lead(core)
    told = [
        (said.event_id, said.body.met, said.body.missed, said.body.tardiness_us)
        for seq, batch in enumerate(stream, 1)
        for said in core.handle(Received("rt.events.task.n1", batch, seq=seq), 0)
        if isinstance(said, Publish) and isinstance(said.body, DeadlineEvent)
    ]
    core.check()
    plain = heard(stream, GUARANTEE, WINDOW)
    assert plain.told == told
    assert +plain.counters == +core.counters
    _same_state(plain, core)


def _same_state(plain: RowByRow, core: Core) -> None:
    node = core.nodes["n1"]
    for name, ring in plain.rings.items():
        found = node.rings[name]
        assert (ring.container, ring.high, ring.closed) == (found.container, found.high, found.closed)
        opened = {seq: (t.number, t.begin_us, t.deadline_us, t.name, t.overdue) for seq, t in ring.open.items()}
        assert opened == {seq: tuple(task) for seq, *task in found.dump()[3]}
        assert ring.high == Ring.load(name, found.dump(), node.records).high
    for name, record in plain.records.items():
        counted = node.records[name]
        assert +record.counts == +type(record.counts)(counted.counts)
        assert (record.window.count(True), record.warned) == (counted.window.met, counted.warned)


@given(ACTS, HARM)
@settings(max_examples=50, deadline=None)
def test_what_a_batch_matched_comes_out_in_stream_order(acts: Acts, harm: list[tuple[str, int]]) -> None:
    monitor = Monitor()
    for act in acts:
        monitor.act(*act)
    batch = batches(harmed(monitor.rows, harm), set(), [], wrong=False)[0]
    node = led(tracker(WINDOW)).core
    node.handle(Received("rt.events.task.n1", batch.model_copy(update={column: [] for column in COLUMNS}), seq=1), 0)
    judge = Judge(batch, list(node.nodes["n1"].rings.values()), node.counters, _quiet)
    judge.rows()
    assert heard([batch], GUARANTEE, WINDOW).decided == list(_rows(judge.matched))


def _rows(matched: Matched) -> list[tuple[object, ...]]:
    words = {1: "met", 2: "missed", 3: "invalid", 4: "overdue", 5: "ended"}
    return [(*task, words[row[-1]]) for task, row in zip(matched.tasks(), matched.rows, strict=True)]


def _quiet(*_: object) -> None:
    """Nobody is told."""

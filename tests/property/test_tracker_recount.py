"""Verdicts equal an offline recount of the stream, whatever is repeated and wherever the tracker is restarted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.deadline_tracker.core import CHECKPOINT_US, TASKS
from shared.effects import Commit, CommitDone, CommitOutcome, Publish, Received, Tick
from shared.messages import TaskBatch, TaskEventKind
from tests.tracker_server import led, tracker
from tests.unit.test_tracker_core import batch, row

DEADLINE = 50_000


@st.composite
def histories(draw: st.DrawFn) -> list[TaskBatch]:
    """What a monitor could write: begins, ends in any order, overdues of open tasks, losses, aborts, repeats."""
    rows: list[tuple[int, ...]] = []
    opened: list[int] = []
    seq = 0
    for _ in range(draw(st.integers(1, 40))):
        kind = draw(st.sampled_from(["begin", "end", "overdue", "lost", "aborted", "skip"]))
        if kind == "begin" or not opened:
            seq += 1
            opened.append(seq)
            rows.append(row(TaskEventKind.BEGIN, seq, stamp_us=1000 * seq))
        elif kind == "end":
            begin = opened.pop(draw(st.integers(0, len(opened) - 1)))
            seq += 1
            took = draw(st.sampled_from([-5, 0, DEADLINE, DEADLINE + 1]))
            rows.append(row(TaskEventKind.END, seq, begin, stamp_us=1000 * begin + took))
        elif kind == "skip":
            seq += draw(st.integers(1, 3))
            opened.clear()
        else:
            begin = draw(st.sampled_from(opened))
            rows.append(row(TaskEventKind[kind.upper()], begin))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(rows) - 1)), max_size=6)))
    pieces = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True) if rows[a:b]]
    repeats = draw(st.lists(st.integers(0, len(pieces) - 1), max_size=2))
    return [batch(piece) for piece in pieces] + [batch(pieces[i]) for i in repeats]


def recount(history: list[TaskBatch]) -> tuple[dict[str, int], set[int]]:
    """The rules of the protocol in their plainest form: one dictionary, no windows, no checkpoints."""
    counts = dict.fromkeys(("met", "missed", "lost", "aborted", "invalid", "late_record"), 0)
    opened: dict[int, tuple[int, bool]] = {}
    missed: set[int] = set()
    high = 0
    for one in history:
        for kind, seq, begin, stamp in zip(one.kind, one.seq, one.begin_seq, one.stamp_us, strict=True):
            if kind in (TaskEventKind.BEGIN, TaskEventKind.END):
                if seq <= high:
                    continue
                if seq > high + 1:
                    counts["lost"] += sum(not overdue for _, overdue in opened.values())
                    opened.clear()
                high = seq
            if kind == TaskEventKind.BEGIN:
                opened[seq] = (stamp, False)
            elif begin not in opened:
                continue
            elif kind == TaskEventKind.END:
                began, overdue = opened.pop(begin)
                took = stamp - began
                word = "invalid" if took < 0 else "met" if took <= DEADLINE else "missed"
                if overdue:
                    counts["late_record"] += word == "met"
                else:
                    counts[word] += 1
                    missed |= {begin} if word == "missed" else set()
            elif kind == TaskEventKind.OVERDUE and not opened[begin][1]:
                opened[begin] = (opened[begin][0], True)
                counts["missed"] += 1
                missed.add(begin)
            elif kind in (TaskEventKind.LOST, TaskEventKind.ABORTED):
                _, overdue = opened.pop(begin)
                if kind == TaskEventKind.ABORTED:
                    counts["aborted"] += 1
                else:
                    counts["lost"] += not overdue
    return counts, missed


@given(histories(), st.sets(st.integers(0, 45), max_size=5), st.sets(st.integers(0, 45), max_size=5))
@settings(max_examples=300, deadline=None)
def test_verdicts_equal_an_offline_recount_with_crashes_anywhere(
    history: list[TaskBatch], saves: set[int], crashes: set[int]
) -> None:
    core, saved, missed = led(tracker(500)).core, None, []
    seq = 1
    while seq <= len(history):
        for effect in core.handle(Received("rt.events.task.n1", history[seq - 1], seq=seq), 0):
            missed += [effect.event_id] if isinstance(effect, Publish) and effect.body.kind == "missed" else []
        core.check()
        if seq in saves:
            for effect in core.handle(Tick("checkpoint", 0), seq * CHECKPOINT_US):
                assert isinstance(effect, Commit)
                first = effect.writes[0]
                saved = first.value if first.key == "node.n1" else saved
                revisions = {write.key: seq + 100 for write in effect.writes}
                core.handle(CommitDone(effect.commit, CommitOutcome.WRITTEN, revisions), seq * CHECKPOINT_US)
        if seq in crashes:
            crashes.discard(seq)
            it = led(tracker(500), saved)
            core, seq = it.core, it.next[TASKS]
        else:
            seq += 1
    expected, expected_missed = recount(history)
    assert core.nodes["n1"].records["c0"].counts == expected
    assert set(missed) == {f"n1/r0/{begin}/missed" for begin in expected_missed}

"""Trackers on one stream and one bucket: whoever dies, is deposed or slow, each verdict is said, and once."""

from __future__ import annotations

from collections import deque
from itertools import zip_longest

import hypothesis.strategies as st
from hypothesis import given, settings

from services.deadline_tracker.shares import partition_of
from shared.messages import NodeDeadlines, TaskBatch
from shared.subjects import node_key
from tests.property.test_tracker_recount import histories, recount
from tests.tracker_server import LEASE_US, TICK_US, Server, Tracker, tracker

NODES = ("n1", "n2")
"""In different ones of three partitions."""
STEPS = ("monitor", "hear", "verdicts", "watch", "tick", "saves", "deliver", "commit", "kill", "join", "leave", "power")


class Trackers:
    """Up to three of them, one after another under each of three names."""

    def __init__(self) -> None:
        self.server, self.now_us, self.starts = Server(), 0, 0
        self.at_work: list[Tracker] = []
        self.begin()

    def begin(self) -> None:
        self.starts += 1
        core = tracker(500, f"{'abc'[self.starts % 3]}{self.starts}", partitions=3)
        self.at_work.append(Tracker(self.server, core, self.now_us))

    def do(self, step: str, which: int, much: int) -> None:
        it = self.at_work[which % len(self.at_work)]
        match step:
            case "hear" | "verdicts":
                it.hear(much, verdicts=step == "verdicts")
            case "tick":
                self.tick(it, much)
            case "saves":
                self.tick(it, 4)
                it.commit()
            case "join" if len(self.at_work) < 3:
                self.begin()
            case "kill" | "leave" if much > 6:
                self.end(it, at_once=step == "kill")
            case "power" if much > 8:
                self.at_work = []
                self.begin()
            case "watch" | "deliver" | "commit":
                getattr(it, step)()

    def tick(self, it: Tracker, ticks: int) -> None:
        self.now_us += ticks * TICK_US
        it.tick(self.now_us)

    def end(self, it: Tracker, *, at_once: bool) -> None:
        if not at_once:
            it.stop()
        self.at_work.remove(it)
        if not self.at_work:
            self.begin()

    def come_to_rest(self) -> None:
        for _ in range(4 * LEASE_US // TICK_US):
            self.now_us += TICK_US
            for it in self.at_work:
                it.tick(self.now_us)
                it.all_of_it()


@given(
    histories(),
    histories(),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2), st.integers(1, 12)), min_size=80, max_size=120),
)
@settings(max_examples=60, deadline=None)
def test_each_verdict_stands_in_the_stream_once_whoever_dies_comes_or_leaves(
    one: list[TaskBatch], other: list[TaskBatch], steps: list[tuple[str, int, int]]
) -> None:
    told = {node: [b.model_copy(update={"node": node}) for b in h] for node, h in zip(NODES, (one, other), strict=True)}
    left, trackers = deque(batch for pair in zip_longest(*told.values()) for batch in pair if batch), Trackers()
    for step, which, much in steps:
        if step == "monitor" and left:
            trackers.server.hear(left.popleft())
        trackers.do(step, which, much)
    for batch in left:
        trackers.server.hear(batch)
    trackers.come_to_rest()
    for node, history in told.items():
        _agrees(node, history, trackers)
    share = 3 // len(trackers.at_work)
    assert [0, 1, 2] == sorted(number for it in trackers.at_work for number in it.held)
    assert all(len(it.held) in (share, share + 1) for it in trackers.at_work)


def _agrees(node: str, history: list[TaskBatch], trackers: Trackers) -> None:
    counts, missed = recount(history)
    said = [name for name in trackers.server.said if name.startswith(f"{node}/") and name.endswith("/missed")]
    assert sorted(f"{node}/r0/{begin}/missed" for begin in missed) == sorted(said)
    (follower,) = (it for it in trackers.at_work if partition_of(node, 3) in it.held)
    assert counts == follower.core.nodes[node].records["c0"].counts
    assert 0 == follower.core.nodes[node].unsaid
    saved, _ = trackers.server.bucket[node_key(node)]
    assert saved is not None
    assert NodeDeadlines.trusted(saved).stream_seq == follower.core.nodes[node].stream_seq

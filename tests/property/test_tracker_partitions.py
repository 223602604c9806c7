"""Trackers on one stream and one bucket: whoever dies, hangs, is deposed or slow, and where the server comes back with
an older bucket, each verdict is said, and once.

A life is drawn from one seed: rounds of ordinary work, in which each tracker does its parts in any order and some of
them not at all, and now and then something happens to one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from random import Random

import hypothesis.strategies as st
from hypothesis import Phase, given, settings

from services.deadline_tracker.shares import partition_of
from shared.messages import NodeDeadlines, TaskBatch
from shared.subjects import node_key
from tests.property.test_tracker_recount import histories, recount
from tests.tracker_server import LEASE_US, TICK_US, Server, Tracker, tracker
from tests.unit.test_tracker_core import batch

NODES = ("n1", "n2", "n3", "n4")
"""In partitions 1, 2, 1, 0 of three, and 1, 0, 1, 0 of two."""
WORK = ("hear", "verdicts", "watch", "tick", "deliver", "deliver", "commit", "commit")
LEASE_TICKS = LEASE_US // TICK_US


@dataclass
class Trackers:
    """Up to three at work at once, each start a process of its own."""

    drawn: Random
    rewinds: bool = False
    server: Server = field(default_factory=Server)
    now_us: int = 0
    starts: int = 0
    at_work: list[Tracker] = field(default_factory=list)
    asleep: dict[str, int] = field(default_factory=dict)
    """Rounds in which one that hangs does nothing yet, by its holder's name."""

    @property
    def partitions(self) -> int:
        return self.at_work[0].core.shares.partitions

    def begin(self) -> None:
        self.starts += 1
        wanted = self.drawn.choice((3, 3, 3, 2))
        core = tracker(500, f"{'abc'[self.starts % 3]}{self.starts}", partitions=wanted)
        self.at_work.append(Tracker(self.server, core, self.now_us))

    def round(self) -> None:
        self.now_us += TICK_US * self.drawn.choice((0, 1, 1, 1, 2))
        for it in self.at_work:
            name = it.core.shares.holder
            self.asleep[name] = self.asleep.get(name, 0) - 1
            if self.asleep[name] < 0:
                it.slow = self.drawn.choice((0, 0, 1, 4))
                for part in self.drawn.sample(WORK, self.drawn.randint(2, len(WORK))):
                    self.work(it, part)
        if self.drawn.random() < 0.15:
            self.happens()
        if self.rewinds and self.drawn.random() < 0.05:
            self.rewind()

    def work(self, it: Tracker, part: str) -> None:
        match part:
            case "hear" | "verdicts":
                it.hear(self.drawn.randint(1, 8), verdicts=part == "verdicts")
            case "tick":
                it.tick(self.now_us)
            case "watch":
                it.watch(self.drawn.choice((1, 2, 5, 100)))
            case "commit":
                it.commit(answered=self.drawn.random() < 0.9)
            case _:
                getattr(it, part)()

    def happens(self) -> None:
        it = self.drawn.choice(self.at_work)
        match self.drawn.choice(("kill", "leave", "join", "join", "sleep", "sleep", "power")):
            case "sleep":
                self.asleep[it.core.shares.holder] = self.drawn.randint(1, 3 * LEASE_TICKS)
            case "join" if len(self.at_work) < 3:
                self.begin()
            case "leave":
                it.stop()
                self.at_work.remove(it)
            case "kill":
                self.at_work.remove(it)
            case "power":
                self.at_work = []
        if not self.at_work:
            self.begin()

    def rewind(self) -> None:
        self.server.rewind(self.drawn.choice((0, 1, 2, 5, 20, 10_000)))
        for it in self.at_work:
            it.cut()

    def come_to_rest(self) -> None:
        for _ in range(4 * LEASE_TICKS):
            for it in self.at_work:
                it.all_of_it()
            self.now_us += TICK_US
            for it in self.at_work:
                it.tick(self.now_us)
                it.all_of_it()


SEEDED = settings(max_examples=100, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
"""A seed has no less."""


@given(st.lists(histories(), min_size=4, max_size=4), st.integers(0, 2**32))
@SEEDED
def test_each_verdict_stands_in_the_stream_once_whoever_dies_hangs_comes_or_leaves(
    drawn: list[list[TaskBatch]], seed: int
) -> None:
    _live(drawn, Trackers(Random(seed)))


@given(st.lists(histories(), min_size=4, max_size=4), st.integers(0, 2**32))
@SEEDED
def test_each_verdict_stands_in_the_stream_once_when_the_bucket_goes_back(
    drawn: list[list[TaskBatch]], seed: int
) -> None:
    _live(drawn, Trackers(Random(seed), rewinds=True))


def _live(drawn: list[list[TaskBatch]], trackers: Trackers) -> None:
    told = {node: list(_singly(node, history)) for node, history in zip(NODES, drawn, strict=True)}
    left = deque(one for four in zip_longest(*told.values()) for one in four if one)
    trackers.begin()
    while left:
        for _ in range(min(len(left), trackers.drawn.randint(0, 4))):
            trackers.server.hear(left.popleft())
        trackers.round()
    trackers.come_to_rest()
    _agree(told, trackers)
    count = trackers.partitions
    shares = [count // len(trackers.at_work), -(-count // len(trackers.at_work))]
    assert list(range(count)) == sorted(number for it in trackers.at_work for number in it.held)
    assert all(len(it.held) in shares for it in trackers.at_work)

    again = trackers.server.again
    trackers.at_work = []
    trackers.begin()
    trackers.come_to_rest()
    _agree(told, trackers)
    assert again == trackers.server.again, "who begins anew, and hears what was said, says it again"


def _singly(node: str, history: list[TaskBatch]) -> Iterator[TaskBatch]:
    """The same rows, each in a batch of its own: so that something can happen between any two."""
    for one in history:
        columns = (one.ring, one.kind, one.seq, one.begin_seq, one.task, one.stamp_us, one.deadline_us, one.name)
        yield from (batch([row]).model_copy(update={"node": node}) for row in zip(*columns, strict=True))


def _agree(told: dict[str, list[TaskBatch]], trackers: Trackers) -> None:
    """Verdicts, counts and checkpoints are those of an offline recount."""
    missed = {node: recount(history)[1] for node, history in told.items()}
    expected = chain.from_iterable((f"{node}/r0/{begin}/missed" for begin in missed[node]) for node in told)
    assert sorted(expected) == sorted(name for name in trackers.server.said if name.endswith("/missed"))
    for node, history in told.items():
        (follower,) = (it for it in trackers.at_work if partition_of(node, trackers.partitions) in it.held)
        assert recount(history)[0] == follower.core.nodes[node].records["c0"].counts
        assert 0 == follower.core.nodes[node].unsaid
        saved, _ = trackers.server.bucket[node_key(node)]
        assert saved is not None
        assert NodeDeadlines.trusted(saved).stream_seq == follower.core.nodes[node].stream_seq

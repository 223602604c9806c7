"""Two trackers on one stream and one bucket: whoever is killed, deposed or slow, each verdict is said, and once."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
from hypothesis import given, settings

from services.deadline_tracker.core import LEASE, Core
from shared.effects import Commit, CommitDone, CommitOutcome, Effect, KeyChanged, Publish, Received, Tick, WatchReplayed
from shared.messages import TaskBatch
from shared.subjects import DEADLINES, Subjects
from tests.property.test_tracker_recount import histories, recount

TICK_US = 250_000
LEASE_US = 2_000_000


class Server:
    """The stream, which keeps one message per id, and the bucket, which writes all of a batch or nothing."""

    def __init__(self) -> None:
        self.stream: list[tuple[str, TaskBatch | Publish]] = []
        self.bucket: dict[str, tuple[bytes | None, int]] = {}
        self.ids: set[str] = set()
        self.revision = 0

    def store(self, said: Publish) -> None:
        if said.event_id not in self.ids:
            self.ids.add(said.event_id)
            self.stream.append((said.subject, said))

    def write(self, commit: Commit) -> CommitDone:
        current = tuple(KeyChanged(DEADLINES, w.key, *self.bucket.get(w.key, (None, 0))) for w in commit.writes)
        if any(now.revision != write.expected for now, write in zip(current, commit.writes, strict=True)):
            return CommitDone(commit.commit, CommitOutcome.CONFLICT, current=current)
        revisions = {}
        for write in commit.writes:
            self.revision += 1
            self.bucket[write.key], revisions[write.key] = (write.value, self.revision), self.revision
        return CommitDone(commit.commit, CommitOutcome.WRITTEN, revisions)


class Tracker:
    """One process: it hears batches and verdicts at different speeds, and its commits and events take their time."""

    def __init__(self, server: Server, name: str, now_us: int) -> None:
        self.server, self.now_us = server, now_us
        self.core = Core(Subjects(), 0.99, 500, name, LEASE_US)
        self.outbox: deque[Publish] = deque()
        self.commits: deque[Commit] = deque()
        self.seen: dict[str, int] = {}
        self.watch()
        self.take(self.core.handle(WatchReplayed(DEADLINES, frozenset(server.bucket)), now_us))
        self.batch_seq, self.verdict_seq = self.core.start_seq(), self.core.start_seq_of_verdicts()

    def take(self, effects: list[Effect]) -> None:
        self.outbox += [effect for effect in effects if isinstance(effect, Publish)]
        self.commits += [effect for effect in effects if isinstance(effect, Commit)]
        self.core.check()

    def hear(self, most: int, *, verdicts: bool) -> None:
        """The next messages of one of its two consumers."""
        first = self.verdict_seq if verdicts else self.batch_seq
        for seq, (subject, one) in list(enumerate(self.server.stream, 1))[first - 1 : first - 1 + most]:
            if verdicts and isinstance(one, Publish):
                event = Received(subject, one.body, seq=seq, headers={"ce-id": one.event_id})
                self.take(self.core.handle(event, self.now_us))
            if not verdicts and isinstance(one, TaskBatch):
                self.take(self.core.handle(Received(subject, one, seq=seq), self.now_us))
        heard = min(first + most, len(self.server.stream) + 1)
        self.batch_seq, self.verdict_seq = (self.batch_seq, heard) if verdicts else (heard, self.verdict_seq)

    def watch(self) -> None:
        for key, (value, revision) in self.server.bucket.items():
            if self.seen.get(key) != revision:
                self.seen[key] = revision
                self.take(self.core.handle(KeyChanged(DEADLINES, key, value, revision), self.now_us))

    def tick(self, now_us: int) -> None:
        self.now_us = now_us
        self.take(self.core.handle(Tick("checkpoint", 0), now_us))

    def deliver(self) -> None:
        if self.outbox:
            self.server.store(self.outbox.popleft())

    def commit(self) -> None:
        if self.commits:
            self.take(self.core.handle(self.server.write(self.commits.popleft()), self.now_us))

    def all_of_it(self) -> None:
        """Everything that is on its way arrives."""
        for verdicts in (True, False):
            self.hear(len(self.server.stream), verdicts=verdicts)
        self.watch()
        while self.outbox or self.commits:
            self.deliver()
            self.commit()


STEPS = ("monitor", "hear", "verdicts", "watch", "tick", "saves", "deliver", "commit", "kill", "power")


@given(
    histories(),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 1), st.integers(1, 12)), min_size=80, max_size=120),
)
@settings(max_examples=60)
def test_each_verdict_stands_in_the_stream_once_whoever_dies(
    history: list[TaskBatch], steps: list[tuple[str, int, int]]
) -> None:
    server, now_us, left = Server(), 0, deque(history)
    trackers = [Tracker(server, "a0", 0), Tracker(server, "b0", 0)]
    for number, (step, which, much) in enumerate(steps):
        it = trackers[which]
        match step:
            case "monitor" if left:
                server.stream.append(("rt.events.task.n1", left.popleft()))
            case "hear" | "verdicts":
                it.hear(much, verdicts=step == "verdicts")
            case "watch":
                it.watch()
            case "tick":
                now_us += much * TICK_US
                it.tick(now_us)
            case "deliver":
                it.deliver()
            case "commit":
                it.commit()
            case "saves":
                now_us += 4 * TICK_US
                it.tick(now_us)
                it.commit()
            case "kill" if much > 6:
                trackers[which] = Tracker(server, f"{'ab'[which]}{number + 1}", now_us)
            case "power" if much > 8:
                trackers = [Tracker(server, f"{name}{number + 1}", now_us) for name in "ab"]
    server.stream += [("rt.events.task.n1", one) for one in left]
    for _ in range(3 * LEASE_US // TICK_US):
        now_us += TICK_US
        for it in trackers:
            it.tick(now_us)
            it.all_of_it()
    _agrees(server, history, trackers)


def _agrees(server: Server, history: list[TaskBatch], trackers: list[Tracker]) -> None:
    counts, missed = recount(history)
    said = [one.event_id for _, one in server.stream if isinstance(one, Publish) and one.body.kind == "missed"]
    assert sorted(f"n1/r0/{begin}/missed" for begin in missed) == sorted(said)
    for it in trackers:
        assert counts == it.core.nodes["n1"].records["c0"].counts
        assert 0 == it.core.nodes["n1"].unsaid
    assert 1 == sum(it.core.lease.active for it in trackers)
    assert server.bucket[LEASE][0] is not None

"""The stream and the bucket that trackers share, as a model: what cores ask for happens when a test says so."""

from __future__ import annotations

from collections import deque

from services.deadline_tracker.core import TASKS, VERDICTS, Core
from services.deadline_tracker.shares import Shares
from shared.effects import (
    Commit,
    CommitDone,
    CommitOutcome,
    Disconnected,
    Draining,
    Effect,
    KeyChanged,
    Publish,
    ReadFrom,
    ReadingFrom,
    Received,
    Reconnected,
    Tick,
    WatchBegins,
    WatchReplayed,
)
from shared.messages import TaskBatch
from shared.subjects import DEADLINES, Subjects

TICK_US = 250_000
LEASE_US = 2_000_000


def tracker(window: int = 1000, holder: str = "t", partitions: int = 1) -> Core:
    return Core(Subjects(), guarantee=0.99, window=window, shares=Shares(partitions, holder, LEASE_US))


class Server:
    """The stream, which keeps one message per id, and the bucket, which writes all of a batch or nothing."""

    def __init__(self) -> None:
        self.stream: list[tuple[str, TaskBatch | Publish]] = []
        self.bucket: dict[str, tuple[bytes | None, int]] = {}
        self.ids: set[str] = set()
        self.again = 0
        """Messages that came although the stream had them."""
        self.revision = 0
        self.former: list[tuple[dict[str, tuple[bytes | None, int]], int]] = [({}, 0)]
        """The bucket and its revision before and after each write."""

    def hear(self, batch: TaskBatch) -> None:
        self.stream.append((Subjects().task_events(batch.node), batch))

    def store(self, said: Publish) -> None:
        self.again += said.event_id in self.ids
        if said.event_id not in self.ids:
            self.ids.add(said.event_id)
            self.stream.append((said.subject, said))

    def put(self, key: str, value: bytes | None) -> None:
        self.revision += 1
        self.bucket[key] = (value, self.revision)

    def write(self, commit: Commit) -> CommitDone:
        current = self.current(commit)
        if any(now.revision != write.expected for now, write in zip(current, commit.writes, strict=True)):
            return CommitDone(commit.commit, CommitOutcome.CONFLICT, current=current)
        for write in commit.writes:
            self.put(write.key, write.value)
        self.former.append((dict(self.bucket), self.revision))
        revisions = {write.key: self.bucket[write.key][1] for write in commit.writes}
        return CommitDone(commit.commit, CommitOutcome.WRITTEN, revisions)

    def rewind(self, writes: int) -> None:
        """The bucket is as it was so many writes ago, and its revisions are given again."""
        self.former = self.former[: max(1, len(self.former) - writes)]
        self.bucket, self.revision = dict(self.former[-1][0]), self.former[-1][1]

    def current(self, commit: Commit) -> tuple[KeyChanged, ...]:
        return tuple(KeyChanged(DEADLINES, w.key, *self.bucket.get(w.key, (None, 0))) for w in commit.writes)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for key, (value, _) in self.bucket.items() if value is not None)

    @property
    def said(self) -> list[str]:
        return [one.event_id for _, one in self.stream if isinstance(one, Publish)]


class Tracker:
    """One process: it hears batches and verdicts at different speeds, and its commits and events take their time."""

    def __init__(self, server: Server, core: Core, now_us: int = 0) -> None:
        self.server, self.core, self.now_us = server, core, now_us
        self.outbox: deque[Publish] = deque()
        self.commits: deque[Commit] = deque()
        self.unknown: deque[CommitDone] = deque()
        """Ends of writes whose answer was lost with the connection."""
        self.cut_off = False
        """It was lost, and the watch has not begun anew."""
        self.seen = 0
        """Revision of the bucket up to which its watch has shown all."""
        self.next = dict[str, int]()
        """Sequence that each of its two readers is to hear next."""
        self.inbox = deque[Received | ReadingFrom]()
        self.slow = 0
        """How much of what it has read waits in its inbox."""
        self.watch()
        self.take(self.core.handle(WatchReplayed(DEADLINES, server.keys), now_us))

    def take(self, effects: list[Effect]) -> None:
        self.outbox += [effect for effect in effects if isinstance(effect, Publish)]
        self.commits += [effect for effect in effects if isinstance(effect, Commit)]
        self.core.check()
        for effect in effects:
            if isinstance(effect, ReadFrom):
                self.next[effect.subject] = effect.start_seq
                self.inbox.append(ReadingFrom(effect.subject, effect.start_seq))
        self._work()

    def _work(self) -> None:
        while len(self.inbox) > self.slow:
            self.take(self.core.handle(self.inbox.popleft(), self.now_us))

    def hear(self, most: int, *, verdicts: bool) -> None:
        """The next messages of one of its two readers."""
        name = VERDICTS if verdicts else TASKS
        for _ in range(most):
            if not 0 < (seq := self.next.get(name, 0)) <= len(self.server.stream):
                return
            self.next[name] = seq + 1
            self._hear(*self.server.stream[seq - 1], seq, verdicts)

    def _hear(self, subject: str, one: TaskBatch | Publish, seq: int, verdicts: bool) -> None:
        if isinstance(one, Publish) != verdicts or not self.core.wants(subject):
            return
        body, headers = (one.body, {"ce-id": one.event_id}) if isinstance(one, Publish) else (one, {})
        self.inbox.append(Received(subject, body, seq=seq, headers=headers))
        self._work()

    def watch(self, most: int = 1_000_000) -> None:
        """The next keys that were written, in that order; all of them after the connection was lost."""
        if self.cut_off:
            self._watch_anew()
        changed = sorted((rev, key, value) for key, (value, rev) in self.server.bucket.items() if rev > self.seen)
        for revision, key, value in changed[:most]:
            self.seen = revision
            self.take(self.core.handle(KeyChanged(DEADLINES, key, value, revision), self.now_us))

    def cut(self) -> None:
        """The server was started again: what was on its way to it is lost."""
        self.take(self.core.handle(Disconnected(), self.now_us))
        lost = [CommitDone(c.commit, CommitOutcome.UNKNOWN, current=self.server.current(c)) for c in self.commits]
        self.commits.clear()
        self.unknown += lost
        self.cut_off = True

    def _watch_anew(self) -> None:
        self.cut_off, self.seen = False, 0
        self.take(self.core.handle(Reconnected(0), self.now_us))
        self.take(self.core.handle(WatchBegins(DEADLINES), self.now_us))
        self.watch()
        self.take(self.core.handle(WatchReplayed(DEADLINES, self.server.keys), self.now_us))

    def tick(self, now_us: int) -> None:
        self.now_us = now_us
        self.take(self.core.handle(Tick("checkpoint", 0), now_us))

    def deliver(self) -> None:
        if self.outbox:
            self.server.store(self.outbox.popleft())

    def commit(self, *, answered: bool = True) -> None:
        """The next write. Where its answer is lost the bucket is looked at, as the shell does."""
        if self.unknown:
            self.take(self.core.handle(self.unknown.popleft(), self.now_us))
            return
        if not self.commits:
            return
        commit = self.commits.popleft()
        done = self.server.write(commit)
        if not answered:
            done = CommitDone(commit.commit, CommitOutcome.UNKNOWN, current=self.server.current(commit))
        self.take(self.core.handle(done, self.now_us))

    def settle(self) -> None:
        """Everything that is on its way to and from the bucket arrives."""
        self.watch()
        while self.commits or self.unknown:
            self.commit()
            self.watch()

    def all_of_it(self) -> None:
        """Everything that is on its way arrives."""
        self.slow = 0
        self._work()
        self.settle()
        for verdicts in (True, False):
            self.hear(len(self.server.stream), verdicts=verdicts)
        while self.outbox:
            self.deliver()
        self.settle()

    def stop(self) -> None:
        """What it says last arrives."""
        self.take(self.core.handle(Draining(), self.now_us))
        while self.commits or self.unknown:
            self.commit()
        while self.outbox:
            self.deliver()

    def lead(self) -> None:
        """It takes what is free, and says what it finds unsaid."""
        self.settle()
        self.tick(self.now_us)
        self.settle()

    @property
    def held(self) -> list[int]:
        return [part.number for part in self.core.shares.held]


def led(core: Core, saved: bytes | None = None) -> Tracker:
    """Alone, on a stream of its own and a bucket that holds one checkpoint at most."""
    server = Server()
    if saved:
        server.put("node.n1", saved)
    it = Tracker(server, core)
    it.lead()
    return it


def lead(core: Core, saved: bytes | None = None) -> list[Effect]:
    """It takes all partitions and follows them from where the checkpoint ends; what it says then."""
    return list(led(core, saved).outbox)

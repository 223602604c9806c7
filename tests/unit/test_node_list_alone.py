"""A node that is written alone is one message with the lists' record inside, which only the holder of the lease can
write; and what a writer does that does not know what became of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from services.node_list.core import LEASE, Core
from services.node_list.lists import MOST_INSIDE
from shared.effects import Commit, CommitDone, CommitOutcome, KeyChanged, Publish, Received, WatchReplayed
from shared.messages import Lease, ListDelta, ListsRecord, NodeEvent, NodeFacts, RecordInside
from shared.subjects import DEADLINES, LEDGER, LISTS_KEY, NODES, Subjects, node_key
from tests.unit.test_node_list_core import POLICY, SECOND, Harness, device, reservation

N1 = node_key("n1")
TAKEOVER_US = 3_250_000


def record_in(changes: Iterable[KeyChanged]) -> ListsRecord | None:
    """The newest record in rt_nodes: in the lists' own key, or in that of a node which was written alone."""
    for change in sorted(changes, key=lambda change: change.revision, reverse=True):
        if change.key == LISTS_KEY:
            return ListsRecord.trusted(change.value or b"")
        if change.key.startswith("node.") and (inside := RecordInside.trusted(change.value or b"").lists):
            return inside
    return None


def record(it: Harness) -> ListsRecord:
    """As rt_nodes has it."""
    found = record_in(KeyChanged(NODES, key, *at) for key, at in it.bucket.items())
    assert found is not None
    return found


def inside(it: Harness, key: str = N1) -> RecordInside:
    return RecordInside.trusted(it.bucket[key][0] or b"")


def ready(*nodes: str) -> Harness:
    it = Harness()
    for node in nodes or ("n1",):
        it.beat(node, device("g0"), times=2)
    return it


class Apart(Harness):
    """Its commits wait until the test carries them out, and nothing comes by the watch but what the test brings."""

    def __init__(self, holder: str = "b", bucket: dict[str, tuple[bytes | None, int]] | None = None) -> None:
        self.commits: list[Commit] = []
        super().__init__(holder, bucket)

    def tell(self, event: object) -> None:
        for effect in self.core.handle(event, self.now_us):
            match effect:
                case Commit():
                    self.commits.append(effect)
                case Publish(body=ListDelta() as delta):
                    self.changes.append((effect.event_id, delta))
                case Publish():
                    self.said.append(effect)
        self.core.check()

    def carry_out(self) -> Commit:
        commit = self.commits.pop(0)
        self.tell(self._commit(commit))
        return commit

    def lost(self, commit: Commit) -> CommitDone:
        """Whoever waited for it has given up; ``current`` is as the bucket is now."""
        keys = [key for write in commit.writes for key in (write.key, write.fence) if key]
        current = tuple(KeyChanged(NODES, key, *self.bucket.get(key, (None, 0))) for key in keys)
        return CommitDone(commit.commit, CommitOutcome.UNKNOWN, current=current)

    def brought(self, *keys: str) -> None:
        """The watch brings keys as they are, in the order of their revisions."""
        for key in sorted(keys, key=lambda key: self.bucket[key][1]):
            self.tell(KeyChanged(NODES, key, *self.bucket[key]))


def writing(it: Harness) -> Apart:
    """A writer that took over from ``it`` and has caught up, with one node that it hears."""
    second = Apart("b", it.bucket)
    second.beat("n1", device("g0"), times=2)
    second.wait(TAKEOVER_US, beating=("n1",))
    second.carry_out()
    second.brought(LEASE)
    for _, delta in second.changes:
        second.tell(Received("rt.events.list.x", delta))
    assert second.commits == []
    return second


def test_a_change_of_one_node_is_one_message_fenced_by_the_lease_and_has_the_record_inside() -> None:
    it = ready()
    lists, lease = it.bucket[LISTS_KEY], it.bucket[LEASE]
    it.hold("n1", reservation("q1", "g0"))
    assert (lists, lease) == (it.bucket[LISTS_KEY], it.bucket[LEASE])
    found = inside(it).lists
    assert found is not None
    assert [delta for _, delta in it.changes[-2:]] == list(found.unsaid[-2:])
    assert {"interactive": 3, "fast": 3} == found.revisions


def test_whoever_reads_a_nodes_facts_does_not_see_the_record() -> None:
    it = ready()
    it.hold("n1", reservation("q1", "g0"))
    body = it.bucket[N1][0] or b""
    assert b'"lists"' in body
    assert it.core.nodes["n1"].facts == NodeFacts.trusted(body)
    assert b'"lists"' not in NodeFacts.trusted(body).to_json()


def test_nodes_that_change_together_are_one_batch_with_the_lists_key_whose_record_counts_from_then_on() -> None:
    it = ready("n1", "n2")
    assert inside(it, node_key("n2")).lists is not None
    it.wait(4 * SECOND)  # both are silent
    assert [None, None] == [inside(it, node_key(node)).lists for node in ("n1", "n2")]
    assert it.bucket[LISTS_KEY][1] + 1 == it.bucket[LEASE][1]
    assert Harness("b", it.bucket).core.lists.record == it.core.lists.record == record(it)


def test_a_write_that_changes_no_list_keeps_the_record_that_its_key_had() -> None:
    it = ready()
    it.hold("n1", reservation("q1", "g0"))
    it.beat("n1", device("g0", group="b"))
    assert NodeFacts.trusted(it.bucket[N1][0] or b"").devices[0].group == "b"
    again = Harness("b", it.bucket)
    assert again.core.lists.revision("fast") == it.core.lists.revision("fast") == 3


def test_too_many_changes_that_were_not_said_go_into_the_lists_key() -> None:
    it = ready()
    for turn in range(MOST_INSIDE):
        it.beat("n1", device("g0", healthy=turn % 2 == 1))
    assert (inside(it).lists, record(it).revisions["fast"]) == (None, MOST_INSIDE + 2)
    for _, delta in it.changes:
        it.tell(Received("rt.events.list.x", delta))
    it.beat("n1", device("g0", healthy=MOST_INSIDE % 2 == 1))
    assert inside(it).lists is not None


def test_a_lease_that_is_due_is_renewed_alone() -> None:
    it = writing(ready())
    it.now_us += SECOND
    it.hold("n1", reservation("q1", "g0"))
    commit = it.carry_out()
    assert [LEASE] == [write.key for write in commit.writes]
    commit = it.carry_out()
    assert [(N1, LEASE, it.bucket[LEASE][1])] == [(w.key, w.fence, w.expected) for w in commit.writes]


@pytest.mark.parametrize("reads", [False, True], ids=["the writer", "an instance that starts"])
def test_the_newest_record_counts_wherever_it_is(reads: bool) -> None:
    it = ready("n1", "n2")
    it.hold("n2", reservation("q1", "g0"))
    it.hold("n1", reservation("q2", "g0"))
    seen = Harness("b", it.bucket) if reads else it
    assert seen.core.lists.record == inside(it).lists
    assert seen.core.lists.newest_revision == it.bucket[N1][1] > it.bucket[node_key("n2")][1] > it.bucket[LISTS_KEY][1]


def superseded() -> tuple[Harness, Apart]:
    """A reader of what a writer has written, of which one key was written again before the watch came to it."""
    it = ready("n1", "n2", "n3")
    seen = Apart("b", it.bucket)
    it.hold("n1", reservation("q1", "g0"))
    it.hold("n2", reservation("q2", "g0"))
    it.hold("n1", reservation("q1", "g0", runtime_us=30_000))
    return it, seen


def test_what_is_not_all_that_its_record_is_of_waits_until_the_rest_has_come() -> None:
    it, seen = superseded()
    before = seen.core.lists.record, dict(seen.core.lists.devices)
    seen.brought(node_key("n2"))
    assert before == (seen.core.lists.record, seen.core.lists.devices)
    seen.brought(N1)
    assert (seen.core.lists.record, seen.core.lists.devices) == (it.core.lists.record, it.core.lists.devices)


def test_a_record_without_sums_of_an_older_node_list_is_taken_as_it_comes() -> None:
    it, seen = superseded()
    body = record(it).model_copy(update={"sums": {}}).to_json()
    it.bucket[LISTS_KEY] = body, it.bucket[N1][1] + 1
    seen.brought(node_key("n2"), LISTS_KEY)
    assert seen.core.lists.record == record(it)


def test_what_somebody_else_wrote_while_nobody_held_the_lease_leaves_a_revision_out() -> None:
    it = ready()
    body = (it.bucket[N1][0] or b"").replace(b"guaranteed", b"tight")
    it.bucket[N1] = body, max(at for _, at in it.bucket.values()) + 1
    second = Apart("b", it.bucket)
    second.beat("n1", device("g0"), times=2)
    second.wait(TAKEOVER_US, beating=("n1",))
    second.carry_out()
    second.brought(LEASE)
    second.carry_out()
    assert record(second).revisions == {"interactive": 4, "fast": 4}


# ------------------------------------------------------------------------------------ who takes over


def test_a_successor_waits_for_its_lease_to_come_by_the_watch_and_goes_on_from_what_came_before_it() -> None:
    first = ready()
    second = Apart("b", first.bucket)
    second.beat("n1", device("g0", healthy=False), times=2)
    second.wait(TAKEOVER_US)
    first.hold("n1", reservation("q1", "g0"))  # in time, and the watch has not brought it to the other yet
    late, _ = first.changes[-1]
    second.carry_out()
    second.hold("n1", reservation("q1", "g0"))
    assert (second.commits, second.changes) == ([], [])
    second.brought(N1, LEASE)
    assert late in [event_id for event_id, _ in second.changes]
    commit = second.carry_out()
    assert {"interactive": 4, "fast": 4} == record(second).revisions
    assert commit.writes[0].fence == LEASE


def test_a_deposed_writers_message_is_refused_and_counted() -> None:
    first = ready()
    writing(first)
    before = first.bucket[N1]
    first.hold("n1", reservation("q1", "g0"))
    assert before == first.bucket[N1]
    assert (first.conflicts, first.core.lease.active) == (1, False)


# ------------------------------------------------------------------------------- what nobody can know


def sick(it: Apart) -> Commit:
    """A write with an event and a change of the list."""
    it.beat("n1", device("g0", healthy=False))
    (commit,) = it.commits
    assert commit.writes[0].fence == LEASE
    it.commits.clear()
    it.said.clear()
    it.changes.clear()
    return commit


def states(it: Apart) -> list[str]:
    return [each.body.state for each in it.said if isinstance(each.body, NodeEvent)]


def test_a_message_that_is_there_though_its_answer_was_lost_is_written() -> None:
    it = writing(ready())
    commit = sick(it)
    it._commit(commit)
    it.tell(it.lost(commit))
    assert (len(it.changes), states(it), it.commits) == (2, ["degraded", "device_lost"], [])


def test_a_message_that_comes_late_is_found_once_the_lease_was_renewed_and_what_it_changed_is_said() -> None:
    it = writing(ready())
    commit = sick(it)
    it.tell(it.lost(commit))
    it._commit(commit)
    renewal = it.carry_out()
    assert ([LEASE], it.commits, it.changes) == ([w.key for w in renewal.writes], [], [])
    it.brought(N1, LEASE)
    assert (len(it.changes), states(it), it.commits) == (2, ["degraded", "device_lost"], [])
    assert not it.core.lists.foreign


def test_a_message_that_comes_after_the_lease_was_renewed_is_refused_and_written_anew() -> None:
    it = writing(ready())
    commit = sick(it)
    it.tell(it.lost(commit))
    renewal = it.commits.pop()
    done = it._commit(renewal)
    assert it._commit(commit).outcome == CommitOutcome.CONFLICT
    it.tell(done)
    it.brought(LEASE)
    again = it.carry_out()
    assert [N1] == [write.key for write in again.writes]
    assert (len(it.changes), states(it)[-2:]) == (2, ["degraded", "device_lost"])
    assert record(it).revisions == {"interactive": 3, "fast": 3}


def test_a_renewal_that_comes_late_is_not_taken_for_anothers() -> None:
    it = writing(ready())
    it.wait(SECOND)
    late = it.commits.pop()
    it.tell(it.lost(late))
    assert it._commit(late).outcome == CommitOutcome.WRITTEN
    it.carry_out()
    it.brought(LEASE)
    assert (it.conflicts, it.core.lease.active, it.core.lease.revision) == (1, True, it.bucket[LEASE][1])
    assert Lease.trusted(it.bucket[LEASE][0] or b"").holder == "b"


def test_our_own_message_may_come_by_the_watch_before_its_answer() -> None:
    it = writing(ready())
    commit = sick(it)
    done = it._commit(commit)
    it.brought(N1)
    assert it.changes == []
    it.tell(done)
    assert (len(it.changes), it.core.lists.foreign, it.commits) == (2, False, [])


def test_an_answer_that_comes_when_a_successor_has_written_changes_nothing_of_what_that_wrote() -> None:
    it = writing(ready())
    done = it._commit(sick(it))
    third = Harness("c", it.bucket)
    third.beat("n1", device("g0", group="b"), times=2)
    third.wait(TAKEOVER_US, beating=("n1",))
    it.brought(N1, LEASE)
    before = it.core.lists.record
    it.tell(done)
    assert it.core.lists.record == before == record(third)
    assert [True] == [each.healthy for each in it.core.lists.devices["n1"].values()]
    assert len(it.changes) == 2


def test_what_somebody_else_wrote_while_we_were_in_doubt_leaves_a_revision_out() -> None:
    it = writing(ready())
    commit = sick(it)
    it.tell(it.lost(commit))
    body = (it.bucket[N1][0] or b"").replace(b"guaranteed", b"tight")
    it.bucket[N1] = (body, max(at for _, at in it.bucket.values()) + 1)
    it.carry_out()
    it.brought(N1, LEASE)
    it.carry_out()
    assert record(it).revisions == {"interactive": 4, "fast": 4}


def test_a_bucket_that_was_lost_is_not_waited_for() -> None:
    it = writing(ready())
    commit = sick(it)
    it.tell(it.lost(commit))
    it.carry_out()
    it.bucket.clear()
    it.tell(WatchReplayed(NODES, frozenset()))
    it.carry_out()
    it.brought(LEASE)
    commit = it.carry_out()
    assert [N1, LISTS_KEY, LEASE] == [write.key for write in commit.writes]


def test_a_watch_that_begins_anew_is_waited_for_until_it_has_come_as_far_again() -> None:
    first = ready()
    second = Apart("b", first.bucket)
    second.wait(TAKEOVER_US)
    first.hold("n1", reservation("q1", "g0"))
    second.carry_out()
    second.brought(LISTS_KEY)
    assert second.changes == []
    second.brought(N1, LEASE)
    assert len(second.changes) == 6


def test_nothing_is_written_before_everything_was_heard_once() -> None:
    core = Core(Subjects(), POLICY, "a", lease_us=3 * SECOND, tick_us=250_000)
    told = [core.handle(WatchReplayed(bucket, frozenset()), 0) for bucket in (NODES, LEDGER, DEADLINES)]
    assert [0, 0, 1] == [len(effects) for effects in told]

"""Who holds which partition, from where its nodes are followed, and how many partitions there are."""

from __future__ import annotations

from services.deadline_tracker.core import TASKS
from services.deadline_tracker.shares import LAYOUT, partition_lease, partition_of
from shared.messages import Lease, NodeDeadlines, TaskBatch, TaskEventKind
from tests.tracker_server import LEASE_US, TICK_US, Server, Tracker, tracker
from tests.unit.test_tracker_core import batch, row

BEGIN, END, OVERDUE, *_ = TaskEventKind


def said_by(node: str, seq: int) -> TaskBatch:
    return batch([row(BEGIN, seq)]).model_copy(update={"node": node})


def at_work(server: Server, name: str, now_us: int = 0, partitions: int = 3) -> Tracker:
    it = Tracker(server, tracker(500, name, partitions), now_us)
    it.lead()
    return it


def partitions_in(server: Server) -> int | None:
    return Lease.trusted(server.bucket[LAYOUT][0] or b"").partitions


def test_a_node_is_in_the_same_partition_in_every_process_and_version() -> None:
    assert [5, 2, 5, 0, 0, 2, 1, 6] == [partition_of(f"n{number}", 8) for number in range(1, 9)]


def test_a_tracker_that_joins_is_given_its_share_after_what_it_includes_was_written() -> None:
    server = Server()
    first = at_work(server, "a")
    server.hear(said_by("n1", 1))
    first.hear(1, verdicts=False)
    second = at_work(server, "b")
    assert ([0, 1, 2], []) == (first.held, second.held)
    for it in (first, second, second):
        it.watch()
        it.tick(TICK_US)
        it.settle()
    assert ([0], [1, 2]) == (first.held, second.held)
    assert (set(), {"n1"}) == (set(first.core.nodes), set(second.core.nodes))
    assert 1 == second.core.nodes["n1"].stream_seq


def test_a_partition_is_read_once_all_that_its_former_holder_wrote_is_shown() -> None:
    server = Server()
    former = at_work(server, "a")
    late = Tracker(server, tracker(500, "b", 3))
    server.hear(said_by("n1", 1))
    former.hear(1, verdicts=False)
    former.stop()
    late.settle()
    late.tick(TICK_US)
    while late.commits:
        late.commit()
    assert ([0, 1, 2], {}) == (late.held, late.next)
    late.watch()
    assert (2, 1) == (late.next[TASKS], late.core.nodes["n1"].stream_seq)


def test_who_takes_a_partition_reads_on_from_where_it_has_come_to_with_the_others() -> None:
    server = Server()
    first, second = at_work(server, "a"), at_work(server, "b")
    for now_us, it in enumerate((first, second, first, second), TICK_US):
        it.watch()
        it.tick(now_us)
        it.settle()
    mine = next(node for node in ("n1", "n2", "n4") if partition_of(node, 3) in second.held)
    other = next(node for node in ("n1", "n2", "n4") if partition_of(node, 3) in first.held)
    for node in (mine, other, other):
        server.hear(said_by(node, 1))
    first.hear(3, verdicts=False)
    first.stop()
    second.watch()
    second.tick(2 * TICK_US)
    second.settle()
    assert (1, {mine, other}) == (second.next[TASKS], {mine, *second.core.nodes})
    second.hear(3, verdicts=False)
    assert {mine: 1, other: 3} == {name: node.stream_seq for name, node in second.core.nodes.items()}


def test_a_tracker_from_before_there_were_partitions_is_waited_for_and_its_checkpoints_are_read_once() -> None:
    server = Server()
    for node, seq in (("n1", 1), ("n2", 2)):
        state = {"rings": {}, "records": {}}
        server.put(f"node.{node}", NodeDeadlines(node=node, at_us=0, stream_seq=seq, checkpoint=state).to_json())
    server.put(LAYOUT, Lease(holder="old", counter=1, ttl_us=LEASE_US).to_json())
    for node in ("n1", "n2", "n1"):
        server.hear(said_by(node, 1))
    it = at_work(server, "a")
    assert ([], None) == (it.held, partitions_in(server))
    it.tick(LEASE_US + 1)
    it.settle()
    assert ([0, 1, 2], 3, 2) == (it.held, partitions_in(server), it.next[TASKS])
    it.hear(3, verdicts=False)
    assert (3, 2, 1) == (*(it.core.nodes[node].stream_seq for node in ("n1", "n2")), it.core.counters["batches_again"])


def test_another_number_of_partitions_counts_when_the_tracker_that_wants_it_is_alone() -> None:
    server = Server()
    first = at_work(server, "a", partitions=3)
    server.hear(said_by("n1", 1))
    first.hear(1, verdicts=False)
    other = at_work(server, "b", partitions=5)
    assert (3, 3) == (partitions_in(server), len(other.core.shares.parts))
    other.watch()
    other.tick(LEASE_US + 1)
    other.settle()
    assert (5, [0, 1, 2, 3, 4]) == (partitions_in(server), other.held)
    other.hear(1, verdicts=False)
    assert 1 == other.core.nodes["n1"].stream_seq
    first.tick(LEASE_US + 2)
    first.commit()
    assert ([], {}) == (first.held, first.core.nodes)


def test_a_partition_that_is_given_up_says_how_far_its_nodes_were_counted() -> None:
    server = Server()
    it = at_work(server, "a", partitions=1)
    for seq in (1, 2):
        server.hear(said_by("n1", seq))
    it.hear(2, verdicts=False)
    it.stop()
    given = Lease.trusted(server.bucket[partition_lease(0)][0] or b"")
    assert (0, 2) == (given.ttl_us, given.stream_seq)


def test_partitions_that_were_taken_away_can_come_back() -> None:
    """The key of such a lease is deleted, and so has a revision."""
    server, now_us = Server(), 0
    for partitions in (3, 2, 3):
        now_us += 4 * LEASE_US
        it = at_work(server, f"t{now_us}", now_us, partitions)
        for _ in range(3 * LEASE_US // TICK_US):
            now_us += TICK_US
            it.tick(now_us)
            it.settle()
        assert (partitions, list(range(partitions))) == (partitions_in(server), it.held)

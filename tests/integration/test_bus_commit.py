"""Commits to a bucket on a real server: every outcome, what it says about the keys, and what a usual client sees."""

import asyncio
import time

import nats
import pytest

from shared.bus import Bus
from shared.bus.atomic import MOST_KEYS
from shared.effects import CommitDone, CommitOutcome, KeyChanged, Write
from shared.errors import BusError, OutcomeUnknownError
from shared.settings import ServiceSettings
from shared.subjects import LEDGER
from shared.testing.nats_server import NatsServer
from shared.testing.wait import eventually, until


async def test_writes_of_a_batch_get_consecutive_revisions_in_their_order(bus: Bus) -> None:
    done = await bus.commit(LEDGER, [Write("a", b"1", 0), Write("b", b"2", 0), Write("c", b"3", 0)], 7)
    assert (CommitOutcome.WRITTEN, 7) == (done.outcome, done.commit)
    seen = {key: await bus.get(LEDGER, key) for key in "abc"}
    assert {
        "a": (b"1", done.revisions["a"]),
        "b": (b"2", done.revisions["b"]),
        "c": (b"3", done.revisions["c"]),
    } == seen
    assert [1, 2, 3] == list(done.revisions.values())


@pytest.mark.parametrize("others", [[], [Write("free", b"x", 0)]], ids=["one key", "a batch"])
async def test_a_stale_key_leaves_all_untouched_and_all_keys_are_read_again(bus: Bus, others: list[Write]) -> None:
    await bus.commit(LEDGER, [Write("taken", b"theirs", 0)])
    done = await bus.commit(LEDGER, [*others, Write("taken", b"ours", 0)])
    absent = tuple(KeyChanged(LEDGER, write.key, None, 0) for write in others)
    assert (CommitOutcome.CONFLICT, (*absent, KeyChanged(LEDGER, "taken", b"theirs", 1))) == (
        done.outcome,
        done.current,
    )


async def test_a_key_with_a_fence_is_written_while_the_other_key_has_the_revision_whatever_its_own_is(bus: Bus) -> None:
    lease = (await bus.commit(LEDGER, [Write("lease", b"a", 0)])).revisions["lease"]
    for value in (b"1", b"2"):
        done = await bus.commit(LEDGER, [Write("node", value, lease, fence="lease")])
        assert CommitOutcome.WRITTEN == done.outcome
        assert (value, done.revisions["node"]) == await bus.get(LEDGER, "node")


@pytest.mark.parametrize("value", [b"b", None], ids=["taken", "given back"])
async def test_a_key_with_a_fence_is_refused_once_the_other_key_was_written_and_both_are_read_again(
    bus: Bus, value: bytes | None
) -> None:
    await bus.commit(LEDGER, [Write("lease", b"a", 0)])
    await bus.commit(LEDGER, [Write("node", b"1", 1, fence="lease")])
    await bus.commit(LEDGER, [Write("lease", value, 1)])
    for expected in (0, 1, 2):
        done = await bus.commit(LEDGER, [Write("node", b"2", expected, fence="lease")])
        assert (
            CommitOutcome.CONFLICT,
            (KeyChanged(LEDGER, "node", b"1", 2), KeyChanged(LEDGER, "lease", value, 3)),
        ) == (
            done.outcome,
            done.current,
        )


async def raced(writer: Bus, successor: Bus, rounds: int = 20) -> list[int]:
    """A lease is taken while its former holder writes: by how much each of those writes that was taken came before."""
    (lease,) = (await writer.commit(LEDGER, [Write("lease", b"", 0)])).revisions.values()
    found = []
    for turn in range(rounds):
        fenced = [Write(f"node.{number}", b"%d" % turn, lease, fence="lease") for number in range(8)]
        writing = [asyncio.create_task(writer.commit(LEDGER, [write])) for write in fenced]
        await asyncio.sleep(0)  # they are on their way
        taken = await successor.commit(LEDGER, [Write("lease", b"%d" % turn, lease)])
        while taken.outcome != CommitOutcome.WRITTEN:  # in a cluster also while a fence is on its way
            taken = await successor.commit(LEDGER, [Write("lease", b"%d" % turn, lease)])
        writing.append(asyncio.create_task(writer.commit(LEDGER, [fenced[0]])))
        lease = taken.revisions["lease"]
        found += [lease - revision for task in writing for revision in (await task).revisions.values()]
    return found


async def test_nothing_with_a_fence_is_written_after_the_other_key(bus: Bus, settings: ServiceSettings) -> None:
    other = await Bus.connect(settings, "other")
    before = await raced(bus, other)
    await other.close()
    assert before
    assert min(before) > 0


async def test_a_fence_of_one_key_among_several_is_refused_by_name(bus: Bus) -> None:
    done = await bus.commit(LEDGER, [Write("a", b"1", 0), Write("node", b"1", 0, fence="lease")])
    assert (CommitOutcome.REFUSED, "node has a fence among 2 keys, allowed: where it is the only one") == (
        done.outcome,
        done.detail,
    )
    assert await bus.get(LEDGER, "a") is None


async def test_a_deleted_key_keeps_a_revision_that_the_next_write_must_name(bus: Bus) -> None:
    await bus.commit(LEDGER, [Write("a", b"1", 0)])
    gone = await bus.commit(LEDGER, [Write("a", None, 1), Write("b", b"1", 0)])
    assert await bus.get(LEDGER, "a") is None
    refused = await bus.commit(LEDGER, [Write("a", b"2", 0)])
    assert (KeyChanged(LEDGER, "a", None, gone.revisions["a"]),) == refused.current
    again = await bus.commit(LEDGER, [Write("a", b"2", gone.revisions["a"])])
    assert CommitOutcome.WRITTEN == again.outcome


async def test_a_key_whose_time_ran_out_is_absent_again(bus: Bus) -> None:
    await bus.commit(LEDGER, [Write("lease.a", b"1", 0, ttl_s=1), Write("b", b"1", 0)])

    async def absent() -> bool | None:
        return await bus.get(LEDGER, "lease.a") is None or None

    await eventually(absent)
    assert CommitOutcome.WRITTEN == (await bus.commit(LEDGER, [Write("lease.a", b"2", 0)])).outcome


async def test_a_thousand_keys_are_one_batch_and_one_more_is_refused_with_the_number(bus: Bus) -> None:
    writes = [Write(f"k{number}", b"x", 0) for number in range(MOST_KEYS + 1)]
    assert CommitOutcome.WRITTEN == (await bus.commit(LEDGER, writes[:-1])).outcome
    done = await bus.commit(LEDGER, writes)
    assert (CommitOutcome.REFUSED, "1001 keys, allowed: 1 to 1000") == (done.outcome, done.detail)


async def test_a_value_over_the_servers_limit_is_refused_and_nothing_is_written(bus: Bus) -> None:
    done = await bus.commit(LEDGER, [Write("small", b"x", 0), Write("large", b"x" * 2_000_000, 0)])
    assert CommitOutcome.REFUSED == done.outcome
    assert await bus.get(LEDGER, "small") is None
    assert CommitOutcome.WRITTEN == (await bus.commit(LEDGER, [Write("small", b"x", 0)])).outcome


async def test_more_open_batches_than_the_server_takes_are_refused_after_retries(bus: Bus) -> None:
    for number in range(50):  # begun by somebody who never ends them
        headers = {"Nats-Batch-Id": f"open-{number}", "Nats-Batch-Sequence": "1"}
        await bus.publish(f"$KV.{LEDGER}.open{number}", b"x", headers=headers)
    began = time.monotonic()
    done = await bus.commit(LEDGER, [Write("a", b"1", 0), Write("b", b"1", 0)])
    waited_s = time.monotonic() - began
    assert CommitOutcome.REFUSED == done.outcome
    assert "(10210)" in done.detail
    assert 1.0 < waited_s < 8.0


async def test_an_open_batch_that_is_given_up_makes_room_again(bus: Bus) -> None:
    for number in range(50):
        headers = {"Nats-Batch-Id": f"open-{number}", "Nats-Batch-Sequence": "1"}
        await bus.publish(f"$KV.{LEDGER}.open{number}", b"x", headers=headers)
    first = asyncio.create_task(bus.commit(LEDGER, [Write("a", b"1", 0), Write("b", b"1", 0)]))
    gap = {"Nats-Batch-Id": "open-0", "Nats-Batch-Sequence": "9"}  # a gap ends a batch at once
    await bus.publish(f"$KV.{LEDGER}.open0", b"x", headers=gap)
    assert CommitOutcome.WRITTEN == (await first).outcome


async def test_a_lost_link_makes_the_outcome_unknown_and_the_keys_are_read_once_it_is_back(
    impatient_bus: Bus, nats_server: NatsServer
) -> None:
    bus = impatient_bus
    await bus.commit(LEDGER, [Write("a", b"1", 0)])
    nats_server.pause()
    commit = asyncio.create_task(bus.commit(LEDGER, [Write("a", b"2", 1), Write("b", b"2", 0)]))
    await until(lambda: not bus.connection.is_up)
    nats_server.kill()
    nats_server.start()
    done = await commit
    assert CommitOutcome.UNKNOWN == done.outcome
    assert (KeyChanged(LEDGER, "a", b"1", 1), KeyChanged(LEDGER, "b", None, 0)) == done.current


async def test_a_time_out_makes_the_outcome_unknown_and_current_tells_that_it_was_written(
    impatient_bus: Bus, nats_server: NatsServer
) -> None:
    bus = impatient_bus
    await bus.commit(LEDGER, [Write("a", b"1", 0)])
    nats_server.pause()
    commit = asyncio.create_task(bus.commit(LEDGER, [Write("a", b"2", 1)]))
    await until(lambda: not bus.connection.is_up)
    nats_server.resume()  # what lay in the socket is still read and written
    done = await commit
    assert CommitOutcome.UNKNOWN == done.outcome
    (current,) = done.current
    assert current in (KeyChanged(LEDGER, "a", b"2", 2), KeyChanged(LEDGER, "a", b"1", 1))


async def test_a_usual_client_reads_and_writes_the_buckets(bus: Bus, nats_url: str) -> None:
    await bus.commit(LEDGER, [Write("node.a", b"1", 0), Write("node.b", b"2", 0)])
    client = await nats.connect(nats_url)
    bucket = await client.jetstream().key_value(LEDGER)
    entry = await bucket.get("node.b")
    assert (b"2", 2) == (entry.value, entry.revision)
    revision = await bucket.put("node.c", b"3")
    await client.close()
    assert (b"3", revision) == await bus.get(LEDGER, "node.c")


async def test_two_that_write_the_same_key_at_once_never_both_succeed(bus: Bus) -> None:
    async def spend(number: int) -> CommitOutcome:
        writes = [Write("node.a", b"%d" % number, 0), Write(f"request.{number}", b"x", 0)]
        return (await bus.commit(LEDGER, writes, number)).outcome

    outcomes = await asyncio.gather(*(spend(number) for number in range(20)))
    assert [CommitOutcome.CONFLICT] * 19 + [CommitOutcome.WRITTEN] == sorted(outcomes)
    written = [number for number in range(20) if await bus.get(LEDGER, f"request.{number}")]
    assert 1 == len(written)


async def begun(bus: Bus, writes: list[Write]) -> CommitDone | BusError:
    """How a commit ends that nobody waits for."""
    told: asyncio.Future[CommitDone | BusError] = asyncio.get_running_loop().create_future()
    await bus.begin_commit(LEDGER, writes, 7, told.set_result)
    return await told


@pytest.mark.parametrize("others", [[], [Write("free", b"x", 0)]], ids=["one key", "a batch"])
async def test_a_commit_that_is_begun_is_told_its_end_or_goes_on_from_the_error(bus: Bus, others: list[Write]) -> None:
    done = await begun(bus, [Write("a", b"1", 0), Write("b", b"2", 0)])
    assert CommitDone(7, CommitOutcome.WRITTEN, {"a": 1, "b": 2}) == done
    stale = [*others, Write("a", b"3", 0)]
    failed = await begun(bus, stale)
    assert isinstance(failed, BusError)
    end = await bus.commit(LEDGER, stale, 7, failed)
    absent = tuple(KeyChanged(LEDGER, write.key, None, 0) for write in others)
    assert (CommitOutcome.CONFLICT, (*absent, KeyChanged(LEDGER, "a", b"1", 1))) == (end.outcome, end.current)


async def test_what_no_commit_can_take_is_refused_also_where_it_was_begun(bus: Bus) -> None:
    many = [Write(f"a{number}", b"1", 0) for number in range(MOST_KEYS + 1)]
    failed = await begun(bus, many)
    assert isinstance(failed, BusError)
    assert CommitOutcome.REFUSED == (await bus.commit(LEDGER, many, 7, failed)).outcome
    assert await bus.get(LEDGER, "a0") is None


async def test_a_commit_that_is_begun_on_a_link_that_dies_is_told_so(bus: Bus, nats_server: NatsServer) -> None:
    await bus.commit(LEDGER, [Write("a", b"1", 0)])
    nats_server.pause()
    ending = asyncio.create_task(begun(bus, [Write("a", b"2", 1)]))
    await until(lambda: not bus.connection.is_up)
    failed = await ending
    nats_server.resume()
    assert isinstance(failed, OutcomeUnknownError)
    assert CommitOutcome.UNKNOWN == (await bus.commit(LEDGER, [Write("a", b"2", 1)], 7, failed)).outcome

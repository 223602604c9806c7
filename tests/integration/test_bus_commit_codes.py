"""What a real server answers to a commit that it does not take, code by code, and what the end of the commit is then.

The codes of the server's own list that a commit of ours can meet stand in docs/ledger.md.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared.bus import ApiError, Bus
from shared.effects import CommitDone, CommitOutcome, Write
from shared.settings import ServiceSettings
from shared.subjects import LEDGER
from shared.testing.nats_server import NatsServer

LEDGER_CONFIG = {
    "name": "KV_rt_ledger",
    "subjects": ["$KV.rt_ledger.>"],
    "max_msgs_per_subject": 1,
    "storage": "file",
    "allow_atomic": True,
}
ONE, TWO = [Write("a", b"x" * 500, 0)], [Write("a", b"x" * 500, 0), Write("b", b"", 0)]


async def api(bus: Bus, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = await bus.request(f"$JS.API.{path}", json.dumps(body).encode() if body else b"", 5_000_000)
    found: dict[str, Any] = json.loads(answer.body)  # type: ignore[union-attr]  # JetStream listens
    assert "error" not in found, found
    return found


async def change(bus: Bus, **config: Any) -> None:
    """What an operator may do to the ledger's stream."""
    info = await api(bus, "STREAM.INFO.KV_rt_ledger")
    await api(bus, "STREAM.UPDATE.KV_rt_ledger", info["config"] | config)


def code_of(done: CommitDone) -> int:
    return int(done.detail.rpartition("(")[2].rstrip(")"))


@pytest.mark.parametrize("writes", [ONE, TWO], ids=["one key", "a batch"])
@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"max_msg_size": 200}, 10054),
        ({"max_bytes": 100}, 10077),
        ({"sealed": True}, 10109),
    ],
    ids=["a value too large", "no room", "sealed"],
)
async def test_a_stream_that_takes_nothing_refuses_with_its_code_and_nothing_is_written(
    bus: Bus, config: dict[str, Any], code: int, writes: list[Write]
) -> None:
    await change(bus, **config)
    done = await bus.commit(LEDGER, writes)
    assert (CommitOutcome.REFUSED, code) == (done.outcome, code_of(done))
    assert None is await bus.get(LEDGER, "a")


async def test_a_stream_without_atomic_batches_refuses_them_and_takes_single_keys(bus: Bus) -> None:
    await change(bus, allow_atomic=False)
    done = await bus.commit(LEDGER, TWO)
    assert (CommitOutcome.REFUSED, 10174) == (done.outcome, code_of(done))
    assert CommitOutcome.WRITTEN == (await bus.commit(LEDGER, ONE)).outcome


async def test_a_stream_without_times_to_live_refuses_a_key_that_has_one(bus: Bus) -> None:
    """No update of a stream takes them from it: it was made without."""
    info = await api(bus, "STREAM.INFO.KV_rt_ledger")
    await api(bus, "STREAM.DELETE.KV_rt_ledger")
    without = {"allow_msg_ttl": False, "subject_delete_marker_ttl": 0}
    await api(bus, "STREAM.CREATE.KV_rt_ledger", info["config"] | without)
    for writes in ([Write("a", b"", 0, ttl_s=60)], [Write("b", b"", 0), Write("a", b"", 0, ttl_s=60)]):
        done = await bus.commit(LEDGER, writes)
        assert (CommitOutcome.REFUSED, 10166) == (done.outcome, code_of(done))
    assert [None, None] == [await bus.get(LEDGER, key) for key in "ab"]
    assert CommitOutcome.WRITTEN == (await bus.commit(LEDGER, TWO)).outcome


async def test_a_server_whose_store_is_full_refuses_one_key_and_a_batch(tmp_path: Path) -> None:
    (tmp_path / "small.conf").write_text("jetstream { max_file_store: 2MB }")
    with NatsServer(tmp_path / "nats", "-c", str(tmp_path / "small.conf")) as server:
        bus = await Bus.connect(ServiceSettings(nats_url=server.url))
        await api(bus, "STREAM.CREATE.KV_rt_ledger", LEDGER_CONFIG)
        key = 0
        while (one := await bus.commit(LEDGER, [Write(f"k{key}", b"x" * 500_000, 0)])).outcome == CommitOutcome.WRITTEN:
            key += 1
        batch = await bus.commit(LEDGER, [Write(f"n{number}", b"x" * 100_000, 0) for number in range(3)])
        assert [(CommitOutcome.REFUSED, 10023)] * 2 == [(done.outcome, code_of(done)) for done in (one, batch)]
        assert [None, None] == [await bus.get(LEDGER, name) for name in (f"k{key}", "n0")]
        await bus.close()


async def test_room_that_comes_while_it_is_tried_again_is_taken(bus: Bus) -> None:
    await change(bus, max_bytes=100)
    committing = asyncio.create_task(bus.commit(LEDGER, TWO))
    await change(bus, max_bytes=-1)
    assert CommitOutcome.WRITTEN == (await committing).outcome


async def test_a_batch_that_the_server_gave_up_is_sent_again(bus: Bus) -> None:
    taken = {"Nats-Batch-Id": f"{bus._commits._nonce}-1", "Nats-Batch-Sequence": "1"}
    await bus.publish(f"$KV.{LEDGER}.other", b"x", headers=taken)  # its first message has the wrong place now
    done = await bus.commit(LEDGER, TWO)
    assert (CommitOutcome.WRITTEN, "") == (done.outcome, done.detail)
    assert None is await bus.get(LEDGER, "other")


async def test_a_key_that_is_twice_in_a_batch_is_a_conflict_and_nothing_is_written(bus: Bus) -> None:
    done = await bus.commit(LEDGER, [Write("a", b"1", 0), Write("a", b"2", 0)])
    assert (CommitOutcome.CONFLICT, 10164) == (done.outcome, code_of(done))
    assert None is await bus.get(LEDGER, "a")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Nats-Batch-Id": "q"}, 10175),
        ({"Nats-Batch-Id": "q", "Nats-Batch-Sequence": "2", "Nats-Batch-Commit": "1"}, 10176),
        (
            {
                "Nats-Batch-Id": "q",
                "Nats-Batch-Sequence": "1",
                "Nats-Batch-Commit": "1",
                "Nats-Expected-Last-Msg-Id": "x",
            },
            10177,
        ),
        ({"Nats-Batch-Id": "q" * 65, "Nats-Batch-Sequence": "1"}, 10179),
        ({"Nats-Batch-Id": "q", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "no"}, 10200),
        ({"Nats-TTL": "-5s"}, 10165),
    ],
)
async def test_the_codes_of_malformed_batches_are_those_that_no_commit_of_ours_makes(
    bus: Bus, headers: dict[str, str], code: int
) -> None:
    with pytest.raises(ApiError) as refused:
        await bus._js.store(f"$KV.{LEDGER}.a", b"x", headers)
    assert code == refused.value.code


async def test_a_message_id_that_the_stream_knows_is_the_code_of_a_batch_that_no_commit_of_ours_makes(bus: Bus) -> None:
    """Our writes have no Nats-Msg-Id: the revision of each key is what keeps it from being written twice."""
    first, again = {"Nats-Msg-Id": "m"}, {"Nats-Msg-Id": "m", "Nats-Batch-Id": "q", "Nats-Batch-Sequence": "1"}
    await bus._js.store(f"$KV.{LEDGER}.a", b"x", first)
    with pytest.raises(ApiError) as refused:
        await bus._js.store(f"$KV.{LEDGER}.a", b"x", again | {"Nats-Batch-Commit": "1"})
    assert 10201 == refused.value.code

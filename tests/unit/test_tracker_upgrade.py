"""A tracker goes on from what trackers of former releases wrote: tracker_checkpoints.json holds what they did write.

They had counted the first `upto` batches of the stream that is there too, and said what `said` names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.deadline_tracker.core import Core
from shared.effects import Publish
from shared.messages import NodeDeadlines, TaskBatch
from tests.tracker_server import LEASE_US, TICK_US, Server, Tracker, tracker

WRITTEN: Any = json.loads(Path(__file__).with_name("tracker_checkpoints.json").read_bytes())
BATCHES = [TaskBatch.from_json(json.dumps(body).encode()) for body in WRITTEN["batches"]]
UPTO, WINDOW = WRITTEN["upto"], WRITTEN["window"]
RELEASES = WRITTEN["releases"]
SAYS_AGAIN = frozenset({"before_rows", "before_partitions"})
"""Their checkpoints keep verdicts until the stream shows them."""


def heard(server: Server, batches: list[TaskBatch]) -> Tracker:
    """Of today, a while after the last lease of whoever was there before."""
    it = Tracker(server, tracker(WINDOW))
    for one in batches:
        server.hear(one)
    for now_us in (LEASE_US + 1, LEASE_US + TICK_US):
        it.tick(now_us)
        it.all_of_it()
    it.tick(LEASE_US + 2 * TICK_US)
    it.all_of_it()
    return it


def upgraded(release: str, bucket: dict[str, Any], unsaid: int = 0) -> Tracker:
    """The former tracker dies with so many of its verdicts on their way."""
    server, said = Server(), RELEASES[release]["said"]
    for one in BATCHES[:UPTO]:
        server.hear(one)
    verdicts = {each.event_id: each for each in told(BATCHES)}
    for event_id in said[: len(said) - unsaid]:
        server.store(verdicts[event_id])
    for key, value in bucket.items():
        server.put(key, json.dumps(value).encode())
    return heard(server, BATCHES[UPTO:])


def told(batches: list[TaskBatch]) -> list[Publish]:
    return [one for _, one in heard(Server(), batches).server.stream if isinstance(one, Publish)]


def counted(core: Core) -> dict[str, Any]:
    return {name: (record.counts, str(record.window)) for name, record in core.nodes["n1"].records.items()}


@pytest.mark.parametrize("release", RELEASES)
def test_the_checkpoint_of_a_former_release_is_gone_on_from_and_nothing_is_counted_twice_or_lost(release: str) -> None:
    it = upgraded(release, RELEASES[release]["bucket"])
    whole = heard(Server(), BATCHES)
    assert counted(whole.core) == counted(it.core)
    assert (sorted(whole.server.said), 0) == (sorted(it.server.said), it.server.again)
    assert 0 == it.core.counters["checkpoints_malformed"]


@pytest.mark.parametrize("release", sorted(SAYS_AGAIN))
def test_verdicts_that_a_former_release_had_not_said_are_said(release: str) -> None:
    it = upgraded(release, RELEASES[release]["bucket"], unsaid=2)
    assert sorted(heard(Server(), BATCHES).server.said) == sorted(it.server.said)


def test_a_checkpoint_that_cannot_be_read_is_counted_and_its_node_is_counted_again_from_the_stream() -> None:
    former = heard(Server(), BATCHES[:UPTO])
    server = former.server
    saved = NodeDeadlines.trusted(server.bucket["node.n1"][0] or b"")
    former.stop()
    server.put("node.n1", saved.model_copy(update={"checkpoint": {"of": "a release to come"}}).to_json())
    it = heard(server, BATCHES[UPTO:])
    assert counted(heard(Server(), BATCHES).core) == counted(it.core)
    assert 1 == it.core.counters["checkpoints_malformed"]

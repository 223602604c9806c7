"""Ten thousand damaged messages to every subject: no process dies, no state is wrong, the service goes on."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client

from tests.e2e.mutations import mutated, sample
from tests.e2e.processes import Cluster
from tests.outside import ask, connect, until

MESSAGES = 10_000
SEED = int(os.environ.get("LAXITY_FUZZ_SEED", "2026"))
"""Another one tries other damage; a failure comes again with the same."""
SUBJECTS = {
    "rt.place": ("PlaceRequest", "PlaceRequest.hold"),
    "rt.confirm": ("ConfirmRequest",),
    "rt.resize": ("ResizeRequest",),
    "rt.defragment": ("DefragmentRequest",),
    "rt.gone": ("GoneRequest",),
    "rt.release": ("ReleaseRequest",),
    "rt.nodes": ("NodesQuery",),
    "rt.metrics.fuzz": ("NodeMetrics",),
    "rt.metrics.fuzz.kube": ("NodeMetrics",),
    "rt.events.task.fuzz": ("TaskBatch",),
    "rt.events.deadline.fuzz.c": ("DeadlineEvent",),
    "rt.events.place.fuzz": ("PlaceEvent",),
    "rt.events.node.fuzz": ("NodeEvent",),
    "rt.events.bus.fuzz": ("BusEvent",),
    "$KV.rt_nodes.node.fuzz": ("NodeFacts",),
    "$KV.rt_deadlines.node.fuzz": ("NodeDeadlines",),
    "$KV.rt_ledger.node.fuzz": ("NodeReservations",),
    "$KV.rt_ledger.request.fuzz": ("RequestRecord",),
    "$KV.rt_ledger.lease.fuzz": ("Lease",),
}
SERVICES = 6
"""Two placers, two monitors, a tracker, a node-list."""
REQUESTS = ("rt.place", "rt.confirm", "rt.release", "rt.nodes")


@pytest.mark.timeout(240)
async def test_ten_thousand_mutations_to_every_subject_harm_nothing(tmp_path: Path) -> None:
    with Cluster(tmp_path, placers=2, nodes=2) as cluster:
        client = await connect(cluster.nats.url)
        pids = [each.pid for each in [*cluster.placers, *cluster.others]]
        replies = await _flood(client, random.Random(SEED))
        await until(lambda: _quiet(client), "everything was handled", 120)
        after = await ask(client, "rt.place", {"request_id": "after", "command": ["x"], "gpu": {"share": 0.5}}, 20)
        assert after["outcome"] in {"placed", "rejected"}, after
        assert pids == [each.pid for each in [*cluster.placers, *cluster.others] if each.running]
        assert {subject: n for subject, n in Counter(replies["count"].values()).items() if subject > 1} == {}
        assert replies["not_json"] == Counter()
        await _ledger_holds(client)
        await client.close()


async def _flood(client: Client, rng: random.Random) -> dict[str, Any]:
    """Publishes everything, in pieces that the server can take; notes what came back."""
    seen: dict[str, Any] = {"count": Counter(), "not_json": Counter()}

    async def heard(message: Any) -> None:
        seen["count"][message.subject] += 1
        try:
            reply = json.loads(message.data)
        except ValueError:
            seen["not_json"][message.subject] += 1
            return
        if reply.get("outcome") == "error":
            assert {"field", "found", "allowed"} <= set(reply["error"]), reply

    await client.subscribe("_INBOX.fuzz.*", cb=heard)
    for n in range(MESSAGES):
        subject = rng.choice(tuple(SUBJECTS))
        body = mutated(sample(rng.choice(SUBJECTS[subject])), rng)
        reply = f"_INBOX.fuzz.{n}" if subject in REQUESTS and rng.random() < 0.8 else ""
        await client.publish(subject, body, reply=reply)
        if n % 200 == 0:
            await client.flush()
            await asyncio.sleep(0)
    await client.flush()
    return seen


async def _quiet(client: Client) -> bool:
    """Every service answers, and has nothing left in its hands."""
    inbox = client.new_inbox()
    sub = await client.subscribe(inbox)
    await client.publish("$SRV.STATS", b"", reply=inbox)
    try:
        found = [json.loads((await sub.next_msg(5)).data) for _ in range(SERVICES)]
    except nats.errors.TimeoutError:
        return False
    finally:
        await sub.unsubscribe()
    return not [s["name"] for s in found if s["data"]["inbox"] or s["data"]["outbox"] or s["data"]["health"] != "ok"]


async def _ledger_holds(client: Client) -> None:
    """Used never exceeds what there is, and each request is in one state; what the fuzz itself wrote aside."""
    kv = await client.jetstream().key_value("rt_ledger")
    known = {"accepted", "queued", "held", "placed", "started", "waiting", "stopping"}
    known |= {"exited", "released", "rejected", "failed", "expired"}
    for key in await kv.keys():
        if key.endswith(".fuzz"):
            continue
        body = json.loads((await kv.get(key)).value or b"{}")
        if key.startswith("node."):
            used: dict[str, int] = defaultdict(int)
            for reservation in body["reservations"]:
                for device in reservation["devices"]:
                    used[device] += reservation["share_micro"]
            assert {device: share for device, share in used.items() if share > 1_000_000} == {}, key
        if key.startswith("request."):
            assert body["state"] in known, key

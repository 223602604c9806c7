"""Response times in rt_learned decide what a placer admits, on a real server; through a restart and forgetting."""

from __future__ import annotations

import asyncio
import itertools

from cli.main import main
from shared.messages import Regime
from shared.subjects import LEARNED, NODES, node_key
from shared.testing.wait import eventually
from tests.decide_world import device, node
from tests.integration import test_placer as placers
from tests.unit.test_placer_measured import BOTH_FIT

stack = placers.stack
cluster = placers.cluster

TIMING = {"deadline_us": 50_000, "period_us": 100_000, "runtime_us": 10_000, "kind": "firm"}


async def test_what_was_learned_admits_until_it_is_forgotten_and_a_new_placer_knows_it(
    cluster: placers.Cluster,
) -> None:
    facts = node("m1", (device("g0", model="H200", regime=Regime.MPS),))
    await cluster.bus.put(NODES, node_key("m1"), facts.to_json())
    (placer,) = await cluster.placers("p1")
    numbers = itertools.count()

    async def place(profile: str, **body: object) -> dict[str, object]:
        timing = TIMING | {"profile": profile}
        return await cluster.place(
            request_id=f"{profile}-{next(numbers)}", gpu={"share": 0.25}, realtime=timing, candidates=["m1"], **body
        )

    async def would_be(outcome: str) -> dict[str, object] | None:
        reply = await place("b", dry_run=True)
        return reply if reply["outcome"] == outcome else None

    async def is_there() -> bool | None:
        return (await place("a"))["outcome"] == "placed" or None

    await eventually(is_there)
    assert await would_be("rejected")
    for change in BOTH_FIT:
        assert change.value is not None
        await cluster.bus.put(LEARNED, change.key, change.value)
    await eventually(lambda: would_be("placed"))
    placer.kill()
    placer.start()
    reply = await eventually(lambda: would_be("placed"))
    assert "99 % of the tasks of" in str(reply["measured"])
    assert 0 == await asyncio.to_thread(main, ["learned", "forget", "a", "--nats-url", cluster.server.url])
    await eventually(lambda: would_be("rejected"))

"""A fake node's monitor on a real server: its containers' tasks take the time that the simulated device gives them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from services.monitor.probes.fake import fake_uuid
from services.monitor.rings import ENDED
from shared.messages import Kind, Realtime, TaskEventKind
from shared.testing.service_process import ServiceProcess
from tests.monitor_folders import labels_of
from tests.outside import events, until

BEGIN, END, OVERDUE, ABORTED, LOST, CLOSED = TaskEventKind
RUNTIME_US, PERIOD_US = 30_000, 100_000
RELAXED, TIGHT = "relaxed", "tight"


def monitor_of(root: Path, nats_url: str) -> ServiceProcess:
    """A time-sliced device with two containers of one runtime: beside each other each takes about twice as long."""
    device = {"count": 1, "regime": "time_sliced", "slice_us": 2_000, "switch_us": 0}
    settings = {
        "LAXITY_MONITOR_NODE": "n1",
        "LAXITY_MONITOR_RING_ROOT": str(root / "rings"),
        "LAXITY_MONITOR_PROBE": "fake",
        "LAXITY_MONITOR_FAKE_DEVICES": json.dumps([device]),
        "LAXITY_MONITOR_FAKE_TASKS": "true",
    }
    for name, deadline_us in ((RELAXED, 90_000), (TIGHT, 40_000)):
        timing = Realtime(deadline_us=deadline_us, period_us=PERIOD_US, runtime_us=RUNTIME_US, kind=Kind.FIRM)
        labels_of(root / "rings", name, realtime=timing, device=fake_uuid("n1", 0))
    return ServiceProcess("services.monitor", root, nats_url, **settings)


async def told(client: Client) -> dict[str, Counter[TaskEventKind]]:
    """By container, how many events of each kind the stream has; each event once."""
    seen = set[tuple[str, TaskEventKind, int]]()
    for _, batch in await events(client, "rt.events.task.n1"):
        rings = batch.get("rings", [])
        for kind, seq, ring in zip(batch.get("kind", []), batch.get("seq", []), batch.get("ring", []), strict=True):
            seen.add((f"{rings[ring]['container']} {rings[ring]['ring']}", TaskEventKind(kind), seq))
    counts: dict[str, Counter[TaskEventKind]] = {}
    for name, kind, _ in seen:
        counts.setdefault(name.split()[0], Counter())[kind] += 1
    return counts


async def told_of(client: Client, kind: TaskEventKind, least: int) -> dict[str, Counter[TaskEventKind]]:
    async def enough() -> Any:
        found = await told(client)
        return found if len(found) == 2 and all(counts[kind] >= least for counts in found.values()) else None

    found: dict[str, Counter[TaskEventKind]] = await until(enough, f"{least} {kind} of each container")
    return found


async def test_a_neighbour_makes_the_tight_one_late_and_not_the_relaxed_one(
    nats_url: str, outside: Client, tmp_path: Path
) -> None:
    with monitor_of(tmp_path, nats_url):
        found = await told_of(outside, END, 10)
    assert (0, True) == (found[RELAXED][OVERDUE], found[TIGHT][OVERDUE] >= 9)


async def test_tasks_of_a_monitor_that_died_are_aborted_and_new_ones_begin(
    nats_url: str, outside: Client, tmp_path: Path
) -> None:
    with monitor_of(tmp_path, nats_url) as monitor:
        await told_of(outside, BEGIN, 2)
        monitor.kill()
        monitor.start()
        await told_of(outside, CLOSED, 1)
        before = await told(outside)
        after = await told_of(outside, END, max(counts[END] for counts in before.values()) + 2)
    done = {name: counts[BEGIN] - counts[END] - counts[ABORTED] for name, counts in after.items()}
    assert [True, True] == [0 <= left <= 1 for left in done.values()]


async def test_a_container_that_ended_leaves_nothing(nats_url: str, outside: Client, tmp_path: Path) -> None:
    with monitor_of(tmp_path, nats_url) as monitor:
        await told_of(outside, END, 1)
        for name in (RELAXED, TIGHT):
            (tmp_path / "rings" / name / ENDED).touch()

        async def gone() -> bool:
            return not list((tmp_path / "rings").iterdir())

        await until(gone, "no folder")
        assert 0 == monitor.stop()

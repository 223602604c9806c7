"""The deadline-tracker at a glance: what it listens to, what it says, what it does on a timer."""

from __future__ import annotations

import gc
import uuid

from services.deadline_tracker.core import HEARTBEATS, TASKS, VERDICTS, Core
from services.deadline_tracker.numbers import METRICS as NUMBERS
from services.deadline_tracker.numbers import numbers
from services.deadline_tracker.settings import TrackerSettings
from services.deadline_tracker.shares import Shares
from services.deadline_tracker.suspects import Rest
from shared.messages import DeadlineEvent, NodeDeadlines, NodeMetrics, TaskBatch
from shared.service import Every, Listen, Publishes, Service, run
from shared.subjects import DEADLINES, EVENTS_STREAM, LEDGER, NODES, Subjects

TICK_US = 250_000
FEW_COLLECTIONS = 100_000
"""Objects made and not yet gone until the collector looks for cycles; Python's own is 700."""


def _not_yet(_: Core) -> None:
    """Read from where the checkpoints of the first partitions end, once they are ours."""


SERVICE = Service(
    name="deadline-tracker",
    about="Turns task events into verdicts, guarantee ratios with bounds, and warnings; it judges no time itself.",
    listens=(
        Listen(DEADLINES, "watch", about="the checkpoints, and the leases of the partitions"),
        Listen(LEDGER, "watch", about="who shares a device, and what they declared: for the causes of misses"),
        Listen(NODES, "watch", about="how devices are shared, and whether they are well: for the causes of misses"),
        Listen(
            HEARTBEATS,
            "core",
            NodeMetrics,
            about="heartbeats of its nodes, read at a miss: what held the clocks of their devices back",
            wanted=Core.wants_heartbeat,
            unread=True,
        ),
        Listen(
            TASKS,
            "stream",
            TaskBatch,
            about="task begins, ends, overdues, aborts and losses of its nodes, from where checkpoints end",
            stream=EVENTS_STREAM,
            start=_not_yet,
            wanted=Core.wants,
        ),
        Listen(
            VERDICTS,
            "stream",
            DeadlineEvent,
            about="its own verdicts: what stands in the stream was said",
            stream=EVENTS_STREAM,
            start=_not_yet,
            wanted=Core.wants,
        ),
    ),
    publishes=(
        Publishes(
            "events.deadline.<node>.<container>",
            "event",
            DeadlineEvent,
            "missed with its causes, at_risk, recovered, noisy; by the holder of the node's partition alone",
        ),
        Publishes(
            DEADLINES,
            "kv",
            NodeDeadlines,
            "a node's records and the stream sequence that they include; by the holder of its partition alone",
        ),
    ),
    every=(
        Every(
            "checkpoint", TICK_US, "renews, takes and gives back leases; once a second writes the records that changed"
        ),
    ),
    metrics=NUMBERS,
    numbers=numbers,
)


async def _comes_back(rest: Rest) -> Rest:
    return rest


async def serve(settings: TrackerSettings) -> None:
    """Runs until asked to stop."""
    holder = f"{settings.instance}-{uuid.uuid4().hex[:8]}"
    # A batch is hundreds of small objects that go as they came: collections that look for cycles find none in them.
    gc.freeze()
    gc.set_threshold(FEW_COLLECTIONS)
    shares = Shares(settings.partitions, holder, settings.lease_us)
    core = Core(Subjects(settings.prefix), settings.guarantee, settings.window, shares)
    await run(SERVICE, core, settings, slow={Rest: _comes_back})

"""The deadline-tracker at a glance: what it listens to, what it says, what it does on a timer."""

from __future__ import annotations

from services.deadline_tracker.core import Core
from services.deadline_tracker.settings import TrackerSettings
from shared.messages import DeadlineEvent, NodeDeadlines, TaskBatch
from shared.service import Every, Listen, Publishes, Service, run
from shared.subjects import DEADLINES, EVENTS_STREAM, Subjects

SERVICE = Service(
    name="deadline-tracker",
    about="Turns task events into verdicts, guarantee ratios with bounds, and warnings; it judges no time itself.",
    listens=(
        Listen(DEADLINES, "watch", about="its own checkpoints, read at start"),
        Listen(
            "events.task.>",
            "stream",
            TaskBatch,
            about="task begins, ends, overdues, aborts and losses, from the first batch that no checkpoint includes",
            stream=EVENTS_STREAM,
            start=Core.start_seq,
        ),
    ),
    publishes=(
        Publishes("events.deadline.<node>.<container>", "event", DeadlineEvent, "missed, at_risk, recovered"),
        Publishes(DEADLINES, "kv", NodeDeadlines, "a node's records and the stream sequence that they include"),
    ),
    every=(Every("checkpoint", 1_000_000, "writes the records that changed"),),
)


async def serve(settings: TrackerSettings) -> None:
    """Runs until asked to stop."""
    core = Core(Subjects(settings.prefix), settings.guarantee, settings.window)
    await run(SERVICE, core, settings)

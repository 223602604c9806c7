"""The node-list at a glance: what it listens to, what it says, what it does on a timer."""

from __future__ import annotations

import uuid

from services.node_list.core import Core
from services.node_list.nodes import Policy
from services.node_list.numbers import METRICS as NUMBERS
from services.node_list.numbers import numbers
from services.node_list.settings import NodeListSettings
from services.node_list.standing import ClassTask
from shared.messages import (
    DeadlineEvent,
    Heartbeat,
    KubeNodeFacts,
    LearnedProfile,
    ListDelta,
    ListsRecord,
    NodeEvent,
    NodeFacts,
    NodesQuery,
    NodesReply,
    PlaceReply,
    RecordInside,
)
from shared.service import Every, Listen, Publishes, Service, run
from shared.subjects import DEADLINES, EVENTS_STREAM, LEARNED, LEDGER, NODES, Subjects

TICK_US = 250_000

SERVICE = Service(
    name="node-list",
    about="Knows who is alive, and keeps per deadline class the ordered list of what each device can still promise.",
    listens=(
        Listen(NODES, "watch", about="what is published, and the writer's lease"),
        Listen(LEDGER, "watch", about="the reservations on each device", keys="node.*"),
        Listen(DEADLINES, "watch", about="containers that are at risk, as the tracker last wrote them"),
        Listen(LEARNED, "watch", about="what was learned of response times, and the lease of who learns"),
        Listen("metrics.*", "core", Heartbeat, about="heartbeats; their local receive time is what counts"),
        Listen("metrics.*.kube", "core", KubeNodeFacts, about="what Kubernetes says of a node"),
        Listen("events.deadline.>", "stream", DeadlineEvent, about="warnings, as they come", stream=EVENTS_STREAM),
        Listen(
            "events.list.*",
            "stream",
            ListDelta,
            about="its own changes of the lists: what stands in the stream was said",
            stream=EVENTS_STREAM,
        ),
        Listen(
            "nodes",
            "request",
            NodesQuery,
            about="the ordered device list of one class",
            queue="node-list",
            fault=PlaceReply.of_error,
        ),
    ),
    publishes=(
        Publishes(NODES, "kv", NodeFacts, "a node's capacity, state and standings; by the holder of the lease alone"),
        Publishes(
            LEARNED, "kv", LearnedProfile, "response times of a profile; by the holder of the bucket's lease alone"
        ),
        Publishes("events.node.<node>", "event", NodeEvent, "joined, ready, degraded, unreachable, lost, device_lost"),
        Publishes(NODES, "kv", ListsRecord, "how far the lists have come; by the holder of the lease alone"),
        Publishes(NODES, "kv", RecordInside, "the same, in a node's key, where that node alone was written"),
        Publishes("events.list.<class>", "event", ListDelta, "what one write changed in the list of a class"),
        Publishes("(reply)", "reply", NodesReply, "to rt.nodes"),
    ),
    every=(Every("age", TICK_US, "judges silence, renews the lease"),),
    metrics=NUMBERS,
    numbers=numbers,
)


def policy(settings: NodeListSettings) -> Policy:
    classes = tuple(
        ClassTask(
            name=one.name,
            deadline_us=one.deadline_us,
            runtime_us=one.runtime_us,
            period_us=one.period_us or one.deadline_us,
            profile=one.profile or one.name,
            guarantee=one.guarantee,
        )
        for one in settings.classes
    )
    return Policy(
        classes,
        settings.grace_us,
        settings.lost_us,
        settings.tight_ratio,
        settings.foreign_context_micro,
        settings.return_ratio,
        settings.return_us,
        settings.tolerated_taints,
    )


async def serve(settings: NodeListSettings) -> None:
    """Runs until asked to stop."""
    holder = f"{settings.instance}-{uuid.uuid4().hex[:8]}"
    core = Core(Subjects(settings.prefix), policy(settings), holder, settings.lease_us, TICK_US)
    await run(SERVICE, core, settings)

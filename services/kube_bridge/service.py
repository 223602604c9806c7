"""The kube-bridge at a glance: what it listens to, what it says, what it does on a timer."""

from __future__ import annotations

import uuid

from services.kube_bridge.asked import Terms
from services.kube_bridge.core import COMPARE, SOON, Core
from services.kube_bridge.numbers import METRICS as NUMBERS
from services.kube_bridge.numbers import numbers
from services.kube_bridge.settings import KubeBridgeSettings
from shared.clock import SystemClock
from shared.messages import BusEvent, KubeNodeFacts, PlaceReply, PodsQuery, PodsReply
from shared.service import Every, Listen, Publishes, Service, run
from shared.subjects import LEDGER, NODES, Subjects

COMPARE_US = 10_000_000
"""What is over is given back within 30 s after the API server answers again, also where its end was not seen."""

SERVICE = Service(
    name="kube-bridge",
    about="Translates between Kubernetes and the bus: answers kube-scheduler, tells of nodes, gives back what is over.",
    listens=(
        Listen(LEDGER, "watch", about="the requests of pods, and when something reserved goes"),
        Listen(NODES, "watch", keys="node.*", about="which nodes have devices, and when that changes"),
        Listen(
            "pods",
            "request",
            PodsQuery,
            about="where pods are bound, or why they are not",
            queue="kube-bridge",
            fault=PlaceReply.of_error,
        ),
    ),
    publishes=(
        Publishes("metrics.<node>.kube", "metric", KubeNodeFacts, "a node as the API server shows it"),
        Publishes("events.bus.kube-bridge", "event", BusEvent, "where a pod and the ledger say different things"),
        Publishes("(reply)", "reply", PodsReply, "to rt.pods"),
    ),
    every=(
        Every(SOON, 1_000_000, "releases that are due; nodes that changed, and every tenth of the others"),
        Every(COMPARE, COMPARE_US, "compares all pods with the ledger"),
    ),
    metrics=NUMBERS,
    numbers=numbers,
)


async def serve(settings: KubeBridgeSettings) -> None:
    """Runs until asked to stop."""
    instance = f"{settings.instance}-{uuid.uuid4().hex[:8]}"
    core = Core(
        instance,
        Subjects(settings.prefix),
        Terms(settings.hold_us, settings.strategy, settings.ahead),
        verdict_us=settings.verdict_us,
        condition_us=settings.condition_us,
        patience_us=settings.patience_us,
        drivers=settings.claim_drivers,
    )
    from services.kube_bridge.perform import Performer  # its client is slow to import

    clock = SystemClock()
    performer = Performer(settings, clock)
    slow, followers = performer.slow(), performer.followers
    await run(SERVICE, core, settings, slow=slow, tasks=(performer.root,), outside=followers, clock=clock)

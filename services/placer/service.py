"""The placer at a glance: what it listens to, what it says, what it does on a timer, and how it is put together."""

from __future__ import annotations

import gc
import uuid
from contextlib import AsyncExitStack

from services.placer.backends.base import Backend
from services.placer.backends.fake import FakeBackend
from services.placer.backends.process import ProcessBackend
from services.placer.core.core import BEAT, LIST, SOON, Core
from services.placer.numbers import METRICS as NUMBERS
from services.placer.numbers import numbers
from services.placer.perform import Performer, Reach
from services.placer.settings import BEAT_US, PlacerSettings
from shared.clock import SystemClock
from shared.messages import (
    BusEvent,
    ConfirmRequest,
    DefragmentRequest,
    GoneRequest,
    NodeReservations,
    PlaceEvent,
    PlaceReply,
    PlaceRequest,
    ReleaseRequest,
    RequestRecord,
    ResizeRequest,
)
from shared.service import Every, Listen, Outside, Publishes, Service, run
from shared.subjects import LEARNED, LEDGER, NODES, PLACE_STREAM, Subjects

SERVICE = Service(
    name="placer",
    about="Decides where containers run, keeps the ledger of who holds what, and has backends carry it out.",
    listens=(
        Listen(LEDGER, "watch", about="the one truth: identity, leases, reservations, requests"),
        Listen(
            NODES,
            "watch",
            about="what the node list says of each node: ranks and excludes, never admits",
            keys="node.*",
        ),
        Listen(LEARNED, "watch", about="measured response times: what admits firm requests, once enough was seen"),
        Listen(
            "place",
            "work",
            PlaceRequest,
            about="the stored copy of each request, decided where nobody has after a grace",
            stream=PLACE_STREAM,
            durable="placer",
        ),
        Listen("place", "request", PlaceRequest, about="place this", queue="placer", fault=PlaceReply.of_error),
        Listen(
            "confirm", "request", ConfirmRequest, about="start what is held", queue="placer", fault=PlaceReply.of_error
        ),
        Listen(
            "resize",
            "request",
            ResizeRequest,
            about="give each replica another size while it runs",
            queue="placer",
            fault=PlaceReply.of_error,
        ),
        Listen(
            "defragment",
            "request",
            DefragmentRequest,
            about="let others move so that it fits",
            queue="placer",
            fault=PlaceReply.of_error,
        ),
        Listen(
            "gone",
            "request",
            GoneRequest,
            about="a node is gone for good: give back what is reserved there",
            queue="placer",
            fault=PlaceReply.of_error,
        ),
        Listen("release", "request", ReleaseRequest, about="end it", queue="placer", fault=PlaceReply.of_error),
    ),
    publishes=(
        Publishes("(reply)", "reply", PlaceReply, "to each question above: one each"),
        Publishes("events.place.<request>", "event", PlaceEvent, "each step of a request's life; how far a pull is"),
        Publishes(
            "events.bus.placer",
            "event",
            BusEvent,
            "the ledger changed; a container without a key; too many lost nodes",
        ),
        Publishes(LEDGER, "kv", RequestRecord, "request.<request id>: where a request is in its life"),
        Publishes(LEDGER, "kv", NodeReservations, "node.<node>: who holds what on it"),
    ),
    every=(
        Every(BEAT, BEAT_US, "renews leases; the leader takes over what nobody carries on"),
        Every(SOON, 100_000, "copies whose grace is over, holds that end, waiting requests that may fit"),
        Every(LIST, 2 * BEAT_US, "compares what runs with what the ledger says"),
    ),
    metrics=NUMBERS,
    numbers=numbers,
)


FEW_COLLECTIONS = 20_000
"""Objects made and not yet gone until the collector looks for cycles; Python's own is 700."""


def reach(settings: PlacerSettings, closing: AsyncExitStack, outside: list[Outside]) -> Reach:
    """The backends that the settings name, each made once; ``closing`` ends what they hold open, ``outside`` gets what
    they cannot do without.
    """
    made: dict[str, Backend] = {}
    for name in settings.backends.values():
        if name not in made:
            made[name] = _backend(name, settings, closing, outside)
    return Reach({pattern: made[name] for pattern, name in settings.backends.items()})


def _backend(name: str, settings: PlacerSettings, closing: AsyncExitStack, outside: list[Outside]) -> Backend:
    if name == "docker":
        from services.placer.backends.docker import DockerBackend  # its client is slow to import

        docker = DockerBackend(settings.docker, settings.ring_root)
        closing.push_async_callback(docker.close)
        return docker
    if name == "kubernetes":
        from services.placer.backends.kubernetes import KubernetesBackend  # its client is slow to import

        kubernetes = KubernetesBackend(settings.kubernetes)
        closing.push_async_callback(kubernetes.close)
        outside.append(kubernetes.pods.follower)
        return kubernetes
    state = settings.state_root / name
    if name == "fake":
        return FakeBackend(state, settings.fake_ring_root)
    return ProcessBackend(state, settings.ring_root, work_dir=settings.work_dir)


async def serve(settings: PlacerSettings) -> None:
    """Runs until asked to stop."""
    clock = SystemClock()
    instance = settings.instance.encode()[:200].decode(errors="ignore")
    me = f"{instance}-{uuid.uuid4().hex[:8]}"
    offset_us = clock.wall_us() - clock.now_us()
    outside: list[Outside] = []
    async with AsyncExitStack() as closing:
        reached = reach(settings, closing, outside)
        # What is kept are facts and records, without cycles: looking for some stopped everything for a quarter of a
        # second with 1,000 nodes.
        gc.freeze()
        gc.set_threshold(FEW_COLLECTIONS)
        core = Core(me, uuid.uuid4().hex, Subjects(settings.prefix), reached, settings.rules(), offset_us)
        performer = Performer(reached, settings.start_timeout_us)
        slow, tasks = performer.slow(), performer.tasks()
        await run(SERVICE, core, settings, slow=slow, tasks=tasks, outside=outside, clock=clock)

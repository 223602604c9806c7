"""Carries out the core's slow effects through backends; every one ends in an event, also when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from services.placer.backends.base import Backend, Seen, StartSpec
from services.placer.core.capabilities import Capabilities
from services.placer.core.commits import PlanNext
from services.placer.core.containers import (
    Ended,
    Found,
    Listed,
    ListFailed,
    ListNode,
    PlaceStreamAt,
    Progress,
    Read,
    ReadDone,
    Remove,
    Resize,
    Resized,
    ResizeFailed,
    ResizeUnknown,
    Start,
    Started,
    StartFailed,
    StartUnknown,
    Stop,
    StopFailed,
    Stopped,
)
from services.placer.core.telling import Deliver, Delivered
from shared.errors import BackendError, BackendSilentError, BusError
from shared.messages import Regime
from shared.service import Runtime
from shared.subjects import LEDGER, PLACE_STREAM

RETRY_US = 500_000
"""Between two looks at a stream that cannot be read."""


class Reach(Mapping[str, Capabilities]):
    """Which backend runs a node's containers, by patterns; as a mapping, what each node's backend can do."""

    def __init__(self, patterns: Mapping[str, Backend]) -> None:
        self._patterns = patterns
        self._known: dict[str, Backend | None] = {}

    def backend(self, node: str) -> Backend:
        """Raises BackendError where no pattern names the node."""
        found = self._find(node)
        if found is None:
            raise BackendError(f"no backend of this placer reaches {node}")
        return found

    def _find(self, node: str) -> Backend | None:
        if node not in self._known:
            matching = (backend for pattern, backend in self._patterns.items() if fnmatchcase(node, pattern))
            self._known[node] = next(matching, None)
        return self._known[node]

    def backends(self) -> set[Backend]:
        return set(self._patterns.values())

    def __getitem__(self, node: str) -> Capabilities:
        # the empty name stands for all nodes that are not named, of which there are none: each is asked for
        found = self._find(node) if node else None
        if found is None:
            raise KeyError(node)
        return found.capabilities

    def __iter__(self) -> Iterator[str]:
        return iter(self._patterns)

    def __len__(self) -> int:
        return len(self._patterns)


class Performer:
    """The slow effects of one placer, and what it hears without having asked."""

    def __init__(self, reach: Reach, start_timeout_us: int) -> None:
        self._reach = reach
        self._start_timeout_us = start_timeout_us
        self._runtime: asyncio.Future[Runtime] | None = None

    def slow(self) -> Mapping[type, Callable[[Any], Awaitable[object | None]]]:
        return {
            Start: self.start,
            Stop: self.stop,
            Resize: self.resize,
            Remove: self.remove,
            ListNode: self.list_node,
            Read: self.read,
            Deliver: self.deliver,
            PlanNext: self.plan_next,
        }

    def tasks(self) -> list[Callable[[Runtime], Awaitable[None]]]:
        """Root tasks: one watch per backend, and the look at the stream of requests at start."""
        watches = [_watch(backend) for backend in self._reach.backends()]
        return [self._look_at_stream, *watches]

    # --- effects ---

    async def start(self, effect: Start) -> Started | StartFailed | StartUnknown:
        labels = effect.labels
        runtime = await self._running()
        spec = StartSpec(
            labels,
            effect.request,
            env={"LAXITY_GATE": gate_of(effect)},
            regimes=effect.regimes,
            progress=lambda text: runtime.post(Progress(labels, text)),
        )
        try:
            async with asyncio.timeout(self._start_timeout_us / 1_000_000):
                seen = await self._reach.backend(labels.node).start(spec)
        except BackendError as error:
            why, unknown = str(error), isinstance(error, BackendSilentError)
        except TimeoutError:
            why, unknown = f"not running after {self._start_timeout_us} us", True
        else:
            return Started(found_of(seen))
        # what a backend has made it undoes; a pod of others that may be bound by now stays where it is
        ended = StartUnknown if unknown and effect.request.pods is not None else StartFailed
        return ended(labels.node, labels.container, why)

    async def stop(self, effect: Stop) -> Stopped | StopFailed:
        try:
            await self._reach.backend(effect.node).stop(effect.node, effect.container)
        except BackendError as error:
            return StopFailed(effect.node, effect.container, str(error))
        return Stopped(effect.node, effect.container)

    async def resize(self, effect: Resize) -> Resized | ResizeFailed | ResizeUnknown:
        node, container, size = effect.node, effect.container, effect.size
        try:
            backend = self._reach.backend(node)
            await backend.resize(node, container, cpu_milli=size.cpu_milli, memory_mib=size.memory_mib)
        except BackendSilentError as error:
            return ResizeUnknown(node, container, str(error))
        except BackendError as error:
            return ResizeFailed(node, container, size, str(error))
        return Resized(node, container, size)

    async def remove(self, effect: Remove) -> None:
        try:
            await self._reach.backend(effect.node).remove(effect.node, effect.container)
        except BackendError as error:
            runtime = await self._running()
            runtime.log.info("not removed", container=effect.container, node=effect.node, error=str(error))

    async def list_node(self, effect: ListNode) -> Listed | ListFailed:
        try:
            backend = self._reach.backend(effect.node)
            known = await backend.glance(effect.node) if effect.glance else None
            seen = await backend.list(effect.node) if known is None else known
        except BackendError as error:
            return ListFailed(effect.node, str(error))
        return Listed(effect.node, tuple(map(found_of, seen)), complete=known is None)

    async def read(self, effect: Read) -> ReadDone:
        runtime = await self._running()
        return ReadDone(await runtime.bus.read(LEDGER, effect.keys), effect.listed, effect.asked_us)

    async def deliver(self, effect: Deliver) -> Delivered:
        runtime = await self._running()
        await runtime.events_stored()
        return Delivered(effect.revision, effect.gone)

    async def plan_next(self, effect: PlanNext) -> PlanNext:
        return effect

    # --- root tasks ---

    async def _look_at_stream(self, runtime: Runtime) -> NoReturn:
        self._future().set_result(runtime)
        runtime.post(PlaceStreamAt(await _last_seq(runtime)))
        await asyncio.Event().wait()
        raise AssertionError("root tasks never end")

    async def _running(self) -> Runtime:
        found = self._future()
        return found.result() if found.done() else await asyncio.shield(found)

    def _future(self) -> asyncio.Future[Runtime]:
        if self._runtime is None:
            self._runtime = asyncio.get_running_loop().create_future()
        return self._runtime


async def _last_seq(runtime: Runtime) -> int:
    """Asked until it is answered: a server that is just restarting is no reason to stop."""
    while True:
        try:
            return await runtime.bus.last_seq(PLACE_STREAM)
        except BusError as error:
            runtime.log.warning("stream of requests not read", error=str(error))
            await runtime.clock.sleep_us(RETRY_US)


def _watch(backend: Backend) -> Callable[[Runtime], Awaitable[None]]:
    async def watch(runtime: Runtime) -> None:
        await backend.watch(lambda seen: runtime.post(Ended(found_of(seen))))

    return watch


def gate_of(start: Start) -> str:
    """LAXITY_GATE: whether its tasks wait for their turns. What nobody knows to be ungated counts as gated."""
    timing = start.request.realtime
    return "1" if timing and timing.gate and not {Regime.GATED, None}.isdisjoint(start.regimes) else "0"


def found_of(seen: Seen) -> Found:
    """What a backend saw, as the core hears of it."""
    return Found(seen.node, seen.container, seen.labels, seen.state == "running", seen.exit_code, seen.cause)

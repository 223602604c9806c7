"""Carries out the core's slow effects: on the bus, at the API server, and towards the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

from services.kube_bridge.calls import (
    Answer,
    AskConfirm,
    AskPlace,
    AskRelease,
    BindPlain,
    ConfirmAnswered,
    Listed,
    LookAtPod,
    NodeChanged,
    NodeGone,
    PlaceAnswered,
    PlainBound,
    PodChanged,
    PodGone,
    PodLooked,
    ReleaseAnswered,
    Silent,
    WriteCondition,
)
from services.kube_bridge.core import Core
from services.kube_bridge.extender import Extender
from services.kube_bridge.kubernetes_client import ApiServer
from services.kube_bridge.list_watch import Follower, Json, KubeError
from services.kube_bridge.seen import CONDITION, NodeSeen, PodSeen
from services.kube_bridge.settings import KubeBridgeSettings
from shared.bus import NoResponders, rfc3339
from shared.errors import BusError, FieldError
from shared.messages import ConfirmRequest, Message, PlaceReply, ReleaseRequest
from shared.service import Runtime

AT_ONCE = 64
"""Writes to the API server under way at a time; a burst of refused pods waits."""


class Performer:
    """The slow effects of one bridge, and its root tasks: the extender and the two watches."""

    def __init__(self, settings: KubeBridgeSettings, core: Core) -> None:
        self._settings, self._core = settings, core
        self._server: ApiServer
        self._runtime: Runtime
        self._extender: Extender
        self._room = asyncio.Semaphore(AT_ONCE)
        self.followers: dict[str, Follower] = {}

    def slow(self) -> Mapping[type, Callable[[Any], Awaitable[object | None]]]:
        return {
            Answer: self.answer,
            AskPlace: self.place,
            AskConfirm: self.confirm,
            AskRelease: self.release,
            LookAtPod: self.look,
            BindPlain: self.bind,
            WriteCondition: self.write,
        }

    async def root(self, runtime: Runtime) -> NoReturn:
        """Ends with the service alone: what breaks in it ends that."""
        self._runtime = runtime
        self._extender = Extender(self._settings, runtime.post, runtime.log)
        self._extender.health = lambda: self._core.health
        self._extender.count = runtime.count
        self._server = ApiServer(self._settings, runtime.clock)
        try:
            await self._extender.open()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pods().run())
                group.create_task(self._nodes().run())
        finally:
            await self._extender.close()
            await self._server.close()
        raise AssertionError("root tasks never end")

    # --- what the API server shows ---

    def _pods(self) -> Follower:
        post, scheduler = self._runtime.post, self._settings.scheduler
        self.followers["pods"] = Follower(
            self._server.kind("pods"),
            self._runtime.clock,
            listed=lambda found: post(Listed(pods=tuple(PodSeen.of(pod, scheduler) for pod in found))),
            changed=lambda pod: post(PodChanged(PodSeen.of(pod, scheduler))),
            deleted=lambda pod: post(PodGone(pod["metadata"]["uid"])),
            silent=self._silent("pods"),
        )
        return self.followers["pods"]

    def _nodes(self) -> Follower:
        post = self._runtime.post
        self.followers["nodes"] = Follower(
            self._server.kind("nodes"),
            self._runtime.clock,
            listed=lambda found: post(Listed(nodes=tuple(map(NodeSeen.of, found)))),
            changed=lambda node: post(NodeChanged(NodeSeen.of(node))),
            deleted=lambda node: post(NodeGone(node["metadata"]["name"])),
            silent=self._silent("nodes"),
        )
        return self.followers["nodes"]

    def _silent(self, kind: Any) -> Callable[[KubeError], None]:
        def silent(error: KubeError) -> None:
            self._runtime.log.info("the API server is not heard", kind=kind, error=str(error))
            self._runtime.post(Silent(kind))

        return silent

    # --- the scheduler and the placers ---

    async def answer(self, effect: Answer) -> None:
        self._extender.answer(effect)

    async def place(self, effect: AskPlace) -> PlaceAnswered:
        subject = self._runtime.bus.subjects.place
        return PlaceAnswered(effect.token, await self._ask(subject, effect.request, self._settings.filter_us))

    async def confirm(self, effect: AskConfirm) -> ConfirmAnswered:
        subject = self._runtime.bus.subjects.confirm
        asked = ConfirmRequest(request_id=effect.request_id, generation=effect.generation)
        return ConfirmAnswered(effect.token, await self._ask(subject, asked, self._settings.bind_us))

    async def release(self, effect: AskRelease) -> ReleaseAnswered:
        subject, asked = self._runtime.bus.subjects.release, ReleaseRequest(request_id=effect.request_id)
        return ReleaseAnswered(effect.request_id, await self._ask(subject, asked, self._settings.bind_us))

    async def _ask(self, subject: str, asked: Message, limit_us: int) -> PlaceReply | None:
        """None where nobody answered: it may have happened nevertheless."""
        try:
            answer = await self._runtime.bus.request(subject, asked.to_json(), limit_us)
            return None if isinstance(answer, NoResponders) else PlaceReply.trusted(answer.body)
        except (BusError, FieldError) as error:
            self._runtime.count("placers.silent")
            self._runtime.log.warning("no answer of a placer", subject=subject, error=str(error))
            return None

    # --- the API server ---

    async def look(self, effect: LookAtPod) -> PodLooked:
        try:
            found = await self._server.pod(effect.namespace, effect.name)
        except KubeError as error:
            self._runtime.log.warning("a pod could not be read", pod=effect.name, error=str(error))
            return PodLooked(effect.uid, None, token=effect.token)
        return _looked(effect, found, self._settings.scheduler)

    async def bind(self, effect: BindPlain) -> PlainBound:
        """Where it is unclear how it ended the pod itself tells."""
        try:
            await self._server.bind(effect.namespace, effect.name, effect.uid, effect.node)
        except KubeError as error:
            looked = await self.look(LookAtPod(effect.namespace, effect.name, effect.uid))
            bound = looked.there and looked.node == effect.node
            return PlainBound(effect.token, "" if bound else f"the pod was not bound: {error}")
        return PlainBound(effect.token)

    async def write(self, effect: WriteCondition) -> None:
        said = effect.condition
        body = {"type": CONDITION, "status": said.status, "reason": said.reason, "message": said.message}
        if effect.turned:
            body["lastTransitionTime"] = rfc3339(self._runtime.clock.wall_us())
        if effect.probed:
            body["lastProbeTime"] = rfc3339(self._runtime.clock.wall_us())
        try:
            async with self._room:
                await self._server.write_condition(effect.namespace, effect.name, effect.uid, body)
        except KubeError as error:
            self._runtime.count("conditions.not_written")
            self._runtime.log.info("a condition was not written", pod=effect.name, error=str(error))


def _looked(effect: LookAtPod, found: Json | None, scheduler: str) -> PodLooked:
    if found is None or found["metadata"]["uid"] != effect.uid:
        return PodLooked(effect.uid, there=False, token=effect.token)
    seen = PodSeen.of(found, scheduler)
    return PodLooked(effect.uid, not seen.ended, seen.node, effect.token)

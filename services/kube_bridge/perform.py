"""Carries out the core's slow effects: on the bus, at the API server, and towards the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn

from services.kube_bridge.calls import (
    Answer,
    AskConfirm,
    AskPlace,
    AskRelease,
    BindPlain,
    ClaimsChanged,
    ClaimsGone,
    ClaimsListed,
    ClaimsLooked,
    ConfirmAnswered,
    Listed,
    LookAtClaims,
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
from services.kube_bridge.claims import KINDS, OF_KINDS, ClaimSeen, ClassSeen
from services.kube_bridge.extender import Extender
from services.kube_bridge.perhaps import Perhaps
from services.kube_bridge.seen import CONDITION, NodeSeen, PodSeen
from services.kube_bridge.settings import KubeBridgeSettings
from shared.bus import NoResponders, rfc3339
from shared.clock import Clock
from shared.errors import BusError, FieldError, KubernetesError
from shared.kubernetes.api import STRATEGIC, ApiServer, Kind
from shared.kubernetes.list_watch import Follower, Json
from shared.messages import ConfirmRequest, Message, PlaceReply, ReleaseRequest
from shared.service import Runtime

AT_ONCE: Final = 64
"""Writes to the API server under way at a time; a burst of refused pods waits."""
BOUND_AT_ONCE: Final = 2
"""The same for what is said of pods that have their places: those that have none yet come first."""
_NOT_FOUND: Final = 404
_RESOURCES: Final = "/apis/resource.k8s.io/v1"


class Performer:
    """The slow effects of one bridge, and its root tasks: the extender and the watches."""

    def __init__(self, settings: KubeBridgeSettings, clock: Clock) -> None:
        """Raises FieldError where the API server cannot be reached for want of a setting."""
        self._settings = settings
        self._server = ApiServer(settings.kubernetes, clock)
        self._runtime: Runtime
        self._extender: Extender
        self._room = asyncio.Semaphore(AT_ONCE)
        self._room_of_bound = asyncio.Semaphore(BOUND_AT_ONCE)
        self._classes_shown = False
        claims = [self._claims(kind, clock) for kind in KINDS if settings.claim_drivers]
        self.followers = (self._pods(clock), self._nodes(clock), *claims)

    def slow(self) -> Mapping[type, Callable[[Any], Awaitable[object | None]]]:
        return {
            Answer: self.answer,
            AskPlace: self.place,
            AskConfirm: self.confirm,
            AskRelease: self.release,
            LookAtPod: self.look,
            LookAtClaims: self.look_at_claims,
            BindPlain: self.bind,
            WriteCondition: self.write,
        }

    async def root(self, runtime: Runtime) -> NoReturn:
        """Ends with the service alone: what breaks in it ends that."""
        self._runtime = runtime
        self._extender = Extender(self._settings, runtime.post, runtime.log)
        self._extender.health = lambda: runtime.health
        self._extender.count = runtime.count
        try:
            await self._extender.open()
            async with asyncio.TaskGroup() as group:
                for follower in self.followers:
                    group.create_task(follower.run())
        finally:
            await self._extender.close()
            await self._server.close()
        raise AssertionError("root tasks never end")

    # --- what the API server shows ---

    def _pods(self, clock: Clock) -> Follower:
        scheduler = self._settings.scheduler
        return Follower(
            "pods",
            Kind(self._server, "/api/v1/pods", {}),
            clock,
            self._settings.kubernetes.silent_us,
            listed=lambda found: self._post(Listed(pods=tuple(PodSeen.of(pod, scheduler) for pod in found))),
            changed=lambda pod: self._post(PodChanged(PodSeen.of(pod, scheduler))),
            deleted=lambda pod: self._post(PodGone(pod["metadata"]["uid"])),
            failed=lambda error: self._silent("pods", error),
        )

    def _nodes(self, clock: Clock) -> Follower:
        return Follower(
            "nodes",
            Kind(self._server, "/api/v1/nodes", {}),
            clock,
            self._settings.kubernetes.silent_us,
            listed=lambda found: self._post(Listed(nodes=tuple(map(NodeSeen.of, found)))),
            changed=lambda node: self._post(NodeChanged(NodeSeen.of(node))),
            deleted=lambda node: self._post(NodeGone(node["metadata"]["name"])),
            failed=lambda error: self._silent("nodes", error),
        )

    def _claims(self, kind: str, clock: Clock) -> Follower:
        """One of those of dynamic resource allocation, which clusters before 1.34 do not have."""
        of, silent_us = OF_KINDS[kind], self._settings.kubernetes.silent_us
        return Follower(
            kind,
            Perhaps(Kind(self._server, f"{_RESOURCES}/{kind}", {}), clock, silent_us // 2),
            clock,
            silent_us,
            listed=lambda found: self._claims_listed(ClaimsListed(kind, tuple(map(of, found)))),
            changed=lambda found: self._post(ClaimsChanged(kind, of(found))),
            deleted=lambda found: self._post(ClaimsGone(kind, of(found).name)),
            failed=lambda error: self._silent(kind, error),
        )

    def _claims_listed(self, listed: ClaimsListed) -> None:
        """A class that takes what is ours ends the service at its start; later pods are refused and the bus is told."""
        taking = [each for each in listed.found if isinstance(each, ClassSeen) and each.takes_ours]
        if taking and not self._classes_shown:
            found = f"{taking[0].name} with {taking[0].stands_for}"
            allowed = "no class whose extendedResourceName is of laxity.dev: kube-scheduler would give devices itself"
            raise FieldError("deviceclasses", found, allowed)
        self._classes_shown = self._classes_shown or listed.kind == "deviceclasses"
        self._post(listed)

    def _post(self, event: object) -> None:
        self._runtime.post(event)

    def _silent(self, kind: str, error: KubernetesError) -> None:
        self._runtime.log.info("the API server is not heard", kind=kind, error=str(error))
        self._post(Silent(kind))

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
            found: Json | None = await self._server.ask("GET", _path(effect.namespace, effect.name))
        except KubernetesError as error:
            if error.status == _NOT_FOUND and not error.unclear:
                return _looked(effect, None, self._settings.scheduler)
            self._runtime.log.warning("a pod could not be read", pod=effect.name, error=str(error))
            return PodLooked(effect.uid, None, token=effect.token)
        return _looked(effect, found, self._settings.scheduler)

    async def look_at_claims(self, effect: LookAtClaims) -> ClaimsLooked:
        try:
            found = [await self._server.ask("GET", _claim_path(*name.split("/"))) for name in effect.claims]
        except KubernetesError as error:
            self._runtime.log.warning("a claim could not be read", claims=effect.claims, error=str(error))
            return ClaimsLooked(effect.token, None)
        return ClaimsLooked(effect.token, tuple(map(ClaimSeen.of, found)))

    async def bind(self, effect: BindPlain) -> PlainBound:
        """Without a word of devices. Where it is unclear how it ended the pod itself tells."""
        target = {"apiVersion": "v1", "kind": "Node", "name": effect.node}
        body = {"metadata": {"name": effect.name, "uid": effect.uid}, "target": target}
        try:
            await self._server.ask("POST", f"{_path(effect.namespace, effect.name)}/binding", body=body)
        except KubernetesError as error:
            looked = await self.look(LookAtPod(effect.namespace, effect.name, effect.uid))
            bound = looked.there and looked.node == effect.node
            return PlainBound(effect.token, "" if bound else f"the pod was not bound: {error}")
        return PlainBound(effect.token)

    async def write(self, effect: WriteCondition) -> None:
        """Of the pod with that uid; merged with its other conditions by type."""
        said = effect.condition
        condition = {"type": CONDITION, "status": said.status, "reason": said.reason, "message": said.message}
        if effect.turned:
            condition["lastTransitionTime"] = rfc3339(self._runtime.clock.wall_us())
        if effect.probed:
            condition["lastProbeTime"] = rfc3339(self._runtime.clock.wall_us())
        body = {"metadata": {"uid": effect.uid}, "status": {"conditions": [condition]}}
        path = f"{_path(effect.namespace, effect.name)}/status"
        try:
            async with self._room_of_bound if said.status == "True" else self._room:
                await self._server.ask("PATCH", path, body=body, content_type=STRATEGIC)
        except KubernetesError as error:
            self._runtime.count("conditions.not_written")
            self._runtime.log.info("a condition was not written", pod=effect.name, error=str(error))


def _path(namespace: str, name: str) -> str:
    """Names of Kubernetes need no quoting."""
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def _claim_path(namespace: str, name: str) -> str:
    return f"{_RESOURCES}/namespaces/{namespace}/resourceclaims/{name}"


def _looked(effect: LookAtPod, found: Json | None, scheduler: str) -> PodLooked:
    if found is None or found["metadata"]["uid"] != effect.uid:
        return PodLooked(effect.uid, there=False, token=effect.token)
    seen = PodSeen.of(found, scheduler)
    return PodLooked(effect.uid, not seen.ended, seen.node, effect.token)

"""Containers as pods; what the API server is told lies in ``kubernetes_spec``, what it shows in ``kubernetes_pods``.

Everything known of a container lies in its pod: its name, and the annotations that its Binding carried. A pod is made
without a node and bound in a second step, in which it gets node, devices and labels in one write; a second Binding is
refused by the API server, so two placers cannot give one pod two places. Nothing is said to have happened that was not
read. docs/kubernetes.md tells it for people.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from services.placer.backends import kubernetes_spec as told
from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.kubernetes_options import KubernetesOptions
from services.placer.backends.kubernetes_pods import Pods
from services.placer.core.capabilities import Capabilities
from shared.clock import Clock, SystemClock
from shared.errors import BackendError, BackendSilentError, KubernetesError, clip
from shared.kubernetes.api import STRATEGIC, ApiServer, Kind
from shared.kubernetes.list_watch import Json
from shared.messages.place import Pod

POLL_US = 50_000
TRIES = 6
"""Of what can be asked again without harm."""
_ByNode = dict[str | None, list[Json]]
"""Pods with a reservation; None: those without a node."""


class RefusedError(BackendError):
    """The API server's answer is an error; ``status`` is that of HTTP. What was asked has not happened."""

    def __init__(self, error: KubernetesError) -> None:
        self.status = error.status
        super().__init__(str(error))


class NoAnswerError(BackendSilentError):
    """It did not answer, or not to the point: what was asked may have happened."""


class KubernetesBackend:
    """Serves every node of one cluster, each under the name that Kubernetes has for it."""

    name = "kubernetes"

    def __init__(self, options: KubernetesOptions, *, clock: Clock | None = None) -> None:
        """FieldError: a wrong setting."""
        self.capabilities = Capabilities(
            needs_image=options.image is None,
            images=True,
            volumes=bool(options.volumes),
            ports=True,
            secrets=True,
            user=True,
            shm=True,
            pods=True,
            resize=True,
        )
        self._options = options
        self._clock = clock or SystemClock()
        self._api = ApiServer(options, self._clock, TRIES)
        self._kind = Kind(self._api, "/api/v1/pods", {"labelSelector": told.CONTAINER})
        self.pods = Pods(self._kind, self._clock, options.silent_us)
        self._reading: asyncio.Task[_ByNode] | None = None
        self._next: asyncio.Task[_ByNode] | None = None
        self._forgotten: set[str] = set()
        """Uids of ended pods of others that the ledger has done with: not ours to delete."""
        self._left_since_us: dict[str, int] = {}

    async def start(self, spec: StartSpec) -> Seen:
        """See Backend. A pod that somebody else made is started once it is bound; what it does then is its owner's."""
        if spec.request.pods is not None:
            return await self._start_given(spec, spec.request.pods[spec.labels.reservation.replica])
        path = self._path(spec.labels.container)
        body = told.pod_body(spec, self._options)
        told.binding_body(spec, body["metadata"]["name"], "")  # refused before anything is made
        await self._check_node(spec.labels.node)
        made: str | None = None
        try:
            while True:
                pod = await self._settled(path)
                if pod is None and made is not None:
                    raise BackendError(f"{spec.labels.container} was deleted while it started")
                if pod is None:
                    made = await self._create(body)
                elif (seen := await self._advance(spec, path, pod)) is not None:
                    return seen
        except asyncio.CancelledError:
            await asyncio.shield(self._undo(path))
            raise

    async def stop(self, node: str, container: str) -> None:
        """See Backend: TERM, and after ``stop_grace_us`` KILL, by the kubelet, which alone says that it is gone.

        A pod that somebody else made is evicted, and a disruption budget may forbid that for now.
        """
        give_up_us = self._clock.now_us() + self._options.stop_grace_us + self._options.stop_timeout_us
        pod = await self._of(node, container)
        while pod is not None:
            if told.has_ended(pod) and not told.is_ours(pod):
                self._forgotten.add(pod["metadata"]["uid"])
                return
            if not told.is_being_deleted(pod):
                await self._end(pod)
            if self._clock.now_us() > give_up_us:
                raise BackendError(f"{container} on {clip(node)} does not end: its kubelet has not said so")
            await self.pods.wait(POLL_US)
            pod = await self._again(pod)
        await self._check_heard(node)

    async def list(self, node: str) -> list[Seen]:
        """See Backend. Also removes what is left of a start that broke off."""
        pods = (await self._all()).get(node, ())
        await self._check_heard(node)
        return [told.seen_of(pod) for pod in pods if told.runs(pod) or self._is_known_ended(pod)]

    async def watch(self, post: Callable[[Seen], None]) -> None:
        """See Backend."""
        posted: set[str] = set()
        while True:
            changes, pods = self.pods.changes, dict(self.pods.found)
            posted &= pods.keys()
            for uid, pod in pods.items():
                if uid not in posted and self._is_known_ended(pod):
                    posted.add(uid)
                    post(told.seen_of(pod))
            await self.pods.wait(self._options.look_us, changes)

    async def resize(self, node: str, container: str, *, cpu_milli: int, memory_mib: int) -> None:
        """See Backend. What the kubelet puts off or cannot do is taken back, so that it keeps no room for it."""
        pod = await self._of(node, container)
        if pod is None or told.node_of(pod) is None:
            raise BackendError(f"{container} is not on {clip(node)}")
        if not (cpu_milli or memory_mib) or told.has_ended(pod):
            return
        wanted = told.resize_body(pod, cpu_milli, memory_mib)
        why = await self._resized(pod, wanted)
        if why is not None:
            kept = await self._resized(pod, told.former_size(pod, wanted))
            if kept is not None:
                raise BackendSilentError(f"{container}: {why}; nor is it known to have what it had: {kept}")
            raise BackendError(f"{container} keeps what it had: {why}")

    async def remove(self, node: str, container: str) -> None:
        """See Backend. An ended pod of somebody else stays for its owner, and is not listed any more."""
        pod = await self._of(node, container)
        if pod is None or not told.has_ended(pod):
            return
        if told.is_ours(pod):
            await self._delete(pod)
        else:
            self._forgotten.add(pod["metadata"]["uid"])

    async def close(self) -> None:
        """Stop following, and close all connections."""
        for task in (self._reading, self._next):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.pods.close()
        await self._api.close()

    # --- start ---

    async def _check_node(self, node: str) -> None:
        """The API server would bind a pod to any name, and nobody would ever say anything of it."""
        if await self._settled(f"/api/v1/nodes/{node}") is None:
            raise BackendError(f"node: found {clip(node)}, allowed: a node of this Kubernetes")

    async def _check_heard(self, node: str) -> None:
        """Raises BackendSilentError where nobody hears its kubelet: what is gone may still run there (case KU06)."""
        found = await self._find(f"/api/v1/nodes/{_token(node)}")
        if found is not None and (why := told.silence(found)) is not None:
            raise BackendSilentError(f"{clip(node)} is not heard, and what is gone there may still run: {why}")

    async def _create(self, body: Json) -> str | None:
        """Its name; None where one is there by now, or nobody can say."""
        try:
            made = await self._ask("POST", f"/api/v1/namespaces/{self._options.namespace}/pods", body=body)
        except RefusedError as error:
            if error.status == 409:  # it is there, or its namespace is just being made
                return None
            raise
        except NoAnswerError:
            await self._clock.sleep_us(POLL_US)
            return None
        return str(made["metadata"]["name"])

    async def _advance(self, spec: StartSpec, path: str, pod: Json) -> Seen | None:
        """One step with a pod that has our name; None: look again."""
        container = spec.labels.container
        if not told.is_ours(pod) or (told.node_of(pod) is not None and told.labels_of(pod) != spec.labels):
            raise BackendError(f"{pod['metadata']['name']} is the name of a pod that is not this container")
        if told.is_being_deleted(pod) and not told.runs(pod):
            await self.pods.wait(POLL_US)
            return None
        if told.node_of(pod) is None and not told.has_ended(pod):
            await self._bind(spec, path, pod)
            return None
        if (why := told.failure(pod)) is not None:
            await self._delete(pod)
            raise BackendError(why)
        if told.has_run(pod):
            return told.seen_of(pod)
        spec.progress(f"{container} is bound to {spec.labels.node} and does not run yet")
        await self._changed(pod)
        return None

    async def _changed(self, pod: Json) -> None:
        """Until it is heard that the pod is newer than this one, or gone; for a while."""
        uid, version = pod["metadata"]["uid"], int(pod["metadata"]["resourceVersion"])
        give_up_us = self._clock.now_us() + self._options.look_us
        known = False
        while (left_us := give_up_us - self._clock.now_us()) > 0:
            changes, heard = self.pods.changes, self.pods.found.get(uid)
            if (heard is None and known) or (heard is not None and int(heard["metadata"]["resourceVersion"]) > version):
                return
            known = heard is not None
            await self.pods.wait(left_us, changes)

    async def _bind(self, spec: StartSpec, path: str, pod: Json) -> bool:
        """Give it node, devices and labels. Whatever the answer: only the pod says whether that happened. False where
        there was none: it may happen later.
        """
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        try:
            await self._ask("POST", f"{path}/binding", body=told.binding_body(spec, name, uid))
        except RefusedError as error:
            if error.status not in {404, 409}:  # gone; bound, going, gated, or another pod by now
                raise
            await self._clock.sleep_us(POLL_US)
        except NoAnswerError:
            await self._clock.sleep_us(POLL_US)
            return False
        return True

    async def _start_given(self, spec: StartSpec, given: Pod) -> Seen:
        """Bind a pod that is there. Refused where it is gone, is another one by now, or has another place.

        BackendSilentError where it may be bound: it cannot be read, or a Binding that nobody answered may still come.
        """
        path = f"/api/v1/namespaces/{_token(given.namespace)}/pods/{_token(given.name)}"
        its = f"pod {given.namespace}/{given.name}"
        unclear = False
        while True:
            try:
                pod = await self._settled(path)
            except RefusedError as error:
                raise BackendSilentError(f"{its} cannot be read: {error}") from error
            if pod is None or pod["metadata"]["uid"] != given.uid:
                raise BackendError(f"{its} with uid {given.uid} is gone")
            if (node := told.node_of(pod)) is not None:
                if told.labels_of(pod) == spec.labels:
                    return told.seen_of(pod)
                raise BackendError(f"{its} is bound to {node} by somebody else")
            if told.is_being_deleted(pod) or told.has_ended(pod):
                raise BackendError(f"{its} is being deleted, or has ended")
            if pod["spec"].get("schedulingGates"):
                raise BackendError(f"{its} waits behind a scheduling gate")
            try:
                unclear |= not await self._bind(spec, path, pod)
            except RefusedError as error:
                if unclear:
                    raise BackendSilentError(f"{its}: {error}, and a Binding before that was not answered") from error
                raise

    async def _undo(self, path: str) -> None:
        """Nobody waits for it any more: it must not run later. While the API server is away that is not said."""
        give_up_us = self._clock.now_us() + self._options.stop_timeout_us
        while self._clock.now_us() < give_up_us:
            with suppress(BackendError):
                pod = await self._find(path)
                if pod is not None and told.is_ours(pod) and not told.has_run(pod):
                    await self._delete(pod)
                return

    # --- end ---

    async def _end(self, pod: Json) -> None:
        if told.is_ours(pod):
            await self._delete(pod)
        else:
            await self._evict(pod)

    async def _delete(self, pod: Json) -> None:
        """That pod and no other of its name; no error where it is gone. Without a grace only where nothing can run."""
        idle = told.node_of(pod) is None or told.has_ended(pod)
        grace_s = 0 if idle else max(1, told.seconds(self._options.stop_grace_us))
        options = {"gracePeriodSeconds": grace_s, "preconditions": {"uid": pod["metadata"]["uid"]}}
        try:
            await self._ask("DELETE", _path_of(pod), body=options)
        except RefusedError as error:
            if error.status not in {404, 409}:
                raise

    async def _evict(self, pod: Json) -> None:
        """Raises RefusedError with the reason where a disruption budget forbids it for now."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        try:
            await self._ask("POST", f"{_path_of(pod)}/eviction", body=body)
        except RefusedError as error:
            if error.status == 429:
                raise BackendError(f"pod {name} may not be evicted now: {error}") from error
            if error.status not in {404, 409}:
                raise

    async def _sweep(self, pods: builtins.list[Json]) -> None:
        """Delete what was made, never ran and is looked after by nobody, since whoever made it has died."""
        left = {
            each["metadata"]["uid"]: each
            for each in pods
            if told.is_ours(each) and not told.has_run(each) and (told.node_of(each) is None or told.has_ended(each))
        }
        now_us = self._clock.now_us()
        self._left_since_us = {uid: self._left_since_us.get(uid, now_us) for uid in left}
        for uid, since_us in self._left_since_us.items():
            if now_us - since_us > self._options.left_after_us:
                await self._delete(left[uid])

    # --- another size ---

    async def _resized(self, pod: Json, wanted: Json) -> str | None:
        """None once the kubelet has carried it out, else why it does not."""
        body = {**wanted, "metadata": {"uid": pod["metadata"]["uid"]}}
        give_up_us = self._clock.now_us() + self._options.resize_timeout_us
        found: Json | None = await self._ask("PATCH", f"{_path_of(pod)}/resize", body=body, content_type=STRATEGIC)
        while found is not None:
            state, why = told.resize_of(found)
            if state == "done" or told.has_ended(found):
                return None
            if state == "refused" or self._clock.now_us() > give_up_us:
                return why
            await self.pods.wait(POLL_US)
            found = await self._again(found)
        return "it is gone"

    # --- look ---

    async def _ask(self, method: str, path: str, **more: Any) -> Json:
        with _in_our_terms():
            return await self._api.ask(method, path, **more)

    def _path(self, container: str) -> str:
        return f"/api/v1/namespaces/{self._options.namespace}/pods/{told.pod_name(container)}"

    async def _find(self, path: str) -> Json | None:
        try:
            return await self._ask("GET", path)
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    async def _settled(self, path: str) -> Json | None:
        """However long the API server is away: what is known of a start is only what its pod says.

        One that has just begun forbids for a moment what is allowed, until it has read its roles.
        """
        forbidden_us: int | None = None
        while True:
            try:
                return await self._find(path)
            except NoAnswerError:
                forbidden_us = None
                continue
            except RefusedError as error:
                now_us = self._clock.now_us()
                forbidden_us = now_us if forbidden_us is None else forbidden_us
                if error.status not in {401, 403} or now_us - forbidden_us > self._options.call_timeout_us:
                    raise
            await self._clock.sleep_us(POLL_US)

    async def _again(self, pod: Json) -> Json | None:
        """The same pod as it is now; None where it is gone."""
        found = await self._find(_path_of(pod))
        return found if found is not None and found["metadata"]["uid"] == pod["metadata"]["uid"] else None

    async def _of(self, node: str, container: str) -> Json | None:
        """The pod of a container, whoever made it; None where there is none, or none that is not forgotten."""
        pod = await self._find(self._path(container))
        if pod is not None and told.is_ours(pod):
            return pod
        for each in (await self._all()).get(node, ()):
            labels = told.labels_of(each)
            mine = labels is not None and (labels.node, labels.container) == (node, container)
            if mine and each["metadata"]["uid"] not in self._forgotten:
                return each
        return None

    def _is_known_ended(self, pod: Json) -> bool:
        """It has ended after it ran, and is not forgotten."""
        if not told.has_ended(pod) or told.node_of(pod) is None:
            return False
        return told.has_run(pod) if told.is_ours(pod) else pod["metadata"]["uid"] not in self._forgotten

    async def _all(self) -> _ByNode:
        """All pods with a reservation, as they are after this call: those who ask at the same time share one list.

        One that is under way when asked may have been answered before, so it is waited for, and the next one counts.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            return await asyncio.shield(self._reading)
        if self._next is None or self._next.done():
            self._next = asyncio.create_task(self._read_after(self._reading))
        return await asyncio.shield(self._next)

    async def _read_after(self, present: asyncio.Task[_ByNode]) -> _ByNode:
        await asyncio.wait([present])
        self._reading, self._next = self._next, None
        return await self._read()

    async def _read(self) -> _ByNode:
        with _in_our_terms():
            pods, _ = await self._kind.list()
        self._forgotten &= {each["metadata"]["uid"] for each in pods}
        await self._sweep(pods)
        found: _ByNode = {}
        for pod in pods:
            found.setdefault(told.node_of(pod), []).append(pod)
        return found


@contextmanager
def _in_our_terms() -> Iterator[None]:
    try:
        yield
    except KubernetesError as error:
        raise (NoAnswerError(str(error)) if error.unclear else RefusedError(error)) from error


def _path_of(pod: Json) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _token(name: str) -> str:
    """A part of a path: what could be more than one is no name of Kubernetes."""
    if "/" in name or name in {"", ".", ".."} or not name.isascii() or not name.isprintable():
        raise BackendError(f"pods: found {clip(name)}, allowed: a name of Kubernetes")
    return name

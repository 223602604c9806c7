"""Containers as pods; what the API server is told lies in ``kubernetes_spec``, what it shows in ``kubernetes_pods``.

Everything known of a container lies in its pod: its name, and the annotations that its Binding carried. A pod is made
without a node and bound in a second step, in which it gets node, devices and labels in one write; a second Binding is
refused by the API server, so two placers cannot give one pod two places. Nothing is said to have happened that was not
read. docs/kubernetes.md tells it for people.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

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
BOUND_US = 1_000_000
"""For the watch to show what a Binding has done; then the pod is read."""
NODE_KEPT_US = 10_000_000
"""For so long a node that was there counts as being there."""


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
        self.pods = Pods(
            Kind(self._api, "/api/v1/pods", {"labelSelector": told.CONTAINER}), self._clock, options.silent_us
        )
        self._node_seen_us: dict[str, int] = {}
        self._node_locks: dict[str, asyncio.Lock] = {}
        self._forgotten: set[str] = set()
        """Uids of ended pods of others that the ledger has done with: not ours to delete."""
        self._left_since_us: dict[str, int] = {}
        self._swept_us: int | None = None

    async def start(self, spec: StartSpec) -> Seen:
        """See Backend. A pod that somebody else made is started once it is bound; what it does then is its owner's."""
        if spec.request.pods is not None:
            return await self._start_given(spec, spec.request.pods[spec.labels.reservation.replica])
        path = self._path(spec.labels.container)
        body = told.pod_body(spec, self._options)
        told.binding_body(spec, body["metadata"]["name"], "")  # refused before anything is made
        await self._check_node(spec.labels.node)
        try:
            pod = await self._create_or_look(body)
            made = pod is not None
            while True:
                pod = pod or await self._settled(path)
                if pod is None and made:
                    raise BackendError(f"{spec.labels.container} was deleted while it started")
                if pod is None:
                    pod = await self._create(body)
                    made = pod is not None
                    continue
                if (seen := await self._seen(spec, pod)) is not None:
                    return seen
                pod = await self._advance(spec, path, pod)
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
        pods = await self._on(node)
        await self._check_heard(node)
        await self._sweep()
        return self._seen_among(pods)

    async def glance(self, node: str) -> builtins.list[Seen] | None:
        """See Backend: what the watch has shown, unless that is old; of a node that is not heard too."""
        self.pods.begin()
        if self.pods.follower.trouble:
            return None
        await self._sweep()
        return self._seen_among(self.pods.on(node))

    def _seen_among(self, pods: Iterable[Json]) -> builtins.list[Seen]:
        return [told.seen_of(pod) for pod in pods if told.runs(pod) or self._is_known_ended(pod)]

    async def watch(self, post: Callable[[Seen], None]) -> None:
        """See Backend."""
        posted: set[str] = set()
        with self.pods.news() as uids:
            while True:
                changes = self.pods.changes
                while uids:
                    uid = uids.pop()
                    if (pod := self.pods.found.get(uid)) is None:
                        posted.discard(uid)
                    elif uid not in posted and self._is_known_ended(pod):
                        posted.add(uid)
                        post(told.seen_of(pod))
                await self.pods.wait(self._options.look_us, changes)
                await self._clock.sleep_us(POLL_US)  # for what comes with it

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
        await self.pods.close()
        await self._api.close()

    # --- start ---

    async def _check_node(self, node: str) -> None:
        """The API server would bind a pod to any name, and nobody would ever say anything of it."""
        async with self._node_locks.setdefault(node, asyncio.Lock()):
            seen_us = self._node_seen_us.get(node)
            if seen_us is not None and self._clock.now_us() - seen_us < NODE_KEPT_US:
                return
            if await self._settled(f"/api/v1/nodes/{node}") is None:
                raise BackendError(f"node: found {clip(node)}, allowed: a node of this Kubernetes")
            self._node_seen_us[node] = self._clock.now_us()

    async def _check_heard(self, node: str) -> None:
        """Raises BackendSilentError where nobody hears its kubelet: what is gone may still run there (case KU06)."""
        found = await self._find(f"/api/v1/nodes/{_token(node)}")
        if found is not None and (why := told.silence(found)) is not None:
            raise BackendSilentError(f"{clip(node)} is not heard, and what is gone there may still run: {why}")

    async def _create_or_look(self, body: Json) -> Json | None:
        """The pod, as most are not there yet; None where that was refused: who looks first learns why."""
        try:
            return await self._create(body)
        except RefusedError:
            return None

    async def _create(self, body: Json) -> Json | None:
        """The pod; None where one is there by now, or nobody can say."""
        try:
            return await self._ask("POST", f"/api/v1/namespaces/{self._options.namespace}/pods", body=body)
        except RefusedError as error:
            if error.status == 409:  # it is there, or its namespace is just being made
                return None
            raise
        except NoAnswerError:
            await self._clock.sleep_us(POLL_US)
            return None

    async def _seen(self, spec: StartSpec, pod: Json) -> Seen | None:
        """What became of a pod that has our name; None while it is on its way."""
        container = spec.labels.container
        if not told.is_ours(pod) or (told.node_of(pod) is not None and told.labels_of(pod) != spec.labels):
            raise BackendError(f"{pod['metadata']['name']} is the name of a pod that is not this container")
        if (told.is_being_deleted(pod) and not told.runs(pod)) or (
            told.node_of(pod) is None and not told.has_ended(pod)
        ):
            return None
        if (why := told.failure(pod)) is not None:
            await self._delete(pod)
            raise BackendError(why)
        if told.has_run(pod):
            return told.seen_of(pod)
        spec.progress(f"{container} is bound to {spec.labels.node} and does not run yet")
        return None

    async def _advance(self, spec: StartSpec, path: str, pod: Json) -> Json | None:
        """One step of a pod that is on its way; as it is then, if the watch has shown that, else None."""
        if told.is_being_deleted(pod) and not told.runs(pod):
            await self.pods.wait(POLL_US)
            return None
        if told.node_of(pod) is None:
            meta = pod["metadata"]
            outcome = await self._bind(spec, path, meta["name"], meta["uid"])
            return await self._newer(pod, BOUND_US) if outcome == "taken" else None
        return await self._newer(pod, self._options.look_us)

    async def _newer(self, pod: Json, at_most_us: int) -> Json | None:
        return await self.pods.newer(pod["metadata"]["uid"], int(pod["metadata"]["resourceVersion"]), at_most_us)

    async def _bind(self, spec: StartSpec, path: str, name: str, uid: str) -> Literal["taken", "refused", "unclear"]:
        """Give it node, devices and labels. Whatever the answer: only the pod says whether that happened, and after
        an unclear one it may happen later.
        """
        try:
            await self._ask("POST", f"{path}/binding", body=told.binding_body(spec, name, uid))
        except RefusedError as error:
            if error.status not in {404, 409}:  # gone; bound, going, gated, or another pod by now
                raise
            await self._clock.sleep_us(POLL_US)
            return "refused"
        except NoAnswerError:
            await self._clock.sleep_us(POLL_US)
            return "unclear"
        return "taken"

    async def _start_given(self, spec: StartSpec, given: Pod) -> Seen:
        """Bind a pod that is there. Refused where it is gone, is another one by now, or has another place.

        BackendSilentError where it may be bound: it cannot be read, or a Binding that nobody answered may still come.
        """
        path = f"/api/v1/namespaces/{_token(given.namespace)}/pods/{_token(given.name)}"
        its = f"pod {given.namespace}/{given.name}"
        pod: Json | None = None
        unclear = False
        while True:
            outcome = "refused"
            try:
                outcome = await self._bind(spec, path, given.name, given.uid)
            except RefusedError as error:
                if unclear:
                    raise BackendSilentError(f"{its}: {error}, and a Binding before that was not answered") from error
                if pod is not None:
                    raise  # else whoever looks first learns why
            unclear |= outcome == "unclear"
            if outcome == "taken":
                version = 0 if pod is None else int(pod["metadata"]["resourceVersion"])
                pod = await self.pods.newer(given.uid, version, BOUND_US)
            if outcome != "taken" or pod is None:
                try:
                    pod = await self._settled(path)
                except RefusedError as error:
                    raise BackendSilentError(f"{its} cannot be read: {error}") from error
            if (seen := _seen_of_given(pod, given, spec, its)) is not None:
                return seen

    async def _undo(self, path: str) -> None:
        """Nobody waits for it any more: it must not run later. While the API server is away that is not said."""
        give_up_us = self._clock.now_us() + self._options.stop_timeout_us
        while self._clock.now_us() < give_up_us:
            with suppress(BackendError):
                pod = await self._find(path)
                if pod is None or not told.is_ours(pod) or told.has_run(pod):
                    return
                if await self._delete(pod, as_seen=True):
                    return

    # --- end ---

    async def _end(self, pod: Json) -> None:
        if told.is_ours(pod):
            await self._delete(pod)
        else:
            await self._evict(pod)

    async def _delete(self, pod: Json, *, as_seen: bool = False) -> bool:
        """That pod and no other of its name; no error where it is gone. Without a grace only where nothing can run.

        ``as_seen``: and only as it was seen, where others may see meanwhile that it runs; False where it has changed.
        """
        idle = told.node_of(pod) is None or told.has_ended(pod)
        grace_s = 0 if idle else max(1, told.seconds(self._options.stop_grace_us))
        asked = ("uid", "resourceVersion") if as_seen else ("uid",)
        preconditions = {name: pod["metadata"][name] for name in asked}
        try:
            await self._ask(
                "DELETE", _path_of(pod), body={"gracePeriodSeconds": grace_s, "preconditions": preconditions}
            )
        except RefusedError as error:
            if error.status not in {404, 409}:
                raise
            return error.status == 404
        return True

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

    async def _sweep(self) -> None:
        """Delete what was made, never ran and is looked after by nobody, since whoever made it has died.

        By the watch, and looked at again before anything is deleted. Also forgets those whose object is gone.
        """
        self.pods.begin()
        now_us = self._clock.now_us()
        if not self.pods.changes or (self._swept_us is not None and now_us - self._swept_us < self._options.look_us):
            return
        self._swept_us = now_us
        self._forgotten &= self.pods.found.keys()
        left = {uid: pod for uid, pod in self.pods.found.items() if _is_left(pod)}
        self._left_since_us = {uid: self._left_since_us.get(uid, now_us) for uid in left}
        for uid, since_us in self._left_since_us.items():
            if now_us - since_us > self._options.left_after_us:
                pod = await self._again(left[uid])
                if pod is not None and _is_left(pod):
                    await self._delete(pod, as_seen=True)

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
        for each in await self._on(node):
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

    async def _on(self, node: str) -> builtins.list[Json]:
        """The pods with a reservation there, as they are after this call: the API server has an index of nodes."""
        selected = {"labelSelector": told.CONTAINER, "fieldSelector": f"spec.nodeName={told.node_name(node)}"}
        with _in_our_terms():
            pods, _ = await Kind(self._api, "/api/v1/pods", selected).list()
        return pods


def _seen_of_given(pod: Json | None, given: Pod, spec: StartSpec, its: str) -> Seen | None:
    """Once it is bound as was said; None where it can be, BackendError where it never will be."""
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
    return None


def _is_left(pod: Json) -> bool:
    """Ours, made and not run, and nothing is to become of it."""
    return told.is_ours(pod) and not told.has_run(pod) and (told.node_of(pod) is None or told.has_ended(pod))


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

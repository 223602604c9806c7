"""What the API server is told to make of a start, and what it says of pods means; speaks to no API server."""

from __future__ import annotations

import hashlib
import re
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal

from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.kubernetes_options import KubernetesOptions
from services.placer.core.containers import Cause
from shared.errors import BackendError, FieldError, clip
from shared.messages.ledger import ContainerLabels
from shared.messages.place import PlaceRequest, Secret
from shared.units import parse_quantity

Json = dict[str, Any]

MAIN = "main"
"""The container of a pod of ours."""
SCHEDULER = "laxity-direct"
"""No scheduler has this name, so that nobody else binds a pod of ours; admission policies know it by that."""
DEVICES, LABELS, GENERATION = "laxity.dev/devices", "laxity.dev/labels", "laxity.dev/generation"
GATED = "laxity.dev/gated"
"""Annotations that a Binding carries, which the API server writes with the node's name or not at all. The last is what
LAXITY_GATE is told: only who chose the devices knows whether they have a gate."""
CONTAINER = "laxity.dev/container"
"""The label by which pods with a reservation are found; a Binding carries it too."""
OURS = {"app.kubernetes.io/managed-by": "laxity"}
RING, RING_VOLUME, LABELS_VOLUME = "/run/laxity/ring", "laxity-ring", "laxity-labels"
"""The monitor finds both volumes below the kubelet's folder of the pod: the rings, and ``container.json``
with the pod's own names beside it."""
RING_LABELS = "/run/laxity/labels"
"""A kubelet makes only volumes that a container mounts."""
RING_MIB = 64
KEPT_LABELS = 1000
"""Texts whose meaning is kept: the same pod is looked at again and again."""
MOST_BYTES = 200 * 1024
"""Of a Binding's annotations: the API server takes any, and refuses each later write to a pod with over 256 KiB."""
UNREACHABLE = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Taint that an operator puts on a node of which they know that nothing runs there any more."""
FATAL = {
    *("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"),
}
"""Why a container waits that will not run by waiting."""
NEVER_RAN = {"StartError", "ContainerCannotRun"}
"""Why a container ended whose command was never executed."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NODE = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_DEVICE = re.compile(r"[A-Za-z0-9._:/-]{1,253}")
_FOR_ALL = {"all", "none", "void"}


def pod_name(container: str) -> str:
    """The pod's name for a container, and the value of its label: the same for all placers."""
    if _NAME.fullmatch(container):
        return container
    return f"laxity-name-{hashlib.sha256(container.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}"


def node_name(node: str) -> str:
    """BackendError where Kubernetes cannot have a node of this name: it binds to any, and then the pod is spoilt."""
    if not _NODE.fullmatch(node):
        raise BackendError(f"node: found {clip(node)}, allowed: the name of a Kubernetes node")
    return node


def image_of(request: PlaceRequest, options: KubernetesOptions) -> str:
    """The image to run; BackendError where there is none or it may not run."""
    image = request.image or options.image
    if image is None:
        raise BackendError("image: found nothing, allowed: an image, since this cluster has none for such requests")
    if not any(fnmatchcase(image, pattern) for pattern in options.images):
        raise BackendError(f"image: found {clip(image)}, allowed: {', '.join(options.images) or 'none'}")
    return image


def pod_body(spec: StartSpec, options: KubernetesOptions) -> Json:
    """A pod without a node. BackendError where the request asks for what is not allowed."""
    request = spec.request
    main: Json = {
        "name": MAIN,
        "image": image_of(request, options),
        "imagePullPolicy": {"never": "Never", "missing": "IfNotPresent", "always": "Always"}[options.pull],
        "env": _environment(spec),
        "ports": [{"containerPort": port} for port in request.ports],
        "resources": resources(spec.labels.reservation.cpu_milli, spec.labels.reservation.memory_mib),
        "volumeMounts": [
            {"name": RING_VOLUME, "mountPath": RING},
            {"name": LABELS_VOLUME, "mountPath": RING_LABELS, "readOnly": True},
            *({"name": "shm", "mountPath": "/dev/shm"} for _ in range(1 if request.shm_mib else 0)),  # noqa: S108
            *(
                {"name": f"volume-{number}", "mountPath": volume.target, "readOnly": volume.read_only}
                for number, volume in enumerate(request.volumes)
            ),
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, **_user(request)},
        **(
            {"args": [_literally(word) for word in request.command]} if request.command else {}
        ),  # after the image's entrypoint, as with Docker
    }
    body: Json = {
        "schedulerName": SCHEDULER,
        "containers": [main],
        "volumes": _volumes(request, options),
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": options.account,
        "terminationGracePeriodSeconds": seconds(options.stop_grace_us),
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": options.unreachable_s}
            for key in UNREACHABLE
        ],
        "imagePullSecrets": [{"name": name} for name in options.pull_secrets],
    }
    if options.runtime_class is not None:
        body["runtimeClassName"] = options.runtime_class
    if options.priority_class is not None:
        body["priorityClassName"] = options.priority_class
    name = pod_name(spec.labels.container)
    return {
        "metadata": {
            "name": name,
            "labels": {CONTAINER: name, **OURS},
            # never empty and never `none`: images and toolkits take either for every device there is
            "annotations": {DEVICES: "void"},
        },
        "spec": body,
    }


def binding_body(spec: StartSpec, name: str, uid: str) -> Json:
    """What gives a pod its node and its devices in one write. BackendError where it would spoil the pod."""
    labels = spec.labels
    for uuid in labels.reservation.devices:
        if not _DEVICE.fullmatch(uuid) or uuid in _FOR_ALL:
            raise BackendError(f"devices: found {clip(uuid)}, allowed: letters, digits and ._:/-")
    annotations = {
        DEVICES: devices_of(labels),
        GENERATION: str(labels.reservation.generation),
        LABELS: labels.to_json().decode(),
        GATED: spec.env.get("LAXITY_GATE", "0"),
    }
    size = sum(len(key) + len(value.encode()) for key, value in annotations.items())
    if size > MOST_BYTES:
        raise BackendError(f"labels of {size} bytes, allowed: {MOST_BYTES}, since a pod's annotations have a limit")
    return {
        "metadata": {
            "name": name,
            "uid": uid,
            "annotations": annotations,
            "labels": {CONTAINER: pod_name(labels.container)},
        },
        "target": {"kind": "Node", "name": node_name(labels.node)},
    }


def devices_of(labels: ContainerLabels) -> str:
    return ",".join(labels.reservation.devices) or "void"


def resources(cpu_milli: int, memory_mib: int) -> Json:
    """Limits that are requests too, so that a kubelet that lacks them refuses the pod; 0 is none."""
    limits = {
        **({"cpu": f"{cpu_milli}m"} if cpu_milli else {}),
        **({"memory": f"{memory_mib}Mi"} if memory_mib else {}),
    }
    return {"limits": limits, "requests": limits} if limits else {}


def seconds(time_us: int) -> int:
    """Whole ones, rounded up."""
    return -(-time_us // 1_000_000)


def _user(request: PlaceRequest) -> Json:
    if request.user is None:
        return {}
    user, _, group = request.user.partition(":")
    if not user.isdecimal() or (group and not group.isdecimal()):
        raise BackendError(f"user: found {clip(request.user)}, allowed: a number, or UID:GID")
    return {"runAsUser": int(user), **({"runAsGroup": int(group)} if group else {})}


def _volumes(request: PlaceRequest, options: KubernetesOptions) -> list[Json]:
    files = {
        "container.json": f"metadata.annotations['{LABELS}']",
        "namespace": "metadata.namespace",
        "name": "metadata.name",
    }
    items = [{"path": path, "fieldRef": {"fieldPath": field}} for path, field in files.items()]
    found: list[Json] = [
        {"name": RING_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": f"{RING_MIB}Mi"}},
        {"name": LABELS_VOLUME, "downwardAPI": {"items": items}},
    ]
    if request.shm_mib:
        found.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{request.shm_mib}Mi"}})
    for number, volume in enumerate(request.volumes):
        source = options.volumes.get(volume.source)
        if source is None:
            allowed = ", ".join(sorted(options.volumes)) or "none"
            raise BackendError(f"volumes: found source {clip(volume.source)}, allowed: {allowed}")
        claim = {"persistentVolumeClaim": {"claimName": source, "readOnly": volume.read_only}}
        found.append(
            {"name": f"volume-{number}", **({"hostPath": {"path": source}} if source.startswith("/") else claim)}
        )
    return found


def _environment(spec: StartSpec) -> list[Json]:
    """Devices by reference to what the Binding will carry; they cannot be added later. Secrets are the cluster's."""
    request, held = spec.request, spec.labels.reservation
    told = {
        "LAXITY_CONTAINER": spec.labels.container,
        "LAXITY_REQUEST_ID": held.request_id,
        "LAXITY_RING_DIR": RING,
        **({"LAXITY_DEADLINE_US": str(request.realtime.deadline_us)} if request.realtime is not None else {}),
    }
    devices = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{DEVICES}']"}}
    referred: Json = {"NVIDIA_VISIBLE_DEVICES": devices, "LAXITY_DEVICES": devices}
    given = {**request.env, **spec.env, **told}
    return [
        *(
            {"name": name, "valueFrom": {"secretKeyRef": _secret(name, value)}}
            if isinstance(value, Secret)
            else {"name": name, "value": _literally(value)}
            for name, value in given.items()
            if name not in referred
        ),
        *({"name": name, "valueFrom": source} for name, source in referred.items()),
    ]


def _literally(text: str) -> str:
    """Kubernetes would put the value of NAME for ``$(NAME)``, and one dollar for two; other backends do not."""
    return text.replace("$", "$$")


def _secret(variable: str, reference: Secret) -> Json:
    name, slash, key = reference.secret.partition("/")
    if not slash or not name or not key:
        raise BackendError(f"env {variable}: found secret {clip(reference.secret)}, allowed: SECRET/KEY")
    return {"name": name, "key": key}


# --- what a node says of itself ---


def silence(node: Json) -> str | None:
    """Why nothing is known of its containers; None where its kubelet is heard, or an operator says that it is off."""
    if any(taint["key"] == OUT_OF_SERVICE for taint in node["spec"].get("taints") or ()):
        return None
    unknown = [each for each in node["status"].get("conditions") or () if each["status"] == "Unknown"]
    return next((_said(each) for each in unknown if each["type"] == "Ready"), None)


# --- what a pod says of itself ---


def is_ours(pod: Json) -> bool:
    """Made by a placer; what others made is bound, and not deleted when it has ended."""
    return bool(pod["spec"].get("schedulerName") == SCHEDULER)


def node_of(pod: Json) -> str | None:
    """Where it is bound to."""
    node: str | None = pod["spec"].get("nodeName")
    return node


def labels_of(pod: Json) -> ContainerLabels | None:
    """What its Binding carried; None where that cannot be read."""
    text = pod["metadata"].get("annotations", {}).get(LABELS)
    return None if text is None else _labels(text)


@lru_cache(maxsize=KEPT_LABELS)
def _labels(text: str) -> ContainerLabels | None:
    try:
        return ContainerLabels.trusted(text.encode())
    except FieldError:
        return None


def is_being_deleted(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def has_ended(pod: Json) -> bool:
    return pod["status"].get("phase") in {"Succeeded", "Failed"}


def statuses(pod: Json) -> list[Json]:
    """Of its containers, less those that run before or beside them."""
    found: list[Json] = pod["status"].get("containerStatuses") or []
    return found


def has_run(pod: Json) -> bool:
    """A command of it was executed, now or before."""
    for each in statuses(pod):
        for state in (each.get("state") or {}, each.get("lastState") or {}):
            if "running" in state:
                return True
            if "terminated" in state and state["terminated"].get("reason") not in NEVER_RAN:
                return True
    return False


def runs(pod: Json) -> bool:
    """What of it may use devices: ours once its command was executed, another's as soon as it is bound."""
    if has_ended(pod) or node_of(pod) is None:
        return False
    return has_run(pod) or not is_ours(pod)


def failure(pod: Json) -> str | None:
    """Why a pod of ours will not run, in the kubelet's words; None where it may, or has."""
    for each in [*(pod["status"].get("initContainerStatuses") or ()), *statuses(pod)]:
        state = each.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason") in FATAL:
            return _said(waiting)
        if ended.get("reason") in NEVER_RAN:
            return _said(ended)
    if has_ended(pod) and not has_run(pod):
        return _said(pod["status"])
    return None


def _said(status: Json) -> str:
    words = [str(status[what]) for what in ("reason", "message") if status.get(what)]
    return ": ".join(words) or "it ended and no reason was given"


def exit_code(pod: Json) -> int | None:
    """Of the first container that failed, else 0; None where nobody saw the end of one."""
    codes: list[int] = []
    for each in statuses(pod):
        ended = (each.get("state") or {}).get("terminated")
        if ended is None or ended.get("reason") == "ContainerStatusUnknown":
            return None
        codes.append(int(ended["exitCode"]))
    return next((code for code in codes if code), 0) if codes else None


def cause(pod: Json) -> Cause | None:
    """Of what it ended: what befell the pod, else what the first container ended of that failed.

    A pod that was evicted, or whose time was over, says so itself; its containers then only say that a signal came.
    """
    disrupted = [each for each in pod["status"].get("conditions") or () if each["type"] == "DisruptionTarget"]
    ended = [(each.get("state") or {}).get("terminated") or {} for each in statuses(pod)]
    failed = [each for each in ended if each.get("exitCode") != 0]
    said = (pod["status"], *(each for each in disrupted if each.get("status") == "True"), *failed)
    told = next((each for each in said if each.get("reason")), None)
    return Cause(told["reason"], clip(told.get("message") or "")) if told is not None else None


def seen_of(pod: Json) -> Seen:
    """Of one that was bound, and runs or has ended."""
    labels = labels_of(pod)
    node = labels.node if labels is not None else node_of(pod) or ""
    name = labels.container if labels is not None else pod["metadata"]["name"]
    if not has_ended(pod):
        return Seen(node, name, labels, "running")
    return Seen(node, name, labels, "exited", exit_code=exit_code(pod), cause=cause(pod))


# --- another size while it runs ---


def resize_body(pod: Json, cpu_milli: int, memory_mib: int) -> Json:
    """To patch; for the container of ours, or the only one. 0 leaves a limit as it is."""
    names = [each["name"] for each in pod["spec"]["containers"]]
    if len(names) != 1:
        raise BackendError(f"a pod of {len(names)} containers is not resized: which one is not said")
    return {"spec": {"containers": [{"name": names[0], "resources": resources(cpu_milli, memory_mib)}]}}


def former_size(pod: Json, wanted: Json) -> Json:
    """A patch that gives a pod back what it had of what ``wanted`` changes."""
    (asked,) = wanted["spec"]["containers"]
    (had,) = (each["resources"] for each in pod["spec"]["containers"] if each["name"] == asked["name"])
    kept = {
        what: {name: had[what][name] for name in asked["resources"].get(what, {}) if name in had.get(what, {})}
        for what in ("limits", "requests")
    }
    return {"spec": {"containers": [{"name": asked["name"], "resources": kept}]}}


def resize_of(pod: Json) -> tuple[Literal["done", "waits", "refused"], str]:
    """How far the last resize is, with the kubelet's words. One of before the present generation says nothing."""
    generation = pod["metadata"].get("generation", 0)
    said = {each["type"]: each for each in pod["status"].get("conditions") or ()}
    for kind in ("PodResizePending", "PodResizeInProgress"):
        condition = said.get(kind)
        if condition is None or condition.get("status") != "True":
            continue
        words = _said(condition)
        if condition.get("reason") == "Infeasible" and condition.get("observedGeneration", 0) >= generation:
            return "refused", words
        return "waits", words
    wanted = {each["name"]: each.get("resources") or {} for each in pod["spec"]["containers"]}
    actual = {each["name"]: each.get("resources") or {} for each in statuses(pod)}
    same = all(
        parse_quantity(actual.get(name, {}).get("limits", {}).get(what, "0")) == parse_quantity(amount)
        for name, each in wanted.items()
        for what, amount in each.get("limits", {}).items()
    )
    return ("done", "") if same else ("waits", "the kubelet has not answered yet")

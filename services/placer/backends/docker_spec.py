"""What an engine is told to make of a start, and what its answers mean; speaks to no engine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.cgroups import quota_us
from services.placer.backends.docker_options import DockerOptions
from services.placer.backends.process import THREADS
from shared.devices import core_of
from shared.errors import BackendError, FieldError, clip
from shared.messages.ledger import ContainerLabels
from shared.messages.place import PlaceRequest, Secret

RING = "/run/laxity/ring"
"""Where a container finds the folder for its rings."""
SCOPE, LABELS, NODE, CONTAINER = "laxity.scope", "laxity.labels", "laxity.node", "laxity.container"
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")
_IMAGE = re.compile(r"[a-z0-9](?:[A-Za-z0-9_-]|[.:/@](?![.:/@]))*")
_NEVER = "0001-"
"""How the engine's times begin that never were."""
_HUB = "https://index.docker.io/v1/"


def engine_name(scope: str, container: str) -> str:
    """The engine's name for a container: the same for all placers, also where ours cannot be one."""
    name = f"{scope}.{container}" if scope else container
    if _NAME.fullmatch(name):
        return name
    return f"laxity-name-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}"


def filters(scope: str, **more: list[str]) -> str:
    """Parameter ``filters`` of the engine's lists: what is of our scope."""
    return json.dumps({"label": [f"{SCOPE}={scope}"], **more})


def image_of(request: PlaceRequest, options: DockerOptions) -> str:
    """The image to run; BackendError where there is none or it may not run."""
    image = request.image or options.image
    if image is None:
        raise BackendError("image: found nothing, allowed: an image, since this cluster has none for such requests")
    if not _IMAGE.fullmatch(image):
        raise BackendError(f"image: found {clip(image)}, allowed: [registry/]name[:tag][@digest]")
    if not any(fnmatchcase(image, pattern) for pattern in options.images):
        raise BackendError(f"image: found {clip(image)}, allowed: {', '.join(options.images) or 'none'}")
    return image


def tagged(image: str) -> str:
    """With ``:latest`` where it has neither tag nor digest: without, an engine pulls every tag there is."""
    return image if "@" in image or ":" in image.rpartition("/")[2] else f"{image}:latest"


def create_body(spec: StartSpec, options: DockerOptions, ring: Path | None) -> dict[str, Any]:
    """Body of the engine's create. Raises BackendError where the request asks for what is not allowed."""
    request = spec.request
    devices = spec.labels.reservation.devices
    gpus = [uuid for uuid in devices if core_of(uuid) is None] if options.gpus else []
    ports = {f"{port}/tcp": [{"HostIp": options.publish_on, "HostPort": str(port)}] for port in request.ports}
    return {
        "Image": image_of(request, options),
        "Cmd": list(request.command) if request.command else None,
        "Env": [f"{name}={value}" for name, value in _environment(spec, options, gpus, ring).items()],
        "User": request.user or "",
        "ExposedPorts": {port: {} for port in ports},
        "Labels": {
            SCOPE: options.scope,
            LABELS: spec.labels.to_json().decode(),
            NODE: spec.labels.node,
            CONTAINER: spec.labels.container,
        },
        "HostConfig": {
            **_limits(spec, options),
            **_security(options),
            **_device_requests(gpus),
            "NetworkMode": options.network,
            "PortBindings": ports,
            "Mounts": _mounts(request, options),
            "Binds": [f"{ring}:{RING}"] if ring is not None else [],
            "LogConfig": {"Type": "json-file", "Config": {"max-size": f"{options.log_mib}m", "max-file": "2"}},
        },
    }


def cpu_limit(cpu_milli: int) -> dict[str, int]:
    """As with processes: dealt out often, since the engine's 100 ms would halt a small quota past a deadline."""
    if cpu_milli <= 0:
        return {}
    quota, period = quota_us(cpu_milli)
    return {"CpuPeriod": period, "CpuQuota": quota}


def memory_limit(memory_mib: int) -> dict[str, int]:
    """Without swap on top: swapped memory has no deadline that it keeps. Both at once, or an update is refused."""
    return {"Memory": memory_mib << 20, "MemorySwap": memory_mib << 20} if memory_mib > 0 else {}


def _limits(spec: StartSpec, options: DockerOptions) -> dict[str, Any]:
    held = spec.labels.reservation
    cores = [str(core) for uuid in held.devices if (core := core_of(uuid)) is not None]
    shm = {"ShmSize": spec.request.shm_mib << 20} if spec.request.shm_mib else {}
    pinned = {"CpusetCpus": ",".join(cores)} if cores else {}
    return {**cpu_limit(held.cpu_milli), **memory_limit(held.memory_mib), **shm, **pinned, "PidsLimit": options.pids}


def _security(options: DockerOptions) -> dict[str, Any]:
    """The seccomp profile stays the engine's default. Restarts are the placer's alone (case D13)."""
    return {
        "Privileged": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true"],
        "ReadonlyRootfs": options.read_only,
        "Tmpfs": {"/tmp": ""} if options.read_only else {},  # noqa: S108 -- the container's own
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
    }


def _device_requests(gpus: list[str]) -> dict[str, Any]:
    """By id and never by count: the engine refuses both together, and a count takes any (cases D1, D2, D3)."""
    if not gpus:
        return {}
    return {"DeviceRequests": [{"Driver": "nvidia", "DeviceIDs": gpus, "Capabilities": [["gpu"]]}]}


def _mounts(request: PlaceRequest, options: DockerOptions) -> list[dict[str, Any]]:
    found = []
    for volume in request.volumes:
        source = options.volumes.get(volume.source)
        if source is None:
            allowed = ", ".join(sorted(options.volumes)) or "none"
            raise BackendError(f"volumes: found source {clip(volume.source)}, allowed: {allowed}")
        kind = "bind" if source.startswith("/") else "volume"
        found.append({"Type": kind, "Source": source, "Target": volume.target, "ReadOnly": volume.read_only})
    return found


def _environment(spec: StartSpec, options: DockerOptions, gpus: list[str], ring: Path | None) -> dict[str, str]:
    request, held = spec.request, spec.labels.reservation
    cores = sum(core_of(uuid) is not None for uuid in held.devices)
    threads = dict.fromkeys(THREADS, str(cores)) if cores else {}
    own = {
        name: value if isinstance(value, str) else _secret(name, value, options.secrets_dir)
        for name, value in request.env.items()
    }
    told = {
        # never left to the image: those of NVIDIA say `all`, and nobody asked is nobody served (case D15)
        "NVIDIA_VISIBLE_DEVICES": ",".join(gpus) or "void",
        "LAXITY_DEVICES": ",".join(held.devices),
        "LAXITY_CONTAINER": spec.labels.container,
        "LAXITY_REQUEST_ID": held.request_id,
    }
    if ring is not None:
        told["LAXITY_RING_DIR"] = RING
    if request.realtime is not None:
        told["LAXITY_DEADLINE_US"] = str(request.realtime.deadline_us)
    return threads | own | dict(spec.env) | told


def _secret(variable: str, reference: Secret, folder: Path | None) -> str:
    """The content of its file, less one line end. What goes wrong is told with its name only."""
    name = reference.secret
    if folder is None:
        raise BackendError(f"env {variable} refers to a secret, and this cluster has none")
    path = (folder / name.replace("\x00", "")).resolve()
    if "\x00" in name or not path.is_relative_to(folder.resolve()):
        raise BackendError(f"env {variable}: found secret {clip(name)}, allowed: a name below the folder of secrets")
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BackendError(f"env {variable}: secret {clip(name)} cannot be read: {reason}") from None


def registry_auth(image: str, auth_file: Path | None) -> dict[str, str]:
    """The header with the login to the image's registry; empty where there is none."""
    if auth_file is None:
        return {}
    first, slash, _ = image.partition("/")
    host = first if slash and (first == "localhost" or "." in first or ":" in first) else _HUB
    try:
        login = json.loads(auth_file.read_bytes()).get("auths", {}).get(host)
        user, _, password = base64.b64decode(login["auth"]).decode().partition(":") if login else ("", "", "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BackendError(f"logins to registries cannot be read: {auth_file}") from None
    if not login:
        return {}
    content = json.dumps({"username": user, "password": password, "serveraddress": host})
    return {"X-Registry-Auth": base64.urlsafe_b64encode(content.encode()).decode()}


def line_of(line: bytes) -> dict[str, str]:
    """What a line of a stream says, of its words only; nothing where the stream was cut within the line."""
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    words = content.items() if isinstance(content, dict) else ()
    return {word: said for word, said in words if isinstance(said, str)}


def labels_of(labels: dict[str, str] | None, scope: str) -> ContainerLabels | None:
    """Ours; None where it is not of our scope or they cannot be read."""
    if not labels or labels.get(SCOPE) != scope:
        return None
    try:
        return ContainerLabels.trusted(labels.get(LABELS, "").encode())
    except FieldError:
        return None


def never_ran(found: dict[str, Any]) -> bool:
    """Of an inspected container: made, and not started, or its start failed; also while it is being removed."""
    return not runs(found) and str(found["State"]["StartedAt"]).startswith(_NEVER)


def runs(found: dict[str, Any]) -> bool:
    """Of an inspected container; one that is paused runs."""
    return bool(found["State"]["Running"])


def seen_of(found: dict[str, Any], scope: str) -> Seen:
    """Of an inspected container that was started."""
    raw = found["Config"]["Labels"]
    labels = labels_of(raw, scope)
    node, container = (labels.node, labels.container) if labels else (raw.get(NODE, ""), found["Name"].lstrip("/"))
    if runs(found):
        return Seen(node, container, labels, "running")
    # An engine that lost sight of one may say 0 when it is started again, and no time (moby issue 45788).
    nobody_saw = str(found["State"]["FinishedAt"]).startswith(_NEVER)
    return Seen(node, container, labels, "exited", exit_code=None if nobody_saw else found["State"]["ExitCode"])

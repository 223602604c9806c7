"""What an engine is told to make of a start, and what its answers mean; speaks to no engine."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.cgroups import quota_us
from services.placer.backends.docker_options import DockerEngine, DockerOptions
from services.placer.backends.docker_secrets import secret_of
from services.placer.backends.folder import RING_ENDED
from services.placer.backends.process import THREADS
from services.placer.core.containers import Cause
from shared.devices import core_of
from shared.errors import BackendError, FieldError, clip
from shared.messages.ledger import ContainerLabels
from shared.messages.nodes import Regime
from shared.messages.place import PlaceRequest

RING_PARENT, RING = "/run/laxity", "/run/laxity/ring"
"""Where a container finds the folder for its rings."""
MPS, SHM = "/run/laxity/mps", "/dev/shm"  # noqa: S108 -- the container's own
"""Where a container finds the pipes of the MPS daemon, and the memory that it shares with it."""
SCOPE, LABELS, NODE, CONTAINER = "laxity.scope", "laxity.labels", "laxity.node", "laxity.container"
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")
_FETCHED = frozenset({"Verifying Checksum", "Download complete", "Extracting", "Pull complete"})
_OF_LAYERS = _FETCHED | {"Pulling fs layer", "Waiting", "Downloading", "Already exists"}
_IMAGE = re.compile(r"[a-z0-9](?:[A-Za-z0-9_-]|[.:/@](?![.:/@]))*")
_NEVER = "0001-"
"""How the engine's times begin that never were."""


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


def create_body(
    spec: StartSpec, options: DockerOptions, ring: Path | None, where: DockerEngine | None = None
) -> dict[str, Any]:
    """Body of the engine's create. Raises BackendError where the request asks for what is not allowed."""
    where = where or DockerEngine(url="unix:///var/run/docker.sock")
    request = spec.request
    if ring is None and spec.env.get("LAXITY_GATE") == "1":
        raise BackendError("realtime.gate: its tasks cannot wait for their turns, the engine has no ring_root")
    devices = spec.labels.reservation.devices
    gpus = [uuid for uuid in devices if core_of(uuid) is None] if options.gpus else []
    mps = _served_by_mps(spec, gpus, where)
    ports = {f"{port}/tcp": [{"HostIp": options.publish_on, "HostPort": str(port)}] for port in request.ports}
    return {
        "Image": image_of(request, options),
        "Cmd": list(request.command) if request.command else None,
        "Env": [f"{name}={value}" for name, value in _environment(spec, options, gpus, ring, mps).items()],
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
            "Mounts": [
                *_mounts(request, options),
                *(_mps_mounts(where) if mps else ()),
                *(_parent_mounts(options) if ring is not None and not where.local else ()),
            ],
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


def _parent_mounts(options: DockerOptions) -> list[dict[str, Any]]:
    """An engine unpacks no archive into a root file system that is read-only, and takes a mount for another one."""
    return [{"Type": "tmpfs", "Target": RING_PARENT}] if options.read_only else []


def _served_by_mps(spec: StartSpec, gpus: list[str], where: DockerEngine) -> bool:
    """Whether a daemon of MPS shares the container's GPUs. BackendError where that is so and cannot be made so.

    Without the daemon's pipes CUDA goes on alone, beside the daemon: the share that was admitted would be nobody's.
    """
    known = dict(zip(spec.labels.reservation.devices, spec.regimes, strict=False))
    for gpu in gpus:
        if known.get(gpu) is None and where.mps_pipe_dir is not None:
            raise BackendError(f"whether {gpu} is shared by MPS is not known: its node's facts do not name it")
    shared = [gpu for gpu in gpus if known.get(gpu) is Regime.MPS]
    if shared and where.mps_pipe_dir is None:
        raise BackendError(f"{shared[0]} is shared by MPS, and the settings of engine {where.url} name no mps_pipe_dir")
    if shared and spec.request.shm_mib:
        raise BackendError(f"shm_mib: found {spec.request.shm_mib}, allowed: none, since {shared[0]} is shared by MPS")
    return bool(shared)


def _mps_mounts(where: DockerEngine) -> list[dict[str, Any]]:
    """Clients meet the daemon at its pipes, and their CUDA contexts meet in the shared memory that it sees."""
    folders = {MPS: where.mps_pipe_dir, SHM: where.mps_shm_dir}
    return [{"Type": "bind", "Source": str(source), "Target": target} for target, source in folders.items()]


def _mps_environment(spec: StartSpec, gpus: list[str]) -> dict[str, str]:
    """A share in whole percents, rounded down so that all together are not over 100; memory of each GPU by its ordinal
    inside, where all hold the same."""
    held = spec.labels.reservation
    limits = [f"{ordinal}={held.device_memory_mib}M" for ordinal in range(len(gpus))]
    return {
        "CUDA_MPS_PIPE_DIRECTORY": MPS,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, held.share_micro // 10_000)),
        **({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ",".join(limits)} if held.device_memory_mib else {}),
    }


def _environment(
    spec: StartSpec, options: DockerOptions, gpus: list[str], ring: Path | None, mps: bool
) -> dict[str, str]:
    request, held = spec.request, spec.labels.reservation
    cores = sum(core_of(uuid) is not None for uuid in held.devices)
    threads = dict.fromkeys(THREADS, str(cores)) if cores else {}
    own = {
        name: value if isinstance(value, str) else secret_of(name, value, options.secrets_dir)
        for name, value in request.env.items()
    }
    told = {
        # never left to the image: those of NVIDIA say `all`, and nobody asked is nobody served (case D15)
        "NVIDIA_VISIBLE_DEVICES": ",".join(gpus) or "void",
        "LAXITY_DEVICES": ",".join(held.devices),
        "LAXITY_CONTAINER": spec.labels.container,
        "LAXITY_REQUEST_ID": held.request_id,
    }
    if mps:
        told |= _mps_environment(spec, gpus)
    if ring is not None:
        told["LAXITY_RING_DIR"] = RING
    if request.realtime is not None:
        told["LAXITY_DEADLINE_US"] = str(request.realtime.deadline_us)
    return threads | own | dict(spec.env) | told


def ring_archive(labels: ContainerLabels) -> bytes:
    """To unpack in RING_PARENT: a folder in which any user may write, with the labels for the monitor."""
    return _archive({"ring": None, "ring/container.json": labels.to_json()})


def ended_archive() -> bytes:
    """To unpack in RING: the mark with which the folder is left to the monitor."""
    return _archive({RING_ENDED: b""})


def _archive(files: dict[str, bytes | None]) -> bytes:
    """A tar; None stands for a folder."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, body in files.items():
            entry = tarfile.TarInfo(name)
            if body is None:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            else:
                entry.size = len(body)
            tar.addfile(entry, io.BytesIO(body or b""))
    return packed.getvalue()


def line_of(line: bytes) -> dict[str, str]:
    """What a line of a stream says, of its words only; nothing where the stream was cut within the line."""
    return {word: said for word, said in _content(line).items() if isinstance(said, str)}


def _content(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


@dataclass
class _Layer:
    """Bytes as the registry sends them; None where the engine did not say."""

    fetched: int | None = None
    size: int | None = None
    done: bool = False
    there: bool = False
    """Before the pull: nothing of it is fetched."""


class PullProgress:
    """How far a pull is, from the lines that the engine sends of it."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._layers: dict[str, _Layer] = {}

    def take(self, line: bytes) -> None:
        """One line; what is not of a layer changes nothing."""
        said = _content(line)
        status, of, detail = said.get("status"), said.get("id"), said.get("progressDetail")
        if not isinstance(of, str) or status not in _OF_LAYERS:
            return
        layer = self._layers.setdefault(of, _Layer())
        numbers = detail if isinstance(detail, dict) else {}
        layer.size = _positive(numbers.get("total")) or layer.size
        if status == "Downloading":
            layer.fetched = _positive(numbers.get("current")) or layer.fetched
        elif status in _FETCHED:
            layer.fetched = layer.size or layer.fetched
        layer.there = layer.there or status == "Already exists"
        layer.done = layer.done or status in {"Already exists", "Pull complete"}

    @property
    def text(self) -> str:
        """``image X: 41 of 120 MiB, 3 of 7 layers``; what is unknown is said to be so."""
        return f"image {self._image}: {self._size()}, {self._count()}"

    def _size(self) -> str:
        wanted = [layer for layer in self._layers.values() if not layer.there]
        if self._layers and not wanted:
            return "nothing to fetch"
        fetched = [layer.fetched for layer in wanted if layer.fetched is not None]
        sizes = [layer.size for layer in wanted if layer.size is not None]
        if not fetched:
            return "unknown size"
        if len(sizes) < len(wanted):
            return f"{_mib(sum(fetched))} MiB of unknown size"
        return f"{_mib(sum(fetched))} of {_mib(sum(sizes))} MiB"

    def _count(self) -> str:
        if not self._layers:
            return "unknown layers"
        return f"{sum(layer.done for layer in self._layers.values())} of {len(self._layers)} layers"


def _positive(number: object) -> int | None:
    """Engines say 0 or -1, or nothing, where a registry told no size."""
    return number if isinstance(number, int) and number > 0 else None


def _mib(count: int) -> str:
    mib = count / (1 << 20)
    return f"{mib:.0f}" if mib >= 10 else f"{mib:.2g}"


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
    code = None if nobody_saw else found["State"]["ExitCode"]
    # The engine says so too where only a child was killed, and the command went on and ended well.
    cause = Cause("OOMKilled") if code != 0 and found["State"].get("OOMKilled") else None
    return Seen(node, container, labels, "exited", exit_code=code, cause=cause)

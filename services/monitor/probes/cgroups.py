"""Tells by its control group which container a process is in, and what that container uses; not whose container it is.

Read from the machine's side: ``/proc/<pid>/cgroup`` of a pid of the machine. A container that reads its own sees ``/``.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.monitor.probes import proc as procfs
from services.monitor.probes.base import NOT_SUPPORTED, UNREADABLE, ContainerUseReading, Reading
from services.monitor.probes.reasons import Reason

NO_LIMIT: Final = Reason.NO_LIMIT
NOT_VISIBLE: Final = Reason.NOT_VISIBLE
_KEPT_S: Final = 2.0  # a runtime moves a process into its group moments after a fork
_UNLIMITED_BYTES: Final = 1 << 60  # version 1 writes the largest multiple of a page for no limit
_BESIDE: Final = re.compile(r"(?:/\.\.)+/(?P<rest>.+)")
_DEEPEST: Final = 5  # kubepods, class of service, pod, container; one more where a kubelet has a root of its own
_MOST_PLACES: Final = 4_096
_CONTAINER: Final = re.compile(r"(?:(?P<before>.*)[-:])?(?P<id>[0-9a-f]{64})(?:\.scope)?")
_POD: Final = re.compile(r"(?:.*-)?pod(?P<uid>[0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?:\.slice)?")
_RUNTIMES: Final = {"cri-containerd": "containerd", "crio": "cri-o", "libpod": "podman", "libpod-payload": "podman"}


@dataclass(frozen=True, slots=True)
class Group:
    """The innermost container that a control group names. ``paths``: its group by controller, '' in version 2."""

    container_id: str
    runtime: str | None = None
    pod_uid: str | None = None
    paths: Mapping[str, str] = field(default_factory=dict, compare=False)


def group_of(text: str) -> Group | None:
    """What the lines of ``/proc/<pid>/cgroup`` say; None where they name no container (also ``0::/``, case M31)."""
    found: list[tuple[int, Group]] = []
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        inner = _innermost(path) if colon else None
        if inner is None:
            continue
        found.append(inner)
        paths |= dict.fromkeys(controllers.split(","), inner[1].paths[""])
    if not found:
        return None
    _, group = max(found, key=lambda each: each[0])
    same = {key: path for key, path in paths.items() if group.container_id in path.rpartition("/")[2]}
    return Group(group.container_id, group.runtime, group.pod_uid, same)


def _innermost(path: str) -> tuple[int, Group] | None:
    """How deep the last container in a path lies, and that container."""
    parts = path.split("/")
    found: tuple[int, Group] | None = None
    pod: str | None = None
    for depth, part in enumerate(parts):
        names = part.split(":")  # containerd under systemd without its driver: <slice>:cri-containerd:<id>
        if match := _POD.fullmatch(names[0]):
            pod = _uid(match["uid"])
        match = _CONTAINER.fullmatch(part)
        if match is None or (match["before"] or "").endswith("conmon"):  # conmon watches a container from outside
            continue
        before = names[1] if len(names) > 2 else match["before"]
        runtime = _RUNTIMES.get(before, before) if before else "docker" if parts[depth - 1] == "docker" else None
        found = depth, Group(match["id"], runtime, pod, {"": "/".join(parts[: depth + 1])})
        pod = None  # what lies inside of a container is of a pod of its own, if of any
    return found


def _uid(text: str) -> str:
    """As Kubernetes writes it: systemd's slices have ``_`` for ``-``, and static pods have a hash without either."""
    return text.replace("_", "-")


class Groups:
    """The groups of processes, kept by pid and start time: a pid that is used again is another process."""

    def __init__(self, proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._mount = proc, mount
        self._kept: dict[tuple[int, int], tuple[float, Group | None]] = {}
        self._places: dict[tuple[Path, str], Path] = {}

    def of(self, processes: Iterable[tuple[int, int]], at_s: float) -> dict[tuple[int, int], Group]:
        """The group of each process, given by pid and start in ticks, that is in a container; the rest is forgotten."""
        kept: dict[tuple[int, int], tuple[float, Group | None]] = {}
        for key in processes:
            before = self._kept.get(key)
            kept[key] = before if before and at_s - before[0] < _KEPT_S else (at_s, self._read(*key))
        self._kept = kept
        if len(self._places) > _MOST_PLACES:
            self._places.clear()
        return {key: group for key, (_, group) in kept.items() if group is not None}

    def _read(self, pid: int, start_ticks: int) -> Group | None:
        """None too where the process has ended meanwhile (case M38), also if another one has its pid by now."""
        try:
            text = (self._proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        found = procfs.process(self._proc, pid)
        return group_of(text) if found and found.start_ticks == start_ticks else None

    def use(self, group: Group) -> ContainerUseReading:
        """What the container has used since its start, and may use; each value for itself."""
        return ContainerUseReading(group.runtime, group.container_id, group.pod_uid, *self._values(group))

    def _values(self, group: Group) -> tuple[Reading, Reading, Reading, Reading]:
        if "" in group.paths and self._file(group, "", "cgroup.controllers") is not None:
            cpu, memory, scale = self._file(group, "", "cpu.stat"), "", 1
            usage = _number(_lines(cpu).get("usage_usec"))
            held, most = "memory.current", "memory.max"
        else:
            cpu, memory, scale = self._file(group, "cpu", "cpu.stat"), "memory", 1_000
            usage = _number(self._file(group, "cpuacct", "cpuacct.usage"))
            held, most = "memory.usage_in_bytes", "memory.limit_in_bytes"
        values = (
            Reading(usage // scale) if usage is not None else self._unknown(group),
            self._bytes(group, memory, held),
            self._bytes(group, memory, most),
        )
        throttled = _number(_lines(cpu).get("nr_throttled"))
        return (*values, Reading(throttled) if throttled is not None else self._unknown(group))

    def _bytes(self, group: Group, controller: str, name: str) -> Reading:
        """A file with a number of bytes, in MiB."""
        text = self._file(group, controller, name)
        if text is None:
            return self._unknown(group)
        size = _number(text)
        if text.strip() == "max" or (size is not None and size >= _UNLIMITED_BYTES):
            return Reading(None, NO_LIMIT)
        return Reading(size / (1 << 20)) if size is not None else Reading(None, UNREADABLE)

    def _unknown(self, group: Group) -> Reading:
        """Why a value is missing: its group is not there to be seen, or has no such controller."""
        seen = any(folder.is_dir() for controller in group.paths for folder in self._folders(group, controller))
        return Reading(None, NOT_SUPPORTED if seen else NOT_VISIBLE)

    def _file(self, group: Group, controller: str, name: str) -> str | None:
        for folder in self._folders(group, controller):
            try:
                return (folder / name).read_text(encoding="ascii", errors="replace")
            except OSError:
                continue
        return None

    def _folders(self, group: Group, controller: str) -> list[Path]:
        """Where the group of a controller may be mounted."""
        path = group.paths.get(controller)
        if path is None:
            return []
        mounts = [controller] if controller else ["", "unified"]
        mounts += ["cpu,cpuacct", "cpuacct,cpu"] if controller in ("cpu", "cpuacct") else []
        own = _BESIDE.fullmatch(path)
        if own is None:
            return [self._mount / mount / path.lstrip("/") for mount in mounts]
        found = (self._beside(self._mount / mount, own["rest"]) for mount in mounts)
        return [folder for folder in found if folder is not None]

    def _beside(self, mount: Path, rest: str) -> Path | None:
        """A group that lies beside our own, in a view of our own: how deep we are in that of the machine nobody says.

        The rest of its path has the container's id in it, so there is one such folder, or none where we see no more
        than our own group.
        """
        kept = self._places.get((mount, rest))
        if kept is not None and kept.is_dir():
            return kept
        for depth in range(_DEEPEST) if ".." not in rest.split("/") else ():
            for found in mount.glob("*/" * depth + glob.escape(rest)):
                self._places[(mount, rest)] = found
                return found
        return None


def _lines(text: str | None) -> dict[str, str]:
    """``name value`` lines."""
    return dict(line.split(" ", 1) for line in (text or "").splitlines() if " " in line)


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None

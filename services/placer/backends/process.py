"""Containers as processes of this machine, pinned to the cores that stand for their devices; their parent is ``shim``.

Everything known of a container lies in its folder below the state root (``folder``), so that any number of placers on
this machine, and those that come after them, see the same. docs/backends.md tells it for people.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.placer.backends import cgroups, procs
from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.folder import Folder, Started, folder_name, folders, mark_ended, write_whole
from services.placer.backends.wake import Ends, Wake
from services.placer.core.capabilities import Capabilities
from services.placer.core.containers import Cause
from shared.clock import Clock, SystemClock
from shared.devices import core_of
from shared.errors import BackendError
from shared.messages.place import PlaceRequest, Secret

SHIM = Path(__file__).with_name("shim.py")
MARK = "LAXITY_RING_DIR"
"""The variable by which a container's processes are known after its shim was killed: no other one has its value."""
POLL_US = 10_000
BLIND_US = 50_000
"""How often ``watch`` looks where the kernel cannot tell it of the end of a process."""
SHIM_GRACE_US = 2_000_000
"""For the shim to end after its command was killed; then it is killed itself."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Numeric libraries start a thread for each core of the machine, also in a process that is pinned to one."""


@dataclass(frozen=True)
class ProcessOptions:
    stop_grace_us: int = 5_000_000
    """From TERM to KILL: half of what Docker gives, so that a release is not felt as hanging."""
    start_timeout_us: int = 10_000_000
    """For one exec, and for another placer's start or stop of the same container."""
    rescan_us: int = 500_000
    """How often ``watch`` looks for what other placers started; the ends of what it knows are noticed at once."""
    log_bytes: int = 10 * 1024 * 1024
    """Of each of a container's two logs; the last half of what went before is kept beside it."""
    kept: int = 100
    """Folders of removed containers that are kept for their logs."""


DEFAULTS = ProcessOptions()


@dataclass(frozen=True)
class _Found:
    """A container that a scan found. ``key`` is its folder's own: another start of the name has another one."""

    key: tuple[str, int]
    seen: Seen
    shim: procs.Process | None = None


class ProcessBackend:
    """Linux only. Serves every node whose containers are to run on this machine."""

    name = "process"
    capabilities = Capabilities(needs_command=True, resize=True)

    def __init__(
        self,
        state_root: Path,
        ring_root: Path,
        options: ProcessOptions = DEFAULTS,
        *,
        work_dir: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``work_dir``: where commands run; by default where this process runs."""
        self._state_root = state_root.absolute()
        self._ring_root = ring_root.absolute()
        self._options = options
        self._work_dir = (work_dir or Path.cwd()).absolute()
        self._clock = clock or SystemClock()
        self._watching: set[Wake] = set()

    async def start(self, spec: StartSpec) -> Seen:
        """See Backend. Refuses what needs more than a command; a reference to a secret is more."""
        _refuse(spec.request)
        folder = self._folder(spec.labels.container)
        give_up_us = self._clock.now_us() + self._options.start_timeout_us
        while True:
            seen = await asyncio.to_thread(self._start_or_find, folder, spec)
            if seen is not None:
                for wake in self._watching:
                    wake.call()
                return seen
            if self._clock.now_us() > give_up_us:
                raise BackendError(f"another start or stop of {spec.labels.container} does not end: {folder.path}/lock")
            await self._clock.sleep_us(POLL_US)

    async def stop(self, node: str, container: str) -> None:
        """See Backend: TERM to the command's process group, and after ``stop_grace_us`` KILL to all of it."""
        folder = self._folder(container)
        give_up_us = self._clock.now_us() + self._options.stop_grace_us + self._options.start_timeout_us
        while not await asyncio.to_thread(self._forget, folder):
            started = folder.started()
            if started is not None and started.alive():
                await self._end(started)
            if self._clock.now_us() > give_up_us:
                raise BackendError(f"{container} on {node} does not end: {folder.path}")
            await self._clock.sleep_us(POLL_US)

    async def list(self, node: str) -> list[Seen]:
        """See Backend. Also ends what a killed shim left behind, and what is left of a start that broke off."""
        everything = [found.seen for found in await asyncio.to_thread(self._scan)]
        return [seen for seen in everything if seen.node in {node, ""}]

    async def glance(self, node: str) -> Sequence[Seen] | None:  # noqa: ARG002 -- to ask costs little here
        """See Backend."""
        return None

    async def watch(self, post: Callable[[Seen], None]) -> None:
        """See Backend."""
        posted: set[tuple[str, int]] = set()
        wake = Wake(self._clock)
        ends = Ends(wake.call)
        self._watching.add(wake)
        try:
            while True:
                found = await asyncio.to_thread(self._scan)
                exited = {f.key: f.seen for f in found if f.seen.state == "exited"}
                for key in exited.keys() - posted:
                    post(exited[key])
                posted = set(exited)
                told = ends.follow({f.shim for f in found if f.shim is not None})
                await wake.wait(self._options.rescan_us if told else BLIND_US)
        finally:
            self._watching.discard(wake)
            ends.close()

    async def resize(self, node: str, container: str, *, cpu_milli: int, memory_mib: int) -> None:
        """See Backend. One that runs without a control group has none to change, which is an error."""
        folder = self._folder(container)
        if folder.started() is None:
            raise BackendError(f"{container} is not on {node}")
        groups = tuple(folder.plan().get("groups", ()))
        with _refusals(f"resize {container}"):
            await asyncio.to_thread(cgroups.change, groups, cpu_milli, memory_mib)

    async def remove(self, node: str, container: str) -> None:  # noqa: ARG002 -- names are unique on this machine
        """See Backend. The folder goes to the ended ones; the ring is left to the monitor, which may still read it."""
        folder = self._folder(container)
        if folder.ended() is not None:
            await asyncio.to_thread(self._forget, folder)

    def limits(self, container: str) -> dict[str, str]:
        """``cpu`` and ``memory``: which limit holds for a container, or why none does; empty for an unknown one."""
        return dict(self._folder(container).plan().get("limits", {}))

    # What follows blocks, and runs in threads.

    def _folder(self, container: str) -> Folder:
        return Folder(self._state_root / folder_name(container))

    def _ring(self, folder: Folder) -> Path:
        return self._ring_root / folder.path.name

    def _start_or_find(self, folder: Folder, spec: StartSpec) -> Seen | None:
        """None while somebody else is starting or stopping it."""
        with _refusals(f"start {spec.labels.container}"), folder.locked(make=True) as lock:
            if lock is None:
                started = folder.started()
                return _running(folder, started) if started is not None and started.alive() else None
            if folder.started() is not None or folder.ended() is not None:
                return self._settled(folder)
            return self._start_new(folder, spec, lock)

    def _start_new(self, folder: Folder, spec: StartSpec, lock: int) -> Seen:
        try:
            self._prepare(folder, spec)
            report = self._spawn(folder, lock)
            if error := report.get("error"):
                raise BackendError(error)
        except (BackendError, OSError):
            self._undo(folder)
            raise
        return Seen(spec.labels.node, spec.labels.container, spec.labels, "running", pid=report["pid"])

    def _prepare(self, folder: Folder, spec: StartSpec) -> None:
        """Write down everything that the shim, the monitor and other placers need."""
        held = spec.labels.reservation
        cores = [core for uuid in held.devices if (core := core_of(uuid)) is not None]
        group = f"laxity-{hashlib.sha256(os.fsencode(folder.path)).hexdigest()[:24]}"
        limits = cgroups.apply(group, held.cpu_milli, held.memory_mib)
        ring = self._ring(folder)
        plan = {
            "command": spec.request.command,
            "env": _environment(spec, ring, len(cores)),
            "cwd": str(self._work_dir),
            "cores": cores,
            "groups": limits.groups,
            "limits": limits.applied,
            "log_bytes": self._options.log_bytes,
        }
        folder.write("labels.json", spec.labels.to_json())
        folder.write("start.json", json.dumps(plan).encode())
        ring.mkdir(parents=True, exist_ok=True)
        write_whole(ring / "container.json", spec.labels.to_json())

    def _spawn(self, folder: Folder, lock: int) -> dict[str, Any]:
        """What the shim reports: pid, or error."""
        command = [sys.executable, "-I", "-S", str(SHIM), str(folder.path), str(lock)]
        with (folder.path / "shim.log").open("ab") as log:
            shim = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,
                env={},
            )
        with shim:
            line = _read_report(shim, self._options.start_timeout_us)
            if not line:
                os.killpg(shim.pid, signal.SIGKILL)
        if not line:
            raise BackendError(f"the shim gave no report: {_last_line(folder.path / 'shim.log')}")
        report: dict[str, Any] = json.loads(line)
        return report

    def _undo(self, folder: Folder) -> None:
        """Leave nothing of a start that failed; for who holds the lock."""
        self._sweep(folder)
        shutil.rmtree(self._ring(folder), ignore_errors=True)
        folder.discard()

    def _sweep(self, folder: Folder) -> None:
        groups = tuple(folder.plan().get("groups", ()))
        procs.kill_all(MARK, str(self._ring(folder)), groups)
        cgroups.remove(groups)

    def _settled(self, folder: Folder) -> Seen:
        """As exited: what has no exit code, because its shim was killed, is ended here. For who holds the lock."""
        ended = folder.ended()
        if ended is None:
            self._sweep(folder)
            ended = {"exit_code": None, "signal": None, "at_us": None}
            folder.write("exit.json", json.dumps(ended).encode())
        return _exited(folder, ended)

    def _forget(self, folder: Folder) -> bool:
        """True where nothing is left of it; False while somebody holds its lock."""
        with _refusals(f"forget {folder.path.name}"), folder.locked() as lock:
            if lock is None:
                return not folder.path.exists()
            if folder.ended() is None:  # else the shim has seen everything end
                self._sweep(folder)
            cgroups.remove(tuple(folder.plan().get("groups", ())))
            folder.retire(self._options.kept)
            mark_ended(self._ring(folder))
            return True

    async def _end(self, started: Started) -> None:
        started.shim.send(signal.SIGTERM)
        if await self._ended_within(started, self._options.stop_grace_us):
            return
        started.command.send_to_group(signal.SIGKILL)
        if not await self._ended_within(started, SHIM_GRACE_US):
            started.shim.send(signal.SIGKILL)

    async def _ended_within(self, started: Started, time_us: int) -> bool:
        give_up_us = self._clock.now_us() + time_us
        while started.alive():
            if self._clock.now_us() > give_up_us:
                return False
            await self._clock.sleep_us(POLL_US)
        return True

    def _scan(self) -> tuple[_Found, ...]:
        with _refusals("list the containers"):
            return tuple(found for folder in folders(self._state_root) if (found := self._look(folder)) is not None)

    def _look(self, folder: Folder) -> _Found | None:
        """None for one that is being started or stopped."""
        try:
            key = (folder.path.name, folder.path.stat().st_ino)
        except FileNotFoundError:
            return None
        started = folder.started()
        if started is not None and started.alive():
            return _Found(key, _running(folder, started), started.shim)
        seen = _exited(folder, ended) if (ended := folder.ended()) is not None else self._clean(folder)
        return None if seen is None else _Found(key, seen)

    def _clean(self, folder: Folder) -> Seen | None:
        """Settle what no shim looks after; what does not let itself be ended counts as running."""
        try:
            with folder.locked() as lock:
                if lock is None:
                    return None
                if folder.started() is not None or folder.ended() is not None:
                    return self._settled(folder)
                self._undo(folder)
                return None
        except (BackendError, OSError):
            return _running(folder, None)


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """What the machine refuses, in words for the requester."""
    try:
        yield
    except OSError as error:
        raise BackendError(f"cannot {what}: {error}") from error


def _running(folder: Folder, started: Started | None) -> Seen:
    labels = folder.labels()
    pid = started.command.pid if started is not None else None
    node, container = (labels.node, labels.container) if labels is not None else ("", folder.path.name)
    return Seen(node, container, labels, "running", pid=pid)


def _exited(folder: Folder, ended: dict[str, Any]) -> Seen:
    labels = folder.labels()
    node, container = (labels.node, labels.container) if labels is not None else ("", folder.path.name)
    return Seen(node, container, labels, "exited", exit_code=ended["exit_code"], cause=_cause(ended["signal"]))


def _cause(number: int | None) -> Cause | None:
    """The name of the signal that ended it."""
    if number is None:
        return None
    known = number in set(signal.Signals)
    return Cause(signal.Signals(number).name if known else f"signal {number}")


def _refuse(request: PlaceRequest) -> None:
    field = ProcessBackend.capabilities.lacking(request)
    secrets = sorted(name for name, value in request.env.items() if isinstance(value, Secret))
    if field == "env":
        raise BackendError(f"the process backend has no secrets: env {', '.join(secrets)} refers to one")
    if field is not None:
        raise BackendError(f"the process backend cannot do {field}: it runs a command of this machine, nothing else")


def _environment(spec: StartSpec, ring: Path, cores: int) -> dict[str, str]:
    """Clean: nothing of ours leaks in but what a command needs to run; the container's own names win last."""
    request = spec.request
    here = Path(sys.executable).parent  # so that `python` is this one, with the SDK
    essential = {"PATH": f"{here}:{os.environ.get('PATH', os.defpath)}", "LANG": os.environ.get("LANG", "C.UTF-8")}
    essential |= {name: os.environ[name] for name in ("HOME", "TMPDIR", "VIRTUAL_ENV") if name in os.environ}
    threads = dict.fromkeys(THREADS, str(cores)) if cores else {}
    own = {name: value for name, value in request.env.items() if isinstance(value, str)}
    told = {
        MARK: str(ring),
        "LAXITY_DEVICES": ",".join(spec.labels.reservation.devices),
        "LAXITY_CONTAINER": spec.labels.container,
        "LAXITY_REQUEST_ID": spec.labels.reservation.request_id,
    }
    if request.realtime is not None:
        told["LAXITY_DEADLINE_US"] = str(request.realtime.deadline_us)
    return essential | threads | own | dict(spec.env) | told


def _read_report(shim: subprocess.Popen[bytes], timeout_us: int) -> bytes:
    """One line, written in one piece; nothing where the shim ends without it or takes too long."""
    assert shim.stdout is not None
    poll = select.poll()
    poll.register(shim.stdout, select.POLLIN)
    return os.read(shim.stdout.fileno(), 65_536) if poll.poll(timeout_us // 1000) else b""


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return "it said nothing"

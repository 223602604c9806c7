"""A backend that runs nothing: containers are files, and a request's environment says how each one behaves.

It is a real driver, for nodes that exist on paper: several placers share its state directory, and what is in there
survives them. A request that it is given may say in ``env``, as whole numbers:

========================  ========================================================================================
FAKE_START_FAILS          the first n generations fail to start; ``always``: all of them
FAKE_START_US             how long a start takes
FAKE_EXIT_AFTER_US        it exits by itself that long after its start
FAKE_EXIT_CODE            with this code (0)
FAKE_END_REASON           and of this, in a word
FAKE_IGNORE_TERM          ``1``: a stop takes the whole grace
FAKE_MOST_MEMORY_MIB      it refuses to be given more
========================  ========================================================================================

A node whose folder has a file ``.silent`` is cut off: its containers run on, and nothing that is asked is answered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import Field

from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.folder import folder_name, mark_ended, unused, write_whole
from services.placer.backends.wake import Wake
from services.placer.core.capabilities import Capabilities
from services.placer.core.containers import Cause
from shared.clock import Clock, SystemClock
from shared.errors import BackendError, FieldError
from shared.messages.base import Message
from shared.messages.ledger import ContainerLabels

EVERYTHING = Capabilities(
    images=True, volumes=True, ports=True, secrets=True, user=True, shm=True, pods=True, resize=True
)
RESCAN_US = 100_000
"""How often ``watch`` looks for what other placers started."""
SETTLED_NS = 50_000_000
"""So long after a change of a folder the next one has another stamp."""
_CHANGED = ".changed"
"""Beside the folders of nodes: a byte longer whenever what ends by itself, or has ended, is not what it was."""
SILENT = ".silent"
_Version = tuple[int, int]
_Key = tuple[str, _Version]
"""A record's file and which version of it: another start of the same name has another key."""


class Behaviour(Message):
    """What the environment of a request asks of the fake."""

    start_fails: int | None = Field(default=0, ge=0)
    """Generations; None is all."""
    start_us: int = Field(default=0, ge=0)
    exit_after_us: int | None = Field(default=None, ge=0)
    exit_code: int = 0
    end_reason: str | None = None
    ignore_term: bool = False
    most_memory_mib: int | None = Field(default=None, ge=0)

    @classmethod
    def of(cls, env: Mapping[str, object]) -> Behaviour:
        """BackendError where a value is no whole number; unknown names are not ours."""
        fails = env.get("FAKE_START_FAILS", "0")
        after, most = env.get("FAKE_EXIT_AFTER_US"), env.get("FAKE_MOST_MEMORY_MIB")
        return cls(
            start_fails=None if fails == "always" else _number("FAKE_START_FAILS", fails),
            start_us=_number("FAKE_START_US", env.get("FAKE_START_US", "0")),
            exit_after_us=None if after is None else _number("FAKE_EXIT_AFTER_US", after),
            exit_code=_number("FAKE_EXIT_CODE", env.get("FAKE_EXIT_CODE", "0")),
            end_reason=str(env["FAKE_END_REASON"]) if "FAKE_END_REASON" in env else None,
            ignore_term=env.get("FAKE_IGNORE_TERM", "") == "1",
            most_memory_mib=None if most is None else _number("FAKE_MOST_MEMORY_MIB", most),
        )


_USUAL = Behaviour()


class _Record(Message):
    """One container: written once, by the start, and replaced only by ``resize`` and ``kill``."""

    labels: ContainerLabels
    exit_at_us: int | None
    exit_code: int | None
    end_reason: str | None = None
    ignore_term: bool
    most_memory_mib: int | None = None

    def seen(self, now_us: int) -> Seen:
        exited = self.exit_at_us is not None and self.exit_at_us <= now_us
        node, container = self.labels.node, self.labels.container
        if exited:
            cause = Cause(self.end_reason) if self.end_reason else None
            return Seen(node, container, self.labels, "exited", exit_code=self.exit_code, cause=cause)
        return Seen(node, container, self.labels, "running")


@dataclass(frozen=True)
class _Read:
    """A record and which version of its file it was read from."""

    version: _Version
    record: _Record


@dataclass(frozen=True)
class _Node:
    """Where the records of one node lie; paths are text: making objects of them took half the time of a start."""

    folder: str
    silent: str


class FakeBackend:
    """``calls`` records what was asked, in order; an error put into ``next_error`` is raised by the next call."""

    name = "fake"

    def __init__(
        self,
        state_root: Path,
        ring_root: Path | None = None,
        *,
        clock: Clock | None = None,
        stop_grace_us: int = 5_000_000,
        capabilities: Capabilities = EVERYTHING,
    ) -> None:
        """With a ``ring_root`` it writes to a folder of each node there what that node's monitor expects.

        All placers' clocks must be the machine's.
        """
        self.capabilities = capabilities
        self.calls: list[tuple[str, str]] = []
        self.next_error: BackendError | None = None
        self._state_root = state_root
        self._ring_root = ring_root
        self._clock = clock or SystemClock()
        self._stop_grace_us = stop_grace_us
        self._wakes: set[Wake] = set()
        self._read: dict[str, _Read] = {}
        self._nodes: dict[str, _Node] = {}
        self._folders: dict[str, tuple[int, tuple[tuple[str, _Record], ...]]] = {}
        """Of a node: when its folder changed last, and what is in it."""
        self._endings: tuple[int, dict[_Key, _Record]] = (0, {})
        """What ends by itself, and as of how many changes of that."""

    async def start(self, spec: StartSpec) -> Seen:
        """See Backend."""
        self._called("start", spec.labels.container)
        self._reach(spec.labels.node)
        path = self._path(spec.labels.node, spec.labels.container)
        behaviour = Behaviour.of({**spec.request.env, **spec.env}) if spec.request.env else _USUAL
        # where nothing happens before the record is written, that finds the one which is there already
        found = None if behaviour is _USUAL and self._ring_root is None else self._load(path)
        if found is None:
            found = await self._begin(path, spec, behaviour)
        if found is None:
            raise BackendError(f"{spec.labels.container} was stopped while it started")
        if found.exit_at_us is not None:
            self._look()
        return found.seen(self._clock.now_us())

    async def stop(self, node: str, container: str) -> None:
        """See Backend."""
        self._called("stop", container)
        self._reach(node)
        path = self._path(node, container)
        found = self._load(path)
        if found is not None and found.ignore_term and found.seen(self._clock.now_us()).state == "running":
            await self._clock.sleep_us(self._stop_grace_us)
        self._forget(node, container, found)

    async def list(self, node: str) -> list[Seen]:
        """See Backend."""
        self._called("list", node)
        self._reach(node)
        now_us = self._clock.now_us()
        return [record.seen(now_us) for _, record in self._records(self._node(node).folder)]

    async def glance(self, node: str) -> Sequence[Seen] | None:  # noqa: ARG002 -- to ask costs little here
        """See Backend."""
        return None

    async def watch(self, post: Callable[[Seen], None]) -> None:
        """See Backend."""
        posted: set[_Key] = set()
        wake = Wake(self._clock)
        self._wakes.add(wake)
        try:
            while True:
                now_us = self._clock.now_us()
                ending = self._ending()
                seen = {key: record.seen(now_us) for key, record in ending.items()}
                exited = {key: each for key, each in seen.items() if each.state == "exited"}
                for key in exited.keys() - posted:
                    post(exited[key])
                posted = set(exited)
                ends = [
                    r.exit_at_us - now_us for k, r in ending.items() if r.exit_at_us is not None and k not in exited
                ]
                await wake.wait(min([RESCAN_US, *ends]))
        finally:
            self._wakes.discard(wake)

    async def remove(self, node: str, container: str) -> None:
        """See Backend."""
        self._called("remove", container)
        path = self._path(node, container)
        found = self._load(path)
        if found is not None and found.seen(self._clock.now_us()).state == "exited":
            self._forget(node, container, found)

    async def resize(self, node: str, container: str, *, cpu_milli: int, memory_mib: int) -> None:
        """See Backend. Its labels say what it has."""
        self._called("resize", container)
        path = self._path(node, container)
        if (found := self._load(path)) is None:
            raise BackendError(f"{container} is not on {node}")
        if found.most_memory_mib is not None and memory_mib > found.most_memory_mib:
            raise BackendError(f"the fake was told to refuse more: FAKE_MOST_MEMORY_MIB={found.most_memory_mib}")
        if found.seen(self._clock.now_us()).state == "exited":
            return  # a record that is written again would be posted again
        limits = {"cpu_milli": cpu_milli, "memory_mib": memory_mib}
        given = {limit: amount for limit, amount in limits.items() if amount}
        held = found.labels.reservation.model_copy(update=given)
        labels = found.labels.model_copy(update={"reservation": held})
        write_whole(Path(path), found.model_copy(update={"labels": labels}).model_dump_json().encode())
        self._write_labels(labels)
        if found.exit_at_us is not None:
            self._look()

    def kill(self, node: str, container: str, exit_code: int | None = 137, end_reason: str | None = None) -> None:
        """What the world does to a container: it ends now, with that code (None: nobody saw it)."""
        path = self._path(node, container)
        if (found := self._load(path)) is None:
            raise BackendError(f"{container} is not on {node}")
        update = {"exit_at_us": self._clock.now_us(), "exit_code": exit_code, "end_reason": end_reason}
        write_whole(Path(path), found.model_copy(update=update).model_dump_json().encode())
        self._look()

    def _look(self) -> None:
        """What ends by itself, or has ended, is not what it was: all watches look again, also of other placers."""
        with (self._state_root / _CHANGED).open("ab") as file:
            file.write(b".")
        for wake in self._wakes:
            wake.call()

    async def _begin(self, path: str, spec: StartSpec, behaviour: Behaviour) -> _Record | None:
        """What stands there in the end: somebody else may have been faster."""
        if behaviour.start_us:
            await self._clock.sleep_us(behaviour.start_us)
        if behaviour.start_fails is None or spec.labels.reservation.generation <= behaviour.start_fails:
            raise BackendError("the fake was told to fail: FAKE_START_FAILS")
        after_us = behaviour.exit_after_us
        record = _Record(
            labels=spec.labels,
            exit_at_us=None if after_us is None else self._clock.now_us() + after_us,
            exit_code=behaviour.exit_code,
            end_reason=behaviour.end_reason,
            ignore_term=behaviour.ignore_term,
            most_memory_mib=behaviour.most_memory_mib,
        )
        self._write_labels(spec.labels)
        if (version := _write_once(path, record.to_json())) is None:
            return self._load(path)
        self._read[path] = _Read(version, record)
        return record

    def _write_labels(self, labels: ContainerLabels) -> None:
        if (ring := self._ring(labels.node, labels.container)) is not None:
            ring.mkdir(parents=True, exist_ok=True)
            write_whole(ring / "container.json", labels.to_json())

    def _forget(self, node: str, container: str, found: _Record | None) -> None:
        path = self._path(node, container)
        self._read.pop(path, None)
        Path(path).unlink(missing_ok=True)
        if found is not None and found.exit_at_us is not None:
            self._look()
        if (ring := self._ring(node, container)) is not None:
            mark_ended(ring)

    def _ring(self, node: str, container: str) -> Path | None:
        """Each fake node has a ring root of its own, named as its folder of containers."""
        return self._ring_root / folder_name(node) / folder_name(container) if self._ring_root is not None else None

    def _called(self, method: str, about: str) -> None:
        self.calls.append((method, about))
        error, self.next_error = self.next_error, None
        if error is not None:
            raise error

    def _reach(self, node: str) -> None:
        if os.access(self._node(node).silent, os.F_OK):
            raise BackendError(f"{node} does not answer")

    def _path(self, node: str, container: str) -> str:
        return f"{self._node(node).folder}/{folder_name(container)}.json"

    def _node(self, name: str) -> _Node:
        found = self._nodes.get(name)
        if found is None:
            folder = f"{self._state_root}/{folder_name(name)}"
            found = self._nodes[name] = _Node(folder, f"{folder}/{SILENT}")
        return found

    def _load(self, path: str) -> _Record | None:
        """The record; None where there is none, or where somebody spoiled it."""
        try:
            version = _version(os.stat(path))
            known = self._read.get(path)
            if known is None or known.version != version:
                known = self._read[path] = _Read(version, _Record.trusted(Path(path).read_bytes()))
        except (FileNotFoundError, FieldError):
            self._read.pop(path, None)
            return None
        return known.record

    def _records(self, folder: str) -> tuple[tuple[str, _Record], ...]:
        """Read again only where the folder has changed, as it does with whatever is written in it."""
        known_ns, known = self._folders.get(folder, (0, ()))
        try:
            changed_ns = os.stat(folder).st_mtime_ns
            if known_ns == changed_ns:
                return known
            paths = [f"{folder}/{name}" for name in sorted(os.listdir(folder)) if not name.startswith(".")]
        except FileNotFoundError:
            return ()
        found = tuple((path, record) for path in paths if (record := self._load(path)) is not None)
        if self._clock.wall_us() * 1000 - changed_ns > SETTLED_NS:
            self._folders[folder] = changed_ns, found
        return found

    def _ending(self) -> dict[_Key, _Record]:
        """All records of all nodes that end by themselves, read again only where that has changed."""
        try:
            changed = (self._state_root / _CHANGED).stat().st_size
        except FileNotFoundError:
            return {}
        known, found = self._endings
        if changed != known:
            folders = [entry.path for entry in os.scandir(self._state_root) if entry.is_dir()]
            records = [each for folder in folders for each in self._records(folder) if each[1].exit_at_us is not None]
            found = {(path, read.version): record for path, record in records if (read := self._read.get(path))}
            self._endings = changed, found
        return found


def _number(name: str, text: object, least: int = 0) -> int:
    try:
        number = int(str(text))
    except ValueError:
        number = least - 1
    if number < least:
        raise BackendError(f"env {name}: found {text!r}, allowed: a whole number, at least {least}")
    return number


def _write_once(path: str, body: bytes) -> _Version | None:
    """Whole or not at all, and by one only: who comes second leaves the first one's and gets None, else its version."""
    folder = os.path.dirname(path)
    new = f"{folder}/.{unused()}"
    make = partial(os.open, new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        file = make()
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)
        file = make()
    try:
        try:
            while body:
                body = body[os.write(file, body) :]
            version = _version(os.fstat(file))
        finally:
            os.close(file)
        os.link(new, path)
    except FileExistsError:
        return None
    finally:
        os.unlink(new)
    return version


def _version(status: os.stat_result) -> _Version:
    return status.st_ino, status.st_mtime_ns

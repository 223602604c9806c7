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

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from pydantic import Field

from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.folder import folder_name, mark_ended, write_whole
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
_count = itertools.count()
_Key = tuple[Path, tuple[int, int]]
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

    version: tuple[int, int]
    record: _Record


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
        self._read: dict[Path, _Read] = {}
        self._of_node: dict[str, Path] = {}
        self._folders: dict[Path, tuple[int, tuple[tuple[Path, _Record], ...]]] = {}
        """Of a node: when its folder changed last, and what is in it."""
        self._endings: tuple[int, dict[_Key, _Record]] = (0, {})
        """What ends by itself, and as of how many changes of that."""

    async def start(self, spec: StartSpec) -> Seen:
        """See Backend."""
        self._called("start", spec.labels.container)
        self._reach(spec.labels.node)
        path = self._path(spec.labels.node, spec.labels.container)
        if (found := self._load(path)) is None:
            found = await self._begin(path, spec)
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
        self._forget(path, found)

    async def list(self, node: str) -> list[Seen]:
        """See Backend."""
        self._called("list", node)
        self._reach(node)
        now_us = self._clock.now_us()
        return [record.seen(now_us) for _, record in self._records(self._folder(node))]

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
            self._forget(path, found)

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
        write_whole(path, found.model_copy(update={"labels": labels}).model_dump_json().encode())
        if self._ring(path) is not None:
            self._write_labels(path, labels)
        if found.exit_at_us is not None:
            self._look()

    def kill(self, node: str, container: str, exit_code: int | None = 137, end_reason: str | None = None) -> None:
        """What the world does to a container: it ends now, with that code (None: nobody saw it)."""
        path = self._path(node, container)
        if (found := self._load(path)) is None:
            raise BackendError(f"{container} is not on {node}")
        update = {"exit_at_us": self._clock.now_us(), "exit_code": exit_code, "end_reason": end_reason}
        write_whole(path, found.model_copy(update=update).model_dump_json().encode())
        self._look()

    def _look(self) -> None:
        """What ends by itself, or has ended, is not what it was: all watches look again, also of other placers."""
        with (self._state_root / _CHANGED).open("ab") as file:
            file.write(b".")
        for wake in self._wakes:
            wake.call()

    async def _begin(self, path: Path, spec: StartSpec) -> _Record | None:
        """What stands there in the end: somebody else may have been faster."""
        env = {**spec.request.env, **spec.env}
        behaviour = Behaviour.of(env)
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
        self._write_labels(path, spec.labels)
        if (version := _write_once(path, record.to_json())) is None:
            return self._load(path)
        self._read[path] = _Read(version, record)
        return record

    def _write_labels(self, path: Path, labels: ContainerLabels) -> None:
        if (ring := self._ring(path)) is not None:
            ring.mkdir(parents=True, exist_ok=True)
            write_whole(ring / "container.json", labels.to_json())

    def _forget(self, path: Path, found: _Record | None) -> None:
        path.unlink(missing_ok=True)
        if found is not None and found.exit_at_us is not None:
            self._look()
        if (ring := self._ring(path)) is not None:
            mark_ended(ring)

    def _ring(self, path: Path) -> Path | None:
        """Each fake node has a ring root of its own, named as its folder of containers."""
        return self._ring_root / path.parent.name / path.stem if self._ring_root is not None else None

    def _called(self, method: str, about: str) -> None:
        self.calls.append((method, about))
        error, self.next_error = self.next_error, None
        if error is not None:
            raise error

    def _reach(self, node: str) -> None:
        if (self._folder(node) / SILENT).exists():
            raise BackendError(f"{node} does not answer")

    def _path(self, node: str, container: str) -> Path:
        return self._folder(node) / f"{folder_name(container)}.json"

    def _folder(self, node: str) -> Path:
        found = self._of_node.get(node)
        if found is None:
            found = self._of_node[node] = self._state_root / folder_name(node)
        return found

    def _load(self, path: Path) -> _Record | None:
        """The record; None where there is none, or where somebody spoiled it."""
        try:
            version = _version(path.stat())
            known = self._read.get(path)
            if known is None or known.version != version:
                known = self._read[path] = _Read(version, _Record.trusted(path.read_bytes()))
        except (FileNotFoundError, FieldError):
            self._read.pop(path, None)
            return None
        return known.record

    def _records(self, folder: Path) -> tuple[tuple[Path, _Record], ...]:
        """Read again only where the folder has changed, as it does with whatever is written in it."""
        known_ns, known = self._folders.get(folder, (0, ()))
        try:
            changed_ns = folder.stat().st_mtime_ns
            if known_ns == changed_ns:
                return known
            paths = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=attrgetter("name"))
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
            folders = [Path(entry.path) for entry in os.scandir(self._state_root) if entry.is_dir()]
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


def _write_once(path: Path, body: bytes) -> tuple[int, int] | None:
    """Whole or not at all, and by one only: who comes second leaves the first one's and gets None, else its version."""
    new = path.with_name(f".{os.getpid()}.{next(_count)}")
    try:
        file = new.open("xb")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = new.open("xb")
    try:
        with file:
            file.write(body)
        path.hardlink_to(new)
        return _version(new.stat())
    except FileExistsError:
        return None
    finally:
        new.unlink()


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns

"""Containers on Docker engines, each node's on its own; what engines are told lies in ``docker_spec``.

Everything known of a container lies in its engine, under its name and in its labels. A container is started only by
the call that made it, once: who finds one made and not started waits for it, and after a time removes it and makes
another. So two placers cannot run a command twice, also where it ends at once. docs/backends.md tells it for people.
"""

from __future__ import annotations

import asyncio
import builtins
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from services.placer.backends import docker_spec as told
from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.docker_engine import Engine, NoAnswerError, RefusedError
from services.placer.backends.docker_options import DockerOptions
from services.placer.backends.docker_pull import Pulls
from services.placer.backends.folder import folder_name, mark_ended, write_whole
from services.placer.core.capabilities import Capabilities
from shared.clock import Clock, SystemClock
from shared.errors import BackendError, clip

POLL_US = 20_000
RESUBSCRIBE_US = 200_000
"""Between the end of one stream of events and the next try."""


class DockerBackend:
    """Serves every node for which the options name an engine."""

    name = "docker"

    def __init__(self, options: DockerOptions, ring_root: Path, *, clock: Clock | None = None) -> None:
        """``ring_root``: for engines of this machine that have none of their own. FieldError: a wrong setting."""
        self.capabilities = Capabilities(
            needs_image=options.image is None,
            images=True,
            volumes=bool(options.volumes),
            ports=True,
            secrets=options.secrets_dir is not None,
            user=True,
            shm=True,
            resize=True,
        )
        self._options = options
        self._ring_root = ring_root.absolute()
        self._clock = clock or SystemClock()
        made = {where: Engine(where, options.call_timeout_us) for where in options.engines.values()}
        self._engines = {pattern: made[where] for pattern, where in options.engines.items()}
        self._pulls = Pulls(options, self._clock)

    async def start(self, spec: StartSpec) -> Seen:
        """See Backend."""
        engine = self._engine(spec.labels.node)
        name = self._name(spec.labels.container)
        body = told.create_body(spec, self._options, self._ring(engine, spec.labels.container), engine.where)
        give_up_us = self._clock.now_us() + 3 * self._options.start_timeout_us
        made = None
        while self._clock.now_us() < give_up_us:
            if (found := await engine.inspect(name)) is not None:
                seen = await self._adopt(engine, spec, found)
            elif made is not None:
                raise BackendError(f"{spec.labels.container} was stopped while it started")
            else:
                made = await self._create(engine, name, body, spec.progress)
                seen = await self._run(engine, made, spec) if made is not None else None
            if seen is not None:
                return seen
        raise BackendError(f"another start or stop of {spec.labels.container} does not end")

    async def stop(self, node: str, container: str) -> None:
        """See Backend: the image's stop signal, or TERM, and after ``stop_grace_us`` KILL."""
        engine = self._engine(node)
        give_up_us = self._clock.now_us() + self._options.stop_grace_us + self._options.start_timeout_us
        found = await self._ours(engine, container)
        if found is None:
            return
        if told.runs(found):
            await self._end(engine, found)
        if not engine.where.local:
            await self._kill(engine, found["Id"])
            await self._leave_ring(engine, found["Id"], container)
        while not await engine.delete(found["Id"], force=True):
            if self._clock.now_us() > give_up_us:
                raise BackendError(f"{container} on {node} does not end")
            await self._clock.sleep_us(POLL_US)
        if engine.where.local:
            await self._leave_ring(engine, found["Id"], container)

    async def list(self, node: str) -> list[Seen]:
        """See Backend. Also removes what is left of a start that broke off."""
        engine = self._engine(node)
        found = []
        entries = await self._entries(engine)
        unstarted = {entry["Id"] for entry in entries if entry["State"] == "created"}
        engine.unstarted_since_us = {i: since for i, since in engine.unstarted_since_us.items() if i in unstarted}
        for entry in entries:
            labels = told.labels_of(entry["Labels"], self._options.scope)
            of_node = labels.node if labels is not None else entry["Labels"].get(told.NODE, "")
            if of_node not in {node, ""}:
                continue
            if (seen := await self._look(engine, entry)) is not None:
                found.append(seen)
        return found

    async def glance(self, node: str) -> Sequence[Seen] | None:  # noqa: ARG002 -- to ask costs little here
        """See Backend."""
        return None

    async def watch(self, post: Callable[[Seen], None]) -> None:
        """See Backend. Events only say when to look: engines do not repeat those that were missed."""
        async with asyncio.TaskGroup() as group:
            for engine in set(self._engines.values()):
                group.create_task(self._watch(engine, post))

    async def remove(self, node: str, container: str) -> None:
        """See Backend. The ring is left to the monitor, which may still read it."""
        engine = self._engine(node)
        found = await self._ours(engine, container)
        if found is None or told.runs(found) or told.never_ran(found):
            return
        await self._leave_ring(engine, found["Id"], container)
        await engine.delete(found["Id"], force=False)

    async def resize(self, node: str, container: str, *, cpu_milli: int = 0, memory_mib: int = 0) -> None:
        """See Backend. An engine that refuses puts back what it had."""
        engine = self._engine(node)
        found = await self._ours(engine, container)
        if found is None:
            raise BackendError(f"{container} is not on {node}")
        limits = told.cpu_limit(cpu_milli) | told.memory_limit(memory_mib)
        if limits:
            await engine.ask("POST", f"containers/{found['Id']}/update", body=limits)

    async def close(self) -> None:
        """Close all connections."""
        for engine in self._engines.values():
            await engine.close()

    # --- names ---

    def _engine(self, node: str) -> Engine:
        for pattern, engine in self._engines.items():
            if fnmatchcase(node, pattern):
                return engine
        raise BackendError(f"no engine of this placer runs the containers of {clip(node)}")

    def _name(self, container: str) -> str:
        return told.engine_name(self._options.scope, container)

    def _ring(self, engine: Engine, container: str) -> Path | None:
        """The folder on the engine's machine; None where the engine is elsewhere and we were not told of one."""
        root = engine.where.ring_root or (self._ring_root if engine.where.local else None)
        return None if root is None else root / folder_name(container)

    # --- start ---

    async def _create(self, engine: Engine, name: str, body: dict[str, Any], hear: Callable[[str], None]) -> str | None:
        """Its id; None where the name is taken by now."""
        image, options = body["Image"], self._options
        if options.pull == "always":
            await self._pulls.pull(engine, image, hear, again=True)
        try:
            return await self._create_once(engine, name, body)
        except RefusedError as error:
            if error.status != 404 or options.pull == "always":  # 404: no such image
                raise
            if options.pull == "never":
                raise BackendError(f"image {image} is not on {engine.where.url}, and none is pulled") from error
        await self._pulls.pull(engine, image, hear, again=False)
        return await self._create_once(engine, name, body)

    async def _create_once(self, engine: Engine, name: str, body: dict[str, Any]) -> str | None:
        timeout_us = self._options.start_timeout_us
        try:
            made = await engine.ask(
                "POST", "containers/create", params={"name": name}, body=body, timeout_us=timeout_us
            )
        except RefusedError as error:
            if error.status == 409:
                return None
            raise
        return str(made["Id"])

    async def _run(self, engine: Engine, made: str, spec: StartSpec) -> Seen | None:
        """Start what this call made; None where somebody removed it. A failure leaves nothing, also of the ring."""
        container = spec.labels.container
        start_by_us = self._clock.now_us() + self._options.left_after_us // 2
        try:
            await self._make_ring(engine, made, spec)
            if self._clock.now_us() > start_by_us:
                raise BackendError(f"{container} was made and not started in time")
            await engine.ask("POST", f"containers/{made}/start", timeout_us=self._options.start_timeout_us)
            found = await engine.inspect(made)
            if found is not None and told.never_ran(found):
                raise BackendError(f"engine {engine.where.url} started {container} and knows nothing of it")
            return None if found is None else told.seen_of(found, self._options.scope)
        except RefusedError:
            if await engine.inspect(made) is None:
                return None
            if (seen := await self._undo(engine, made, container, failed=True)) is not None:
                return seen
            raise
        except BackendError:
            if (seen := await asyncio.shield(self._undo(engine, made, container))) is not None:
                return seen
            raise
        except asyncio.CancelledError:
            await asyncio.shield(self._undo(engine, made, container))
            raise

    async def _undo(self, engine: Engine, made: str, container: str, *, failed: bool = False) -> Seen | None:
        """What runs all the same, where only the answer was lost; else None, and nothing is left of it.

        Never by force: what is asked of a halted engine may come to it when another placer has long seen that the
        container runs. ``failed``: the engine said so, and nobody starts it again under this name.
        """
        with suppress(BackendError):  # an engine that does not answer: found and removed when it does
            if failed and not engine.where.local:
                await self._leave_ring(engine, made, container)
            if not await engine.delete(made, force=False):
                found = await engine.inspect(made)
                return told.seen_of(found, self._options.scope) if found is not None and told.runs(found) else None
            if engine.where.local and (ring := self._ring(engine, container)) is not None:
                shutil.rmtree(ring, ignore_errors=True)
        return None

    async def _make_ring(self, engine: Engine, made: str, spec: StartSpec) -> None:
        """With the labels for the monitor. Whatever user the image has must be able to write there."""
        ring = self._ring(engine, spec.labels.container)
        if ring is None:
            return
        if not engine.where.local:  # through the container's mount: the only way to that machine's files
            await engine.put(made, told.RING_PARENT, told.ring_archive(spec.labels))
            return
        try:
            ring.mkdir(parents=True, exist_ok=True)
            ring.chmod(0o777)
            write_whole(ring / "container.json", spec.labels.to_json())
        except OSError as error:
            raise BackendError(f"cannot make the ring folder {ring}: {error.strerror}") from error

    async def _leave_ring(self, engine: Engine, container_id: str, container: str) -> None:
        """Before the container is removed where its ring is reached through it; nothing runs in it any more."""
        ring = self._ring(engine, container)
        if ring is None:
            return
        if engine.where.local:
            mark_ended(ring)
            return
        with suppress(RefusedError):  # it is gone, or was made without a ring
            await engine.put(container_id, told.RING, told.ended_archive())

    async def _adopt(self, engine: Engine, spec: StartSpec, found: dict[str, Any]) -> Seen | None:
        """What a container is that has our name; None: look again."""
        labels = told.labels_of(found["Config"]["Labels"], self._options.scope)
        if labels is None or labels.container != spec.labels.container:
            if told.runs(found):
                raise BackendError(f"{found['Name'].lstrip('/')} is the name of a running container that is not ours")
            await engine.delete(found["Id"], force=False)
            return None
        if told.never_ran(found):
            await self._replace_if_left(engine, found["Id"])
        elif found["State"]["Status"] != "removing":
            return told.seen_of(found, self._options.scope)
        await self._clock.sleep_us(POLL_US)
        return None

    async def _replace_if_left(self, engine: Engine, container_id: str) -> None:
        """Remove one that nobody started for a while, unless its start is under way: then an inspection waits."""
        now_us, left_after_us = self._clock.now_us(), self._options.left_after_us
        since_us = engine.unstarted_since_us.setdefault(container_id, now_us)
        if now_us - since_us < left_after_us:
            return
        with suppress(NoAnswerError):
            found = await engine.inspect(container_id, min(left_after_us, self._options.call_timeout_us))
            if found is not None and told.never_ran(found):
                await engine.delete(container_id, force=False)

    # --- stop and look ---

    async def _ours(self, engine: Engine, container: str) -> dict[str, Any] | None:
        found = await engine.inspect(self._name(container))
        labels = told.labels_of(found["Config"]["Labels"], self._options.scope) if found else None
        return found if labels is not None and labels.container == container else None

    async def _end(self, engine: Engine, found: dict[str, Any]) -> None:
        """Politely; returns when it has ended or the grace is over."""
        path, signal = f"containers/{found['Id']}", found["Config"].get("StopSignal") or "SIGTERM"
        try:
            await engine.ask("POST", f"{path}/kill", params={"signal": signal})
            if self._options.stop_grace_us:
                await engine.ask("POST", f"{path}/wait", timeout_us=self._options.stop_grace_us)
        except RefusedError as error:
            if error.status not in {404, 409}:  # it is gone, or has ended
                raise
        except NoAnswerError:  # of the wait: it has not ended
            return

    async def _kill(self, engine: Engine, container_id: str) -> None:
        """Returns when nothing of it runs; it is still there."""
        with suppress(RefusedError):  # it is gone, or has ended
            await engine.ask("POST", f"containers/{container_id}/kill", params={"signal": "SIGKILL"})
            await engine.ask("POST", f"containers/{container_id}/wait")

    async def _entries(self, engine: Engine) -> builtins.list[dict[str, Any]]:
        params = {"all": True, "filters": told.filters(self._options.scope)}
        entries: list[dict[str, Any]] = await engine.ask("GET", "containers/json", params=params)
        return entries

    async def _look(self, engine: Engine, entry: dict[str, Any]) -> Seen | None:
        """Of a list's entry, which has no exit code; None for one that is being removed, or was made and never ran.

        Inspected where the list says *created*: it goes on saying so for up to a second after a start, and a
        container that others know as started would be taken for vanished.
        """
        if entry["State"] == "removing":
            return None
        if entry["State"] not in {"created", "exited", "dead"}:
            found: dict[str, Any] | None = {
                "Name": entry["Names"][0],
                "Config": {"Labels": entry["Labels"]},
                "State": {"Running": True},
            }
        else:
            found = await engine.inspect(entry["Id"])
        if found is not None and told.never_ran(found):  # nor has it ended: somebody may just be removing it
            await self._replace_if_left(engine, entry["Id"])
            return None
        return None if found is None else told.seen_of(found, self._options.scope)

    async def _watch(self, engine: Engine, post: Callable[[Seen], None]) -> NoReturn:
        """Subscribe first and look then, so that nothing falls between."""
        posted: set[str] = set()
        params = {"filters": told.filters(self._options.scope, type=["container"], event=["die"])}
        while True:
            with suppress(BackendError):
                async with engine.stream("GET", "events", params) as lines:
                    await self._post_ends(engine, posted, post)
                    while line := await engine.line(lines, self._options.rescan_us):
                        if (ended := told.line_of(line).get("id")) is None:
                            await self._post_ends(engine, posted, post)
                        else:
                            await self._post_end(engine, ended, posted, post)
                    if line is None:  # nothing ended, or nobody is there any more: only another stream can tell
                        continue
            await self._clock.sleep_us(RESUBSCRIBE_US)

    async def _post_ends(self, engine: Engine, posted: set[str], post: Callable[[Seen], None]) -> None:
        """Post what has ended, of all that there is."""
        entries = await self._entries(engine)
        posted.intersection_update(entry["Id"] for entry in entries)
        for entry in entries:
            if entry["State"] in {"exited", "dead"}:
                await self._post_end(engine, entry["Id"], posted, post)

    async def _post_end(self, engine: Engine, ended: str, posted: set[str], post: Callable[[Seen], None]) -> None:
        """Post it unless it was posted. An id is one start: engines do not restart what we made (case D13).

        Inspected, since the engine's list shows an end only some time after the event that tells of it.
        """
        if ended in posted or (found := await engine.inspect(ended)) is None:
            return
        if told.runs(found) or told.never_ran(found):
            return
        posted.add(ended)
        post(told.seen_of(found, self._options.scope))

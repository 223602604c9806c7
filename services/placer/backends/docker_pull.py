"""Pulls of images: one of an image at a time on each engine, told about to all who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.placer.backends import docker_spec as told
from services.placer.backends.docker_engine import LONGEST_REASON, Engine, RefusedError
from services.placer.backends.docker_options import DockerEngine, DockerOptions
from services.placer.backends.docker_secrets import registry_auth
from shared.clock import Clock
from shared.errors import BackendError, clip

TELL_EVERY_US = 1_000_000
"""People read it, and each is an event of every request that waits."""

Hear = Callable[[str], None]


@dataclass
class _Pull:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: list[Hear] = field(default_factory=list)

    def tell(self, text: str) -> None:
        for hear in list(self.waiting):
            hear(text)


class Pulls:
    """The pulls of one backend."""

    def __init__(self, options: DockerOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._under_way: dict[tuple[DockerEngine, str], _Pull] = {}

    async def pull(self, engine: Engine, image: str, hear: Hear, *, again: bool) -> None:
        """Who waited for another's pull finds the image there, unless it is to be pulled again. BackendError."""
        key = engine.where, image
        pull = self._under_way.setdefault(key, _Pull())
        pull.waiting.append(hear)
        try:
            async with pull.lock:
                if again or not await self._has(engine, image):
                    await self._pull(engine, image, pull)
        finally:
            pull.waiting.remove(hear)
            if not pull.waiting:
                del self._under_way[key]

    async def _pull(self, engine: Engine, image: str, pull: _Pull) -> None:
        progress = told.PullProgress(image)
        pull.tell(progress.text)
        try:
            await self._follow(engine, image, progress, pull.tell)
        except BackendError as error:
            why = _named(image, error)
            pull.tell(str(why))
            raise why from error
        pull.tell(f"{progress.text}, pulled")

    async def _follow(self, engine: Engine, image: str, progress: told.PullProgress, tell: Hear) -> None:
        params = {"fromImage": told.tagged(image)}
        headers = registry_auth(image, self._options.auth_file)
        told_us = self._clock.now_us()
        async with engine.stream("POST", "images/create", params, headers) as lines:
            while line := await engine.line(lines, self._options.pull_idle_us):
                if (error := told.line_of(line).get("error")) is not None:
                    raise BackendError(clip(error, LONGEST_REASON))
                progress.take(line)
                if self._clock.now_us() - told_us >= TELL_EVERY_US:
                    told_us = self._clock.now_us()
                    tell(progress.text)
        if line is None:
            raise BackendError("no progress")

    async def _has(self, engine: Engine, image: str) -> bool:
        try:
            await engine.ask("GET", f"images/{image}/json")
        except RefusedError as error:
            if error.status == 404:
                return False
            raise
        return True


def _named(image: str, error: BackendError) -> BackendError:
    """A registry's words alone, such as `unauthorized`, do not say of what they are."""
    return BackendError(f"image {image} cannot be pulled: {error}")

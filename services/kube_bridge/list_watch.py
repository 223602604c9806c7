"""Following one kind of object of a Kubernetes API server: list, watch from there, and again after any doubt.

No client here: whoever has one gives a Source. What the rules are about: KUBERNETES-API concepts "Efficient detection
of changes" (https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes).
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol

from shared.clock import Clock
from shared.errors import LaxityError

Json = dict[str, Any]

GONE: Final = 410
"""The version that a watch was to start from is too old: list again."""
FIRST_US: Final = 200_000
"""Between a failure and the next try; doubled each time, with up to as much again at random."""
MOST_US: Final = 10_000_000


class KubeError(LaxityError):
    """The API server refused, or did not answer; `status` is that of HTTP, None where there was no answer."""

    def __init__(self, what: str, status: int | None = None, retry_after_us: int = 0) -> None:
        super().__init__(what)
        self.status, self.retry_after_us = status, retry_after_us


class Source(Protocol):
    """One kind of object. Both raise KubeError, and nothing else that is to be expected."""

    async def list(self) -> tuple[list[Json], str]:
        """All objects, and the version of the list."""
        ...

    def watch(self, version: str) -> AsyncIterator[Json]:
        """Events with bookmarks, from that version on; ends by itself after some minutes."""
        ...


@dataclass
class Follower:
    """Tells of every object, in order. It never gives up, and never ends (case KU32)."""

    source: Source
    clock: Clock
    listed: Callable[[list[Json]], None]
    """All that there is, after the start and after a gap."""
    changed: Callable[[Json], None]
    deleted: Callable[[Json], None]
    silent: Callable[[KubeError], None]
    """Nothing was heard: what is known may be old. Said for each try."""
    heard_us: int = 0
    """When the server was last heard, a bookmark counts; by the monotonic clock."""
    restarts: int = 0
    _version: str | None = field(default=None)
    _failures: int = field(default=0)

    async def run(self) -> NoReturn:
        while True:
            try:
                await self._once()
                self._failures = 0
            except KubeError as error:
                await self._failed(error)

    async def _once(self) -> None:
        """A list where one is needed, and one watch until it ends."""
        if self._version is None:
            objects, version = await self.source.list()
            self._heard(version)
            self.listed(objects)
        assert self._version is not None
        events = 0
        async for event in self.source.watch(self._version):
            events += 1
            self._event(event)
        if not events:
            # not even a bookmark: a version from the future is answered with silence
            self._version = None

    def _event(self, event: Json) -> None:
        found = event.get("object") if isinstance(event, dict) else None
        if not isinstance(found, dict):
            raise KubeError(f"no event: {str(event)[:200]}")
        kind = event.get("type")
        if kind == "ERROR":
            raise KubeError(str(found.get("message", found))[:500], found.get("code"))
        if kind == "BOOKMARK":
            pass
        elif kind == "DELETED":
            self.deleted(found)
        else:
            self.changed(found)
        self._heard(found["metadata"]["resourceVersion"])
        self._failures = 0

    def _heard(self, version: str) -> None:
        self._version, self.heard_us = version, self.clock.now_us()

    async def _failed(self, error: KubeError) -> None:
        self.restarts += 1
        if error.status == GONE:
            self._version = None
        self.silent(error)
        wait_us = min(MOST_US, FIRST_US << min(self._failures, 16))
        self._failures += 1
        jitter_us = random.randrange(wait_us)  # noqa: S311  # so that not all who lost the server come back at once
        await self.clock.sleep_us(max(error.retry_after_us, wait_us + jitter_us))


async def events_of(chunks: AsyncIterable[bytes]) -> AsyncIterator[Json]:
    """One JSON object a line. Lines may be longer than any buffer of a client; KubeError for what is none."""
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        while (end := rest.find(b"\n")) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            if line.strip():
                yield _object(line)


def _object(line: bytes) -> Json:
    try:
        found = json.loads(line)
    except ValueError:
        raise KubeError(f"no JSON: {line[:100]!r}") from None
    if not isinstance(found, dict):
        raise KubeError(f"no object: {line[:100]!r}")
    if found.get("kind") == "Status":
        raise KubeError(str(found.get("message", "")), found.get("code"))
    return found

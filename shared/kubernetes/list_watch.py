"""Following one kind of object of an API server: list, watch from there, and again after any doubt.

No client here: whoever has one gives a Source. What the rules are about: Kubernetes API concepts, "Efficient detection
of changes" (https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes).
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol

from shared.clock import Clock
from shared.errors import KubernetesError, NotToThePointError
from shared.metrics import Metric, Sample

Json = dict[str, Any]
Event = tuple[str, Json]
"""ADDED, MODIFIED, DELETED or BOOKMARK, and the object; of a bookmark only the version counts."""

GONE: Final = 410
"""The version that a list or watch was to go on from is not kept any more: list again."""
FIRST_US: Final = 200_000
MOST_US: Final = 10_000_000
"""Between a failure and the next try: doubled each time, with up to as much again at random."""

_SILENT: Final = Metric(
    "laxity_kubernetes_silent_seconds", "gauge", "Since an API server's last sign of life, by what is read.", ("kind",)
)
_FAILED: Final = Metric(
    "laxity_kubernetes_watch_failures_total",
    "counter",
    "Lists and watches that were begun anew, by why.",
    ("kind", "why"),
)
METRICS: Final = (_SILENT, _FAILED)


class Source(Protocol):
    """One kind of object. What is to be expected of both is KubernetesError, and nothing else."""

    async def list(self) -> tuple[list[Json], str]:
        """All objects, and the version of the list."""
        ...

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """What happens from that version on, with bookmarks; entered once the server has taken it. Ends by itself."""
        ...


@dataclass
class Follower:
    """Tells of every object, in order. It never gives up, and never ends (case KU32)."""

    kind: str
    source: Source
    clock: Clock
    silent_us: int
    """After so long without a sign of life what is known counts as old."""
    listed: Callable[[list[Json]], None]
    """All that there is, after the start and after a gap."""
    changed: Callable[[Json], None]
    deleted: Callable[[Json], None]
    failed: Callable[[KubernetesError], None] = lambda _: None
    """A list or a watch did; said for each try."""
    heard_us: int | None = None
    """When the server last gave a sign of life, which a bookmark is; None: never. By the monotonic clock."""
    failures: Counter[str] = field(default_factory=Counter)
    """By why."""
    _version: str | None = None
    _in_a_row: int = 0

    async def run(self) -> NoReturn:
        while True:
            try:
                await self._once()
            except KubernetesError as error:
                await self._begin_anew(error)

    @property
    def silence_us(self) -> int | None:
        """Since the last sign of life; None where there was none yet."""
        return None if self.heard_us is None else self.clock.now_us() - self.heard_us

    @property
    def trouble(self) -> str:
        """Why what is known of it cannot be relied on; empty while it can."""
        silence_us = self.silence_us
        if silence_us is None:
            return f"the API server has not shown its {self.kind} yet"
        if silence_us > self.silent_us:
            return f"the API server said nothing of its {self.kind} for {silence_us / 1e6:.0f} s"
        return ""

    def numbers(self) -> Iterator[Sample]:
        yield from _SILENT.of(None if self.silence_us is None else self.silence_us / 1e6, self.kind)
        for why, count in self.failures.items():
            yield from _FAILED.of(count, self.kind, why)

    async def _once(self) -> None:
        """A list where one is needed, and one watch until it ends."""
        version = self._version
        if version is None:
            objects, version = await self.source.list()
            self._heard()
            self.listed(objects)
        self._version = version
        async with self.source.watch(version) as events:
            self._heard()
            self._version = None  # until it says something: a version of another store is met with silence
            async for kind, found in events:
                self._take(kind, found)
        if self._version is None:
            raise KubernetesError(f"a watch of {self.kind} from version {version} ended without a word")

    def _take(self, kind: str, found: Json) -> None:
        if kind == "DELETED":
            self.deleted(found)
        elif kind != "BOOKMARK":
            self.changed(found)
        self._version, self._in_a_row = found["metadata"]["resourceVersion"], 0
        self._heard()

    def _heard(self) -> None:
        self.heard_us = self.clock.now_us()

    async def _begin_anew(self, error: KubernetesError) -> None:
        self.failures[_why(error)] += 1
        if error.status == GONE:
            self._version = None
        self.failed(error)
        wait_us = max(error.retry_after_us, backoff_us(self._in_a_row))
        self._in_a_row += 1
        await self.clock.sleep_us(wait_us)


def backoff_us(failures: int) -> int:
    """After so many failures before this one; a part of it is drawn, so that not all come back at once."""
    wait_us = min(MOST_US, FIRST_US << min(failures, 16))
    return wait_us + random.randrange(wait_us)  # noqa: S311 -- no secret


def _why(error: KubernetesError) -> str:
    if isinstance(error, NotToThePointError):
        return "not_to_the_point"
    if error.status is None:
        return "no_answer"
    return "gone" if error.status == GONE else "refused"


async def events_of(chunks: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """One JSON object a line, of any length, which clients' own readers refuse.

    KubernetesError where the server says that the watch is over; NotToThePointError for what is no event: a proxy's
    page, half a line. Nothing behind such a line can be relied on, and a new watch says again what it was.
    """
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        while (end := rest.find(b"\n")) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            if line.strip():
                yield _event(line)
    if rest.strip():
        raise NotToThePointError(f"a watch broke off within a line: {bytes(rest[:100])!r}")


def _event(line: bytes) -> Event:
    try:
        event = json.loads(line)
        kind, found = ("ERROR", event) if event.get("kind") == "Status" else (event["type"], event["object"])
        if kind != "ERROR" and isinstance(found["metadata"]["resourceVersion"], str):
            return kind, found
        refused = KubernetesError(str(found.get("message", "")), int(found["code"]))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise NotToThePointError(f"a watch said {line[:100]!r}") from None
    raise refused

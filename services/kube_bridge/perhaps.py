"""A kind of object that a cluster may not have yet: nothing is listed then, and it is looked for again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from shared.clock import Clock
from shared.errors import KubernetesError
from shared.kubernetes.list_watch import GONE, Event, Json, Source

ABSENT: Final = "absent"
"""The version of a list of nothing, which no API server gives."""
_NOT_FOUND: Final = 404


@dataclass(frozen=True)
class Perhaps:
    """A Source. While there is no such kind a bookmark is a sign of life: the API server has said so again."""

    source: Source
    clock: Clock
    again_us: int

    async def list(self) -> tuple[list[Json], str]:
        try:
            return await self.source.list()
        except KubernetesError as error:
            if error.status == _NOT_FOUND and not error.unclear:
                return [], ABSENT
            raise

    @asynccontextmanager
    async def watch(self, version: str) -> AsyncIterator[AsyncIterator[Event]]:
        if version == ABSENT:
            yield self._until_there()
            return
        async with self.source.watch(version) as events:
            yield events

    async def _until_there(self) -> AsyncIterator[Event]:
        while True:
            await self.clock.sleep_us(self.again_us)
            _, version = await self.list()
            if version != ABSENT:
                raise KubernetesError("there is such a kind by now", GONE)
            yield "BOOKMARK", {"metadata": {"resourceVersion": ABSENT}}

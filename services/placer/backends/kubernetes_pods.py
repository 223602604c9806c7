"""The pods of one cluster as the API server last showed them; whoever waits for one is woken by its changes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from services.placer.backends.kubernetes_spec import node_of
from shared.clock import Clock
from shared.kubernetes.list_watch import Follower, Json, Source


class Pods:
    """Followed for ever from when somebody first asks for them."""

    def __init__(self, source: Source, clock: Clock, silent_us: int) -> None:
        self.follower = Follower("pods", source, clock, silent_us, self._listed, self._changed, self._deleted)
        self._task: asyncio.Task[NoReturn] | None = None
        self._change = asyncio.Event()
        self.found: dict[str, Json] = {}
        """By uid: the same name with another uid is another object."""
        self._by_node: defaultdict[str | None, dict[str, Json]] = defaultdict(dict)
        """The same, by where they are bound to; None: nowhere."""
        self.changes = 0
        """Also a list is one: 0 means that nothing was shown yet."""
        self._news: list[set[str]] = []
        self._awaited: dict[str, set[asyncio.Future[None]]] = {}

    def on(self, node: str) -> Collection[Json]:
        """Those that were shown to be bound there."""
        return self._by_node[node].values() if node in self._by_node else ()

    @contextmanager
    def news(self) -> Iterator[set[str]]:
        """Uids of all that there are, and then of each that changes or goes; whoever reads them takes them out."""
        uids = set(self.found)
        self._news.append(uids)
        try:
            yield uids
        finally:
            self._news = [each for each in self._news if each is not uids]

    async def wait(self, at_most_us: int, seen: int | None = None) -> None:
        """Until something changes after ``seen`` changes, or from now on, for at most so long."""
        self.begin()
        before = self.changes if seen is None else seen
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_us / 1e6):
                while self.changes == before:
                    await self._change.wait()

    async def newer(self, uid: str, version: int, at_most_us: int) -> Json | None:
        """One pod once it is newer than that; None where it is gone, or nothing was heard of it for so long.

        What happens to others wakes nobody here: thousands may wait.
        """
        self.begin()
        known = uid in self.found
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_us / 1e6):
                while not self._is_newer(uid, version) and not (known and uid not in self.found):
                    known = uid in self.found
                    await self._news_of(uid)
        return self.found[uid] if self._is_newer(uid, version) else None

    def _is_newer(self, uid: str, version: int) -> bool:
        return uid in self.found and int(self.found[uid]["metadata"]["resourceVersion"]) > version

    async def _news_of(self, uid: str) -> None:
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._awaited.setdefault(uid, set())
        waiting.add(news)
        try:
            await news
        finally:
            waiting.discard(news)
            if not waiting and self._awaited.get(uid) is waiting:
                del self._awaited[uid]

    def begin(self) -> None:
        """Follow them from now on; raises what ended it, if something did, which is a bug."""
        if self._task is None:
            self._task = asyncio.create_task(self.follower.run())
        elif self._task.done():
            self._task.result()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _listed(self, pods: list[Json]) -> None:
        gone = [*self.found]
        self.found.clear()
        self._by_node.clear()
        for pod in pods:
            self._put(pod)
        self._tell(*gone, *self.found)

    def _changed(self, pod: Json) -> None:
        self._remove(pod)
        self._put(pod)
        self._tell(pod["metadata"]["uid"])

    def _deleted(self, pod: Json) -> None:
        self._remove(pod)
        self._tell(pod["metadata"]["uid"])

    def _put(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        self.found[uid] = self._by_node[node_of(pod)][uid] = pod

    def _remove(self, pod: Json) -> None:
        """As it was known: nobody bound it to another node, but it may have had none."""
        uid = pod["metadata"]["uid"]
        if (known := self.found.pop(uid, None)) is not None:
            node = node_of(known)
            del self._by_node[node][uid]
            if not self._by_node[node]:
                del self._by_node[node]

    def _tell(self, *uids: str) -> None:
        for uids_of_one in self._news:
            uids_of_one.update(uids)
        for uid in uids:
            for news in self._awaited.pop(uid, ()):
                if not news.done():
                    news.set_result(None)
        self.changes += 1
        self._change.set()
        self._change = asyncio.Event()

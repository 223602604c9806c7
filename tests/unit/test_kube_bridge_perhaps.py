"""A kind of object that a cluster does not have: listed as nothing, looked for again, and followed once it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from services.kube_bridge.perhaps import ABSENT, Perhaps
from shared.clock import SystemClock
from shared.errors import KubernetesError, NotToThePointError
from shared.kubernetes.list_watch import Event, Follower, Json
from shared.testing.wait import until

ONE = {"metadata": {"name": "one", "resourceVersion": "6"}}


@dataclass
class Cluster:
    """A Source: ``error`` is what a list ends with; a watch brings one event and waits."""

    error: KubernetesError | None = None

    async def list(self) -> tuple[list[Json], str]:
        if self.error is not None:
            raise self.error
        return [ONE], "5"

    @asynccontextmanager
    async def watch(self, version: str) -> AsyncIterator[AsyncIterator[Event]]:
        assert "5" == version
        yield self._events()

    async def _events(self) -> AsyncIterator[Event]:
        yield "MODIFIED", ONE
        await asyncio.Event().wait()


async def test_what_is_not_there_is_listed_as_nothing_and_heard_of_again_until_it_comes() -> None:
    cluster, listed, changed, failed = Cluster(KubernetesError("no such kind", 404)), [], [], []
    clock = SystemClock()
    follower = Follower(
        "claims",
        Perhaps(cluster, clock, 10_000),
        clock,
        10_000_000,
        listed=listed.append,
        changed=changed.append,
        deleted=changed.append,
        failed=failed.append,
    )
    running = asyncio.create_task(follower.run())
    await until(lambda: bool(listed))
    first_us = follower.heard_us
    await until(lambda: follower.heard_us != first_us)
    assert ([[]], "", []) == (listed, follower.trouble, failed)

    cluster.error = None
    await until(lambda: bool(changed))
    assert ([[], [ONE]], [ONE]) == (listed, changed)
    running.cancel()


@pytest.mark.parametrize("error", [KubernetesError("forbidden", 403), NotToThePointError("a page", 404)])
async def test_an_api_server_that_does_not_say_that_there_is_none_is_no_empty_list(error: KubernetesError) -> None:
    with pytest.raises(KubernetesError):
        await Perhaps(Cluster(error), SystemClock(), 1).list()
    assert ([], ABSENT) == await Perhaps(Cluster(KubernetesError("", 404)), SystemClock(), 1).list()

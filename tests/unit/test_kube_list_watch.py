"""The loop that follows a list of the API server: what each kind of trouble leads to, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from services.kube_bridge.list_watch import MOST_US, Follower, Json, KubeError, events_of

Step = list[Json] | KubeError


class Scripted:
    """Lists and watches as told; when there is nothing more to tell it waits for ever."""

    def __init__(self, lists: Iterable[list[str] | KubeError], *watches: Step) -> None:
        self.lists, self.watches = list(lists), list(watches)
        self.asked: list[str] = []

    async def list(self) -> tuple[list[Json], str]:
        self.asked.append("list")
        found = self.lists.pop(0)
        if isinstance(found, KubeError):
            raise found
        return [thing(name) for name in found], str(100 * (1 + self.asked.count("list")))

    async def watch(self, version: str) -> AsyncIterator[Json]:
        self.asked.append(f"watch {version}")
        if not self.watches:
            await asyncio.Event().wait()
        step = self.watches.pop(0)
        if isinstance(step, KubeError):
            raise step
        for event in step:
            yield event


class Sleeps:
    """A clock whose sleeps end at once."""

    def __init__(self) -> None:
        self.slept: list[int] = []

    def now_us(self) -> int:
        return sum(self.slept)

    def wall_us(self) -> int:
        return 0

    async def sleep_us(self, duration_us: int) -> None:
        self.slept.append(duration_us)


def thing(name: str, version: int = 1) -> Json:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def event(kind: str, name: str, version: int) -> Json:
    return {"type": kind, "object": thing(name, version)}


async def follow(source: Scripted) -> tuple[list[str], Sleeps]:
    """What was told until the source has nothing more to say."""
    told: list[str] = []
    clock = Sleeps()
    follower = Follower(
        source,
        clock,
        listed=lambda found: told.append(f"listed {' '.join(each['metadata']['name'] for each in found)}"),
        changed=lambda found: told.append(f"changed {found['metadata']['name']}"),
        deleted=lambda found: told.append(f"deleted {found['metadata']['name']}"),
        silent=lambda error: told.append(f"silent {error.status}"),
    )
    task = asyncio.create_task(follower.run())
    while source.watches or source.lists:
        assert not task.done(), task.exception()
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done(), "it never ends"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return told, clock


async def test_a_list_then_changes_from_its_version_on_and_the_next_watch_from_the_last_bookmark() -> None:
    events = [event("ADDED", "b", 205), event("DELETED", "a", 206), event("BOOKMARK", "", 250)]
    source = Scripted([["a"]], events, [event("MODIFIED", "b", 260)])
    told, _ = await follow(source)

    assert ["listed a", "changed b", "deleted a", "changed b"] == told
    assert ["list", "watch 200", "watch 250", "watch 260"] == source.asked


async def test_KU31_what_an_api_server_says_while_it_starts_is_waited_out() -> None:
    after = KubeError("429: storage is (re)initializing", 429, retry_after_us=7_000_000)
    source = Scripted([KubeError("connection refused"), after, ["a"]], [event("ADDED", "b", 205)])
    told, clock = await follow(source)

    assert ["silent None", "silent 429", "listed a", "changed b"] == told
    assert 7_000_000 == clock.slept[1]


@pytest.mark.parametrize(
    "trouble", [KubeError("410: too old resource version: 1 (534)", 410), [{"type": "ERROR", "object": {"code": 410}}]]
)
async def test_a_version_that_is_too_old_means_a_new_list(trouble: Step) -> None:
    source = Scripted([["a"], ["b"]], trouble)
    told, _ = await follow(source)

    assert ["listed a", "silent 410", "listed b"] == told
    assert ["list", "watch 200", "list", "watch 300"] == source.asked


async def test_a_cut_watch_goes_on_where_it_was() -> None:
    source = Scripted([["a"]], [event("ADDED", "b", 205), {"type": "ADDED", "object": "<html>"}], KubeError("cut"))
    told, _ = await follow(source)

    assert ["listed a", "changed b", "silent None", "silent None"] == told
    assert ["list", "watch 200", "watch 205", "watch 205"] == source.asked


async def test_a_watch_that_ends_without_a_word_means_a_new_list() -> None:
    """A version from the future, after the API server's store was put back, is answered with silence."""
    source = Scripted([["a"], ["b"]], [])
    told, _ = await follow(source)

    assert ["listed a", "listed b"] == told


async def test_KU32_it_never_gives_up_and_waits_longer_each_time_up_to_a_limit() -> None:
    source = Scripted([*[KubeError("refused")] * 20, ["a"]])
    told, clock = await follow(source)

    assert "listed a" == told[-1]
    assert all(MOST_US <= each <= 2 * MOST_US for each in clock.slept[10:])
    assert clock.slept[0] < 1_000_000


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(*parts: bytes) -> list[Any]:
    return [each async for each in events_of(chunks(*parts))]


async def test_events_are_lines_however_they_come() -> None:
    assert [{"a": 1}, {"b": 2}] == await read(b'{"a"', b': 1}\n\n{"b": 2', b"}\n")
    long = b'{"a": "' + b"x" * 3_000_000 + b'"}\n'
    assert 1 == len(await read(*(long[start : start + 65_536] for start in range(0, len(long), 65_536))))
    assert [] == await read(b'{"cut in half'), "what has no end was not said"


@pytest.mark.parametrize(
    "line, status",
    [(b"<html>\n", None), (b'"text"\n', None), (b'{"kind": "Status", "code": 410, "message": "too old"}\n', 410)],
)
async def test_KU31_what_is_no_event_is_an_error(line: bytes, status: int | None) -> None:
    with pytest.raises(KubeError) as raised:
        await read(line)

    assert status == raised.value.status

"""The loop that follows a list of the API server: what each kind of trouble leads to, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable

import pytest

from shared.errors import KubernetesError, NotToThePointError
from shared.kubernetes.list_watch import MOST_US, Event, Follower, Json, events_of

Step = list[Event | KubernetesError] | KubernetesError
"""A watch that tells, and may break off; or one that is not taken."""
SILENT_US = 90_000_000


class Scripted:
    """Lists and watches as told; when there is nothing more to tell it waits for ever."""

    def __init__(self, lists: Iterable[list[str] | KubernetesError], *watches: Step) -> None:
        self.lists, self.watches = list(lists), list(watches)
        self.asked: list[str] = []

    async def list(self) -> tuple[list[Json], str]:
        self.asked.append("list")
        found = self.lists.pop(0)
        if isinstance(found, KubernetesError):
            raise found
        return [thing(name) for name in found], str(100 * (1 + self.asked.count("list")))

    @contextlib.asynccontextmanager
    async def watch(self, version: str) -> AsyncIterator[AsyncIterator[Event]]:
        self.asked.append(f"watch {version}")
        if not self.watches:
            await asyncio.Event().wait()
        step = self.watches.pop(0)
        if isinstance(step, KubernetesError):
            raise step
        yield self._events(step)

    async def _events(self, step: Iterable[Event | KubernetesError]) -> AsyncIterator[Event]:
        for each in step:
            if isinstance(each, KubernetesError):
                raise each
            yield each


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


def event(kind: str, name: str, version: int) -> Event:
    return kind, thing(name, version)


async def follow(source: Scripted) -> tuple[list[str], Sleeps, Follower]:
    """What was told until the source has nothing more to say."""
    told: list[str] = []
    clock = Sleeps()
    follower = Follower(
        "things",
        source,
        clock,
        SILENT_US,
        listed=lambda found: told.append(f"listed {' '.join(each['metadata']['name'] for each in found)}"),
        changed=lambda found: told.append(f"changed {found['metadata']['name']}"),
        deleted=lambda found: told.append(f"deleted {found['metadata']['name']}"),
        failed=lambda error: told.append(f"failed {error.status}"),
    )
    task = asyncio.create_task(follower.run())
    for _ in range(1_000):
        assert not task.done(), task.exception()
        await asyncio.sleep(0)
    assert [] == [*source.watches, *source.lists], "it asks for no more"
    assert not task.done(), "it never ends"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return told, clock, follower


async def test_a_list_then_changes_from_its_version_on_and_the_next_watch_from_the_last_bookmark() -> None:
    events = [event("ADDED", "b", 205), event("DELETED", "a", 206), event("BOOKMARK", "", 250)]
    source = Scripted([["a"]], events, [event("MODIFIED", "b", 260)])
    told, *_ = await follow(source)

    assert ["listed a", "changed b", "deleted a", "changed b"] == told
    assert ["list", "watch 200", "watch 250", "watch 260"] == source.asked


async def test_KU31_what_an_api_server_says_while_it_starts_is_waited_out() -> None:
    after = KubernetesError("429: storage is (re)initializing", 429, retry_after_us=7_000_000)
    source = Scripted([KubernetesError("connection refused"), after, ["a"]], [event("ADDED", "b", 205)])
    told, clock, _ = await follow(source)

    assert ["failed None", "failed 429", "listed a", "changed b"] == told
    assert 7_000_000 == clock.slept[1]


@pytest.mark.parametrize(
    "trouble", [KubernetesError("too old resource version: 1 (534)", 410), [KubernetesError("too old", 410)]]
)
async def test_a_version_that_is_too_old_means_a_new_list(trouble: Step) -> None:
    source = Scripted([["a"], ["b"]], trouble)
    told, *_ = await follow(source)

    assert ["listed a", "failed 410", "listed b"] == told
    assert ["list", "watch 200", "list", "watch 300"] == source.asked


async def test_a_cut_watch_goes_on_where_it_was() -> None:
    source = Scripted([["a"]], [event("ADDED", "b", 205), KubernetesError("cut")], KubernetesError("refused"))
    told, *_ = await follow(source)

    assert ["listed a", "changed b", "failed None", "failed None"] == told
    assert ["list", "watch 200", "watch 205", "watch 205"] == source.asked


@pytest.mark.parametrize("silence", [[], [KubernetesError("nothing came")]])
async def test_a_watch_that_ends_without_a_word_means_a_new_list(silence: Step) -> None:
    """A version from the future, after the API server's store was put back, is answered with silence."""
    source = Scripted([["a"], ["b"]], silence)
    told, *_ = await follow(source)

    assert ["listed a", "failed None", "listed b"] == told


async def test_KU32_it_never_gives_up_and_waits_longer_each_time_up_to_a_limit() -> None:
    source = Scripted([*[KubernetesError("refused")] * 20, ["a"]])
    told, clock, _ = await follow(source)

    assert "listed a" == told[-1]
    assert all(MOST_US <= each <= 2 * MOST_US for each in clock.slept[10:])
    assert clock.slept[0] < 1_000_000


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(*parts: bytes) -> list[Event]:
    return [each async for each in events_of(chunks(*parts))]


def line(kind: str, name: str, version: int = 1) -> bytes:
    return json.dumps({"type": kind, "object": thing(name, version)}).encode() + b"\n"


async def test_events_are_lines_however_they_come() -> None:
    said = line("ADDED", "a") + b"\n" + line("DELETED", "b")
    assert [event("ADDED", "a", 1), event("DELETED", "b", 1)] == await read(said[:10], said[10:60], said[60:])
    long = line("ADDED", "x" * 3_000_000)
    assert 1 == len(await read(*(long[start : start + 65_536] for start in range(0, len(long), 65_536))))


@pytest.mark.parametrize(
    "said",
    [
        b"<html>\n",
        b'"text"\n',
        b"[]\n",
        b'{"type": "ADDED"}\n',
        b'{"type": "ADDED", "object": "<html>"}\n',
        b'{"type": "ADDED", "object": {"metadata": {}}}\n',
        b'{"type": "ERROR", "object": "<html>"}\n',
        b'{"type": "ADDED", "obj',
    ],
)
async def test_KU31_what_is_no_event_is_counted_and_what_it_was_is_asked_for_again(said: bytes) -> None:
    with pytest.raises(NotToThePointError) as raised:
        await read(said)
    source = Scripted([["a"]], [event("ADDED", "b", 205), raised.value])
    told, _, follower = await follow(source)

    assert ["listed a", "changed b", "failed None"] == told
    assert "watch 205" == source.asked[-1]
    assert {"not_to_the_point": 1} == follower.failures


@pytest.mark.parametrize(
    "said",
    [
        b'{"kind": "Status", "code": 410, "message": "too old"}\n',
        b'{"type": "ERROR", "object": {"code": 410, "message": "too old"}}\n',
    ],
)
async def test_a_server_that_ends_a_watch_says_why(said: bytes) -> None:
    with pytest.raises(KubernetesError, match="410: too old") as raised:
        await read(said)

    assert (410, False) == (raised.value.status, raised.value.unclear)


async def test_KU29_how_long_ago_it_was_heard_is_told_and_too_long_ago_is_trouble() -> None:
    clock = Sleeps()
    source = Scripted([])
    follower = Follower("things", source, clock, SILENT_US, *[lambda _: None] * 3)
    assert "the API server has not shown its things yet" == follower.trouble
    assert [] == list(follower.numbers()), "unknown is not zero"

    _, clock, follower = await follow(Scripted([["a"]], [event("BOOKMARK", "", 205)]))
    assert "" == follower.trouble
    await clock.sleep_us(SILENT_US)
    assert "" == follower.trouble
    await clock.sleep_us(1)
    assert "said nothing of its things for 90 s" in follower.trouble
    ((metric, labels, seconds),) = follower.numbers()
    assert ("laxity_kubernetes_silent_seconds", ("things",), 90.000001) == (metric.name, labels, seconds)

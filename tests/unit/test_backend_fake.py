"""How the fake backend plays what a request's environment asks for, in virtual time."""

import asyncio
import os
from pathlib import Path

import pytest

from services.placer.backends.base import StartSpec
from services.placer.backends.fake import RESCAN_US, FakeBackend
from shared.errors import BackendError
from shared.messages.ledger import ContainerLabels, Reservation
from shared.messages.place import PlaceRequest
from shared.testing.manual_clock import ManualClock
from tests.backends import watched

NODE, BOX = "node-1", "box"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now_us=1_000)


@pytest.fixture
def fake(tmp_path: Path, clock: ManualClock) -> FakeBackend:
    return FakeBackend(tmp_path, clock=clock)


def spec(generation: int = 1, **env: str) -> StartSpec:
    held = Reservation(
        request_id="detector",
        replica=0,
        generation=generation,
        devices=("GPU-1",),
        share_micro=1_000_000,
        device_memory_mib=0,
        cpu_milli=0,
        memory_mib=0,
    )
    labels = ContainerLabels(container=BOX, ledger_id="ledger", node=NODE, reservation=held)
    return StartSpec(labels, PlaceRequest(image="detector:3", env=dict(env)))


async def looks(clock: ManualClock) -> None:
    """A watch has looked at everything again."""
    for _ in range(5):
        await clock.advance(RESCAN_US)


async def states(backend: FakeBackend) -> list[tuple[str, int | None]]:
    return [(seen.state, seen.exit_code) for seen in await backend.list(NODE)]


async def test_a_start_takes_the_time_it_is_told(fake: FakeBackend, clock: ManualClock) -> None:
    starting = asyncio.create_task(fake.start(spec(FAKE_START_US="250000")))
    await clock.advance(0)
    await clock.advance(249_999)
    assert [] == await states(fake)
    await clock.advance(1)
    assert starting.done()
    assert [("running", None)] == await states(fake)


async def test_the_first_generations_fail_to_start(fake: FakeBackend) -> None:
    for generation in (1, 2):
        for _ in range(2):  # a repeat within a generation meets the same fate
            with pytest.raises(BackendError, match="told to fail"):
                await fake.start(spec(generation, FAKE_START_FAILS="2"))
    await fake.start(spec(3, FAKE_START_FAILS="2"))
    assert [("running", None)] == await states(fake)


async def test_who_starts_what_is_there_leaves_it_as_it_is(
    fake: FakeBackend, tmp_path: Path, clock: ManualClock
) -> None:
    once = await fake.start(spec())
    (file,) = (tmp_path / NODE).iterdir()
    before = file.stat()
    await fake.resize(NODE, BOX, cpu_milli=500, memory_mib=0)
    resized = await asyncio.gather(
        *(FakeBackend(tmp_path, clock=clock).start(spec()) for _ in range(3)), fake.start(spec())
    )
    assert {500} == {seen.labels.reservation.cpu_milli for seen in resized if seen.labels}
    assert [file] == list((tmp_path / NODE).iterdir())
    assert ("running", once.container) == (resized[0].state, resized[0].container)
    assert before.st_mode == file.stat().st_mode


async def test_what_was_forgotten_is_not_remembered(fake: FakeBackend) -> None:
    for _ in range(2):
        await fake.start(spec())
        assert 1 == len(fake._read)
        await fake.stop(NODE, BOX)
        assert not fake._read


async def test_it_can_always_fail_to_start(fake: FakeBackend) -> None:
    with pytest.raises(BackendError, match="told to fail"):
        await fake.start(spec(1_000, FAKE_START_FAILS="always"))


async def test_it_exits_when_and_how_it_is_told(fake: FakeBackend, clock: ManualClock) -> None:
    await fake.start(spec(FAKE_EXIT_AFTER_US="40000", FAKE_EXIT_CODE="3"))
    await clock.advance(39_999)
    assert [("running", None)] == await states(fake)
    await clock.advance(1)
    assert [("exited", 3)] == await states(fake)


async def test_a_watcher_hears_of_an_exit_at_its_time(fake: FakeBackend, clock: ManualClock) -> None:
    async with watched(fake) as posts:
        await clock.advance(0)
        await fake.start(spec(FAKE_EXIT_AFTER_US="40000", FAKE_EXIT_CODE="3", FAKE_END_REASON="Evicted"))
        await clock.advance(39_999)
        assert [] == posts
        await clock.advance(1)
        assert [(3, "Evicted")] == [(post.exit_code, str(post.cause)) for post in posts]
        await clock.advance(1_000_000)
        assert [3] == [post.exit_code for post in posts]


async def test_a_watcher_hears_of_what_another_placer_starts_in_a_folder_that_it_has_read(tmp_path: Path) -> None:
    clock = ManualClock(wall_us=1 << 52)  # so late that no change is young
    fake, other, folder = FakeBackend(tmp_path, clock=clock), FakeBackend(tmp_path, clock=clock), tmp_path / NODE
    async with watched(fake) as posts:
        await other.start(spec())
        await looks(clock)
        await other.stop(NODE, BOX)
        await other.start(spec(FAKE_EXIT_AFTER_US="1"))
        stamp_ns = folder.stat().st_mtime_ns + 1  # the file system's own may stand still for some milliseconds
        os.utime(folder, ns=(stamp_ns, stamp_ns))
        await looks(clock)
        assert ["exited"] == [post.state for post in posts]


async def test_what_was_stopped_before_its_end_is_posted_by_nobody(tmp_path: Path, clock: ManualClock) -> None:
    fake, other = FakeBackend(tmp_path, clock=clock), FakeBackend(tmp_path, clock=clock)
    async with watched(fake) as posts:
        await other.start(spec(FAKE_EXIT_AFTER_US="1000000"))
        await looks(clock)
        await other.stop(NODE, BOX)
        await clock.advance(1_000_000)
        await looks(clock)
        assert [] == posts


async def test_a_list_shows_what_other_placers_have_done_since_the_last_one(tmp_path: Path) -> None:
    clock = ManualClock(wall_us=1 << 52)  # so late that no change is young
    fake, other, folder = FakeBackend(tmp_path, clock=clock), FakeBackend(tmp_path, clock=clock), tmp_path / NODE
    await other.start(spec())
    assert [("running", None)] == await states(fake)
    other.kill(NODE, BOX, exit_code=9)
    stamp_ns = folder.stat().st_mtime_ns + 1  # the file system's own may stand still for some milliseconds
    os.utime(folder, ns=(stamp_ns, stamp_ns))
    assert [("exited", 9)] == await states(fake)
    assert await fake.list(NODE) == await fake.list(NODE)


async def test_one_that_ignores_term_takes_the_whole_grace(tmp_path: Path, clock: ManualClock) -> None:
    fake = FakeBackend(tmp_path, clock=clock, stop_grace_us=70_000)
    await fake.start(spec(FAKE_IGNORE_TERM="1"))
    stopping = asyncio.create_task(fake.stop(NODE, BOX))
    await clock.advance(0)
    await clock.advance(69_999)
    assert not stopping.done()
    await clock.advance(1)
    assert stopping.done()
    assert [] == await states(fake)


async def test_a_container_can_be_killed_from_outside(fake: FakeBackend, clock: ManualClock) -> None:
    async with watched(fake) as posts:
        await fake.start(spec())
        await clock.advance(10)
        fake.kill(NODE, BOX, exit_code=None)
        await clock.advance(0)
        await clock.advance(0)
        assert [("exited", None)] == [(post.state, post.exit_code) for post in posts]
    with pytest.raises(BackendError, match="not on"):
        fake.kill(NODE, "another")


async def test_the_next_call_raises_the_error_it_was_given_and_the_one_after_does_not(fake: FakeBackend) -> None:
    fake.next_error = BackendError("engine is away")
    with pytest.raises(BackendError, match="engine is away"):
        await fake.list(NODE)
    await fake.start(spec())
    assert [("running", None)] == await states(fake)


async def test_calls_are_recorded_in_order(fake: FakeBackend) -> None:
    await fake.start(spec())
    await fake.stop(NODE, BOX)
    await fake.remove(NODE, BOX)
    await fake.list(NODE)
    assert [("start", BOX), ("stop", BOX), ("remove", BOX), ("list", NODE)] == fake.calls


@pytest.mark.parametrize("name", ["FAKE_START_FAILS", "FAKE_START_US", "FAKE_EXIT_AFTER_US", "FAKE_EXIT_CODE"])
async def test_a_value_that_is_no_number_is_a_failed_start_that_names_it(fake: FakeBackend, name: str) -> None:
    with pytest.raises(BackendError, match=f"{name}: found 'soon', allowed: a whole number"):
        await fake.start(spec(1, **{name: "soon"}))
    assert [] == await states(fake)


@pytest.mark.parametrize("name", ["FAKE_START_FAILS", "FAKE_START_US", "FAKE_EXIT_AFTER_US"])
async def test_a_time_or_count_below_nothing_is_a_failed_start(fake: FakeBackend, name: str) -> None:
    with pytest.raises(BackendError, match=f"{name}: found '-1'"):
        await fake.start(spec(1, **{name: "-1"}))


async def test_a_spoiled_file_is_no_container(fake: FakeBackend, tmp_path: Path) -> None:
    await fake.start(spec())
    (tmp_path / NODE / f"{BOX}.json").write_text("{")
    assert [] == await states(fake)


async def test_the_labels_lie_where_the_monitor_of_that_node_alone_looks(tmp_path: Path, clock: ManualClock) -> None:
    fake = FakeBackend(tmp_path / "state", tmp_path / "rings", clock=clock)
    await fake.start(spec())
    folder = tmp_path / "rings" / NODE / BOX
    assert ["container.json"] == [path.name for path in folder.iterdir()]
    await fake.stop(NODE, BOX)
    assert ["container.json", "ended"] == sorted(path.name for path in folder.iterdir())

"""A node with thousands of rings: each is found and read, also where there are too few descriptors for a while."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nats.aio.client import Client

import laxity
from laxity.ring import Ring
from services.monitor.rings import RingDirectory
from shared.testing.service_process import ServiceProcess
from tests.outside import heartbeat

CONTAINERS = 300
RINGS_PER_CONTAINER = 10
RING_ID = slice(24, 40)


def copies(root: Path, folders: int, rings: int) -> None:
    """Rings of one finished process, under other ids: each has a begin and an end."""
    made = Ring(str(root), 16)
    task = laxity.task("infer", deadline_us=1000)
    task.ring = made
    with task:
        pass
    made.close()
    content = bytearray(made.path.read_bytes())
    made.path.unlink()
    for number in range(folders):
        folder = root / f"c{number:03d}"
        folder.mkdir()
        for _ in range(rings):
            content[RING_ID] = ring_id = os.urandom(16)
            (folder / f"ring-{ring_id.hex()}.ring").write_bytes(content)


@contextmanager
def descriptors(most: int) -> Iterator[None]:
    """No more of them than so many, for this process and those that it starts meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def as_many_as_allowed() -> Iterator[None]:
    with descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        yield


def test_three_thousand_rings_are_found_and_read_once_and_go(tmp_path: Path) -> None:
    copies(tmp_path, CONTAINERS, RINGS_PER_CONTAINER)
    directory = RingDirectory(tmp_path)
    with as_many_as_allowed():
        found = directory.scan().new
        assert CONTAINERS * RINGS_PER_CONTAINER == len(found) == len({reader.ring for reader in found})
        assert {(2, 2, 0)} == {(read.taken, read.head, read.lost) for read in (reader.read() for reader in found)}
        assert ([], []) == directory.scan()
        for reader in found:
            assert reader.writer_gone()
            directory.remove(reader)
    assert [] == list(tmp_path.rglob("*.ring"))
    directory.close()


def test_rings_for_which_there_is_no_descriptor_are_counted_and_come_later(tmp_path: Path) -> None:
    copies(tmp_path, 20, 10)
    directory = RingDirectory(tmp_path)
    with descriptors(len(list(Path("/proc/self/fd").iterdir())) + 50):
        first = directory.scan().new
    assert 0 < len(first) < 200
    assert directory.counts["os_error"] > 0
    with as_many_as_allowed():
        assert 200 == len(first) + len(directory.scan().new)
    directory.close()


async def test_a_monitor_is_not_held_to_the_few_descriptors_that_a_shell_gives(
    nats_url: str, outside: Client, tmp_path: Path
) -> None:
    root, settings = tmp_path / "rings", {"LAXITY_MONITOR_NODE": "n1", "LAXITY_MONITOR_PROBE": "fake"}
    process = ServiceProcess("services.monitor", tmp_path, nats_url, LAXITY_MONITOR_RING_ROOT=str(root), **settings)
    with descriptors(100):
        process.start()
    try:
        with as_many_as_allowed():
            folders = [root / f"c{number}" for number in range(20)]
            for folder in folders:
                folder.mkdir(parents=True)
            rings = [Ring(str(folder), 16) for folder in folders for _ in range(10)]
        body = await heartbeat(outside, lambda body: body["counters"]["rings.open"] == 200, "all rings are read")
        assert "rings.os_error" not in body["counters"]
        for ring in rings:
            ring.close()
    finally:
        process.stop()

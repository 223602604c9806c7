"""The tasks of containers on made-up devices: as long as the simulated device says, in rings as any monitor reads."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from services.monitor.fake_tasks import SCAN_US, FakeTasks
from services.monitor.probes.fake import FakeDevices, fake_uuid
from services.monitor.rings import BEGIN, ENDED, RingReader
from shared.messages import Kind, Realtime, Regime
from tests.monitor_folders import labels_of
from tests.ring_columns import column

NODE, START_US = "n1", 5_000_000
SLICED = FakeDevices(regime=Regime.TIME_SLICED, slice_us=2_000, switch_us=0)
GATED = FakeDevices(regime=Regime.GATED)


def timing(runtime_us: int, period_us: int = 50_000) -> Realtime:
    return Realtime(deadline_us=period_us, runtime_us=runtime_us, kind=Kind.FIRM, gate=True)


class Played:
    """A fake node with one device and what its rings hold."""

    def __init__(self, root: Path, device: FakeDevices) -> None:
        self.root = root
        self.tasks = FakeTasks(NODE, (device,), root)
        self.tasks.advance(START_US)
        self._readers: dict[str, RingReader] = {}
        self._begun: dict[str, dict[int, int]] = {}

    def contain(self, name: str, realtime: Realtime | None) -> None:
        labels_of(self.root, name, realtime=realtime, device=fake_uuid(NODE, 0))

    def reader(self, name: str) -> RingReader:
        if name not in self._readers:
            [file] = (self.root / name).glob("ring-*.ring")
            self._readers[name] = RingReader.open(file)
        return self._readers[name]

    def durations_us(self, name: str) -> list[int]:
        """Of the tasks that ended since the last look."""
        read, begun = self.reader(name).read(), self._begun.setdefault(name, {})
        durations = []
        rows = zip(column(read, "kind"), column(read, "begin_seq"), column(read, "stamp_us"), strict=True)
        for kind, begin, at_us in rows:
            if kind == BEGIN:
                begun[begin] = at_us
            else:
                durations.append(at_us - begun.pop(begin))
        return durations


def played(root: Path, device: FakeDevices, *runtimes_us: int) -> Played:
    node = Played(root, device)
    for number, runtime_us in enumerate(runtimes_us):
        node.contain(f"c{number}", timing(runtime_us))
    node.tasks.advance(START_US + SCAN_US)
    return node


def test_a_task_alone_takes_its_runtime(tmp_path: Path) -> None:
    node = played(tmp_path, SLICED, 5_000)
    node.tasks.advance(START_US + SCAN_US + 90_000)
    assert [5_000, 5_000] == node.durations_us("c0")


def test_neighbours_on_a_time_sliced_device_take_turns(tmp_path: Path) -> None:
    node = played(tmp_path, SLICED, 5_000, 3_000)
    node.tasks.advance(START_US + SCAN_US + 40_000)
    assert ([8_000], [7_000]) == (node.durations_us("c0"), node.durations_us("c1"))


def test_on_a_gated_device_the_earlier_deadline_is_first(tmp_path: Path) -> None:
    node = Played(tmp_path, GATED)
    node.contain("c0", timing(9_000, 90_000))
    node.contain("c1", timing(4_000, 40_000))
    node.contain("c2", timing(6_000, 60_000))
    node.tasks.advance(START_US + SCAN_US)
    node.tasks.advance(START_US + SCAN_US + 30_000)
    assert ([19_000], [4_000], [10_000]) == tuple(node.durations_us(name) for name in ("c0", "c1", "c2"))


def test_a_late_reading_finds_the_times_of_the_device_and_not_its_own(tmp_path: Path) -> None:
    prompt, late = played(tmp_path / "a", SLICED, 5_000), played(tmp_path / "b", SLICED, 5_000)
    for at_us in range(0, 1_000_000, 5_000):
        prompt.tasks.advance(START_US + SCAN_US + at_us)
    late.tasks.advance(START_US + SCAN_US + 995_000)
    assert [5_000] * 20 == prompt.durations_us("c0") == late.durations_us("c0")


def test_a_ring_is_left_when_its_container_has_ended_and_the_others_go_on(tmp_path: Path) -> None:
    node = played(tmp_path, SLICED, 40_000, 5_000)
    assert [False, False] == [node.reader(name).writer_gone() for name in ("c0", "c1")]
    (tmp_path / "c0" / ENDED).touch()
    node.tasks.advance(START_US + 3 * SCAN_US)
    node.durations_us("c1")
    assert [True, False] == [node.reader(name).writer_gone() for name in ("c0", "c1")]
    node.tasks.advance(START_US + 3 * SCAN_US + 99_000)
    assert [5_000, 5_000] == node.durations_us("c1")


@pytest.mark.parametrize("realtime", [None, Realtime(deadline_us=50_000, kind=Kind.SOFT)])
def test_who_declared_no_runtime_has_no_tasks(tmp_path: Path, realtime: Realtime | None) -> None:
    node = Played(tmp_path, SLICED)
    node.contain("c0", realtime)
    node.tasks.advance(START_US + SCAN_US)
    assert [] == list((tmp_path / "c0").glob("ring-*"))


def test_a_second_container_on_an_exclusive_device_is_not_played(tmp_path: Path) -> None:
    played(tmp_path, FakeDevices(), 5_000, 5_000)
    assert [1, 0] == [len(list((tmp_path / name).glob("ring-*"))) for name in ("c0", "c1")]


def test_labels_that_come_late_are_read_when_they_are_there(tmp_path: Path) -> None:
    node = Played(tmp_path, SLICED)
    (tmp_path / "made").mkdir()
    node.tasks.advance(START_US + SCAN_US)
    (tmp_path / "made").rmdir()
    node.contain("made", timing(5_000))
    node.tasks.advance(START_US + 2 * SCAN_US)
    assert not node.reader("made").writer_gone()


def test_a_ring_that_cannot_be_made_is_made_when_there_is_room(tmp_path: Path) -> None:
    node = Played(tmp_path, SLICED)
    node.contain("c0", timing(5_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        node.tasks.advance(START_US + SCAN_US)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ["container.json"] == [file.name for file in (tmp_path / "c0").iterdir()]
    node.tasks.advance(START_US + 2 * SCAN_US)
    node.tasks.advance(START_US + 2 * SCAN_US + 49_000)
    assert [5_000] == node.durations_us("c0")


def test_labels_that_say_nothing_are_left_alone(tmp_path: Path) -> None:
    node = Played(tmp_path, SLICED)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "container.json").write_text("{}")
    node.contain("c0", timing(5_000))
    node.tasks.advance(START_US + SCAN_US)
    assert not node.reader("c0").writer_gone()

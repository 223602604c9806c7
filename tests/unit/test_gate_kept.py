"""What one gate leaves to the next: files that come back as they were, and are of use to nobody else."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from services.monitor.gate.core import Owed
from services.monitor.gate.kept import Kept, Turn

OWED = Owed("detector", "GPU-0", 25_000, 2_500, 1_000, ("reader",), lost=True, neighbours=("reader", "sorter"))


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
def kept(tmp_path: Path, counts: Counter[str]) -> Kept:
    return Kept(tmp_path, counts)


def test_what_is_held_against_a_container_comes_back_as_it_was(kept: Kept, tmp_path: Path) -> None:
    kept.keep("c", replace(OWED, until_us=3))
    kept.keep("c", OWED)
    assert [("c", OWED)] == list(Kept(tmp_path, Counter()).owed({"c", "d"}))


def test_it_is_forgotten_with_its_container(kept: Kept) -> None:
    for token in ("gone", "told-gone", "here"):
        kept.keep(token, OWED)
    kept.forget("told-gone")
    kept.forget("never-kept")
    assert ["here"] == [token for token, _ in kept.owed({"here", "told-gone"})]
    assert ["here"] == [token for token, _ in kept.owed({"here", "gone"})]


def test_the_last_turn_of_a_device_comes_back(kept: Kept, tmp_path: Path) -> None:
    assert kept.last("GPU-0") is None
    kept.begin("GPU-0", "a" * 255, 1)
    kept.begin("GPU-0", "b", 2)
    kept.begin("GPU-1", "c", 3)
    after = Kept(tmp_path, Counter())
    assert [Turn("b", 2), Turn("c", 3)] == [after.last("GPU-0"), after.last("GPU-1")]


def test_the_longest_name_of_a_folder_has_room(kept: Kept) -> None:
    kept.begin("GPU-0", "a" * 255, 1)
    assert Turn("a" * 255, 1) == kept.last("GPU-0")


def test_what_a_former_boot_left_says_nothing(kept: Kept, tmp_path: Path, counts: Counter[str]) -> None:
    kept.keep("c", OWED)
    kept.begin("GPU-0", "c", 1)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().encode()
    for path in (tmp_path / "owed" / "c", *(tmp_path / "turns").iterdir()):
        path.write_bytes(path.read_bytes().replace(boot, boot[::-1]))
    after = Kept(tmp_path, counts)
    assert ([], None) == (list(after.owed({"c"})), after.last("GPU-0"))
    assert Counter() == counts


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"boot": 1, "owed"', "\x00"])
def test_a_file_that_makes_no_sense_is_counted_and_removed(
    kept: Kept, tmp_path: Path, counts: Counter[str], text: str
) -> None:
    (tmp_path / "owed" / "c").write_text(text)
    assert [] == list(kept.owed({"c"}))
    assert Counter(unread=1) == counts
    assert [] == list((tmp_path / "owed").iterdir())


def test_a_file_of_another_version_is_counted(kept: Kept, tmp_path: Path, counts: Counter[str]) -> None:
    kept.keep("c", OWED)
    path = tmp_path / "owed" / "c"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "red"}))
    assert [] == list(kept.owed({"c"}))
    assert Counter(unread=1) == counts


def test_where_there_is_no_room_the_gate_goes_on_and_counts_it(
    kept: Kept, tmp_path: Path, counts: Counter[str]
) -> None:
    for folder in ("owed", "turns"):
        (tmp_path / folder).rmdir()
        (tmp_path / folder).write_text("in the way")
    kept.keep("c", OWED)
    kept.begin("GPU-0", "c", 1)
    assert Counter(unkept=2) == counts

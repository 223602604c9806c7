"""Folders that may have changed, as the kernel tells it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.monitor.changes import Changes


@pytest.fixture
def changes() -> Iterator[Changes]:
    made = Changes()
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path, changes: Changes) -> Path:
    made = tmp_path / "watched"
    made.mkdir()
    if not changes.watches(str(made)):
        pytest.skip("the kernel refuses another inotify instance or watch")
    return made


def test_a_folder_has_changed_once_for_each_time_that_it_did(changes: Changes, folder: Path) -> None:
    assert set() == changes.take()
    (folder / "a").touch()
    (folder / "b").touch()
    assert ({str(folder)}, set()) == (changes.take(), changes.take())
    (folder / "a").rename(folder / "c")
    assert {str(folder)} == changes.take()
    (folder / "c").unlink()
    assert {str(folder)} == changes.take()


def test_only_the_one_that_changed_is_told(changes: Changes, folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir()
    assert changes.watches(str(other))
    (other / "a").touch()
    assert {str(other)} == changes.take()


def test_what_is_written_in_a_file_is_no_change(changes: Changes, folder: Path) -> None:
    (folder / "a").touch()
    changes.take()
    (folder / "a").write_text("more")
    assert set() == changes.take()


def test_a_folder_that_is_removed_and_made_again_is_watched_again(changes: Changes, folder: Path) -> None:
    folder.rmdir()
    assert {str(folder)} == changes.take()
    assert not changes.watches(str(folder))
    folder.mkdir()
    assert changes.watches(str(folder))
    (folder / "a").touch()
    assert {str(folder)} == changes.take()


def test_a_folder_that_another_one_took_the_place_of_is_watched_again(changes: Changes, folder: Path) -> None:
    folder.rename(folder.parent / "old")
    folder.mkdir()
    assert {str(folder)} == changes.take()
    assert changes.watches(str(folder))
    (folder.parent / "old" / "a").touch()
    assert set() == changes.take()
    (folder / "a").touch()
    assert {str(folder)} == changes.take()


def test_a_missing_folder_is_not_watched(changes: Changes, tmp_path: Path) -> None:
    assert not changes.watches(str(tmp_path / "later"))


def test_when_the_kernel_has_lost_count_all_may_have_changed(changes: Changes, folder: Path) -> None:
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if most > 100_000:
        pytest.skip(f"fs.inotify.max_queued_events is {most}")
    for _ in range(most // 2 + 1):
        (folder / "a").touch()
        (folder / "a").unlink()
    told = [changes.take() for _ in range(most // 1_000)]
    assert None in told
    assert set() == changes.take()


def test_one_that_is_closed_tells_nothing(changes: Changes, folder: Path) -> None:
    changes.close()
    (folder / "a").touch()
    assert (set(), False) == (changes.take(), changes.watches(str(folder)))

"""Names on disk: cores as devices, containers as folders, files that are there whole or not at all."""

import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placer.backends.folder import Folder, folder_name, folders, write_whole
from services.placer.backends.folder import __file__ as folder_file
from shared.devices import core_of, cpu_device_uuid
from shared.errors import FieldError

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=63)


@given(names, st.integers(0, 999_999))
def test_the_core_behind_a_uuid_is_the_one_it_was_made_for(machine: str, core: int) -> None:
    assert core == core_of(cpu_device_uuid(machine, core))


@pytest.mark.parametrize("uuid", ["GPU-5f1-3", "CPU-3", "CPU--3", "CPU-m-", "CPU-m-03", "CPU-m--3x", "CPU-m-3\n", ""])
def test_what_is_no_core_has_none(uuid: str) -> None:
    assert None is core_of(uuid)


def test_a_core_without_machine_or_below_nothing_is_refused() -> None:
    with pytest.raises(FieldError, match="machine_id"):
        cpu_device_uuid("", 0)
    with pytest.raises(FieldError, match="core"):
        cpu_device_uuid("m", -1)


@given(names, names)
def test_folder_names_differ_as_names_do_and_stay_in_their_root(one: str, other: str) -> None:
    found = folder_name(one)
    assert (one == other) == (found == folder_name(other))
    assert not found.startswith(".")
    assert "/" not in found
    assert len(found.encode()) <= 200


def test_long_names_that_begin_alike_differ() -> None:
    assert folder_name("." * 253) != folder_name("." * 252 + "-")


def test_a_folder_is_locked_by_one_at_a_time(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "box")
    with folder.locked() as nothing_there:
        assert None is nothing_there
    with folder.locked(make=True) as mine:
        assert None is not mine
        with folder.locked() as second:
            assert None is second
    with folder.locked() as again:
        assert None is not again


def test_the_lock_of_a_folder_that_was_moved_away_is_no_lock(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "box")
    with folder.locked(make=True) as mine:
        assert None is not mine
        folder.discard()
        with folder.locked(make=True) as newer:
            assert None is not newer
    assert [folder] == folders(tmp_path)


def test_half_written_files_are_read_as_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for name in ("labels.json", "start.json", "started.json", "exit.json"):
        (tmp_path / name).write_text('{"pid": 1, ')
    assert (None, {}, None, None) == (folder.labels(), folder.plan(), folder.started(), folder.ended())


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for body in (b"one", b"two"):
        write_whole(tmp_path / "file", body)
    assert [b"two"] == [path.read_bytes() for path in tmp_path.iterdir()]


def test_another_program_with_the_same_process_id_writes_to_other_files() -> None:
    names = [runpy.run_path(folder_file)["unused"]() for _ in range(2)]
    assert 2 == len(set(names))

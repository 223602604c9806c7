"""Which containers are at a gate, by folders and labels that nobody vouches for; and the gate's words as the SDK's."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from laxity import gate as sdk
from services.monitor.gate import wire
from services.monitor.gate.boxes import Boxes, Found, terms_of
from services.monitor.gate.core import Terms
from shared.messages import Kind, Realtime
from tests.monitor_folders import labels_of

TIMING = Realtime(deadline_us=50_000, period_us=40_000, runtime_us=12_000, kind=Kind.HARD, gate=True)


@pytest.fixture
def boxes(tmp_path: Path) -> Boxes:
    return Boxes(tmp_path)


def found(boxes: Boxes) -> list[Found]:
    new = boxes.look().new
    for each in new:
        each.listener.close()
    return new


def labels(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "container.json").read_text())
    return read


def test_sdk_and_gate_say_the_same_words() -> None:
    assert (wire.SOCKET, wire.VERSION, wire.ASK, wire.RELEASE, wire.WELCOME, wire.GRANT, wire.MESSAGE.format) == (
        sdk.SOCKET,
        sdk.VERSION,
        sdk.ASK,
        sdk.RELEASE,
        sdk.WELCOME,
        sdk.GRANT,
        sdk.MESSAGE.format,
    )


def test_the_host_part_is_taken_from_period_and_deadline(tmp_path: Path) -> None:
    folder = labels_of(tmp_path, "c", realtime=TIMING.model_copy(update={"host_us": 3_000}), device="GPU-7")
    assert Terms("c", "GPU-7", 12_000, 37_000, 47_000) == terms_of(labels(folder))


def test_a_soft_container_is_best_effort_and_its_period_the_deadline_where_not_given(tmp_path: Path) -> None:
    soft = Realtime(deadline_us=50_000, runtime_us=1_000, kind=Kind.SOFT, gate=True)
    folder = labels_of(tmp_path, "c", realtime=soft, device="GPU-7")
    assert Terms("c", "GPU-7", 1_000, 50_000, 50_000, best_effort=True) == terms_of(labels(folder))


@pytest.mark.parametrize(
    "timing",
    [None, TIMING.model_copy(update={"gate": False}), Realtime(deadline_us=1, kind=Kind.SOFT, gate=True)],
)
def test_who_does_not_use_the_gate_has_no_terms(tmp_path: Path, timing: Realtime | None) -> None:
    assert terms_of(labels(labels_of(tmp_path, "c", realtime=timing))) is None


@pytest.mark.parametrize("runtime_us", [0, -1, 1.5, "5", True, 1 << 60])
def test_times_that_are_none_are_refused(tmp_path: Path, runtime_us: object) -> None:
    read = labels(labels_of(tmp_path, "c", realtime=TIMING))
    read["reservation"]["realtime"]["runtime_us"] = runtime_us
    with pytest.raises(ValueError, match="a time in microseconds: found"):
        terms_of(read)


def test_a_container_is_found_once_and_gone_once(boxes: Boxes, tmp_path: Path) -> None:
    folder = labels_of(tmp_path, "c", realtime=TIMING)
    (new,) = found(boxes)
    assert ("c", "c") == (new.token, new.terms.container)
    assert 0o777 == (folder / wire.SOCKET).stat().st_mode & 0o777
    assert ([], []) == boxes.look()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert ([], ["c"]) == boxes.look()


def test_labels_may_come_after_the_folder(boxes: Boxes, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    assert [] == found(boxes)
    (tmp_path / "c" / "container.json").write_text('{"container": "c", "reserv')
    assert [] == found(boxes)
    (tmp_path / "c" / "container.json").unlink()
    (tmp_path / "c").rmdir()
    labels_of(tmp_path, "c", realtime=TIMING)
    assert ["c"] == [each.token for each in found(boxes)]


def test_labels_that_make_no_sense_are_not_looked_at_for_ever(boxes: Boxes, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "container.json").write_text("[]")
    for _ in range(100):
        assert [] == found(boxes)
    sound = labels_of(tmp_path / ".elsewhere", "c", realtime=TIMING) / "container.json"
    (tmp_path / "c" / "container.json").write_bytes(sound.read_bytes())
    assert [] == found(boxes)


def test_folders_without_labels_for_long_are_looked_into_seldom_and_not_all_at_once(
    boxes: Boxes, tmp_path: Path
) -> None:
    for token in ("a", "b"):
        (tmp_path / token).mkdir()
    for _ in range(300):
        assert [] == found(boxes)
    for token in ("a", "b"):
        sound = labels_of(tmp_path / ".elsewhere", token, realtime=TIMING) / "container.json"
        (tmp_path / token / "container.json").write_bytes(sound.read_bytes())
    looks = [[each.token for each in found(boxes)] for _ in range(50)]
    assert [["a"], ["b"]] == sorted(look for look in looks if look)


def test_links_and_folders_of_ours_are_no_containers(boxes: Boxes, tmp_path: Path) -> None:
    elsewhere = labels_of(tmp_path / ".gate", "c", realtime=TIMING)
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "container.json").symlink_to(elsewhere / "container.json")
    assert [] == found(boxes)
    assert not (elsewhere / wire.SOCKET).exists()


def test_a_link_in_the_place_of_the_socket_is_replaced_and_not_followed(boxes: Boxes, tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_text("kept")
    target.chmod(0o600)
    folder = labels_of(tmp_path, "c", realtime=TIMING)
    (folder / wire.SOCKET).symlink_to(target)
    assert 1 == len(found(boxes))
    assert (folder / wire.SOCKET).is_socket()
    assert ("kept", 0o600) == (target.read_text(), target.stat().st_mode & 0o777)


def test_a_socket_can_be_reached_however_long_its_path_is(boxes: Boxes, tmp_path: Path) -> None:
    long = tmp_path / ("r" * 100)
    labels_of(long, "c" * 100, realtime=TIMING)
    (new,) = Boxes(long).look().new
    folder = os.open(long / new.token, os.O_RDONLY)
    with new.listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(f"/proc/self/fd/{folder}/{wire.SOCKET}")
    os.close(folder)

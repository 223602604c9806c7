"""``laxity keys`` adds what is missing and keeps what is there; a seed is never shown."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cli.keys import make, public_key
from cli.main import main
from cli.output import CommandError
from cli.permissions import Rules
from shared.bus.credentials import Credentials, credentials
from shared.errors import FieldError
from shared.settings import ServiceSettings

NODES = ["gpu-1", "gpu.2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "keys", Rules(), NODES, ["shop"])
    return tmp_path / "keys"


def seeds(folder: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in folder.glob("*.nk")}


def test_each_user_has_a_seed_of_its_own_that_only_its_owner_may_read(folder: Path) -> None:
    fixed = {"deadline-tracker", "node-list", "placer", "kube-bridge", "operator", "client"}
    assert fixed | {"monitor-gpu-1", "monitor-gpu=2E2", "client-shop"} == set(seeds(folder))
    assert len(seeds(folder)) == len(set(seeds(folder).values()))
    assert {0o600} == {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.nk")}
    assert 0o700 == stat.S_IMODE(folder.stat().st_mode)


def test_the_servers_configuration_names_every_public_key_once_and_no_seed(folder: Path) -> None:
    text = (folder / "authorization.conf").read_text()
    assert [1] * 9 == [text.count(public_key(path)) for path in folder.glob("*.nk")]
    assert not any(seed.decode().strip() in text for seed in seeds(folder).values())


def test_again_it_changes_nothing_and_a_new_node_is_added(folder: Path) -> None:
    before, text = seeds(folder), (folder / "authorization.conf").read_text()
    assert [] == [user.name for user, new in make(folder, Rules(), [], []) if new]
    assert (before, text) == (seeds(folder), (folder / "authorization.conf").read_text())
    assert ["monitor-gpu-3"] == [user.name for user, new in make(folder, Rules(), ["gpu-3"], []) if new]
    assert before.items() < seeds(folder).items()


def test_a_rotated_user_alone_has_a_new_key(folder: Path) -> None:
    before = seeds(folder)
    make(folder, Rules(), [], [], ["monitor-gpu=2E2"])
    assert {"monitor-gpu=2E2"} == {name for name, seed in seeds(folder).items() if seed != before[name]}
    assert public_key(folder / "monitor-gpu=2E2.nk") in (folder / "authorization.conf").read_text()


def test_a_node_whose_seed_was_removed_is_no_user_any_more(folder: Path) -> None:
    gone = public_key(folder / "monitor-gpu-1.nk")
    (folder / "monitor-gpu-1.nk").unlink()
    make(folder, Rules(), [], [])
    assert gone not in (folder / "authorization.conf").read_text()


def test_what_is_wrong_is_said_before_anything_is_written(folder: Path) -> None:
    before = seeds(folder)
    with pytest.raises(CommandError, match="no such user: nobody"):
        make(folder, Rules(), [], [], ["nobody"])
    (folder / "placer.nk").chmod(0o640)
    with pytest.raises(CommandError, match="can be read by others"):
        make(folder, Rules(), [], [])
    (folder / "placer.nk").chmod(0o600)
    (folder / "placer.nk").write_text("no seed")
    with pytest.raises(CommandError, match="holds no seed"):
        make(folder, Rules(), [], [])
    assert before | {"placer": b"no seed"} == seeds(folder)


def test_another_prefix_has_its_own_subjects_streams_and_buckets() -> None:
    users = Rules("x").users(["n"], [])
    said = {subject for user in users for subject in (*user.publish, *user.subscribe)}
    assert set() == {subject for subject in said if "rt" in subject.split(".") or "rt_" in subject or "RT_" in subject}


def test_the_command_prints_no_seed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["keys", str(folder), "--node", "gpu-9", "--rotate", "placer"])
    said = "".join(capsys.readouterr())
    assert "monitor-gpu-9" in said
    assert not any(seed.decode().strip() in said for seed in seeds(folder).values())


# --- what a service makes of them ---


def test_without_settings_a_connection_is_anonymous() -> None:
    assert Credentials() == credentials(ServiceSettings())


def test_the_inbox_is_named_after_the_seed_file_unless_a_setting_says_otherwise(folder: Path) -> None:
    seed = folder / "monitor-gpu=2E2.nk"
    assert "_INBOX.monitor-gpu=2E2" == credentials(ServiceSettings(nats_seed_file=seed)).inbox_prefix
    named = ServiceSettings(nats_seed_file=seed, nats_inbox_prefix="_INBOX.other")
    assert "_INBOX.other" == credentials(named).inbox_prefix


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_seed_that_others_may_read_or_write_is_refused(folder: Path, mode: int) -> None:
    (folder / "placer.nk").chmod(mode)
    with pytest.raises(FieldError, match=f"LAXITY_NATS_SEED_FILE: .*mode {mode:o}.*chmod 600"):
        credentials(ServiceSettings(nats_seed_file=folder / "placer.nk"))


@pytest.mark.parametrize("content", ["", "no seed", "SUAAAA", "é"])
def test_a_file_without_a_seed_is_refused_and_not_shown(folder: Path, content: str) -> None:
    (folder / "placer.nk").write_text(content)
    with pytest.raises(FieldError, match="one nkey seed") as error:
        credentials(ServiceSettings(nats_seed_file=folder / "placer.nk"))
    assert not content or content not in str(error.value)


def test_a_seed_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"absent\.nk"):
        credentials(ServiceSettings(nats_seed_file=tmp_path / "absent.nk"))

"""Limits as control groups: where our own group is found, and what is written for each version, in a made-up tree."""

import os
from pathlib import Path

import pytest

from services.placer.backends.cgroups import Hierarchy, apply, change, own_groups, quota_us, remove

V1_MOUNTS = """\
30 23 0:26 / {point}/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
31 23 0:27 /docker/abc {point}/memory rw - cgroup cgroup rw,memory
32 23 0:28 / {point}/systemd rw - cgroup cgroup rw,xattr,name=systemd
33 23 0:29 / / rw - ext4 /dev/vda rw
"""


def tree(folder: Path, mounts: str, cgroup: str) -> Path:
    proc = folder / "proc"
    proc.mkdir()
    (proc / "mountinfo").write_text(mounts.format(point=folder))
    (proc / "cgroup").write_text(cgroup)
    return proc


def test_our_groups_are_found_below_each_mount(tmp_path: Path) -> None:
    proc = tree(tmp_path, V1_MOUNTS, "4:memory:/docker/abc/inner\n3:cpu,cpuacct:/user.slice\n1:name=systemd:/x\n")
    found = {h.own for h in own_groups(proc) if h.controllers & {"cpu", "memory"}}
    assert {tmp_path / "cpu,cpuacct" / "user.slice", tmp_path / "memory" / "inner"} == found


def test_version_2_has_the_controllers_that_its_group_offers(tmp_path: Path) -> None:
    own = tmp_path / "app.scope"
    own.mkdir()
    (own / "cgroup.controllers").write_text("cpu memory pids\n")
    proc = tree(tmp_path, "30 23 0:26 / {point} rw - cgroup2 cgroup2 rw\n", "0::/app.scope\n")
    assert (Hierarchy(2, frozenset({"cpu", "memory", "pids"}), own),) == own_groups(proc)


def test_M31_a_group_path_that_says_nothing_is_no_crash(tmp_path: Path) -> None:
    proc = tree(tmp_path, "30 23 0:26 /elsewhere {point} rw - cgroup2 cgroup2 rw\n", "0::/\n")
    assert (Hierarchy(2, frozenset(), tmp_path),) == own_groups(proc)


def test_a_machine_without_control_groups_has_none(tmp_path: Path) -> None:
    assert () == own_groups(tmp_path)
    limits = apply("box", 500, 64, ())
    assert ((), ["cpu", "memory"]) == (limits.groups, sorted(limits.applied))
    assert all(text.startswith("not applied: no control group with") for text in limits.applied.values())


def test_version_1_gets_one_group_for_each_controller(tmp_path: Path) -> None:
    where = tuple(Hierarchy(1, frozenset({name}), tmp_path / name) for name in ("cpu", "memory"))
    for hierarchy in where:
        hierarchy.own.mkdir()
    limits = apply("box", 500, 64, where)
    assert (str(tmp_path / "cpu" / "box"), str(tmp_path / "memory" / "box")) == limits.groups
    assert "10000" == (tmp_path / "cpu/box/cpu.cfs_quota_us").read_text()
    assert "20000" == (tmp_path / "cpu/box/cpu.cfs_period_us").read_text()
    assert str(64 * 1024 * 1024) == (tmp_path / "memory/box/memory.limit_in_bytes").read_text()
    assert {"cpu": "cgroup v1: 500 milli", "memory": "cgroup v1: 64 MiB"} == limits.applied


def test_version_2_gets_one_group_for_both(tmp_path: Path) -> None:
    limits = apply("box", 1500, 64, (Hierarchy(2, frozenset({"cpu", "memory"}), tmp_path),))
    assert (str(tmp_path / "box"),) == limits.groups
    assert "30000 20000" == (tmp_path / "box/cpu.max").read_text()
    assert str(64 * 1024 * 1024) == (tmp_path / "box/memory.max").read_text()
    assert "+memory" == (tmp_path / "cgroup.subtree_control").read_text()


def test_what_the_machine_refuses_is_said_and_leaves_no_group(tmp_path: Path) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "cpu.max").mkdir()  # writing to it fails
    (tmp_path / "fresh").mkdir()
    where = (Hierarchy(2, frozenset({"cpu"}), tmp_path), Hierarchy(1, frozenset({"memory"}), tmp_path / "absent"))
    limits = apply("box", 500, 64, where)
    assert () == limits.groups
    assert "not applied: cgroup v2 refuses: Is a directory" == limits.applied["cpu"]
    assert "not applied: cgroup v1 refuses: No such file or directory" == limits.applied["memory"]


def test_no_limit_is_made_for_nothing(tmp_path: Path) -> None:
    limits = apply("box", 0, 0, (Hierarchy(2, frozenset({"cpu", "memory"}), tmp_path),))
    assert ((), {"cpu": "not asked for", "memory": "not asked for"}) == (limits.groups, limits.applied)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "cpu_milli,expected",
    [
        (1000, (20_000, 20_000)),
        (50, (1_000, 20_000)),
        (49, (1_000, 20_408)),
        (1, (1_000, 1_000_000)),
        (2500, (50_000, 20_000)),
    ],
)
def test_quotas_keep_their_ratio_and_the_kernel_s_least(cpu_milli: int, expected: tuple[int, int]) -> None:
    assert expected == quota_us(cpu_milli)


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    remove((str(tmp_path / "absent"), os.devnull))


def group(folder: Path, **files: str) -> str:
    """A group's folder; `_` stands for the dots of its files' names but the first."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return str(folder)


def test_version_2_changes_what_is_asked_and_leaves_the_rest(tmp_path: Path) -> None:
    box = group(tmp_path / "box", cpu_max="10000 20000", memory_max="1")
    change((box,), 1500, 0)
    assert ("30000 20000", "1") == ((tmp_path / "box/cpu.max").read_text(), (tmp_path / "box/memory.max").read_text())
    change((box,), 0, 64)
    assert str(64 << 20) == (tmp_path / "box/memory.max").read_text()


@pytest.mark.parametrize("size", [32, 128])
def test_version_1_changes_memory_with_and_without_swap(tmp_path: Path, size: int) -> None:
    cpu = group(tmp_path / "cpu", cpu_cfs_quota_us="10000", cpu_cfs_period_us="20000")
    files = {"memory_limit_in_bytes": str(64 << 20), "memory_memsw.limit_in_bytes": str(64 << 20)}
    memory = group(tmp_path / "memory", **files)
    change((cpu, memory), 1, size)
    found = {file.name: file.read_text() for folder in (cpu, memory) for file in Path(folder).iterdir()}
    assert {"cpu.cfs_quota_us": "1000", "cpu.cfs_period_us": "1000000"} == {n: found[n] for n in found if n[0] == "c"}
    assert {str(size << 20)} == {text for name, text in found.items() if name[0] == "m"}


def test_without_a_group_for_one_of_them_neither_is_changed(tmp_path: Path) -> None:
    box = group(tmp_path / "memory", memory_max="1")
    with pytest.raises(OSError, match="started without a limit of cpu"):
        change((box,), 500, 64)
    assert "1" == (tmp_path / "memory/memory.max").read_text()

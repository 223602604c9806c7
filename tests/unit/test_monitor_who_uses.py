"""Which container a process is in by its control group, what that container uses, and who holds a GPU's memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from services.monitor.container_use import use_of
from services.monitor.probes.base import NOT_SUPPORTED, ContainerReading, ContainerUseReading, Reading
from services.monitor.probes.cgroups import NO_LIMIT, NOT_VISIBLE, Group, Groups, group_of
from services.monitor.probes.gpu_time import GpuTimes
from services.monitor.probes.holders import by_group, with_gpus
from services.monitor.probes.proc import Process
from shared.messages import Measured

A, B = "a" * 64, "b" * 64
UID = "01234567-89ab-cdef-0123-456789abcdef"
POD = f"pod{UID.replace('-', '_')}"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/docker/{A}", Group(A, "docker")),
        (f"/system.slice/docker-{A}.scope", Group(A, "docker")),
        (f"/docker/{B}/docker/{A}", Group(A, "docker")),
        (f"/docker/{A}/init.scope", Group(A, "docker")),
        (f"/kubepods.slice/kubepods-{POD}.slice/cri-containerd-{A}.scope", Group(A, "containerd", UID)),
        (f"/system.slice/containerd.service/kubepods-{POD}.slice:cri-containerd:{A}", Group(A, "containerd", UID)),
        (f"/kubepods.slice/kubepods-burstable-{POD}.slice/crio-{A}.scope", Group(A, "cri-o", UID)),
        (f"/kubepods/besteffort/pod{UID}/{A}", Group(A, None, UID)),
        (f"/kubepods/pod{UID.replace('-', '')}/{A}", Group(A, None, UID.replace("-", ""))),
        (f"/docker/{B}/kubelet/kubepods/pod{UID}/{A}", Group(A, None, UID)),
        (f"/kubepods/pod{UID}/{B}/docker/{A}", Group(A, "docker")),
        (f"/machine.slice/libpod-{A}.scope/container", Group(A, "podman")),
        (f"/machine.slice/libpod-payload-{A}", Group(A, "podman")),
        (f"/../../docker/{A}", Group(A, "docker")),
        (f"/machine.slice/libpod-conmon-{A}.scope", None),
        (f"/kubepods.slice/crio-conmon-{A}.scope", None),
        (f"/docker/{A[:-1]}", None),
        (f"/docker/{A}a", None),
        ("/user.slice/user-1000.slice/session-1.scope", None),
        ("/", None),
    ],
)
def test_M31_every_form_of_a_path_names_its_innermost_container_or_none(path: str, expected: Group | None) -> None:
    assert expected == group_of(f"0::{path}\n")
    assert expected == group_of(f"11:memory:{path}\n4:cpu,cpuacct:{path}\n0::/\n")


@pytest.mark.parametrize("text", ["", "0::/", "nonsense", "1:", "0::/\n0::/"])
def test_M31_what_says_nothing_is_no_container(text: str) -> None:
    assert group_of(text) is None


def place(proc: Path, pid: int, start: int, path: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"{pid} (a ) b) S " + " ".join(["0"] * 18 + [str(start)] + ["0"] * 5))
    (folder / "cgroup").write_text(f"0::{path}\n")


def test_a_pid_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    groups = Groups(tmp_path)
    place(tmp_path, 7, 100, f"/docker/{A}")
    assert {(7, 100): Group(A, "docker")} == groups.of([(7, 100)], 0.0)
    place(tmp_path, 7, 200, f"/docker/{B}")
    assert {(7, 200): Group(B, "docker")} == groups.of([(7, 200)], 0.1)
    assert {} == groups.of([(7, 100)], 0.2)


def test_M38_a_process_that_has_ended_is_in_no_container(tmp_path: Path) -> None:
    assert {} == Groups(tmp_path).of([(7, 100)], 0.0)


def test_M34_the_control_group_names_the_container_and_mount_points_do_not(tmp_path: Path) -> None:
    place(tmp_path, 7, 100, f"/kubepods/pod{UID}/{A}")
    (tmp_path / "7/mountinfo").write_text(f"1 0 0:1 /containers/{B}/hostname /etc/hostname rw - ext4 /dev/x rw\n")
    groups = Groups(tmp_path).of([(7, 100)], 0.0)
    assert Group(A, None, UID) == groups[7, 100]
    (tmp_path / "7/cgroup").write_text("0::/\n")  # no reason to look elsewhere
    assert {} == Groups(tmp_path).of([(7, 100)], 0.0)


def test_a_process_that_is_moved_into_its_group_is_found_there_soon(tmp_path: Path) -> None:
    groups = Groups(tmp_path)
    place(tmp_path, 7, 100, "/system.slice/containerd.service")
    assert {} == groups.of([(7, 100)], 0.0)
    place(tmp_path, 7, 100, f"/docker/{A}")
    assert {(7, 100): Group(A, "docker")} == groups.of([(7, 100)], 2.0)


def files(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)


def found(text: str) -> Group:
    group = group_of(text)
    assert group is not None
    return group


def test_version_2_tells_time_memory_and_throttling(tmp_path: Path) -> None:
    stat = "usage_usec 1500\nuser_usec 1000\nnr_throttled 3\n"
    files(
        tmp_path / "docker" / A,
        cgroup__controllers="cpu memory\n",
        cpu__stat=stat,
        memory__current=str(3 << 20),
        memory__max="max\n",
    )
    use = Groups(mount=tmp_path).use(found(f"0::/docker/{A}/init.scope\n"))
    values = (Reading(1500), Reading(3.0), Reading(None, NO_LIMIT), Reading(3))
    assert ContainerUseReading("docker", A, None, *values) == use


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_version_1_tells_the_same_in_microseconds_and_mib(tmp_path: Path, mount: str) -> None:
    both = {"cpu__stat": "nr_periods 9\nnr_throttled 4\n"}
    files(tmp_path / mount / "docker" / A, **both)
    files(tmp_path / ("cpuacct" if mount == "cpu" else mount) / "docker" / A, cpuacct__usage="2500999\n")
    memory = {"memory__usage_in_bytes": str(1 << 20), "memory__limit_in_bytes": str(8 << 20)}
    files(tmp_path / "memory" / "docker" / A, **memory)
    text = f"4:memory:/docker/{A}\n3:cpu,cpuacct:/docker/{A}\n0::/docker/{A}\n"
    use = Groups(mount=tmp_path).use(found(text))
    assert (Reading(2500), Reading(1.0), Reading(8.0), Reading(4)) == (
        use.cpu_us,
        use.memory_mib,
        use.memory_limit_mib,
        use.throttled_periods,
    )


def test_version_1_without_a_limit_has_none(tmp_path: Path) -> None:
    files(tmp_path / "memory" / "docker" / A, memory__limit_in_bytes="9223372036854771712\n")
    assert Reading(None, NO_LIMIT) == Groups(mount=tmp_path).use(found(f"4:memory:/docker/{A}\n")).memory_limit_mib


def test_a_controller_that_is_off_leaves_its_values_unknown(tmp_path: Path) -> None:
    files(tmp_path / "docker" / A, cgroup__controllers="\n", cpu__stat="usage_usec 0\n")
    use = Groups(mount=tmp_path).use(found(f"0::/docker/{A}\n"))
    unknown = Reading(None, NOT_SUPPORTED)
    assert (Reading(0), unknown, unknown) == (use.cpu_us, use.memory_mib, use.throttled_periods)


def test_a_group_outside_of_what_we_see_is_not_read(tmp_path: Path) -> None:
    files(tmp_path / "docker" / A, cgroup__controllers="\n", cpu__stat="usage_usec 5\n", memory__current="5\n")
    use = Groups(mount=tmp_path / "mount").use(found(f"0::/../docker/{A}\n"))
    assert (Reading(None, NOT_VISIBLE), Reading(None, NOT_VISIBLE)) == (use.cpu_us, use.memory_mib)


@pytest.mark.parametrize(
    ("ups", "rest"),
    [
        ("/../..", f"kubepods-burstable-{POD}.slice/cri-containerd-{A}.scope"),  # of our own class of service
        ("/../../..", f"kubepods-{POD}.slice/cri-containerd-{A}.scope"),
        ("/../../../..", f"docker/{A}"),
    ],
)
def test_a_monitor_with_a_view_of_its_own_finds_the_groups_beside_it(tmp_path: Path, ups: str, rest: str) -> None:
    """As a pod without privileges has it in version 2, with the machine's groups mounted."""
    inside = {"/../..": "kubepods.slice/kubepods-burstable.slice", "/../../..": "kubepods.slice"}.get(ups, "")
    files(tmp_path / inside / rest, cgroup__controllers="\n", cpu__stat="usage_usec 5\n", memory__current="1048576\n")
    files(tmp_path / "kubepods.slice" / "other" / f"cri-containerd-{B}.scope", cgroup__controllers="\n")
    groups = Groups(mount=tmp_path)
    group = found(f"0::{ups}/{rest}\n")

    assert [(Reading(5), Reading(1.0))] * 2 == [(use.cpu_us, use.memory_mib) for use in map(groups.use, [group] * 2)]

    for file in (tmp_path / inside / rest).iterdir():
        file.unlink()
    (tmp_path / inside / rest).rmdir()
    assert Reading(None, NOT_VISIBLE) == groups.use(group).cpu_us


def test_a_path_that_goes_up_and_down_is_not_followed(tmp_path: Path) -> None:
    files(tmp_path / "docker" / A, cgroup__controllers="\n", cpu__stat="usage_usec 5\n")
    (tmp_path / "x").mkdir()

    assert Reading(None, NOT_VISIBLE) == Groups(mount=tmp_path).use(found(f"0::/../x/../docker/{A}\n")).cpu_us


def process(pid: int, start: int) -> Process:
    return Process(pid, 1, 1, start, 0, 0, kernel=False)


def test_who_hides_its_environment_is_still_of_its_container() -> None:
    first, hidden, other = process(1, 10), process(2, 20), process(3, 5)
    owned = {"c": [first]}
    groups = {(1, 10): Group(A), (2, 20): Group(A), (3, 5): Group(B)}
    assert ({"c": Group(A)}, [other]) == by_group(owned, [hidden, other], groups)
    assert {"c": [first, hidden]} == owned


def test_a_node_that_runs_in_a_container_itself_is_not_that_of_its_processes() -> None:
    placer, ours = process(1, 10), process(2, 20)
    owned = {"c": [ours]}
    assert ({}, [placer]) == by_group(owned, [placer], {(1, 10): Group(A), (2, 20): Group(A)})
    assert {"c": [ours]} == owned


def test_a_gpu_has_several_owners_and_what_is_unknown_is_not_added_up() -> None:
    containers = [ContainerReading("c", None, (1, 2)), ContainerReading("d", None, (3,)), ContainerReading("e")]
    holders: dict[str, dict[int, int | None] | str] = {"G0": {1: 5, 2: 6, 3: 7, 9: 8}, "G1": {2: 1, 1: None}, "G2": "x"}
    told = with_gpus(containers, holders, GpuTimes(Counter()))
    held = [container.use.gpus if container.use else None for container in told]
    assert [{"G0": Reading(11), "G1": Reading(None, NOT_SUPPORTED)}, {"G0": Reading(7)}, None] == held


def test_what_cannot_be_is_unknown_and_counted() -> None:
    counts: Counter[str] = Counter()
    use = use_of(ContainerUseReading(cpu_us=Reading(-1), memory_mib=Reading(2.5)), counts)
    assert use is not None
    assert (Measured(value=None, reason="implausible"), Measured(value=2.5)) == (use.cpu_us, use.memory_mib)
    assert {"probe.rejected.cpu_us": 1} == counts

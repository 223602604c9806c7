"""The probe of GPUs on a driver library without a GPU: the real binding, in the real process of its own."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from services.monitor.probes import proc as procfs
from services.monitor.probes.base import Capacity, Reading
from services.monitor.probes.gpu import GpuSharing
from shared.messages import Regime
from tests.gpu_node import FOREIGN, GPU0, GPU1, MIG0, MIG3, NOBODY, OURS, Node, faults, told


def test_a_gpu_is_told_with_what_the_driver_does_not_reserve(node: Node) -> None:
    first, second = node.plays("h100")
    assert (GPU0, 0, "NVIDIA H100 80GB HBM3", Regime.TIME_SLICED, None) == (
        first.uuid,
        first.index,
        first.model,
        first.regime,
        first.fault,
    )
    assert (GPU1, 1) == (second.uuid, second.index)
    assert [Reading(81_559 - 551), Reading(4), Reading(0.25), Reading(0), Reading(0)] == [
        first.memory_mib,
        first.memory_used_mib,
        first.utilisation_ratio,
        first.foreign_share_micro,
        first.foreign_memory_mib,
    ]


def test_the_rest_of_the_node_is_as_the_host_has_it(node: Node) -> None:
    node.plays("h100")
    snapshot = node.seen[-1]
    assert Capacity(8_000, 32_000) == node.probe.capacity()
    assert (["c"], Reading(100), Reading(700), 1) == (
        [container.container for container in snapshot.containers],
        snapshot.foreign_cpu_milli,
        snapshot.foreign_memory_mib,
        snapshot.counts["host"],
    )


@pytest.mark.parametrize("profile, memory", [("r510", (81_008, 1004)), ("old", (81_559, 1555))])
def test_an_old_driver_is_asked_by_its_older_functions(node: Node, profile: str, memory: tuple[int, int]) -> None:
    node.process.restart()  # which version is there is remembered
    device = node.plays(profile, (0, OURS, 1000))[0]
    node.process.restart()
    assert (*memory, 0) == (
        device.memory_mib.value,
        device.memory_used_mib.value,
        device.foreign_memory_mib.value,
    )


def test_M4_the_parts_of_a_split_gpu_are_devices_whose_utilisation_is_unknown(node: Node) -> None:
    devices = node.plays("h200-mig")
    assert [(MIG0, Regime.MIG, 16_384), (MIG3, Regime.MIG, 16_384), (GPU1, Regime.TIME_SLICED, 143_157)] == [
        (device.uuid, device.regime, device.memory_mib.value) for device in devices
    ]
    assert [Reading(None, "mig_enabled")] * 2 + [Reading(0.25)] == [device.utilisation_ratio for device in devices]
    assert [None] * 3 == faults(devices)


def test_a_gpu_that_is_split_while_it_is_watched_is_no_device_any_more(node: Node) -> None:
    node.plays("h100")
    assert [(GPU0, "mig_enabled"), (MIG0, None), (MIG3, None), (GPU1, None)] == [
        (device.uuid, device.fault) for device in node.plays("h200-mig")
    ]


def test_parts_that_may_not_be_seen_are_counted_and_the_other_gpu_stays(node: Node) -> None:
    assert [GPU1] == [device.uuid for device in node.plays("no-permission")]
    assert node.counts["nvml.mig.no_permission"] >= 1


def test_M17_a_card_without_some_values_is_healthy_and_they_are_unknown(node: Node) -> None:
    (device,) = node.plays("geforce")
    assert (None, Reading(None, "not_supported"), 16_076) == (
        device.fault,
        device.health["remapped_rows_uncorrectable"],
        device.memory_mib.value,
    )


@pytest.mark.parametrize("profile", ["gb10", "gb10-zero", "gb10-wrong"])
def test_M2_memory_that_is_the_machines_is_told_so_whatever_the_driver_answers(node: Node, profile: str) -> None:
    (device,) = node.plays(profile, (0, FOREIGN, 300))
    assert (None, procfs.memory_mib(Path("/proc"))["MemTotal"], 300, 700) == (
        device.fault,
        device.memory_mib.value,
        device.memory_used_mib.value,
        device.foreign_memory_mib.value,
    )


def test_what_a_gpu_uses_of_the_machines_memory_is_unknown_where_one_process_does_not_tell(node: Node) -> None:
    (device,) = node.plays("gb10", (0, OURS, 300), (0, FOREIGN, -1))
    assert Reading(None, "unified_memory") == device.memory_used_mib


def test_a_card_that_does_not_tell_its_memory_is_not_given_the_machines(node: Node) -> None:
    assert [Reading(None, "not_supported")] * 2 == [device.memory_mib for device in node.plays("no-memory")]


def test_M21_a_lost_gpu_leaves_the_other(node: Node) -> None:
    assert Reading(None, "gpu_lost") == node.plays("lost")[1].memory_mib
    node.plays("h100")
    devices = node.plays("lost")
    assert [None, "gpu_lost"] == faults(devices)
    assert [(81_008, 4, 0.25), (81_008, None, None)] == [
        (device.memory_mib.value, device.memory_used_mib.value, device.utilisation_ratio.value) for device in devices
    ]


def test_M21_a_gpu_that_does_not_even_answer_keeps_its_name_and_what_it_had(node: Node) -> None:
    node.plays("h100")
    lost = node.plays("gone")[1]
    assert (GPU1, "gpu_lost", 81_008, Reading(None, "gpu_lost")) == (
        lost.uuid,
        lost.fault,
        lost.memory_mib.value,
        lost.utilisation_ratio,
    )
    assert [None, None] == faults(node.plays("h100"))


def test_M21_a_gpu_that_never_said_who_it_is_is_counted(node: Node) -> None:
    assert [GPU0] == [device.uuid for device in node.plays("gone")]
    assert node.counts["nvml.device.gpu_lost"] >= 1


def test_a_gpu_whose_memory_the_driver_cannot_say_is_ill(node: Node) -> None:
    assert [None, "driver_error"] == faults(node.plays("unreachable"))


def test_a_gpu_on_which_no_process_may_compute_is_ill(node: Node) -> None:
    assert [None, "compute_prohibited"] == faults(node.plays("prohibited"))


def test_a_gpu_that_takes_one_process_is_exclusive_unless_something_else_is_stated(node: Node) -> None:
    assert [Regime.TIME_SLICED, Regime.EXCLUSIVE] == [device.regime for device in node.plays("exclusive")]


def test_stated_regimes_are_told_by_uuid(node: Node) -> None:
    node = Node(node.driver, node.process, GpuSharing(Regime.TIME_SLICED, {GPU1: Regime.MPS}, 2_000, 50))
    assert [(Regime.TIME_SLICED, 2_000, 50), (Regime.MPS, None, None)] == [
        (device.regime, device.slice_us, device.switch_us) for device in node.plays("exclusive")
    ]


def test_M15_a_number_that_cannot_be_is_rejected_and_the_rest_stays(node: Node) -> None:
    node.plays("garbage")
    metrics = told(node.seen[-1])
    assert [(0.25, None), (None, "implausible")] == [
        (device.utilisation_ratio.value, device.utilisation_ratio.reason) for device in metrics.devices
    ]
    assert (1, [True, True]) == (
        metrics.counters["probe.rejected.utilisation_ratio"],
        [device.healthy for device in metrics.devices],
    )


@pytest.mark.parametrize(
    "processes, share, memory",
    [
        ([(0, FOREIGN, 1000)], Reading(250_000), Reading(1000)),
        ([(0, OURS, 1000)], Reading(0), Reading(0)),
        ([(1, FOREIGN, 1000)], Reading(0), Reading(0)),
        ([(0, OURS, 1000), (0, FOREIGN, 500)], Reading(None, "not_told_apart"), Reading(500)),
        ([(0, FOREIGN, -1)], Reading(250_000), Reading(None, "not_supported")),
        ([(0, OURS, 100), (0, NOBODY, 100)], *[Reading(None, "not_told_apart")] * 2),
    ],
)
def test_foreign_use_is_told_where_it_can_be(
    node: Node, processes: list[tuple[int, int, int]], share: Reading, memory: Reading
) -> None:
    device = node.plays("h100", *processes)[0]
    assert (share, memory) == (device.foreign_share_micro, device.foreign_memory_mib)


@pytest.mark.parametrize("pid", [0, 1 << 23])
def test_M7_M8_one_impossible_pid_makes_the_whole_list_unknown(node: Node, pid: int) -> None:
    device = node.plays("h100", (0, FOREIGN, 100), (0, pid, 100))[0]
    assert [Reading(None, "implausible")] * 2 == [device.foreign_share_micro, device.foreign_memory_mib]
    assert node.counts["nvml.processes.implausible"] >= 1


def test_memory_that_no_listed_process_holds_makes_foreign_use_unknown(node: Node) -> None:
    device = node.plays("hidden", (0, OURS, 100))[0]
    assert [Reading(None, "not_told_apart")] * 2 == [device.foreign_share_micro, device.foreign_memory_mib]


def test_M24_a_driver_that_hangs_is_given_up_in_time_and_seen_again_when_it_is_well(hasty: Node) -> None:
    hasty.until(lambda devices: [None, None] == faults(devices))
    hasty.driver.plays("hung")
    began_s = time.monotonic()
    assert ["driver_hung", None] == faults(hasty.read())  # the other one has not been asked
    assert time.monotonic() - began_s < 2
    devices = hasty.until(lambda devices: ["driver_hung"] * 2 == faults(devices))
    assert [(81_008, Reading(None, "driver_hung"))] * 2 == [
        (device.memory_mib.value, device.utilisation_ratio) for device in devices
    ]
    assert ["driver_hung"] * 2 == faults(hasty.read())  # also while a new process is asked
    hasty.driver.plays("h100")
    hasty.until(lambda devices: [None, None] == faults(devices))


@pytest.mark.parametrize("ill, fault", [("hang", "driver_hung"), ("crash", "driver_crashed")])
@pytest.mark.parametrize("first", [True, False])
def test_M24_one_gpu_in_which_the_driver_hangs_or_crashes_leaves_the_other(
    patient: Node, ill: str, fault: str, first: bool
) -> None:
    node, sick = patient, 0 if first else 1
    node.until(lambda devices: [None, None] == faults(devices))
    node.seen.clear()
    node.driver.fails(f"DeviceGetMemoryInfo* {sick} {ill}")
    node.until(lambda devices: devices[sick].fault == fault)
    hangs = f"DeviceGetMemoryInfo* {sick} {ill}"
    node.driver.fails(hangs, "DeviceGetUtilizationRates * 50 50")
    node.until(lambda devices: Reading(0.5) == devices[1 - sick].utilisation_ratio)
    asked_by = asking()
    node.driver.fails(hangs, "DeviceGetUtilizationRates * 60 50")
    node.until(lambda devices: Reading(0.6) == devices[1 - sick].utilisation_ratio)
    assert asked_by == asking()  # it is not asked again and again
    assert {None} == {snapshot.devices[1 - sick].fault for snapshot in node.seen}
    devices = told(*node.seen).devices
    assert [(False, fault), (True, None)] == [(devices[at].healthy, devices[at].reason) for at in (sick, 1 - sick)]


def test_M24_what_was_said_is_not_said_again_while_a_killed_process_does_not_die(patient: Node) -> None:
    patient.until(lambda devices: [None, None] == faults(devices))
    patient.driver.fails("DeviceGetMemoryInfo* 1 hang")
    patient.until(lambda devices: [None, "driver_hung"] == faults(devices) and devices[0].read)
    with subprocess.Popen(["sleep", "600"]) as one_that_does_not_die:
        patient.process._killed = one_that_does_not_die
        assert [False, False] == [device.read for device in patient.read()]
        one_that_does_not_die.kill()
    assert patient.until(lambda devices: devices[0].read)


def test_a_gpu_that_hung_is_asked_again_and_last(hasty: Node) -> None:
    hasty.until(lambda devices: [None, None] == faults(devices))
    hasty.driver.fails("DeviceGetMemoryInfo* 0 hang")
    hasty.until(lambda devices: ["driver_hung", None] == faults(devices) and devices[1].read)
    hasty.until(lambda devices: ["driver_hung", None] == faults(devices) and devices[1].read)
    hasty.driver.fails()
    assert [True, True] == [device.read for device in hasty.until(lambda d: [None, None] == faults(d) and d[0].read)]


def test_a_gpu_that_hung_and_is_gone_is_not_told_for_ever(patient: Node) -> None:
    patient.until(lambda devices: [None, None] == faults(devices))
    patient.driver.fails("DeviceGetMemoryInfo* 1 hang")
    patient.until(lambda devices: [None, "driver_hung"] == faults(devices))
    patient.driver.fails("DeviceGetCount_v2 - 1")
    patient.until(lambda devices: [None] == faults(devices))


def asking() -> set[int]:
    """The processes of ours that ask a driver."""
    children = psutil.Process().children()
    return {child.pid for child in children if any("nvml.py" in word for word in child.cmdline())}


def test_M24_one_process_at_most_asks_the_driver(hasty: Node) -> None:
    others = asking()
    hasty.until(lambda devices: len(devices) == 2)
    (first,) = asking() - others
    hasty.driver.plays("hung")
    hasty.until(lambda _: len(asking() - others - {first}) == 1)
    assert first not in asking()


def test_a_driver_that_takes_longer_at_first_is_waited_for(hasty: Node) -> None:
    hasty.driver.plays("slow")
    assert ((), 1) == (hasty.read(), hasty.counts["nvml.driver_starting"])
    assert [None, None] == faults(hasty.until(bool))


@pytest.mark.parametrize(
    "profile, reason",
    [
        ("crash", "driver_crashed"),
        ("mismatch", "driver_mismatch"),
        ("not-loaded", "driver_not_loaded"),
        ("empty", "no_devices"),
    ],
)
def test_a_driver_that_fails_leaves_its_reason_and_is_seen_again(node: Node, profile: str, reason: str) -> None:
    node.plays("h100")
    node.process.restart()  # what fails at its start is asked by a new process
    node.driver.plays(profile)
    node.until(lambda devices: [reason] * 2 == faults(devices))
    assert {"c"} == {container.container for container in node.seen[-1].containers}
    assert 1 == node.counts[f"nvml.{reason}"]
    assert [None, None] == faults(node.plays("h100"))


def test_without_a_driver_there_is_no_device_and_one_line_says_why(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    node.process.restart()
    node.until(lambda _: node.counts["nvml.no_driver"] >= 3)
    assert () == node.seen[-1].devices
    assert ["no_driver"] == [line["reason"] for line in node.said.entries]
    (tmp_path / node.driver.library.name).symlink_to(node.driver.library)
    node.until(lambda devices: len(devices) == 2)


def test_M17_each_value_of_health_is_a_number_or_says_why_not_and_never_zero(node: Node) -> None:
    node.plays("garbage")
    first, second = (device.health for device in told(node.seen[-1]).devices)
    assert [(41.0, None), (118_000.0, None), (4.0, None), (81_237_469_120.0, None)] == [
        (first[name].value, first[name].reason)
        for name in ("temperature_celsius", "power_mw", "throttle_reasons", "energy_mj")
    ]
    told_of = {name: (value.value, value.reason) for name, value in second.items() if name != "xid"}
    assert {(None, "implausible")} == set(told_of.values())

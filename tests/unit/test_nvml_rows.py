"""Which call of NVIDIA's driver fails where, and what is published then: a test for each row of that table.

All go through the unmodified binding, in the process of its own, to a driver library without a GPU, and look at what
the monitor publishes. Rows that have their test elsewhere:

- a driver that hangs, in a call of one GPU: test_M24_* in test_monitor_gpu_probe.py and test_monitor_gpus.py
- processes' utilisation (five rows), XIDs: with the parts that read them
- one at a time of the cases of the monitor: M2, M4, M7, M8, M15, M17, M21, M24 test_monitor_gpu_probe.py; M6, M14,
  M22, M23, M37 here as well as in test_monitor_devices.py; M19 there; M26, M28 (text such as [n/a]) in
  test_monitor_cpu_probe.py, since the binding hands over numbers, and text only as a name: that is tested here; M31,
  M34, M38 test_monitor_who_uses.py
- display mode, applications clocks, power management: not asked for; that what is deprecated is absent is tested here
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.monitor.probes import nvml
from services.monitor.probes import proc as procfs
from services.monitor.probes.nvml_process import NvmlProcess
from services.monitor.probes.reasons import Reason
from shared.messages import DeviceMetrics, Measured, Regime
from tests.fake_nvml.build import PROFILES, FakeDriver, rows_of
from tests.gpu_node import FOREIGN, GPU0, GPU1, MIG0, MIG3, NOBODY, OURS, Node, told

MEMTOTAL_MIB = procfs.memory_mib(Path("/proc"))["MemTotal"]


@pytest.fixture
def fresh(node: Node) -> Iterator[Node]:
    """One that has not asked yet: a process remembers which functions its driver has."""
    node.process.restart()
    yield node
    node.process.restart()


def unknown(reason: str) -> Measured:
    return Measured(value=None, reason=reason)


def known(value: float) -> Measured:
    return Measured(value=value, reason=None)


def after(node: Node, *rows: str) -> tuple[DeviceMetrics, ...]:
    """What is published once these rows stand on top of the profile."""
    node.driver.fails(*rows)
    node.answers()
    return told(node.seen[-1]).devices


# --- MIG ---


@pytest.mark.parametrize("whose", ["of its GPU", "of a MIG device"])
def test_M4_utilisation_with_mig_on_is_unknown_because_of_it(node: Node, whose: str) -> None:
    node.plays("h200")
    devices = {device.uuid: device for device in node.tells("h200-mig")}
    uuid = GPU0 if whose == "of its GPU" else MIG0
    assert unknown("mig_enabled") == devices[uuid].utilisation_ratio
    assert known(0.25) == devices[GPU1].utilisation_ratio  # it is not split


GPM = ("GpmQueryDeviceSupport 0 1", "GpmMetricsGet:1:2 0 37.5", "GpmMetricsGet:1:5 0 0")


def mig_utilisation(node: Node) -> list[Measured]:
    devices = {device.uuid: device for device in told(node.seen[-1]).devices}
    return [devices[uuid].utilisation_ratio for uuid in (MIG0, MIG3)]


def test_M4_utilisation_of_a_mig_device_is_told_by_gpm_from_the_second_sample_on(node: Node) -> None:
    node.plays("h200-mig")
    node.driver.fails(*GPM)
    node.process.restart()
    node.until(lambda devices: any(device.utilisation_ratio.reason == Reason.FIRST_SAMPLE for device in devices))
    assert [unknown("first_sample")] * 2 == mig_utilisation(node)
    node.answers()
    assert [known(0.375), known(0)] == mig_utilisation(node)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("GpmQueryDeviceSupport 0 0", "mig_enabled"),
        ("GpmQueryDeviceSupport 0 error 13", "mig_enabled"),
        ("GpmMigSampleGet:* 0 error 4", "no_permission"),
        ("GpmMetricsGet:* 0 error 4", "no_permission"),
        ("GpmMetricsGet:* 0 error 15", "gpu_lost"),
        ("GpmMetricsGet:* 0 nan", "unreadable"),
        ("GpmMetricsGet:* 0 1e300", "implausible"),
        ("GpmMetricsGet:* 0 -1", "implausible"),
    ],
)
def test_utilisation_that_gpm_does_not_tell_is_unknown_with_the_reason(node: Node, row: str, reason: str) -> None:
    node.plays("h200-mig")
    after(node, *GPM, row)
    node.answers()
    assert [unknown(reason)] * 2 == mig_utilisation(node)


def test_remapped_rows_with_mig_on_are_unknown(node: Node) -> None:
    (first, *_) = node.tells("h200-mig")
    assert [unknown("mig_enabled")] * 2 == [
        first.health[name] for name in ("remapped_rows_uncorrectable", "row_remap_failure")
    ]


def test_a_row_remap_failure_is_not_forgotten_while_mig_hides_it(node: Node) -> None:
    node.driver.plays("h200")
    assert known(1) == after(node, "DeviceGetRemappedRows 0 0 8 0 1")[0].health["row_remap_failure"]
    by_uuid = {device.uuid: device for device in node.tells("h200-mig")}
    assert [known(1)] * 2 == [by_uuid[uuid].health["row_remap_failure"] for uuid in (MIG0, MIG3)]
    assert known(0) == by_uuid[GPU1].health["row_remap_failure"]
    assert known(0) == node.tells("h200")[0].health["row_remap_failure"]  # the driver says so itself


def test_what_still_works_with_mig_on_is_told(node: Node) -> None:
    """Of each part its memory and processes; what is of the whole board as well, with the GPU as its source."""
    node.driver.plays("h200-mig")
    held = f"DeviceGetComputeRunningProcesses* 0.0 {FOREIGN}:{1 << 30}"
    (first, *_) = after(node, held, "DeviceGetMemoryInfo_v2 0.0 16384MiB 0MiB 15356MiB 1028MiB")
    assert (True, Regime.MIG, 16_384, 1024) == (
        first.healthy,
        first.regime,
        first.memory_mib,
        first.foreign_memory_mib,
    )
    assert known(1028) == first.memory_used_mib
    assert (GPU0, None) == (first.parent, node.tells("h200")[0].parent)
    board = ("temperature_celsius", "sm_clock_mhz", "throttle_reasons", "ecc_uncorrected")
    assert [known(41), known(1980), known(4), known(0)] == [first.health[name] for name in board]
    assert {GPU0} == {first.sources[name] for name in board if name != "throttle_reasons"}
    assert unknown("mig_enabled") == first.health["power_mw"]  # of all parts together


def test_mig_devices_that_may_not_be_seen_are_not_permitted_rather_than_absent(node: Node) -> None:
    assert [GPU1] == [device.uuid for device in node.tells("no-permission")]
    assert node.counts["nvml.mig.no_permission"] >= 1


# --- who holds memory ---


def test_M8_a_list_with_pid_and_memory_swapped_is_unknown_as_a_whole(node: Node) -> None:
    node.driver.plays("h100", (0, OURS, 100), (0, FOREIGN, 100))
    swapped = f"{OURS}:{100 << 20} {100 << 20}:{FOREIGN}"
    device = after(node, f"DeviceGetComputeRunningProcesses* 0 {swapped}")[0]
    assert (None, None, "implausible") == (
        device.foreign_memory_mib,
        device.foreign_share_micro,
        device.reasons["foreign_memory_mib"],
    )
    (container,) = node.seen[-1].containers
    assert container.use is None  # nor is any of it a container's


def test_a_process_that_holds_more_than_the_gpu_has_makes_the_list_unknown(node: Node) -> None:
    device = after(node, f"DeviceGetComputeRunningProcesses* 0 {FOREIGN}:{1 << 40}")[0]
    assert "implausible" == device.reasons["foreign_memory_mib"]


def test_a_pid_that_nobody_has_makes_the_list_unknown(node: Node) -> None:
    device = node.tells("h100", (0, OURS, 100), (0, NOBODY, 100))[0]
    assert (None, "not_told_apart") == (device.foreign_memory_mib, device.reasons["foreign_memory_mib"])


@pytest.mark.parametrize("profile", ["h100", "r510", "old"])
def test_the_list_of_processes_is_asked_by_the_newest_version_that_is_there(fresh: Node, profile: str) -> None:
    device = fresh.tells(profile, (0, FOREIGN, 100), (0, OURS, 50))[0]
    assert 100 == device.foreign_memory_mib


def test_which_version_of_the_list_a_driver_has_is_remembered(fresh: Node) -> None:
    fresh.tells("old", (0, FOREIGN, 100))
    newer = f"DeviceGetComputeRunningProcesses_v[23] 0 {FOREIGN}:{200 << 20}"
    assert 100 == after(fresh, newer)[0].foreign_memory_mib


def test_memory_of_a_process_that_is_not_told_is_never_summed(node: Node) -> None:
    device = node.tells("h100", (0, FOREIGN, -1), (0, OURS, 100))[0]
    assert (None, "not_supported") == (device.foreign_memory_mib, device.reasons["foreign_memory_mib"])


@pytest.mark.parametrize("processes", [(), ((0, FOREIGN, 100),)], ids=["empty list", "pids of the machine"])
def test_in_a_pid_namespace_of_our_own_no_list_is_believed(
    nvml_driver: FakeDriver, nvml_process: NvmlProcess, processes: tuple[tuple[int, int, int], ...]
) -> None:
    device = Node(nvml_driver, nvml_process, host_pids=False).tells("h100", *processes)[0]
    assert (None, None) == (device.foreign_memory_mib, device.foreign_share_micro)
    assert {"foreign_memory_mib": "own_pidns", "foreign_share_micro": "own_pidns"} == device.reasons
    assert (True, 81_008) == (device.healthy, device.memory_mib)


@pytest.mark.parametrize("name, sees", [("pid:[4026531836]", True), ("pid:[4026532201]", False), (None, True)])
def test_whether_the_machines_pids_are_seen_is_found_out(tmp_path: Path, name: str | None, sees: bool) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    if name:
        (tmp_path / "self/ns/pid").symlink_to(name)
    assert sees is procfs.sees_machine(tmp_path)


# --- memory ---


@pytest.mark.parametrize("profile", ["gb10", "gb10-zero", "gb10-wrong"])
def test_M2_memory_of_a_known_integrated_gpu_is_the_machines(node: Node, profile: str) -> None:
    (device,) = node.tells(profile, (0, FOREIGN, 300))
    assert (True, MEMTOTAL_MIB, known(300)) == (device.healthy, device.memory_mib, device.memory_used_mib)
    assert ("nvml", "/proc/meminfo") == (device.source, device.sources["memory_mib"])


def test_memory_of_any_other_gpu_that_does_not_tell_it_is_unknown(node: Node) -> None:
    device = node.tells("no-memory")[0]
    assert (None, "not_supported") == (device.memory_mib, device.reasons["memory_mib"])
    assert unknown("not_supported") == device.memory_used_mib


def test_what_is_reserved_can_not_be_scheduled_and_is_not_used(node: Node) -> None:
    node.driver.plays("h200")
    busy = after(node, "DeviceGetMemoryInfo_v2 0 143771MiB 614MiB 110796MiB 32361MiB")[0]
    assert (143_771 - 614, known(32_361)) == (busy.memory_mib, busy.memory_used_mib)


# --- chips and cards that have less ---


@pytest.mark.parametrize("profile", ["jetson", "jetson-zero"])
def test_M6_a_jetson_that_tells_nothing_is_healthy_and_unknown_and_not_zero(
    nvml_driver: FakeDriver, nvml_process: NvmlProcess, tmp_path: Path, profile: str
) -> None:
    node = Node(nvml_driver, nvml_process, sys=tmp_path)
    (device,) = node.tells(profile)
    assert (True, "Orin (nvgpu)", MEMTOTAL_MIB) == (device.healthy, device.model, device.memory_mib)
    assert {None} == {value.value for value in device.health.values()}
    assert [None, None] == [device.utilisation_ratio.value, device.memory_used_mib.value]
    metrics = told(node.seen[-1])
    assert (5, 2) == tuple(metrics.counters[name] for name in ("probe.fields", "probe.fields_known"))


@pytest.mark.parametrize("profile", ["jetson", "jetson-zero"])
@pytest.mark.parametrize("load, ratio", [("437\n", 0.437), ("0\n", 0.0), ("1001\n", None), ("[n/a]\n", None)])
def test_a_jetsons_load_is_what_the_kernel_says(
    nvml_driver: FakeDriver, nvml_process: NvmlProcess, tmp_path: Path, profile: str, load: str, ratio: float | None
) -> None:
    file = tmp_path / "class/devfreq/17000000.gpu/device/load"
    file.parent.mkdir(parents=True)
    file.write_text(load)
    (device,) = Node(nvml_driver, nvml_process, sys=tmp_path).tells(profile)
    assert ratio == device.utilisation_ratio.value


def test_the_kernels_load_is_not_asked_of_a_card(
    nvml_driver: FakeDriver, nvml_process: NvmlProcess, tmp_path: Path
) -> None:
    file = tmp_path / "class/devfreq/17000000.gpu/device/load"
    file.parent.mkdir(parents=True)
    file.write_text("437")
    node = Node(nvml_driver, nvml_process, sys=tmp_path)
    node.plays("h100")
    assert unknown("not_supported") == after(node, "DeviceGetUtilizationRates * error 3")[0].utilisation_ratio


def test_a_geforce_has_no_ecc_and_no_remapped_rows_and_is_healthy(node: Node) -> None:
    (device,) = node.tells("geforce")
    names = ("ecc_uncorrected", "remapped_rows_uncorrectable", "row_remap_failure")
    assert (True, [unknown("not_supported")] * 3) == (device.healthy, [device.health[name] for name in names])
    assert known(0.3) == device.health["fan_ratio"]


def test_an_l40s_cannot_be_split_and_has_all_else(node: Node) -> None:
    (device, _) = node.tells("l40s")
    assert (True, 46_068 - 595, Regime.TIME_SLICED) == (device.healthy, device.memory_mib, device.regime)
    older = ["retired_pages_sbe", "retired_pages_dbe", "retired_pages_pending"]  # it remaps rows instead
    assert [*older, "fan_ratio"] == [name for name, value in device.health.items() if value.value is None]


def test_a_board_without_a_fan_has_none_rather_than_one_that_stands_still(node: Node) -> None:
    assert unknown("not_supported") == node.tells("h100")[0].health["fan_ratio"]


def test_what_the_driver_calls_deprecated_is_absent(node: Node) -> None:
    device = after(node, "DeviceGetPowerUsage 0 error 26")[0]
    assert (unknown("deprecated"), known(41)) == (device.health["power_mw"], device.health["temperature_celsius"])


@pytest.mark.parametrize("missing", ["EventReasons", "ThrottleReasons"])
def test_throttle_reasons_are_found_under_either_of_their_names(node: Node, missing: str) -> None:
    device = after(node, f"DeviceGetCurrentClocks{missing} * error 13")[0]
    assert known(4) == device.health["throttle_reasons"]


def test_throttle_reasons_of_a_driver_that_has_neither_name_are_unknown(node: Node) -> None:
    device = after(node, "DeviceGetCurrentClocks* * error 13")[0]
    assert unknown("not_in_this_driver") == device.health["throttle_reasons"]


def test_how_long_clocks_were_held_back_is_told_in_microseconds_or_why_not(node: Node) -> None:
    node.plays("h200")
    rows = ("DeviceGetViolationStatus:0 0 77 5000000000", "DeviceGetViolationStatus:1 0 77 0")
    first, second = after(node, *rows, "DeviceGetViolationStatus:? 1 error 3")
    names = ("power_throttled_us", "thermal_throttled_us")
    assert [known(5_000_000), known(0)] == [first.health[name] for name in names]
    assert [unknown("not_supported")] * 2 == [second.health[name] for name in names]


def test_persistence_mode_is_told(node: Node) -> None:
    assert [known(0), known(1)] == [
        device.health["persistence_mode"] for device in after(node, "DeviceGetPersistenceMode 0 0")
    ]


def test_one_session_is_held_over_all_cycles(fresh: Node) -> None:
    fresh.plays("h100")
    for _ in range(5):
        assert known(118_000) == after(fresh, "DeviceGetPowerUsage * session 2 1")[0].health["power_mw"]


# --- a GPU or a driver that fails ---


@pytest.mark.parametrize("profile", ["lost", "gone"])
def test_M21_a_gpu_that_fell_off_the_bus_is_ill_and_unknown_and_the_other_is_as_before(
    node: Node, profile: str
) -> None:
    node.plays("h100")
    well, lost = node.tells(profile)
    assert (True, known(0.25)) == (well.healthy, well.utilisation_ratio)
    assert (False, "gpu_lost") == (lost.healthy, lost.reason)
    assert {unknown("gpu_lost")} == {lost.utilisation_ratio, lost.memory_used_mib, *lost.health.values()}
    assert [None, None] == [lost.foreign_memory_mib, lost.foreign_share_micro]


def test_a_gpu_that_answers_unknown_errors_to_all_is_ill_and_the_other_is_as_before(node: Node) -> None:
    well, ill = after(node, "* 1 error 999", f"DeviceGetUUID 1 {GPU1}", "DeviceGetHandleByIndex_v2 1 ok")
    assert [(True, None), (False, "driver_error")] == [(well.healthy, well.reason), (ill.healthy, ill.reason)]


def test_M22_M23_a_gpu_that_was_reset_is_seen_again_by_a_new_session(fresh: Node) -> None:
    fresh.plays("h100")
    fresh.process.restart()
    fresh.driver.fails("DeviceGetMemoryInfo* 1 session 1 error 15")
    fresh.answers()
    assert [None, "gpu_lost"] == [device.fault for device in fresh.read()]
    fresh.until(lambda devices: [None, None] == [device.fault for device in devices])


@pytest.mark.parametrize(
    "profile, reason",
    [
        ("access-lost", "gpu_access_lost"),
        ("mismatch", "driver_mismatch"),
        ("not-loaded", "driver_not_loaded"),
        ("empty", "no_devices"),
    ],
)
def test_a_driver_that_gives_nothing_makes_all_unknown_with_its_reason(node: Node, profile: str, reason: str) -> None:
    node.plays("h100")
    node.process.restart()
    node.driver.plays(profile)
    node.read()
    devices = told(node.seen[0], node.seen[-1]).devices
    assert [(False, reason, 81_008, unknown(reason))] * 2 == [
        (device.healthy, device.reason, device.memory_mib, device.utilisation_ratio) for device in devices
    ]
    assert 1 == node.counts[f"nvml.{reason}"]
    assert None not in {device.stale_since_us for device in devices}


def test_a_number_of_gpus_that_cannot_be_is_a_failure(node: Node) -> None:
    node.plays("h100")
    node.driver.fails("DeviceGetCount_v2 - 4294967295")
    assert ["implausible"] * 2 == [device.fault for device in node.read()]


# --- numbers that cannot be, and names ---


def test_M14_M15_numbers_that_stand_for_none_elsewhere_are_rejected_and_counted(node: Node) -> None:
    first, second = node.tells("garbage")
    numbers = {value for name, value in second.health.items() if name != "xid"}
    assert {unknown("implausible")} == {second.utilisation_ratio, *numbers}
    assert (True, known(0.25)) == (second.healthy, first.utilisation_ratio)
    assert 1 == told(node.seen[-1]).counters["probe.rejected.utilisation_ratio"]


@pytest.mark.parametrize("sentinel", [9_223_372_036_854_775_792, 9_223_372_036_854_775_794, 2**64 - 1])
def test_memory_that_stands_for_none_is_unknown(node: Node, sentinel: int) -> None:
    device = after(node, f"DeviceGetMemoryInfo* 0 {sentinel} 0 0 {sentinel}")[0]
    assert (None, "implausible", "implausible") == (
        device.memory_mib,
        device.reasons["memory_mib"],
        device.memory_used_mib.reason,
    )


def test_M37_the_uuid_names_a_gpu_whose_index_has_changed(node: Node) -> None:
    node.plays("h100", (1, FOREIGN, 100))
    before = node.seen[-1]
    swapped = [f"DeviceGetUUID {index} {uuid}" for index, uuid in ((0, GPU1), (1, GPU0))]
    node.driver.plays("h100", (0, FOREIGN, 100))
    after(node, *swapped)
    devices = {device.uuid: device for device in told(before, node.seen[-1]).devices}
    assert [(1, 0), (0, 100)] == [(devices[uuid].index, devices[uuid].foreign_memory_mib) for uuid in (GPU0, GPU1)]


def test_M26_M28_a_name_that_is_no_text_leaves_the_rest(node: Node) -> None:
    device = after(node, "DeviceGetName 0 \udcff\udcfe")[0]
    assert (True, "unknown", 81_008, known(0.25)) == (
        device.healthy,
        device.model,
        device.memory_mib,
        device.utilisation_ratio,
    )


def calls() -> list[str]:
    """All functions that the profile of a GPU has an answer for, but those by which it is known at all."""
    named = {row.split()[0] for row in rows_of(PROFILES / "h100") if row.split()[1] != "-"}
    return sorted(named - {"DeviceGetUUID"})


@pytest.mark.parametrize("call", calls())
def test_M17_a_function_that_is_refused_leaves_all_else_of_its_gpu_and_the_other(node: Node, call: str) -> None:
    node.driver.plays("h100")
    before = [values(device) for device in after(node)]
    refused = [values(device) for device in after(node, f"{call} 1 error 3")]
    assert before[0] == refused[0]
    changed = {name for name in before[1] if before[1][name] != refused[1][name]}
    assert len(changed) <= 4  # remapped rows are four values of one function, memory is two
    assert all(value is None for name, value in refused[1].items() if name in changed)


def values(device: DeviceMetrics) -> dict[str, float | None]:
    health = {name: value.value for name, value in device.health.items()}
    return health | {
        "memory_mib": device.memory_mib,
        "utilisation_ratio": device.utilisation_ratio.value,
        "memory_used_mib": device.memory_used_mib.value,
    }


# --- reasons ---


def test_every_reason_of_the_process_that_asks_is_in_the_list() -> None:
    assert set() == set(nvml.REASONS.values()) - set(Reason)


def test_the_page_for_operators_has_every_reason() -> None:
    page = Path(__file__).parents[2].joinpath("docs/gpus.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.partition("## Reasons")[2].splitlines() if line.startswith("| `")]
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert set(Reason) == named - {"gate_down", "gate_lost"}

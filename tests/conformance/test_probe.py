"""What every probe promises, asked of the fake one and of those of this machine's cores and of GPUs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.monitor.probes import proc as procfs
from services.monitor.probes.base import FIRST_SAMPLE, Capacity, Probe, Reading
from services.monitor.probes.cpu import CoreSettings, CpuProbe, usable_cores
from services.monitor.probes.fake import DeviceFault, FakeDevices, FakeProbe, Faults
from services.monitor.probes.gpu import GpuProbe, GpuSharing
from services.monitor.probes.nvml_process import NvmlProcess
from shared.devices import core_of
from shared.messages import Regime
from tests.fake_nvml.build import FakeDriver, build_fake_nvml
from tests.gpu_node import told
from tests.monitor_folders import labels_of

DEADLINE_S = 20.0


@pytest.fixture(params=["cpu", "fake", "nvml"])
def probe(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Probe]:
    cores = CpuProbe(tmp_path, {core: CoreSettings() for core in usable_cores()})
    match request.param:
        case "cpu":
            yield cores
        case "fake":
            yield FakeProbe("n1", (FakeDevices(count=3, regime=Regime.GATED),), Capacity(64_000, 1 << 19))
        case _:
            patch = request.getfixturevalue("monkeypatch")
            for name, value in FakeDriver(build_fake_nvml(tmp_path), tmp_path / "profile").environment.items():
                patch.setenv(name, value)
            driver = NvmlProcess(DEADLINE_S, DEADLINE_S, 0.001)
            yield GpuProbe(cores, driver, GpuSharing(), host_pids=True)
            driver.restart()


def test_the_capacity_is_known_before_the_first_reading(probe: Probe) -> None:
    assert probe.capacity().cpu_milli >= 1000
    assert probe.capacity().memory_mib > 0


def test_M37_every_device_has_a_uuid_of_its_own_that_stays(probe: Probe) -> None:
    first, second = probe.read(), probe.read()
    uuids = [device.uuid for device in first.devices]
    assert len(uuids) == len(set(uuids))
    assert uuids == [device.uuid for device in second.devices]


def test_every_value_is_plausible_or_unknown_with_a_reason(probe: Probe) -> None:
    probe.read()
    metrics = told(probe.read())
    assert [] == [name for name in metrics.counters if name.startswith("probe.rejected")]
    for device in metrics.devices:
        for value in (device.utilisation_ratio, device.memory_used_mib):
            assert (value.value is None) == (value.reason is not None)


def test_memory_is_known_in_every_reading(probe: Probe) -> None:
    assert all(device.memory_mib for device in told(probe.read()).devices)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_reading_leaves_no_file_open(probe: Probe) -> None:
    probe.read()
    before = open_files()
    for _ in range(5):
        probe.read()
    assert before == open_files()


# --- the fake probe's faults, which document the real ones ---


@pytest.fixture
def control(tmp_path: Path) -> Callable[[Faults], Path]:
    def write(faults: Faults) -> Path:
        (tmp_path / "faults.json").write_text(faults.model_dump_json())
        return tmp_path / "faults.json"

    return write


def fake(control: Path, count: int = 3) -> FakeProbe:
    return FakeProbe("n1", (FakeDevices(count=count),), Capacity(64_000, 1 << 19), control)


def test_M14_M15_garbage_is_handed_over_and_rejected(control: Callable[[Faults], Path]) -> None:
    probe = fake(control(Faults(devices={1: DeviceFault(garbage=True)})))
    metrics = told(probe.read())
    assert [True, False, True] == [device.utilisation_ratio.value == 0.0 for device in metrics.devices]
    assert metrics.devices[1].memory_mib is None
    assert 5 == sum(count for name, count in metrics.counters.items() if name.startswith("probe.rejected"))


def test_M21_M22_a_device_is_lost_and_comes_back_while_the_others_stay(control: Callable[[Faults], Path]) -> None:
    probe = fake(control(Faults()))
    seen = [probe.read()]
    control(Faults(devices={0: DeviceFault(lost=True)}))
    seen.append(probe.read())
    assert [False, True, True] == [device.healthy for device in told(*seen).devices]
    control(Faults())
    seen += [probe.read() for _ in range(3)]
    assert [True, True, True] == [device.healthy for device in told(*seen).devices]


def test_M17_a_value_that_cannot_be_read_leaves_the_rest(control: Callable[[Faults], Path]) -> None:
    probe = fake(
        control(Faults(devices={2: DeviceFault(values={"utilisation_ratio": None, "memory_used_mib": "[n/a]"})}))
    )
    device = told(probe.read()).devices[2]
    assert (True, None, None, 0) == (
        device.healthy,
        device.utilisation_ratio.value,
        device.memory_used_mib.value,
        device.foreign_memory_mib,
    )


def test_an_error_is_raised_and_ends_with_its_cause(control: Callable[[Faults], Path]) -> None:
    probe = fake(control(Faults(error="driver not loaded")))
    with pytest.raises(OSError, match="driver not loaded"):
        probe.read()
    control(Faults())
    assert 3 == len(probe.read().devices)


def test_a_malformed_control_file_is_counted_and_changes_nothing(control: Callable[[Faults], Path]) -> None:
    path = control(Faults(devices={0: DeviceFault(lost=True)}))
    probe = fake(path)
    probe.read()
    path.write_text("{")
    snapshot = probe.read()
    assert (2, {"control_malformed": 1}) == (len(snapshot.devices), dict(snapshot.counts))


# --- the cpu probe on this machine ---


@pytest.fixture
def spinner() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes that keep a core busy, and ends them."""
    started: list[subprocess.Popen[bytes]] = []

    def start(core: int | None = None, **environment: str) -> subprocess.Popen[bytes]:
        pin = f"os.sched_setaffinity(0, {{{core}}})" if core is not None else "pass"
        code = f"import os\n{pin}\nprint(flush=True)\nwhile True: pass"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, env={**os.environ, **environment}
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def until(ready: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.05)


def cpu(root: Path) -> CpuProbe:
    """Asks where a process is pinned only of this test's own: tests that run beside it pin others."""
    ours = os.getpid()

    def pinned(pid: int) -> frozenset[int] | None:
        with contextlib.suppress(psutil.Error):
            return procfs.affinity(pid) if ours == psutil.Process(pid).ppid() else None
        return None

    return CpuProbe(root, {core: CoreSettings() for core in usable_cores()}, affinity=pinned)


def test_a_rate_is_unknown_at_the_first_sample_and_never_zero(tmp_path: Path) -> None:
    for device in cpu(tmp_path).read().devices:
        assert Reading(None, FIRST_SAMPLE) == device.utilisation_ratio


def test_each_usable_core_is_a_device(tmp_path: Path) -> None:
    assert usable_cores() == [core_of(device.uuid) for device in cpu(tmp_path).read().devices]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core everything is pinned to it")
def test_foreign_time_is_that_of_processes_pinned_to_the_core_alone(
    tmp_path: Path, spinner: Callable[..., subprocess.Popen[bytes]]
) -> None:
    core = usable_cores()[0]
    spinner(core)
    spinner()  # may run anywhere: it makes way
    probe = cpu(tmp_path)
    probe.read()

    def seen() -> bool:
        shares = [device.foreign_share_micro.value for device in probe.read().devices]
        return isinstance(shares[0], int) and shares[0] > 100_000 and shares[1] == 0

    until(seen)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core everything is pinned to it")
def test_a_containers_process_is_not_foreign_and_is_told_with_its_use(
    tmp_path: Path, spinner: Callable[..., subprocess.Popen[bytes]]
) -> None:
    directory = labels_of(tmp_path, "det ector", request_id="q1")
    process = spinner(usable_cores()[0], LAXITY_RING_DIR=str(directory))
    probe = cpu(tmp_path)
    probe.read()

    def seen() -> bool:
        snapshot = probe.read()
        assert snapshot.devices[0].foreign_share_micro.value == 0
        (container,) = snapshot.containers
        assert ("det ector", "q1", (process.pid,)) == (container.container, container.request_id, container.pids)
        return isinstance(container.cpu_ratio.value, float) and container.cpu_ratio.value > 0.1

    until(seen)

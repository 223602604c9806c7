"""The monitor at a glance: what it says and what it does on a timer. It listens to nothing but its own node."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from services.monitor.core import METRICS, Core, Forget, GateSaid, Limits, Wake
from services.monitor.gate_process import GateProcess
from services.monitor.numbers import METRICS as NUMBERS
from services.monitor.numbers import numbers
from services.monitor.probe_thread import ProbeThread
from services.monitor.probes.base import Capacity, Probe
from services.monitor.probes.cpu import CoreSettings, CpuProbe, usable_cores
from services.monitor.probes.fake import FakeProbe
from services.monitor.probes.gpu import GpuProbe, GpuSharing
from services.monitor.probes.nvml_process import NvmlProcess
from services.monitor.ring_loop import RingLoop
from services.monitor.rings import boot_id
from services.monitor.settings import MonitorSettings
from services.monitor.slices import Sharing, measure
from shared.clock import SystemClock
from shared.log import logger
from shared.messages import NodeMetrics, Regime, TaskBatch
from shared.service import Every, Publishes, Service, run
from shared.subjects import Subjects

SERVICE = Service(
    name="monitor",
    about="Reads the devices, containers and task rings of one node and says what it saw; one per node.",
    publishes=(
        Publishes("events.task.<node>", "event", TaskBatch, "begins, ends, overdues, aborts and losses of tasks"),
        Publishes("metrics.<node>", "metric", NodeMetrics, "heartbeat: devices, containers, counters"),
    ),
    every=(Every(METRICS, 1_000_000, "heartbeat and metrics; the period is a setting"),),
    metrics=NUMBERS,
    numbers=numbers,
)


def make_probe(settings: MonitorSettings) -> Probe:
    """The probe of this node. Blocks for half a second per core whose slices are measured."""
    if settings.probe == "fake":
        capacity = Capacity(settings.fake_cpu_milli, settings.fake_memory_mib)
        return FakeProbe(settings.node, settings.fake_devices, capacity, settings.fake_control)
    if settings.probe == "nvml":
        host = CpuProbe(settings.ring_root, {core: CoreSettings() for core in usable_cores()})
        sharing = GpuSharing(
            settings.regime,
            settings.nvml_regimes,
            settings.slice_us,
            settings.switch_us,
            settings.nvml_xid_quiet_us / 1_000_000,
        )
        return GpuProbe(host, _driver(settings), sharing, host_pids=settings.nvml_host_pids)
    return CpuProbe(settings.ring_root, {core: core_settings(settings, core) for core in usable_cores()})


def _driver(settings: MonitorSettings) -> NvmlProcess:
    """The one who asks NVIDIA's driver; nothing is started yet."""
    return NvmlProcess(
        deadline_s=settings.nvml_deadline_us / 1_000_000,
        first_deadline_s=settings.nvml_start_us / 1_000_000,
        pause_s=settings.nvml_retry_us / 1_000_000,
    )


def core_settings(settings: MonitorSettings, core: int) -> CoreSettings:
    """How a core is shared: as stated, and as measured where it is time-sliced and nothing is stated."""
    regime = settings.regimes.get(core, settings.regime)
    if regime != Regime.TIME_SLICED:
        return CoreSettings(regime)
    sharing = Sharing(settings.slice_us, settings.switch_us)
    if settings.slice_us is None and settings.measure_slices:
        sharing = measure(core)
        logger(service="monitor").info("measured", core=core, slice_us=sharing.slice_us, switch_us=sharing.switch_us)
    return CoreSettings(regime, sharing.slice_us, sharing.switch_us)


def _fake_tasks(settings: MonitorSettings) -> Callable[[int], None] | None:
    """What plays the tasks of a fake node, where that is asked for."""
    if settings.probe != "fake" or not settings.fake_tasks:
        return None
    from services.monitor.fake_tasks import FakeTasks  # not above: its numpy is 12 MiB, which real nodes need not pay

    return FakeTasks(settings.node, settings.fake_devices, settings.ring_root).advance


async def serve(settings: MonitorSettings, probe: Probe) -> None:
    """Runs until asked to stop."""
    start_id = os.urandom(8).hex()
    limits = Limits(
        batch_us=settings.batch_us,
        period_us=settings.period_us,
        stale_after_us=settings.stale_after_us,
        gate_margin_us=settings.gate_margin_us if settings.gated else None,
        kubelet=settings.kubelet_socket is not None,
    )
    core = Core(
        settings.node,
        start_id,
        boot_id().hex(),
        probe.capacity(),
        subjects=Subjects(settings.prefix),
        labels=settings.labels,
        limits=limits,
    )
    loop = RingLoop(settings, start_id, SystemClock().now_us(), _fake_tasks(settings))
    probing = ProbeThread(probe, settings.period_us, settings.probe_deadline_us)
    service = replace(SERVICE, every=tuple(replace(every, period_us=settings.period_us) for every in SERVICE.every))
    tasks = [loop.run, loop.tidy, probing.run]
    if settings.gated:
        gate = GateProcess(settings.ring_root, settings.gate_margin_us, end_overruns=settings.gate_overrun == "end")
        for told in await gate.begin():
            core.handle(GateSaid(told, SystemClock().wall_us()), 0)
        tasks.append(gate.run)
    if settings.kubelet_socket is not None:
        from services.monitor.kubelet import Kubelet  # not above: nodes without a kubelet need no HTTP/2

        tasks.append(Kubelet(settings.kubelet_socket, settings.kubelet_us).run)
    await run(service, core, settings, slow={Wake: loop.wake, Forget: loop.forget}, tasks=tasks)

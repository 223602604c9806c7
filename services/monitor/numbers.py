"""The monitor's numbers for /metrics, from what it published last: a field of the message, a name, a unit; no device.

The names ``DCGM_FI_*`` and their units are those of dcgm-exporter (VERSION below). A new field is one line here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from services.monitor.core import Core
from shared.messages import ContainerMetrics, DeviceMetrics, Measured, Message, NodeMetrics
from shared.metrics import MIB, Metric, Sample

DCGM_VERSION: Final = "4.5.3-4.8.2, with the label hostname that came after it"
"""The dcgm-exporter whose names and units these are; ``Hostname`` is how it spelled that label before."""
GPUS: Final = ("GPU-", "MIG-", "FAKE-")
"""How uuids of GPUs begin, made-up ones too: cores have no DCGM names."""

_DEVICE: Final = ("node", "uuid")
_DCGM: Final = (
    *("gpu", "UUID", "pci_bus_id", "device", "modelName"),
    *("GPU_I_PROFILE", "GPU_I_ID", "Hostname", "hostname"),
    *("container", "namespace", "pod"),
)
_CONTAINER: Final = ("node", "container", "request", "namespace", "pod")


@dataclass(frozen=True, slots=True)
class Field:
    """``field`` of the message times ``scale``, without ``less`` where that is known too; both may have dots."""

    field: str
    metric: Metric
    scale: float = 1
    less: str | None = None

    def value(self, message: Message) -> float | None:
        value = _known(message, self.field)
        less = _known(message, self.less) if self.less else 0
        return None if value is None or less is None else (value - less) * self.scale


def _own(name: str, about: str) -> Metric:
    return Metric(f"laxity_device_{name}", "gauge", about, _DEVICE)


def _dcgm(name: str, about: str, kind: Literal["counter", "gauge"] = "gauge") -> Metric:
    return Metric(f"DCGM_FI_{name}", kind, about, _DCGM)


def _errors(health: str, name: str, about: str) -> Field:
    return Field(f"health.{health}", _dcgm(f"DEV_{name}", about, "counter"))


def _throttled(by: str, cause: str) -> Metric:
    about = f"Time in which the clocks of the device were held back because {cause}."
    return Metric(f"laxity_device_{by}_throttled_seconds_total", "counter", about, _DEVICE)


def _container(name: str, about: str, kind: Literal["counter", "gauge"] = "gauge") -> Metric:
    return Metric(f"laxity_container_{name}", kind, about, _CONTAINER)


DEVICE_FIELDS: Final = (
    Field("utilisation_ratio", _own("utilisation_ratio", "Share of time in which the device was busy, 0 to 1.")),
    Field("memory_mib", _own("memory_bytes", "Memory that can be scheduled."), MIB),
    Field("memory_used_mib", _own("memory_used_bytes", "Memory in use."), MIB),
    Field("foreign_share_micro", _own("foreign_ratio", "Device time of processes of no reservation, 0 to 1."), 1e-6),
    Field("foreign_memory_mib", _own("foreign_memory_bytes", "Memory of processes of no reservation."), MIB),
)
DCGM_FIELDS: Final = (
    Field("utilisation_ratio", _dcgm("DEV_GPU_UTIL", "GPU utilization (in %)."), 100),
    Field("memory_used_mib", _dcgm("DEV_FB_USED", "Framebuffer memory used (in MiB).")),
    Field("memory_mib", _dcgm("DEV_FB_FREE", "Framebuffer memory free (in MiB)."), less="memory_used_mib"),
    Field("health.sm_clock_mhz", _dcgm("DEV_SM_CLOCK", "SM clock frequency (in MHz).")),
    Field("health.memory_clock_mhz", _dcgm("DEV_MEM_CLOCK", "Memory clock frequency (in MHz).")),
    Field("health.temperature_celsius", _dcgm("DEV_GPU_TEMP", "GPU temperature (in C).")),
    Field("health.power_mw", _dcgm("DEV_POWER_USAGE", "Power draw (in W)."), 1e-3),
    Field(
        "health.energy_mj",
        _dcgm("DEV_TOTAL_ENERGY_CONSUMPTION", "Total energy consumption since boot (in mJ).", "counter"),
    ),
    Field("health.xid", _dcgm("DEV_XID_ERRORS", "Value of the last XID error encountered.")),
    _errors("pcie_replays", "PCIE_REPLAY_COUNTER", "Total number of PCIe retries."),
    _errors("ecc_corrected", "ECC_SBE_AGG_TOTAL", "Total number of single-bit persistent ECC errors."),
    _errors("ecc_uncorrected", "ECC_DBE_AGG_TOTAL", "Total number of double-bit persistent ECC errors."),
    _errors("retired_pages_sbe", "RETIRED_SBE", "Total number of retired pages due to single-bit errors."),
    _errors("retired_pages_dbe", "RETIRED_DBE", "Total number of retired pages due to double-bit errors."),
    _errors("retired_pages_pending", "RETIRED_PENDING", "Total number of pages pending retirement."),
    _errors(
        "remapped_rows_uncorrectable",
        "UNCORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for uncorrectable errors",
    ),
    _errors("remapped_rows_correctable", "CORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for correctable errors"),
    Field("health.row_remap_failure", _dcgm("DEV_ROW_REMAP_FAILURE", "Whether remapping of rows has failed")),
)
THROTTLED_FIELDS: Final = (
    Field("health.power_throttled_us", _throttled("power", "of the power that it may draw"), 1e-6),
    Field("health.thermal_throttled_us", _throttled("thermal", "of its temperature"), 1e-6),
)
CONTAINER_FIELDS: Final = (
    Field("cpu_ratio", _container("cpu_cores", "CPU in use, in cores.")),
    Field("memory_mib", _container("memory_bytes", "Memory in use."), MIB),
    Field(
        "tasks_us",
        _container("tasks_busy_seconds_total", "Time with a task open, added up over its processes.", "counter"),
        1e-6,
    ),
    Field("use.cpu_us", _container("cpu_seconds_total", "Processor time by its control group.", "counter"), 1e-6),
    Field("use.memory_mib", _container("charged_memory_bytes", "Memory by its control group, with page cache."), MIB),
    Field("use.memory_limit_mib", _container("memory_limit_bytes", "The limit of that, where there is one."), MIB),
    Field(
        "use.throttled_periods",
        _container("throttled_periods_total", "Periods in which it was stopped at its limit of CPU.", "counter"),
    ),
)
_INFO: Final = Metric(
    "laxity_device_info", "gauge", "1, with what the device is.", (*_DEVICE, "index", "model", "regime", "group")
)
_HEALTHY: Final = Metric("laxity_device_healthy", "gauge", "1 where nothing keeps the device from promises.", _DEVICE)
_ILL: Final = Metric("laxity_device_ill", "gauge", "1 while it is ill, with the reason.", (*_DEVICE, "reason"))
_SUPPORTED: Final = Metric(
    "laxity_device_field_supported",
    "gauge",
    "1 where the field's value is known; 0 with the reason where it is not, and its series is absent.",
    (*_DEVICE, "field", "reason"),
)
_XIDS: Final = Metric(
    "laxity_device_xid_errors_total",
    "counter",
    "Errors that the driver reported of the device, by their code (XID).",
    (*_DEVICE, "xid"),
)
_XID_LAST: Final = Metric(
    "laxity_device_xid_last_timestamp_seconds", "gauge", "When it last did, since 1970.", (*_DEVICE, "xid")
)


def _held(name: str, about: str, kind: Literal["counter", "gauge"] = "gauge") -> Metric:
    return Metric(f"laxity_container_device_{name}", kind, about, (*_CONTAINER, "uuid"))


HELD_FIELDS: Final = (
    Field("memory_mib", _held("memory_bytes", "Memory of a device that the container's processes hold."), MIB),
    Field("utilisation_ratio", _held("utilisation_ratio", "Share of time in which they computed, by samples.")),
    Field("busy_us", _held("busy_seconds_total", "The same added up since it was first seen there.", "counter"), 1e-6),
    Field("busy_error_us", _held("busy_error_seconds", "By how much that may be off."), 1e-6),
)
_RECORDS: Final = Metric("laxity_monitor_task_records_total", "counter", "Task records by kind.", ("kind",))
_LOST: Final = Metric(
    "laxity_monitor_lost_records_total", "counter", "Task records overwritten in their ring before they were read."
)
_RINGS: Final = Metric("laxity_monitor_rings", "gauge", "Task rings that are read.")
_FIELDS: Final = Metric("laxity_monitor_fields", "gauge", "Fields of all devices.")
_KNOWN: Final = Metric("laxity_monitor_fields_known", "gauge", "Fields of all devices whose value is known.")
_COUNTED: Final = Metric(
    "laxity_monitor_counted_total", "counter", "What else the monitor counts, by its name in rt.metrics.", ("what",)
)
_PLAIN: Final = {
    "tasks.lost_records": _LOST,
    "rings.open": _RINGS,
    "probe.fields": _FIELDS,
    "probe.fields_known": _KNOWN,
}
METRICS: Final = (
    *(field.metric for field in (*DEVICE_FIELDS, *DCGM_FIELDS, *THROTTLED_FIELDS, *CONTAINER_FIELDS, *HELD_FIELDS)),
    *(_INFO, _HEALTHY, _ILL, _SUPPORTED, _XIDS, _XID_LAST, _RECORDS, *_PLAIN.values(), _COUNTED),
)


def numbers(core: Core) -> Iterator[Sample]:
    """Nothing before the first heartbeat."""
    told = core.told
    if told is None:
        return
    holders = _holders(told.containers)
    for device in told.devices:
        yield from _device(told.node, device, holders.get(device.uuid, ()))
    for container in told.containers:
        yield from _of_container(told.node, container)
    yield from _counted(told)


def _holders(containers: Iterable[ContainerMetrics]) -> Mapping[str, Sequence[ContainerMetrics]]:
    """By uuid, the containers whose processes hold memory of the device."""
    found: defaultdict[str, list[ContainerMetrics]] = defaultdict(list)
    for container in containers:
        for held in container.use.gpus if container.use else ():
            found[held.uuid].append(container)
    return found


def _whose(holders: Sequence[ContainerMetrics]) -> tuple[str | None, ...]:
    """Container, namespace and pod of a device that one container has; nobody's where several do, so that sums over
    devices stay true. In a pod only Kubernetes knows what it calls the container."""
    if len(holders) != 1:
        return (None, None, None)
    (holder,) = holders
    return (holder.container if holder.pod is None else None, holder.namespace, holder.pod)


def _device(node: str, device: DeviceMetrics, holders: Sequence[ContainerMetrics]) -> Iterator[Sample]:
    at = (node, device.uuid)
    yield from _INFO.of(1, *at, str(device.index), device.model, device.regime, device.group)
    yield from _HEALTHY.of(device.healthy, *at)
    if not device.healthy:
        yield from _ILL.of(1, *at, device.reason)
    for field in DEVICE_FIELDS:
        yield from field.metric.of(field.value(device), *at)
        yield from _SUPPORTED.of(_known(device, field.field) is not None, *at, field.field, _why(device, field.field))
    for name, value in device.health.items():
        yield from _SUPPORTED.of(value.value is not None, *at, name, value.reason)
    yield from _told(THROTTLED_FIELDS, device, at)
    for seen in device.xids:
        yield from _XIDS.of(seen.count, *at, str(seen.xid))
        yield from _XID_LAST.of(seen.at_us / 1_000_000, *at, str(seen.xid))
    if device.uuid.startswith(GPUS):
        index = str(device.index)
        instance = None if device.gpu_instance is None else str(device.gpu_instance)
        gpu = (index, device.uuid, device.pci_bus_id, f"nvidia{index}", device.model)
        yield from _told(DCGM_FIELDS, device, (*gpu, device.mig_profile, instance, node, node, *_whose(holders)))


def _of_container(node: str, container: ContainerMetrics) -> Iterator[Sample]:
    of = (node, container.container, container.request_id, container.namespace, container.pod)
    yield from _told(CONTAINER_FIELDS, container, of)
    for held in container.use.gpus if container.use else ():
        yield from _told(HELD_FIELDS, held, (*of, held.uuid))


def _told(fields: Iterable[Field], message: Message, labels: tuple[str | None, ...]) -> Iterator[Sample]:
    for field in fields:
        yield from field.metric.of(field.value(message), *labels)


def _counted(told: NodeMetrics) -> Iterator[Sample]:
    for name, count in told.counters.items():
        if (metric := _PLAIN.get(name)) is not None:
            yield from metric.of(count)
        elif name.startswith("tasks."):
            yield from _RECORDS.of(count, name.removeprefix("tasks."))
        else:
            yield from _COUNTED.of(count, name)


def _known(message: Message, field: str) -> float | None:
    found = _at(message, field)
    return found.value if isinstance(found, Measured) else found


def _why(device: DeviceMetrics, field: str) -> str | None:
    found = _at(device, field)
    return found.reason if isinstance(found, Measured) else device.reasons.get(field)


def _at(message: Message, field: str) -> Measured | float | None:
    """None where something on the way is not there."""
    found: Any = message
    for name in field.split("."):
        found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
    return cast("Measured | float | None", found)

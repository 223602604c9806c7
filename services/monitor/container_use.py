"""Checks what a probe says of a container's use and puts it into the words of the message; nothing is read here."""

from __future__ import annotations

from collections import Counter
from typing import Final

from services.monitor.devices import MAX_MIB, checked
from services.monitor.probes.base import ContainerUseReading, GpuTimeReading, Reading
from shared.messages import ContainerUse, GpuUse

_MAX_COUNT: Final = float(1 << 53)
"""More is no count that a message could carry exactly: 285 years of processor time in microseconds."""


def use_of(reading: ContainerUseReading | None, counts: Counter[str]) -> ContainerUse | None:
    """What can be is told, anything else is None with its reason, and counted."""
    if reading is None:
        return None
    return ContainerUse(
        runtime=reading.runtime,
        runtime_id=reading.runtime_id,
        pod_uid=reading.pod_uid,
        cpu_us=checked("cpu_us", reading.cpu_us, counts, _MAX_COUNT),
        memory_mib=checked("memory_mib", reading.memory_mib, counts, MAX_MIB),
        memory_limit_mib=checked("memory_limit_mib", reading.memory_limit_mib, counts, MAX_MIB),
        throttled_periods=checked("throttled_periods", reading.throttled_periods, counts, _MAX_COUNT),
        gpus=tuple(_gpu(uuid, held, reading.gpu_times.get(uuid), counts) for uuid, held in reading.gpus.items()),
    )


def _gpu(uuid: str, held: Reading, time: GpuTimeReading | None, counts: Counter[str]) -> GpuUse:
    memory_mib = checked("memory_mib", held, counts)
    if time is None:
        return GpuUse(uuid=uuid, memory_mib=memory_mib)
    return GpuUse(
        uuid=uuid,
        memory_mib=memory_mib,
        utilisation_ratio=checked("utilisation_ratio", time.ratio, counts),
        busy_us=checked("busy_us", time.busy_us, counts, _MAX_COUNT),
        busy_error_us=checked("busy_error_us", time.error_us, counts, _MAX_COUNT),
    )

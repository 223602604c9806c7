"""The program that asks NVIDIA's driver, in a process of its own; what the answers mean is decided elsewhere.

``python nvml.py PARENT``: for each line on stdin, which says what GPUs are not to be asked, lines of JSON on stdout:
two for each GPU, before it is asked and after, and one for the end. A driver may hang for ever or bring its process
down: so the monitor never loads it itself, and knows from these lines in which GPU it was. Nothing of ours is imported:
this starts again and again while a driver is ill. One value that the driver refuses is a reason in its place and leaves
the others as they are.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypedDict

import pynvml

REASONS: Final = {
    pynvml.NVML_ERROR_UNINITIALIZED: "not_initialized",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "not_supported",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not_supported",
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
    pynvml.NVML_ERROR_NOT_FOUND: "not_found",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "insufficient_power",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "driver_not_loaded",
    pynvml.NVML_ERROR_TIMEOUT: "driver_timeout",
    pynvml.NVML_ERROR_IRQ_ISSUE: "irq_issue",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no_driver",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "not_in_this_driver",
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: "corrupted_inforom",
    pynvml.NVML_ERROR_GPU_IS_LOST: "gpu_lost",
    pynvml.NVML_ERROR_RESET_REQUIRED: "reset_required",
    pynvml.NVML_ERROR_OPERATING_SYSTEM: "gpu_access_lost",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver_mismatch",
    pynvml.NVML_ERROR_MEMORY: "out_of_memory",
    pynvml.NVML_ERROR_NO_DATA: "no_data",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "out_of_memory",
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "not_in_this_driver",
    pynvml.NVML_ERROR_DEPRECATED: "deprecated",
    pynvml.NVML_ERROR_NOT_READY: "not_ready",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "no_devices",
}
"""Codes of NVML in our words (reasons.py); any other is ``driver_error``."""

NOT_AVAILABLE: Final = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
REINIT_AFTER: Final = 30
"""Cycles with a lost GPU after which we begin anew: one that was reset is seen again only then (case M22)."""
MOST_DEVICES: Final = 256
"""More than a machine has, or a GPU has parts: no number of them."""


TOPOLOGY_EVERY: Final = 60
"""Cycles: what is linked with what hardly ever changes, and takes many questions."""


class Asked(TypedDict):
    """What the driver said: a value, or the reason why there is none."""

    value: Any
    reason: str | None


def main() -> None:
    """Answer until stdin ends, or until the driver as a whole fails: a new process may find it well again."""
    _die_with(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a driver prints is no answer
    known: dict[int, str] = {}
    lost_cycles = 0

    def say(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    for cycle, line in enumerate(sys.stdin):
        question = json.loads(line)
        failed = None if pynvml.nvmlLib and lost_cycles < REINIT_AFTER else _init()
        found: list[dict[str, Any]] = []
        count = 0
        if not failed:
            try:
                count = _count()
                for index in _order(count, question):
                    say(asking=index)
                    found.append(_gpu(index, known))
                    say(gpu=found[-1])
                if cycle % TOPOLOGY_EVERY == 0:
                    for gpu in found:
                        say(gpu=_placed(gpu, question["skip"]))
            except pynvml.NVMLError as error:
                failed = _reason(error)
            except OverflowError:
                failed = "implausible"
        lost_cycles = (lost_cycles % REINIT_AFTER) + 1 if any(map(_lost, found)) else 0
        say(done=True, failed=failed, count=count)
        if failed:
            return


def _init() -> str | None:
    """Begin with the driver, or begin anew. Where it may not open the device files it says *unknown*."""
    try:
        if pynvml.nvmlLib:
            EVENTS.clear()
            ASKED.clear()
            GPM.clear()
            pynvml.nvmlShutdown()
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return "gpu_access_lost" if error.value == pynvml.NVML_ERROR_UNKNOWN else _reason(error)
    return None


def _count() -> int:
    """How many GPUs there are. Raises NVMLError where there is none, OverflowError where it is no number of GPUs."""
    count: int = pynvml.nvmlDeviceGetCount()
    if count > MOST_DEVICES:
        raise OverflowError
    if count == 0:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_NOT_FOUND)  # their files are not here
    return count


def _order(count: int, question: dict[str, list[int]]) -> list[int]:
    """The GPUs to ask, by index; those that did not answer before come last."""
    return sorted(set(range(count)) - set(question["skip"]), key=lambda index: (index in question["last"], index))


def _lost(gpu: dict[str, Any]) -> bool:
    return any(gpu[name]["reason"] in ("gpu_lost", "reset_required") for name in ("uuid", "memory") if name in gpu)


def _gpu(index: int, known: dict[int, str]) -> dict[str, Any]:
    """One GPU. ``known``: uuids by index, for one that does not even tell that any more."""
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle["reason"]:
        lost = {"value": known.get(index), "reason": handle["reason"]}
        return {"index": index, "uuid": lost, "xids": _ask(_xids, lost["value"], None)}
    gpu = _device(index, handle["value"])
    if gpu["uuid"]["value"]:
        known[index] = gpu["uuid"]["value"]
    gpu["xids"] = _ask(_xids, known.get(index), handle["value"])
    gpu["samples"] = _ask(_samples, known.get(index, ""), handle["value"])
    gpu["pci_bus_id"] = _ask(lambda: pynvml.nvmlDeviceGetPciInfo(handle["value"]).busId)
    mode = _ask(pynvml.nvmlDeviceGetMigMode, handle["value"])
    if mode["value"] and mode["value"][0]:
        gpu["instances"] = _instances(index, handle["value"])
    else:
        gpu["utilisation"] = _ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle["value"]).gpu)
    gpu["compute_mode"] = _ask(pynvml.nvmlDeviceGetComputeMode, handle["value"])
    return gpu


def _instances(index: int, parent: Any) -> Asked:
    """The MIG devices of a GPU; a slot without one is left out."""
    count = _ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, parent)
    if count["reason"]:
        return count
    if count["value"] > MOST_DEVICES:
        return {"value": None, "reason": "implausible"}
    handles = [_ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, slot) for slot in range(count["value"])]
    refused = [handle for handle in handles if handle["reason"] not in (None, "not_found")]
    found = [_instance(index, parent, handle["value"]) for handle in handles if handle["reason"] is None]
    return {"value": found, "reason": refused[0]["reason"] if refused else None}


def _instance(index: int, parent: Any, handle: Any) -> dict[str, Any]:
    found = {**_device(index, handle), "instance": _ask(pynvml.nvmlDeviceGetGpuInstanceId, handle)}
    uuid, instance = found["uuid"]["value"], found["instance"]["value"]
    if uuid is not None and instance is not None:
        found["utilisation"] = _ask(_gpm, parent, uuid, instance)
    return found


def _placed(gpu: dict[str, Any], skip: list[int]) -> dict[str, Any]:
    """With what it is linked to."""
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, gpu["index"])
    if handle["reason"]:
        return gpu
    asked = {"links": _ask(_links, handle["value"]), "levels": _ask(_levels, gpu["index"], handle["value"], skip)}
    return gpu | asked


def _device(index: int, handle: Any) -> dict[str, Any]:
    """What can be asked of a GPU and of a MIG device alike."""
    return {
        "index": index,
        "uuid": _ask(pynvml.nvmlDeviceGetUUID, handle),
        "name": _ask(pynvml.nvmlDeviceGetName, handle),
        "memory": _ask(_memory, handle),
        "processes": _ask(_processes, handle),
        "health": {name: _ask(call, handle) for name, call in HEALTH.items()},
    }


def _throttle_reasons(handle: Any) -> int:
    """The call has two names, and a driver has one of them or both."""
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _retired(handle: Any, cause: int) -> int:
    """How many; the binding would make room for as many as a driver says, whatever it says."""
    call, count = getattr(pynvml.nvmlLib, "nvmlDeviceGetRetiredPages", None), ctypes.c_uint(0)
    code = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND if call is None else call(handle, cause, ctypes.byref(count), None)
    if code not in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_INSUFFICIENT_SIZE):
        raise pynvml.NVMLError(code)
    return count.value


def _throttled_us(handle: Any, policy: int) -> int:
    """How long in all its clocks were held back by a policy; the driver tells it in nanoseconds."""
    return int(pynvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime) // 1_000


HEALTH: Final[dict[str, Callable[[Any], Any]]] = {
    "temperature_celsius": lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    "power_mw": pynvml.nvmlDeviceGetPowerUsage,
    "energy_mj": pynvml.nvmlDeviceGetTotalEnergyConsumption,
    "sm_clock_mhz": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    "sm_clock_max_mhz": lambda handle: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
    "throttle_reasons": _throttle_reasons,
    "power_throttled_us": lambda handle: _throttled_us(handle, pynvml.NVML_PERF_POLICY_POWER),
    "thermal_throttled_us": lambda handle: _throttled_us(handle, pynvml.NVML_PERF_POLICY_THERMAL),
    "ecc_corrected": lambda handle: pynvml.nvmlDeviceGetTotalEccErrors(
        handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_AGGREGATE_ECC
    ),
    "ecc_uncorrected": lambda handle: pynvml.nvmlDeviceGetTotalEccErrors(
        handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC
    ),
    "remapped_rows_correctable": lambda handle: pynvml.nvmlDeviceGetRemappedRows(handle)[0],
    "remapped_rows_uncorrectable": lambda handle: pynvml.nvmlDeviceGetRemappedRows(handle)[1],
    "row_remap_pending": lambda handle: pynvml.nvmlDeviceGetRemappedRows(handle)[2],
    "row_remap_failure": lambda handle: pynvml.nvmlDeviceGetRemappedRows(handle)[3],
    "retired_pages_sbe": lambda handle: _retired(
        handle, pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS
    ),
    "retired_pages_dbe": lambda handle: _retired(handle, pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR),
    "retired_pages_pending": pynvml.nvmlDeviceGetRetiredPagesPendingStatus,
    "pcie_replays": pynvml.nvmlDeviceGetPcieReplayCounter,
    "fan_ratio": lambda handle: pynvml.nvmlDeviceGetFanSpeed(handle) / 100,
    "persistence_mode": pynvml.nvmlDeviceGetPersistenceMode,
}
"""Each asked on its own: one that is refused leaves the others. Names as in docs/gpus.md."""


def _links(handle: Any) -> list[tuple[int, str]]:
    """Type and PCI bus id of what is at the other end of each NVLink that is up."""
    found: list[tuple[int, str]] = []
    refused: list[pynvml.NVMLError] = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link):
                kind = _ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)["value"]
                bus = _ask(lambda link=link: pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)["value"]
                found.append((pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN if kind is None else kind, bus or ""))
        except pynvml.NVMLError as error:
            refused.append(error)  # beyond those that it has
    if len(refused) == pynvml.NVML_NVLINK_MAX_LINKS:
        raise refused[0]
    return found


def _levels(index: int, handle: Any, skip: list[int]) -> list[tuple[int, int]]:
    """To each GPU of a higher index; one that does not answer is left out."""

    def level(other: int) -> int:
        return int(pynvml.nvmlDeviceGetTopologyCommonAncestor(handle, pynvml.nvmlDeviceGetHandleByIndex(other)))

    others = [other for other in range(index + 1, pynvml.nvmlDeviceGetCount()) if other not in skip]
    asked = {other: _ask(level, other) for other in others}
    if asked and all(each["reason"] for each in asked.values()):
        level(others[0])  # raises why
    return [(other, each["value"]) for other, each in asked.items() if each["reason"] is None]


def _xids(uuid: str | None, handle: Any) -> list[tuple[int, int | None, int]]:
    """Code, GPU instance and wall-clock time in us of each XID since the last question; the first one finds none.

    Each GPU has a set of events of its own: one that is lost may not silence the others. ``handle`` is None of one that
    cannot be asked any more; what it said before can.
    """
    if uuid is None or (uuid not in EVENTS and handle is None):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    found: list[tuple[int, int | None, int]] = []
    try:
        events = EVENTS[uuid] if uuid in EVENTS else EVENTS.setdefault(uuid, _listen(handle))
        while len(found) < MOST_EVENTS:
            event = pynvml.nvmlEventSetWait_v2(events, 0)
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                instance = None if event.gpuInstanceId == NO_INSTANCE else event.gpuInstanceId
                found.append((event.eventData, instance, time.time_ns() // 1000))
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_TIMEOUT:
            EVENTS.pop(uuid, None)  # asked for anew next time
            if not found:
                raise
    return found


def _listen(handle: Any) -> Any:
    if not pynvml.nvmlDeviceGetSupportedEventTypes(handle) & pynvml.nvmlEventTypeXidCriticalError:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    events = pynvml.nvmlEventSetCreate()
    try:
        pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    except pynvml.NVMLError:
        pynvml.nvmlEventSetFree(events)
        raise
    return events


EVENTS: Final[dict[str, Any]] = {}
"""The set of events of each GPU, by uuid."""
MOST_EVENTS: Final = 256
"""Taken of a GPU in one cycle; the rest waits in the driver."""
NO_INSTANCE: Final = 0xFFFFFFFF
"""NVML's number for the whole GPU."""


def _samples(uuid: str, handle: Any) -> dict[str, Any]:
    """Pid and percent of each process that computed since the question before, and how long that is; first nothing."""
    now_s, now_us = time.monotonic(), time.time_ns() // 1000
    asked_s, seen_us = ASKED.get(uuid, (now_s, now_us))
    seen_us = min(seen_us, now_us)  # the wall clock may have been set
    found: list[Any] = []
    try:
        found = pynvml.nvmlDeviceGetProcessUtilization(handle, seen_us)
    except pynvml.NVMLError as error:
        if error.value not in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS):  # nothing new
            raise
    newer = [each for each in found if each.pid and seen_us < each.timeStamp <= now_us + 1_000_000]
    ASKED[uuid] = now_s, max((each.timeStamp for each in newer), default=seen_us)
    return {"window_us": int((now_s - asked_s) * 1_000_000), "samples": [(each.pid, each.smUtil) for each in newer]}


ASKED: Final[dict[str, tuple[float, int]]] = {}
"""Of each GPU when its samples were asked for, and the time of the newest that it had: it has old ones for long."""


def _gpm(parent: Any, uuid: str, instance: int) -> float | None:
    """Percent of the time since the question before in which anything computed on a GPU instance; first none is known.

    The only way to ask it of a part of a GPU, and only of Hopper and later.
    """
    if not pynvml.nvmlGpmQueryDeviceSupport(parent).isSupportedDevice:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    now, before = pynvml.nvmlGpmSampleAlloc(), GPM.pop(uuid, None)
    try:
        pynvml.nvmlGpmMigSampleGet(parent, instance, now)
        GPM[uuid] = now
        return None if before is None else _gpm_between(before, now)
    finally:
        for sample in (before, None if uuid in GPM else now):
            if sample is not None:
                pynvml.nvmlGpmSampleFree(sample)


def _gpm_between(before: Any, now: Any) -> float:
    asked = pynvml.c_nvmlGpmMetricsGet_t(
        version=pynvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=1, sample1=before, sample2=now
    )
    asked.metrics[0].metricId = pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL
    (metric, *_) = pynvml.nvmlGpmMetricsGet(asked).metrics
    if metric.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(metric.nvmlReturn)
    if not math.isfinite(metric.value):
        raise ArithmeticError
    return float(metric.value)


GPM: Final[dict[str, Any]] = {}
"""The last sample of each MIG device's GPU instance, by the device's uuid: what is told is between two of them."""


def _memory(handle: Any) -> dict[str, int | None]:
    """In bytes. The first version counts what is reserved as used, and does not tell it: drivers before R510."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        reserved = int(memory.reserved)
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        memory, reserved = pynvml.nvmlDeviceGetMemoryInfo(handle), None
    return {"total": int(memory.total), "used": int(memory.used), "reserved": reserved}


def _processes(handle: Any) -> list[tuple[int, int | None]]:
    """Pid and bytes of each process with a context, computing or drawing; None where its memory is not told."""
    found: dict[int, int | None] = {}
    for kind in LISTS:
        try:
            listed = _listed(kind, handle)
        except pynvml.NVMLError as error:
            if kind == "Compute" or error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                raise
            continue  # cards that draw nothing need not have this list
        found |= {process.pid: _told(process.usedGpuMemory) for process in listed if process.pid not in found}
    return list(found.items())


def _told(held: int | None) -> int | None:
    """What a process holds; NVML's number for *not available* is none."""
    return None if held == NOT_AVAILABLE else held


def _listed(kind: str, handle: Any) -> list[Any]:
    """The newest list that this driver has, which is remembered; each version has its own layout."""
    versions = LISTS[kind]
    while True:
        try:
            return list(versions[0](handle))
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND or len(versions) == 1:
                raise
            versions.pop(0)


class _ProcessV1(ctypes.Structure):
    """An entry of the list of drivers before R510, which the binding does not read any more."""

    _fields_ = (("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong))


def _first_version(name: str, handle: Any) -> list[Any]:
    call = getattr(pynvml.nvmlLib, name, None)
    if call is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    room = ctypes.c_uint(0)
    entries = (_ProcessV1 * 0)()
    code = call(handle, ctypes.byref(room), None)
    if code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
        room.value = room.value * 2 + 5  # others may start meanwhile
        entries = (_ProcessV1 * room.value)()
        code = call(handle, ctypes.byref(room), entries)
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    return list(entries[: room.value])


LISTS: Final[dict[str, list[Callable[[Any], Any]]]] = {
    kind: [
        getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses_v3"),
        getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses_v2"),
        functools.partial(_first_version, f"nvmlDeviceGet{kind}RunningProcesses"),
    ]
    for kind in ("Compute", "Graphics")
}
"""Versions of the list of processes, the newest first; those that this driver does not have are taken off."""


def _ask(call: Callable[..., Any], *arguments: Any) -> Asked:
    try:
        return {"value": call(*arguments), "reason": None}
    except pynvml.NVMLError as error:
        return {"value": None, "reason": _reason(error)}
    except (ValueError, ArithmeticError, LookupError, MemoryError):  # text that is none, lists that cannot be
        return {"value": None, "reason": "unreadable"}


def _reason(error: Any) -> str:
    return REASONS.get(error.value, "driver_error")


def _die_with(monitor: int) -> None:
    """One that hangs in a driver does not notice that stdin has ended. 1 is PR_SET_PDEATHSIG."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != monitor:  # it was gone before we had asked for that
        sys.exit()


if __name__ == "__main__":
    main()

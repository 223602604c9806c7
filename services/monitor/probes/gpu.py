"""A probe whose devices are NVIDIA's GPUs and MIG devices: what the driver's answers mean, not how it is asked."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from services.monitor.probes import proc as procfs
from services.monitor.probes.base import (
    FIRST_SAMPLE,
    IMPLAUSIBLE,
    MIG_ENABLED,
    NOT_SUPPORTED,
    NOT_TOLD_APART,
    UNIFIED_MEMORY,
    UNREADABLE,
    Capacity,
    DeviceReading,
    Probe,
    Reading,
    Snapshot,
)
from services.monitor.probes.cards import Cards
from services.monitor.probes.gpu_time import GpuTimes
from services.monitor.probes.holders import with_gpus
from services.monitor.probes.nvml_process import (
    Answer,
    Asked,
    AskedMemory,
    AskedProcesses,
    AskedSamples,
    NvmlProcess,
    RawDevice,
    RawGpu,
)
from services.monitor.probes.reasons import Reason
from shared.log import Logger, logger
from shared.messages import Regime

HIDDEN_MIB: Final = 256
"""More memory than this in use and held by no process that the driver lists is somebody's whom we cannot see."""
HIDDEN_WITH_RESERVED_MIB: Final = 2_048
"""The same where the driver counts what it reserves as used, and does not tell how much that is."""
MAX_PID: Final = 1 << 22
NVML: Final = "nvml"
MEMINFO: Final = "/proc/meminfo"
LOAD: Final = "/sys/class/devfreq/*/device/load"
"""Where a value comes from."""
_ILL: Final = frozenset({Reason.GPU_LOST, Reason.RESET_REQUIRED})
"""Reasons that concern the whole device, whatever was asked."""
_ILL_WITHOUT_MEMORY: Final = frozenset({Reason.DRIVER_ERROR, Reason.DRIVER_TIMEOUT})
"""The same only where not even the memory is told: a card that fell off the bus may answer this (NVML: unknown)."""
_INTEGRATED: Final = re.compile(r"\b(GB10|Orin|Thor|Xavier|Tegra)\b", re.IGNORECASE)
"""Chips whose memory is the machine's. By model, since the same chip answers now this, now that (case M2)."""
_TEGRA: Final = re.compile(r"\b(Orin|Thor|Xavier|Tegra)\b", re.IGNORECASE)
"""Those whose driver supports next to nothing, and says so, or says success and zero (case M6)."""
_OF_THE_BOARD: Final = frozenset(
    {
        "temperature_celsius",
        "sm_clock_mhz",
        "sm_clock_max_mhz",
        "memory_clock_mhz",
        "throttle_reasons",
        "power_throttled_us",
        "thermal_throttled_us",
        "ecc_corrected",
        "ecc_uncorrected",
        "remapped_rows_correctable",
        "remapped_rows_uncorrectable",
        "row_remap_pending",
        "row_remap_failure",
        "retired_pages_sbe",
        "retired_pages_dbe",
        "retired_pages_pending",
        "pcie_replays",
        "fan_ratio",
        "persistence_mode",
    }
)
"""What is as true of a MIG device as of its GPU. Power is not: the devices of one GPU would add up to a multiple."""
_WITHOUT_GPM: Final = frozenset({Reason.NOT_SUPPORTED, Reason.NOT_IN_THIS_DRIVER})
_EXCLUSIVE_THREAD, _PROHIBITED, _EXCLUSIVE_PROCESS = 1, 2, 3  # NVML's compute modes


@dataclass(frozen=True, slots=True)
class GpuSharing:
    """How GPUs are shared: ``regime``, or for single ones ``regimes`` by uuid; MIG devices always as MIG.

    ``xid_quiet_s``: how long after the last fatal error none of their promises is believed.
    """

    regime: Regime = Regime.TIME_SLICED
    regimes: Mapping[str, Regime] = field(default_factory=dict)
    slice_us: int | None = None
    switch_us: int | None = None
    xid_quiet_s: float = 600


class GpuProbe:
    """GPUs from the driver, all else from ``host``, whose own devices are left out.

    A driver that gives nothing at all leaves the devices that were seen before ill with its reason, and the rest of
    the node as it is. Needs to see the machine's processes, since the driver speaks of pids of the machine:
    ``host_pids`` says whether it does, None that this is to be found out.
    """

    def __init__(
        self,
        host: Probe,
        driver: NvmlProcess,
        sharing: GpuSharing,
        *,
        host_pids: bool | None = None,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        log: Logger | None = None,
    ) -> None:
        self._host, self._driver, self._sharing, self._proc = host, driver, sharing, proc
        self._sys = sys
        self._host_pids = procfs.sees_machine(proc) if host_pids is None else host_pids
        self._max_pid = procfs.max_pid(proc) or MAX_PID
        self._log = log or logger(service="monitor")
        self._told: dict[str, DeviceReading] = {}
        self._holders: dict[str, Mapping[int, int | None] | str] = {}
        self._chips: dict[str, str] = {}
        self._remap_failed: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._times = GpuTimes(self._counts)
        self._cards = Cards(sharing.xid_quiet_s, self._counts, self._log)
        self._state: str | None = ""

    def capacity(self) -> Capacity:
        return self._host.capacity()

    def read(self) -> Snapshot:
        host = self._host.read()
        answer = self._driver.ask()
        if answer.pending and not answer.gpus:
            return replace(host, devices=tuple(self._ageing(())), counts={**host.counts, **self._counts})
        failed = answer.failed
        now_s = time.monotonic()
        self._cards.take(answer.gpus, now_s)
        found = [self._ill(uuid, failed) for uuid in self._told] if failed else list(self._devices(answer, host))
        found = [self._cards.told(reading, failed, now_s) for reading in found]
        self._note(failed, len(found))
        self._told |= {reading.uuid: reading for reading in found}
        if answer.pending:
            found += self._ageing([reading.uuid for reading in found])
        if failed:
            self._times.failed(failed, now_s)
        else:
            self._times.take(_samples(answer), self._holders, host.containers, now_s)
        containers = with_gpus(host.containers, {} if failed else self._holders, self._times)
        return replace(host, devices=tuple(found), containers=containers, counts={**host.counts, **self._counts})

    def _ageing(self, told: Collection[str]) -> list[DeviceReading]:
        """The others, of which there is nothing new."""
        return [replace(reading, read=False) for uuid, reading in self._told.items() if uuid not in told]

    def _note(self, failed: str | None, devices: int) -> None:
        """Count what is wrong in each cycle, and log it once."""
        if failed:
            self._counts[f"nvml.{failed}"] += 1
        if failed != self._state:
            self._state = failed
            if failed:
                self._log.warning("no GPU can be seen", reason=failed)
            else:
                self._log.info("GPUs are seen", devices=devices)

    def _devices(self, answer: Answer, host: Snapshot) -> Iterator[DeviceReading]:
        ours = frozenset(pid for container in host.containers for pid in container.pids)
        self._holders = {}
        for gpu in answer.gpus:
            uuid = gpu.uuid.value
            if gpu.uuid.reason or not isinstance(uuid, str) or not uuid:
                self._counts[f"nvml.device.{gpu.uuid.reason or UNREADABLE}"] += 1
                if uuid in self._told:
                    yield self._ill(uuid, gpu.uuid.reason or UNREADABLE)
            else:
                found = [self._device(gpu, ours, host)] if gpu.instances is None else self._split(gpu, ours, host)
                yield from (replace(device, age_us=answer.age_us) for device in found)

    def _split(self, gpu: RawGpu, ours: frozenset[int], host: Snapshot) -> Iterator[DeviceReading]:
        """The MIG devices instead of the GPU; a GPU that was told before it was split is no device any more."""
        assert gpu.instances is not None
        if gpu.instances.reason:
            self._counts[f"nvml.mig.{gpu.instances.reason}"] += 1
        if gpu.uuid.value in self._told:
            yield self._ill(gpu.uuid.value, MIG_ENABLED)
        for instance in gpu.instances.value or ():
            if isinstance(instance.uuid.value, str) and instance.uuid.value:
                yield self._of_board(gpu, self._device(instance, ours, host))
            else:
                self._counts[f"nvml.mig.{instance.uuid.reason or UNREADABLE}"] += 1

    def _of_board(self, gpu: RawGpu, device: DeviceReading) -> DeviceReading:
        """A MIG device with what the driver tells of its GPU only."""
        board = {name: reading for name, reading in self._health(gpu).items() if name in _OF_THE_BOARD}
        known = {name: reading for name, reading in board.items() if reading.value is not None}
        known = {name: reading for name, reading in known.items() if device.health[name].value is None}
        sources = dict.fromkeys(known, str(gpu.uuid.value))
        return replace(device, health={**device.health, **known}, sources={**device.sources, **sources})

    def _ill(self, uuid: str, reason: str) -> DeviceReading:
        """A device of which nothing is known now but that it was there, and how much memory it has."""
        unknown = Reading(None, reason)
        return replace(
            self._told[uuid],
            utilisation_ratio=unknown,
            memory_used_mib=unknown,
            foreign_share_micro=unknown,
            foreign_memory_mib=unknown,
            health=dict.fromkeys(self._told[uuid].health, unknown),
            sources={},
            fault=reason,
            read=False,
        )

    def _device(self, raw: RawDevice, ours: frozenset[int], host: Snapshot) -> DeviceReading:
        chip = self._chip(raw)
        raw = _without_zeros(raw) if _TEGRA.search(chip) else raw
        processes = self._processes(raw)
        memory, used = self._memory(raw, chip, processes)
        fault = _fault(raw)
        if fault and memory.value is None and raw.uuid.value in self._told:
            memory = self._told[raw.uuid.value].memory_mib  # a fact that stays
        utilisation, sources = self._utilisation(raw, chip)
        unified = bool(chip) and fault is None and memory.reason is None
        if unified:
            sources |= {"memory_mib": MEMINFO, "foreign_memory_mib": MEMINFO}
        elif isinstance(processes, dict) and _hidden(raw, processes, used):
            processes = NOT_TOLD_APART
        self._holders[raw.uuid.value] = processes
        regime = self._regime(raw)
        time_sliced = regime is Regime.TIME_SLICED
        return DeviceReading(
            uuid=raw.uuid.value,
            index=raw.index,
            model=str(raw.name.value or "unknown"),
            regime=regime,
            slice_us=self._sharing.slice_us if time_sliced else None,
            switch_us=self._sharing.switch_us if time_sliced else None,
            memory_mib=memory,
            utilisation_ratio=utilisation,
            memory_used_mib=used,
            foreign_share_micro=_foreign_share(processes, ours, utilisation),
            foreign_memory_mib=host.foreign_memory_mib if unified else _foreign_memory(processes, ours),
            fault=fault,
            health=self._health(raw),
            source=NVML,
            sources=sources,
        )

    def _chip(self, raw: RawDevice) -> str:
        """The model of a chip whose memory is the machine's, else nothing; a name that is garbled later is no news."""
        if isinstance(raw.name.value, str) and _INTEGRATED.search(raw.name.value):
            self._chips[raw.uuid.value] = raw.name.value
        return self._chips.get(raw.uuid.value, "")

    def _memory(self, raw: RawDevice, chip: str, processes: Mapping[int, int | None] | str) -> tuple[Reading, Reading]:
        """What can be scheduled, which is what the driver does not reserve, and what is used; in MiB."""
        memory, reason = raw.memory.value, raw.memory.reason
        if chip and reason in (None, NOT_SUPPORTED):
            total_mib = procfs.memory_mib(self._proc)["MemTotal"]
            return Reading(total_mib, None if total_mib is not None else UNREADABLE), _used_by(processes)
        if memory is None:
            return Reading(None, reason or UNREADABLE), Reading(None, reason or UNREADABLE)
        free_mib = (memory.total - (memory.reserved or 0)) >> 20
        if free_mib < 1:
            self._counts["nvml.memory.implausible"] += 1
            return Reading(None, IMPLAUSIBLE), Reading(None, IMPLAUSIBLE)
        return Reading(free_mib), Reading(_mib(memory.used))

    def _utilisation(self, raw: RawDevice, chip: str) -> tuple[Reading, dict[str, str]]:
        """What the driver says, else what the kernel says of a chip's own GPU; and where that came from."""
        utilisation = _utilisation(raw)
        if utilisation.value is None and _TEGRA.search(chip) and (load := procfs.gpu_load(self._sys)) is not None:
            return Reading(load / 1000), {"utilisation_ratio": LOAD}
        return utilisation, {}

    def _processes(self, raw: RawDevice) -> dict[int, int | None] | str:
        """MiB by pid, None where not told; instead of a list with one impossible entry its reason (cases M7, M8)."""
        if raw.processes.value is None:
            return raw.processes.reason or UNREADABLE
        if not self._host_pids:
            return Reason.OWN_PIDNS  # also of an empty list
        found = {pid: None if held is None else _mib(held) for pid, held in raw.processes.value}
        most = math.inf if raw.memory.value is None or raw.memory.value.total <= 0 else _mib(raw.memory.value.total)
        if not all(0 < pid <= self._max_pid and (held is None or held <= most) for pid, held in found.items()):
            self._counts["nvml.processes.implausible"] += 1
            return IMPLAUSIBLE
        if not all((self._proc / str(pid)).exists() for pid in found):  # pids of a world that we do not see
            return NOT_TOLD_APART
        return found

    def _health(self, raw: RawDevice) -> dict[str, Reading]:
        """A MIG device lacks much that its GPU has, and says why (a driver only says that it is not supported)."""
        missing = NOT_SUPPORTED if isinstance(raw, RawGpu) and raw.instances is None else MIG_ENABLED
        health = {
            name: Reading(asked.value, missing if asked.reason == NOT_SUPPORTED else asked.reason)
            for name, asked in raw.health.items()
        }
        failed = health.get("row_remap_failure", Reading(None))
        if failed.value == 1:
            self._remap_failed.add(raw.uuid.value)
        elif failed.value == 0:
            self._remap_failed.discard(raw.uuid.value)
        elif raw.uuid.value in self._remap_failed:
            health["row_remap_failure"] = Reading(1)  # known, and hidden while the GPU is split or does not answer
        return health

    def _regime(self, raw: RawDevice) -> Regime:
        if not isinstance(raw, RawGpu):
            return Regime.MIG
        stated = self._sharing.regimes.get(raw.uuid.value, self._sharing.regime)
        exclusive = raw.compute_mode.value in (_EXCLUSIVE_THREAD, _EXCLUSIVE_PROCESS)
        return Regime.EXCLUSIVE if exclusive and stated is Regime.TIME_SLICED else stated


def _samples(answer: Answer) -> dict[str, AskedSamples]:
    """Of each device; the driver tells none of MIG devices."""
    found: dict[str, AskedSamples] = {}
    for gpu in answer.gpus:
        parts = gpu.instances.value or () if gpu.instances else ()
        found |= {part.uuid.value: AskedSamples(reason=MIG_ENABLED) for part in parts if part.uuid.value}
        if gpu.uuid.value and not gpu.instances:
            found[gpu.uuid.value] = gpu.samples
    return found


def _fault(raw: RawDevice) -> str | None:
    """Why the device itself is ill."""
    asked: list[Asked | AskedMemory | AskedProcesses] = [raw.uuid, raw.memory, raw.name, raw.processes]
    if isinstance(raw, RawGpu):
        asked += [raw.utilisation, raw.compute_mode]
        if raw.compute_mode.value == _PROHIBITED:
            return Reason.COMPUTE_PROHIBITED
    reasons = [value.reason for value in asked if value.reason in _ILL]
    return reasons[0] if reasons else raw.memory.reason if raw.memory.reason in _ILL_WITHOUT_MEMORY else None


def _without_zeros(raw: RawDevice) -> RawDevice:
    """As if the driver had said of each zero, and of an empty list, that it does not support it."""
    unknown = Asked(reason=NOT_SUPPORTED)
    changed: dict[str, object] = {
        "health": {name: unknown if asked.value == 0 else asked for name, asked in raw.health.items()}
    }
    if raw.processes.value == ():
        changed["processes"] = AskedProcesses(reason=NOT_SUPPORTED)
    if isinstance(raw, RawGpu) and raw.utilisation.value == 0:
        changed["utilisation"] = unknown
    return raw.model_copy(update=changed)


def _utilisation(raw: RawDevice) -> Reading:
    """Of a MIG device there is one by GPM alone, which older chips and drivers do not have (case M4)."""
    value, reason = raw.utilisation.value, raw.utilisation.reason
    if isinstance(value, int | float):
        return Reading(value / 100)
    if isinstance(raw, RawGpu):
        return Reading(None, MIG_ENABLED if raw.instances is not None else reason or UNREADABLE)
    return Reading(None, MIG_ENABLED if reason in _WITHOUT_GPM else reason or FIRST_SAMPLE)


def _used_by(processes: Mapping[int, int | None] | str) -> Reading:
    """Where the memory is the machine's, only what processes hold is the GPU's."""
    if isinstance(processes, str) or None in processes.values():
        return Reading(None, UNIFIED_MEMORY)
    return Reading(sum(filter(None, processes.values())))


def _hidden(raw: RawDevice, processes: Mapping[int, int | None], used: Reading) -> bool:
    """Whether somebody holds memory whom the driver does not list, or may do so since what is used is unknown."""
    if not isinstance(used.value, int):
        return True
    held = list(processes.values())
    if None in held:
        return False  # unknown for a better reason
    told = raw.memory.value is not None and raw.memory.value.reserved is not None
    return used.value - sum(filter(None, held)) > (HIDDEN_MIB if told else HIDDEN_WITH_RESERVED_MIB)


def _foreign_memory(processes: Mapping[int, int | None] | str, ours: frozenset[int]) -> Reading:
    if isinstance(processes, str):
        return Reading(None, processes)
    if None in processes.values():
        return Reading(None, NOT_SUPPORTED)
    return Reading(sum(held or 0 for pid, held in processes.items() if pid not in ours))


def _foreign_share(processes: Mapping[int, int | None] | str, ours: frozenset[int], utilisation: Reading) -> Reading:
    """In millionths: nothing where all are ours, all that is used where none is; between the two it cannot be told."""
    if isinstance(processes, str):
        return Reading(None, processes)
    if processes.keys() <= ours:
        return Reading(0)
    if processes.keys() & ours:
        return Reading(None, NOT_TOLD_APART)
    if not isinstance(utilisation.value, float):
        return utilisation
    return Reading(round(utilisation.value * 1_000_000))


def _mib(size: int) -> int:
    """Rounded up: what is used of a MiB is not free."""
    return math.ceil(size / (1 << 20))

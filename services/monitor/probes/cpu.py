"""A probe whose devices are the cores of this machine; real contention for real tasks, without a GPU."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from services.monitor.probes import proc as procfs
from services.monitor.probes.base import (
    FIRST_SAMPLE,
    NOT_TOLD_APART,
    UNREADABLE,
    Capacity,
    ContainerReading,
    DeviceReading,
    Reading,
    Snapshot,
)
from services.monitor.probes.cgroups import Group, Groups
from services.monitor.probes.holders import by_group
from services.monitor.probes.proc import CoreTimes, Process
from shared.devices import cpu_device_uuid
from shared.errors import FieldError
from shared.messages import ContainerLabels, Regime
from shared.subjects import encode

_ENVIRONMENT_KEPT_S: Final = 2.0  # a process changes its environment when it becomes its command, moments after a fork
_MAX_LABELS: Final = 1 << 18
_MOST_ANCESTORS: Final = 64  # pids are reused: a chain of parents read one after another could close on itself


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """How one core is shared; ``slice_us`` and ``switch_us`` None where they are unknown."""

    regime: Regime = Regime.TIME_SLICED
    slice_us: int | None = None
    switch_us: int | None = None


class _Key(NamedTuple):
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class _Sample:
    """What the next cycle needs of this one to tell rates."""

    at_s: float
    cores: Mapping[int, CoreTimes]
    cpu_ticks: Mapping[_Key, int]


@dataclass(frozen=True, slots=True)
class _Usage:
    """What the processes of one owner used since the last cycle. ``cpu_ratio`` counts cores."""

    pids: tuple[int, ...]
    cpu_ratio: Reading
    memory_mib: float


class CpuProbe:
    """Each core that this process may use is a device.

    Memory is the machine's, split evenly, since a core has none of its own. A process is a container's if its
    environment, or that of an ancestor or of its session's leader, names a container under ``ring_root``. Foreign
    memory is what is used beyond the resident memory of those; foreign time on a core is that of other processes
    pinned to that core alone, since only these cannot make way. Kernel threads, of which each core has some, are none.
    """

    def __init__(
        self,
        ring_root: Path,
        cores: Mapping[int, CoreSettings],
        *,
        proc: Path = Path("/proc"),
        machine: str | None = None,
        affinity: Callable[[int], frozenset[int] | None] = procfs.affinity,
        clock_s: Callable[[], float] = time.monotonic,
        groups: Groups | None = None,
    ) -> None:
        self._root = ring_root
        self._groups = groups or Groups(proc)
        self._cores = dict(sorted(cores.items()))
        self._proc = proc
        self._machine = machine or procfs.machine_id()
        self._model = procfs.cpu_model(proc)
        self._affinity = affinity
        self._clock_s = clock_s
        self._labels: dict[str, tuple[int, ContainerLabels | None]] = {}
        self._environments: dict[_Key, tuple[float, dict[str, str]]] = {}
        self._last: _Sample | None = None

    def capacity(self) -> Capacity:
        """Raises OSError where /proc does not tell the machine's memory."""
        total_mib = procfs.memory_mib(self._proc)["MemTotal"]
        if total_mib is None:
            raise OSError(f"no MemTotal in {self._proc / 'meminfo'}")
        return Capacity(1000 * len(self._cores), total_mib)

    def read(self) -> Snapshot:
        at_s = self._clock_s()
        processes = [process for process in procfs.processes(self._proc) if not process.kernel]
        sample = _Sample(
            at_s,
            procfs.core_times(self._proc),
            {_Key(process.pid, process.start_ticks): process.cpu_ticks for process in processes},
        )
        owned, foreign = self._by_owner(processes, at_s)
        groups = self._groups.of(sample.cpu_ticks, at_s)
        of_token, foreign = by_group(owned, foreign, groups)
        ours = {container: self._usage(members, sample) for container, members in owned.items()}
        memory = procfs.memory_mib(self._proc)
        used_mib, foreign_mib = _used(memory, sum(usage.memory_mib for usage in ours.values()))
        shares = {core: self._foreign_share(core, foreign, sample) for core in self._cores}
        devices = tuple(
            self._device(core, sample, memory["MemTotal"], used_mib, foreign_mib, shares[core])
            for core in self._cores
            if core in sample.cores
        )
        containers = tuple(self._container(token, ours.get(token), of_token.get(token)) for token in self._tokens())
        self._last = sample
        return Snapshot(devices, containers, _milli(shares.values()), foreign_mib)

    def _by_owner(self, processes: list[Process], at_s: float) -> tuple[dict[str, list[Process]], list[Process]]:
        """The processes of each container, by its token, and those of none."""
        self._read_labels()
        by_pid = {process.pid: process for process in processes}
        named = {process.pid: self._named(process, at_s) for process in processes}
        keys = {_Key(process.pid, process.start_ticks) for process in processes}
        self._environments = {key: kept for key, kept in self._environments.items() if key in keys}
        owned: dict[str, list[Process]] = {}
        foreign = []
        for process in processes:
            token = _owner(process, by_pid, named)
            if token is None:
                foreign.append(process)
            else:
                owned.setdefault(token, []).append(process)
        return owned, foreign

    def _named(self, process: Process, at_s: float) -> str | None:
        """The token of the container that a process's own environment names, if it is one of this node."""
        key = _Key(process.pid, process.start_ticks)
        read_s, variables = self._environments.get(key, (float("-inf"), {}))
        if at_s - read_s >= _ENVIRONMENT_KEPT_S:
            variables = procfs.environment(self._proc, process.pid)
            variables = {k: variables[k] for k in ("LAXITY_RING_DIR", "LAXITY_CONTAINER") if k in variables}
            self._environments[key] = (at_s, variables)
        for token in _tokens_in(variables, self._root):
            if token in self._labels:
                return token
        return None

    def _read_labels(self) -> None:
        """The labels of all containers under the root; read again only when their file has changed."""
        found = {}
        try:
            directories = [entry for entry in self._root.iterdir() if entry.is_dir()]
        except OSError:
            directories = []
        for directory in directories:
            path = directory / "container.json"
            try:
                changed_ns = path.stat().st_mtime_ns
            except OSError:
                continue
            kept = self._labels.get(directory.name)
            found[directory.name] = kept if kept and kept[0] == changed_ns else (changed_ns, _labels(path))
        self._labels = found

    def _tokens(self) -> list[str]:
        return sorted(self._labels)

    def _container(self, token: str, usage: _Usage | None, group: Group | None) -> ContainerReading:
        labels = self._labels[token][1]
        name, request = (labels.container, labels.reservation.request_id) if labels else (token, None)
        pod = labels.pod if labels else None
        if usage is None:  # no process: it has ended, or has not begun
            return ContainerReading(name, request, (), Reading(None, UNREADABLE), Reading(None, UNREADABLE), pod)
        use = self._groups.use(group) if group else None
        return ContainerReading(name, request, usage.pids, usage.cpu_ratio, Reading(usage.memory_mib), pod, use)

    def _usage(self, processes: list[Process], sample: _Sample) -> _Usage:
        pages = sum(process.resident_pages for process in processes)
        pids = tuple(sorted(process.pid for process in processes))
        return _Usage(pids, self._cpu_ratio(processes, sample), pages * procfs.PAGE_MIB)

    def _cpu_ratio(self, processes: Iterable[Process], sample: _Sample) -> Reading:
        """Cores kept busy by these processes since the last cycle; one that is new since then began with nothing."""
        last = self._last
        if last is None or sample.at_s <= last.at_s:
            return Reading(None, FIRST_SAMPLE)
        ticks = 0
        for process in processes:
            before = last.cpu_ticks.get(_Key(process.pid, process.start_ticks), 0)
            ticks += max(0, process.cpu_ticks - before)
        return Reading(ticks / procfs.TICKS_PER_S / (sample.at_s - last.at_s))

    def _foreign_share(self, core: int, foreign: list[Process], sample: _Sample) -> Reading:
        """Millionths of the core used by processes of no container that are pinned to it alone."""
        if len(self._cores) == 1:
            return Reading(None, NOT_TOLD_APART)  # everything runs on the only core, pinned or not
        alone = frozenset({core})
        pinned = [process for process in foreign if self._affinity(process.pid) == alone]
        ratio = self._cpu_ratio(pinned, sample)
        if not isinstance(ratio.value, float):
            return ratio
        return Reading(min(1_000_000, round(ratio.value * 1_000_000)))  # ticks are coarse: 101 % of a core is one core

    def _utilisation(self, core: int, sample: _Sample) -> Reading:
        before = self._last.cores.get(core) if self._last else None
        if before is None:
            return Reading(None, FIRST_SAMPLE)
        now = sample.cores[core]
        total = now.total - before.total
        if total <= 0:
            return Reading(None, UNREADABLE)
        idle = min(max(0, now.idle - before.idle), total)  # the kernel's idle time has been seen to go back
        return Reading(1 - idle / total)

    def _device(
        self,
        core: int,
        sample: _Sample,
        total_mib: int | None,
        used_mib: Reading,
        foreign_mib: Reading,
        share: Reading,
    ) -> DeviceReading:
        settings = self._cores[core]
        return DeviceReading(
            uuid=cpu_device_uuid(self._machine, core),
            index=core,
            model=self._model,
            regime=settings.regime,
            slice_us=settings.slice_us,
            switch_us=settings.switch_us,
            memory_mib=_part(Reading(total_mib, None if total_mib is not None else UNREADABLE), len(self._cores)),
            utilisation_ratio=self._utilisation(core, sample),
            memory_used_mib=_part(used_mib, len(self._cores)),
            foreign_share_micro=share,
            foreign_memory_mib=_part(foreign_mib, len(self._cores)),
        )


def usable_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def _owner(process: Process, by_pid: Mapping[int, Process], named: Mapping[int, str | None]) -> str | None:
    """The container named by the process itself, its nearest ancestor that names one, or its session's leader."""
    current: Process | None = process
    for _ in range(_MOST_ANCESTORS):
        if current is None:
            break
        if token := named[current.pid]:
            return token
        current = by_pid.get(current.parent)
    return named.get(process.session)


def _tokens_in(variables: Mapping[str, str], root: Path) -> list[str]:
    """Tokens of containers that these variables speak of."""
    tokens = []
    if directory := variables.get("LAXITY_RING_DIR"):
        path = Path(directory)
        if path.parent == root:
            tokens.append(path.name)
    if name := variables.get("LAXITY_CONTAINER"):
        with contextlib.suppress(FieldError):  # somebody else's variable of that name
            tokens.append(encode(name))
    return tokens


def _labels(path: Path) -> ContainerLabels | None:
    try:
        with path.open("rb") as file:
            return ContainerLabels.from_json(file.read(_MAX_LABELS + 1))
    except (OSError, FieldError):
        return None


def _used(memory: Mapping[str, int | None], ours_mib: float) -> tuple[Reading, Reading]:
    """What is used in all, and what of it by nobody of ours: never below zero, since shared pages count twice."""
    total_mib, available_mib = memory["MemTotal"], memory["MemAvailable"]
    if total_mib is None or available_mib is None:
        return Reading(None, UNREADABLE), Reading(None, UNREADABLE)
    used_mib = max(0, total_mib - available_mib)
    return Reading(used_mib), Reading(max(0, round(used_mib - ours_mib)))


def _part(whole: Reading, parts: int) -> Reading:
    return Reading(whole.value // parts) if isinstance(whole.value, int) else whole


def _milli(shares: Iterable[Reading]) -> Reading:
    """The sum of shares of cores, in thousandths of a core; unknown if one of them is."""
    total_micro = 0
    for share in shares:
        if not isinstance(share.value, int):
            return share
        total_micro += share.value
    return Reading(total_micro // 1000)

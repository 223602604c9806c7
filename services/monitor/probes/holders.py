"""Who holds what: processes of a control group are its container's, memory of a GPU is its processes'. Nothing is read.

A container of a runtime is ours where its oldest process is: a process backend that runs in a container has processes
of ours in that container, and they are not the oldest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from services.monitor.probes.base import (
    NOT_SUPPORTED,
    ContainerReading,
    ContainerUseReading,
    GpuTimeReading,
    Reading,
)
from services.monitor.probes.cgroups import Group
from services.monitor.probes.gpu_time import GpuTimes
from services.monitor.probes.proc import Process


def by_group(
    owned: dict[str, list[Process]], foreign: list[Process], groups: Mapping[tuple[int, int], Group]
) -> tuple[dict[str, Group], list[Process]]:
    """The group of each owner's container, by token, and who is foreign still; ``owned`` gets the others."""
    oldest: dict[str, tuple[int, str | None, Group]] = {}
    for token, process in _all(owned, foreign):
        group = groups.get((process.pid, process.start_ticks))
        if group and (group.container_id not in oldest or process.start_ticks < oldest[group.container_id][0]):
            oldest[group.container_id] = (process.start_ticks, token, group)
    token_of = {id_: token for id_, (_, token, _) in oldest.items() if token is not None}
    left = []
    for process in foreign:
        group = groups.get((process.pid, process.start_ticks))
        if group and group.container_id in token_of:
            owned[token_of[group.container_id]].append(process)
        else:
            left.append(process)
    first = sorted(oldest.values(), key=lambda found: found[0], reverse=True)
    return {token: group for _, token, group in first if token is not None}, left


def _all(owned: Mapping[str, list[Process]], foreign: Iterable[Process]) -> Iterable[tuple[str | None, Process]]:
    """Foreign ones first: of two that began within one tick, none is taken for ours."""
    yield from ((None, process) for process in foreign)
    yield from ((token, process) for token, processes in owned.items() for process in processes)


Holders = Mapping[str, Mapping[int, int | None] | str]
"""MiB by pid of each GPU, or why its list is unknown."""


def with_gpus(
    containers: Iterable[ContainerReading], holders: Holders, times: GpuTimes
) -> tuple[ContainerReading, ...]:
    """The containers with what their processes hold and have had of each GPU. A list that is unknown is nobody's."""
    return tuple(_with_gpus(container, holders, times.of(container.container)) for container in containers)


def _with_gpus(container: ContainerReading, holders: Holders, times: Mapping[str, GpuTimeReading]) -> ContainerReading:
    held: dict[str, Reading] = {}
    for uuid, processes in holders.items():
        if isinstance(processes, str):
            if uuid in times:
                held[uuid] = Reading(None, processes)
            continue
        sizes = [processes[pid] for pid in container.pids if pid in processes]
        if sizes or uuid in times:
            known = [size for size in sizes if size is not None]
            held[uuid] = Reading(sum(known)) if len(known) == len(sizes) else Reading(None, NOT_SUPPORTED)
    if not held:
        return container
    return replace(container, use=replace(container.use or ContainerUseReading(), gpus=held, gpu_times=times))

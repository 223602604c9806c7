"""Which GPUs of a machine are near each other, from what the driver tells of NVLinks and of PCIe; nothing is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.monitor.probes.nvml_process import RawGpu

SWITCH: Final = 2
"""NVML's type of what is at the other end of a link: an NVSwitch, by which all GPUs on switches reach each other."""
NEAR: Final = 40
"""NVML's level of a common ancestor (``NVML_TOPOLOGY_NODE``) up to which no link between processors is crossed."""


@dataclass(slots=True)
class _Known:
    """Of one GPU; None where the driver has not told."""

    bus: str
    links: tuple[tuple[int, str], ...] | None = None
    levels: dict[str, int] | None = None
    """To other GPUs, by uuid."""


@dataclass(slots=True)
class Topology:
    """What was told of all GPUs so far: one that is lost stays where it was."""

    _gpus: dict[str, _Known] = field(default_factory=dict)

    def take(self, gpus: Sequence[RawGpu]) -> None:
        """What is not told in a cycle stays as it was."""
        uuids = {gpu.index: gpu.uuid.value for gpu in gpus if isinstance(gpu.uuid.value, str)}
        for gpu in gpus:
            if gpu.index not in uuids or not isinstance(gpu.pci_bus_id.value, str):
                continue
            known = self._gpus.setdefault(gpu.uuid.value, _Known(gpu.pci_bus_id.value))
            known.bus = gpu.pci_bus_id.value
            known.links = gpu.links.value if gpu.links.value is not None else known.links
            if gpu.levels.value is not None:
                levels = {uuids[other]: level for other, level in gpu.levels.value if other in uuids}
                known.levels = (known.levels or {}) | levels

    def bus(self, uuid: str) -> str | None:
        return self._gpus[uuid].bus if uuid in self._gpus else None

    def groups(self) -> dict[str, str]:
        """The group of each GPU, named by the first of it on the bus; nothing for one GPU, or where nothing is told.

        Linked are those with an NVLink to each other or to a switch. Others are grouped by PCIe, and who is near nobody
        is a group of its own.
        """
        told = {uuid: gpu for uuid, gpu in self._gpus.items() if (gpu.links, gpu.levels) != (None, None)}
        if len(told) < 2:
            return {}
        linked = [part for part in _parts(told, self._linked(told)) if len(part) > 1]
        rest = told.keys() - {uuid for part in linked for uuid in part}
        near = _parts(rest, [(a, b) for a in rest for b, level in (told[a].levels or {}).items() if level <= NEAR])
        return {**self._named("nvlink", linked), **self._named("pcie", near)}

    def _linked(self, told: Iterable[str]) -> list[tuple[str, str]]:
        """A switch stands for itself, whatever its bus: machines have one fabric."""
        at = {known.bus.lower(): uuid for uuid, known in self._gpus.items()}
        ends = [(uuid, kind, bus.lower()) for uuid in told for kind, bus in self._gpus[uuid].links or ()]
        return [(uuid, "switch" if kind == SWITCH else at.get(bus, uuid)) for uuid, kind, bus in ends]

    def _named(self, kind: str, parts: Iterable[Sequence[str]]) -> dict[str, str]:
        return {uuid: f"{kind}-{min(self._gpus[each].bus for each in part)}" for part in parts for uuid in part}


def _parts(nodes: Iterable[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The connected parts of a graph, of its nodes alone; a pair may go by way of what is none of them."""
    nodes = list(nodes)
    part = {node: node for node in nodes}

    def root(node: str) -> str:
        while part.setdefault(node, node) != node:
            node = part[node]
        return node

    for one, other in pairs:
        part[root(one)] = root(other)
    found: dict[str, list[str]] = {}
    for node in nodes:
        found.setdefault(root(node), []).append(node)
    return list(found.values())

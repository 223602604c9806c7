"""The pods of ``bench-kubernetes``: what each asks for in every way, and what their places leave and promise."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from shared.admission.tasks import RtTask, Sharing
from shared.admission.time_sliced import sliced
from shared.messages import Kind, Regime
from tests.kubernetes.bridged import pod as pod_of_ours

Json = dict[str, Any]
DEVICES: Final = 8
"""Of each node."""
SLOTS: Final = 4
"""Replicas of each device, as NVIDIA's plugin shares it by time: without us a quarter is one of them."""
PLUGIN: Final = "nvidia.com/gpu"
SHARING: Final = Sharing(Regime.TIME_SLICED, slice_us=2_000, switch_us=100)
CPU_MILLI, MEMORY_MIB = 250, 1024
IMAGE: Final = "none"
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Sort:
    """`milli` of one device; times in ms, of a firm task whose period is its deadline; without one nothing is due."""

    name: str
    of_a_hundred: int
    milli: int
    deadline_ms: int = 0
    runtime_ms: int = 0

    @property
    def task(self) -> RtTask | None:
        deadline_us, runtime_us = self.deadline_ms * 1_000, self.runtime_ms * 1_000
        return RtTask(self.name, runtime_us, deadline_us, deadline_us, kind=Kind.FIRM) if deadline_us else None

    @property
    def slots(self) -> int:
        return self.milli * SLOTS // 1000


SORTS: Final = {
    sort.name: sort
    for sort in (
        Sort("fast", 35, 250, deadline_ms=20, runtime_ms=5),
        Sort("interactive", 35, 250, deadline_ms=50, runtime_ms=12),
        Sort("batch", 20, 250),
        Sort("whole", 10, 1000),
    )
}
"""The deadlines are those of the node list's own classes."""


def names(prefix: str, count: int, seed: int) -> list[str]:
    """Of pods of all sorts, mixed; a name begins with its sort."""
    sorts = [sort.name for sort in SORTS.values() for _ in range(sort.of_a_hundred)]
    chosen = [sorts[number % len(sorts)] for number in range(count)]
    Random(seed).shuffle(chosen)
    return [f"{sort}-{prefix}-{number}" for number, sort in enumerate(chosen)]


def sort_of(name: str) -> Sort:
    return SORTS[name.partition("-")[0]]


# --- what is asked ---


def plain(name: str, labels: Mapping[str, str]) -> Json:
    """Without us: deadlines cannot be said, and a part of a device is so many of its replicas."""
    sort = sort_of(name)
    found = pod_of_ours(name, image=IMAGE, **_node_resources(), **{PLUGIN: str(sort.slots)})
    found["spec"] |= {"schedulerName": "plain", "nodeSelector": dict(labels)}
    return found


def ours(name: str, labels: Mapping[str, str]) -> Json:
    sort = sort_of(name)
    due = {"deadline": f"{sort.deadline_ms}ms", "runtime": f"{sort.runtime_ms}ms", "kind": "firm"}
    found = pod_of_ours(name, due if sort.deadline_ms else {}, IMAGE, gpu_milli=str(sort.milli), **_node_resources())
    found["spec"]["nodeSelector"] = dict(labels)
    return found


def _node_resources() -> dict[str, str]:
    return {"cpu": f"{CPU_MILLI}m", "memory": f"{MEMORY_MIB}Mi"}


def request(name: str, labels: Mapping[str, str]) -> bytes:
    """The same on `rt.place`."""
    sort = sort_of(name)
    body: Json = {"request_id": name, "image": IMAGE, "gpu": {"share": sort.milli / 1000}, "strategy": "deadline"}
    body |= {"cpu_milli": CPU_MILLI, "memory_mib": MEMORY_MIB, "node_selector": dict(labels)}
    if (task := sort.task) is not None:
        body["realtime"] = {"deadline_us": task.deadline_us, "runtime_us": task.runtime_us, "kind": "firm"}
    return json.dumps(body).encode()


# --- what became of it ---


@dataclass
class Left:
    """Of all nodes, when all pods have their places."""

    idle_devices: int
    idle_nodes: int
    """Those with all their devices idle."""
    kept: float
    """Part of the pods with a deadline whose device can still guarantee it, by the test of THEORY section 1."""
    split: int = 0
    """Pods that asked for a whole device and got parts of several."""


def left(pods: Iterable[Json], nodes: int) -> Left:
    """Of pods in the order in which they were bound."""
    on_device: defaultdict[tuple[str, str], list[Sort]] = defaultdict(list)
    split = 0
    for pod in pods:
        node, sort = pod["spec"]["nodeName"], sort_of(_name(pod))
        given = pod["metadata"].get("annotations", {}).get("laxity.dev/devices")
        devices = given.split(",") if given else _by_plugin(on_device, node, sort)
        split += len(devices) > 1
        for device in devices:
            on_device[node, device].append(sort)
    due = [_keeps(sort, len(there)) for there in on_device.values() for sort in there if sort.task is not None]
    used_nodes = {node for node, _ in on_device}
    return Left(nodes * DEVICES - len(on_device), nodes - len(used_nodes), sum(due) / len(due) if due else 1.0, split)


def _name(pod: Json) -> str:
    """As it was asked for: a pod that a placer made says it in its reservation."""
    labels = pod["metadata"].get("annotations", {}).get("laxity.dev/labels")
    made = pod["spec"].get("schedulerName") == "laxity-direct"
    return str(json.loads(labels)["reservation"]["request_id"] if made else pod["metadata"]["name"])


def _by_plugin(on_device: Mapping[tuple[str, str], list[Sort]], node: str, sort: Sort) -> list[str]:
    """A device plugin at its best: the fullest device that has so many replicas left, else several."""
    free = {str(d): SLOTS - sum(each.slots for each in on_device.get((node, str(d)), ())) for d in range(DEVICES)}
    enough = [device for device, slots in free.items() if slots >= sort.slots]
    if enough:
        return [min(enough, key=lambda device: free[device])]
    found, wanted = list[str](), sort.slots
    for device in sorted(free, key=lambda device: -free[device]):
        if wanted > 0 and free[device] > 0:
            found.append(device)
            wanted -= free[device]
    return found


def _keeps(sort: Sort, on_it: int) -> bool:
    assert sort.task is not None
    return sliced(SHARING, [sort.task], on_it - 1).admitted

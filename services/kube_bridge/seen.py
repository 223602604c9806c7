"""Pods and nodes as the API server last showed them: what the bridge remembers of each; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, TypeVar

from services.kube_bridge import resources
from services.kube_bridge.ahead import Waiting, waiting
from services.kube_bridge.asked import DEVICES, GROUP, LABELS, NVIDIA, wants
from services.kube_bridge.claims import claims_of
from services.kube_bridge.gangs import GANG, Member, gang_of
from shared.errors import FieldError
from shared.messages.ledger import ContainerLabels
from shared.units import MIB

CONDITION: Final = f"{GROUP}Placed"
"""Type of our own condition of a pod: whether it has a place, and the numbers behind that."""
DIRECT: Final = "laxity-direct"
"""Scheduler of pods that our backend makes and binds: there is none of that name."""
NOTHING: Final = "void"
_ENDED: Final = {"Succeeded", "Failed"}
Amount = TypeVar("Amount", int, resources.Amount)


@dataclass(frozen=True, slots=True)
class Condition:
    """What CONDITION says: `status` is True or False, `reason` one word, `message` for people."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PodSeen:
    """One pod, by its uid: another of the same name is another pod."""

    uid: str
    namespace: str
    name: str
    node: str
    """Where it is bound; "" while it is not."""
    ended: bool
    """All its containers are, for good. A pod that is being deleted has not ended."""
    ours: bool
    """Its scheduler is Laxity's."""
    wants: bool
    devices: str | None
    """By its annotation; whoever makes a pod may only say NOTHING."""
    cpu_milli: int | None
    memory_mib: int | None
    """What it reserves of its node; None where that cannot be read."""
    nvidia_gpus: int = 0
    """By NVIDIA's device plugin."""
    made_by_us: bool = False
    """Our backend made it: the ledger has its reservation under an id of its own."""
    says: Condition | None = None
    member: Member | None = None
    """Of a gang; None also where its labels cannot be read."""
    claims: tuple[str, ...] = ()
    """Names of its claims (DRA), with their namespace."""
    request_id: str | None = None
    """Whose reservation its Binding gave it."""
    unscheduled: str = ""
    """Why its scheduler finds no node for it, in that one's words."""
    being_deleted: bool = False
    waits: Waiting | None = None
    """Where nobody has answered it yet."""

    @property
    def bound_by_others(self) -> bool:
        """It asks for devices and has a node without any: a Binding of ours has both in one write."""
        return bool(self.node) and self.ours and self.wants and self.devices in {None, "", NOTHING}

    @property
    def bound_by_us(self) -> bool:
        return bool(self.node) and self.ours and self.wants and not self.bound_by_others

    @property
    def _unanswered(self) -> bool:
        over = self.node or self.ended or self.being_deleted
        return self.ours and self.wants and not (over or self.says or self.unscheduled)

    @classmethod
    def of(cls, pod: Mapping[str, Any], scheduler: str) -> PodSeen:
        meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
        reserves = resources.reserves(pod)
        seen = cls(
            uid=meta["uid"],
            namespace=meta["namespace"],
            name=meta["name"],
            node=spec.get("nodeName") or "",
            ended=status.get("phase") in _ENDED,
            ours=spec.get("schedulerName") == scheduler,
            wants=wants(reserves),
            devices=(meta.get("annotations") or {}).get(DEVICES),
            cpu_milli=_unless_unreadable(reserves.cpu_milli),
            memory_mib=_unless_unreadable(reserves.memory_mib),
            nvidia_gpus=int(_unless_unreadable(lambda: reserves.requested(f"{NVIDIA}gpu")) or 0),
            made_by_us=spec.get("schedulerName") == DIRECT,
            says=condition_of(pod),
            member=_member(pod),
            claims=tuple(claims_of(pod).values()),
            request_id=_request_id(pod),
            unscheduled=_unscheduled(pod),
            being_deleted="deletionTimestamp" in meta,
        )
        alone = GANG not in (meta.get("labels") or {})
        return replace(seen, waits=waiting(pod)) if alone and seen._unanswered else seen


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """One node. `ready` None: its kubelet has not been heard for a while, so nobody knows."""

    name: str
    cpu_milli: int | None
    memory_mib: int | None
    """Allocatable; None where it is absent or cannot be read."""
    labels: Mapping[str, str]
    taints: tuple[tuple[str, str, str], ...]
    """Key, value, effect."""
    unschedulable: bool
    ready: bool | None
    reason: str | None
    conditions: Mapping[str, str]
    """Status by type."""
    publishes_ours: bool
    """It claims to have our resources: its kubelet would give out devices of its own choice (case KU18)."""

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> NodeSeen:
        spec, status = node.get("spec") or {}, node.get("status") or {}
        allocatable = status.get("allocatable") or {}
        conditions = {one["type"]: one for one in status.get("conditions") or ()}
        ready = conditions.get("Ready", {})
        return cls(
            name=node["metadata"]["name"],
            cpu_milli=_allocatable(allocatable, "cpu", Fraction(1000)),
            memory_mib=_allocatable(allocatable, "memory", Fraction(1, MIB)),
            labels=node["metadata"].get("labels") or {},
            taints=tuple((t["key"], t.get("value") or "", t["effect"]) for t in spec.get("taints") or ()),
            unschedulable=bool(spec.get("unschedulable")),
            ready={"True": True, "False": False}.get(ready.get("status", "")),
            reason=ready.get("reason"),
            conditions={kind: one["status"] for kind, one in conditions.items()},
            publishes_ours=any(name.startswith(GROUP) for name in allocatable),
        )


def condition_of(pod: Mapping[str, Any]) -> Condition | None:
    """Our condition as it stands in the pod."""
    return _condition(pod, CONDITION)


def _condition(pod: Mapping[str, Any], kind: str) -> Condition | None:
    for one in (pod.get("status") or {}).get("conditions") or ():
        if one["type"] == kind:
            return Condition(one["status"], one.get("reason") or "", one.get("message") or "")
    return None


def _unscheduled(pod: Mapping[str, Any]) -> str:
    said = _condition(pod, "PodScheduled")
    return said.message or said.reason if said is not None and said.status == "False" else ""


def _request_id(pod: Mapping[str, Any]) -> str | None:
    text = (pod["metadata"].get("annotations") or {}).get(LABELS)
    try:
        return ContainerLabels.trusted(text.encode()).reservation.request_id if text else None
    except FieldError:
        return None


def _member(pod: Mapping[str, Any]) -> Member | None:
    try:
        gang = gang_of(pod)
    except FieldError:
        return None
    if gang is None:
        return None
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    taken = spec.get("nodeName") or status.get("phase") in _ENDED or "deletionTimestamp" in meta
    return Member(meta["uid"], meta["name"], gang, not taken)


def _allocatable(allocatable: Mapping[str, Any], name: str, scale: Fraction) -> int | None:
    """Rounded down: what is not whole cannot be promised."""
    try:
        found = resources.quantity(allocatable, name, "status.allocatable")
    except FieldError:
        return None
    return None if found is None else int(found * scale)


def _unless_unreadable(read: Callable[[], Amount]) -> Amount | None:
    try:
        return read()
    except FieldError:
        return None

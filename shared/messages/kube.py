"""What Kubernetes says of nodes: rt.metrics.<node>.kube."""

from __future__ import annotations

from pydantic import Field

from shared.messages.base import Message, Name


class Taint(Message):
    key: str
    value: str = ""
    effect: str


class KubeNodeFacts(Message):
    """A node as the API server shows it. It says nothing of whether the node lives: its monitor does."""

    node: Name
    at_us: int
    cpu_milli: int | None
    """Allocatable to pods; None where unknown."""
    memory_mib: int | None
    foreign_cpu_milli: int | None
    """Requested by pods that no reservation of the ledger stands for; None where one of them cannot be read."""
    foreign_memory_mib: int | None
    foreign_gpus: int = 0
    """Devices that such pods were given by NVIDIA's device plugin: which ones their node's monitor says."""
    claimed: dict[str, str] = Field(default_factory=dict)
    """By uuid of the device, or of the GPU that it is a part of: the claim that it is allocated to."""
    claimed_unknown: str | None = None
    """A claim has a device of the node of which no slice says the uuid: it may be any."""
    labels: dict[str, str] = Field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False
    """Cordoned."""
    ready: bool | None
    """By its kubelet; None where the API server does not know."""
    reason: str | None = None
    conditions: dict[str, str] = Field(default_factory=dict)
    """Status by type, as the kubelet reports them."""
    publishes_ours: bool = False
    """It claims resources of laxity.dev: its kubelet would choose devices itself, so nothing is placed there."""
    gone: bool = False
    """There is no such node any more."""


class PodsQuery(Message):
    """rt.pods: what is known of the pods of one name."""

    name: Name
    namespace: Name | None = None
    """None: in all namespaces."""


class PodFound(Message):
    """One pod, by what the API server shows of it and the ledger says of its place."""

    namespace: str
    name: str
    uid: str
    request_id: str | None
    """The request that it is part of; None where it asks for nothing of ours."""
    node: str | None
    """Where it is bound."""
    devices: str | None
    """By its annotation: ``void`` before it is bound."""
    ended: bool
    status: str | None = None
    reason: str | None = None
    message: str | None = None
    """Of its condition laxity.dev/Placed: why it has no place, or where it is, in numbers. None: nothing was said."""
    unscheduled: str | None = None
    """Why it has no node, as its scheduler says."""


class PodsReply(Message):
    pods: tuple[PodFound, ...] = ()
    not_loaded: tuple[str, ...] = ()
    """What has to be read before anything can be said."""

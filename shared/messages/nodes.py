"""What nodes have and can promise: rt.metrics.*, rt.nodes, rt.events.node.*, rt.events.bus.*, KV rt_nodes."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pydantic import Field

from shared.messages.base import Message, Name


class Regime(StrEnum):
    """How a device is shared; a setting of its node."""

    EXCLUSIVE = "exclusive"
    MIG = "mig"
    GATED = "gated"
    TIME_SLICED = "time_sliced"
    MPS = "mps"


SOMEBODY: Final = "somebody, perhaps: the kubelet has not answered yet"
"""Holder of a device while nobody knows whether it has one."""


class Measured(Message):
    """A value, or None with the reason code why it is unknown (never zero)."""

    value: float | None
    reason: str | None = None


class Device(Message):
    """One device. The uuid identifies it, the index is a label."""

    uuid: Name
    index: int
    model: str
    regime: Regime
    slice_us: int | None = None
    switch_us: int | None = None
    handover_us: int | None = None
    """Gated: what a turn may take beyond the declared runtime; admission adds it to every runtime."""
    group: str | None = None
    healthy: bool
    reason: str | None = None
    memory_mib: int | None
    """What can be scheduled; None where unknown."""
    foreign_share_micro: int | None = 0
    """Device time used by processes of no reservation, in millionths."""
    foreign_memory_mib: int | None = 0
    plugin_holder: str | None = None
    """Whom the kubelet of its node gave it by a device plugin, so that it is not ours to give; None: nobody."""


class Xid(Message):
    """An error of this code (XID), as NVIDIA's driver reports them."""

    xid: int
    count: int
    """Since the monitor's start."""
    at_us: int
    """When last, by the node's wall clock."""


class HeardDevice(Device):
    """What the node list reads of a device's metrics."""

    parent: str | None = None
    """Of a MIG device the uuid of its GPU."""


class DeviceMetrics(HeardDevice):
    """A device as its probe sees it."""

    utilisation_ratio: Measured
    memory_used_mib: Measured
    pci_bus_id: str | None = None
    """Of the GPU, also for its MIG devices."""
    gpu_instance: int | None = None
    """Of a MIG device: its GPU instance on the GPU."""
    mig_profile: str | None = None
    """Of a MIG device, as ``1g.18gb``."""
    health: dict[str, Measured] = Field(default_factory=dict)
    """Further values by name, units in the names: docs/gpus.md lists them. Empty where the probe has none."""
    reasons: dict[str, str] = Field(default_factory=dict)
    """Why memory_mib, foreign_share_micro or foreign_memory_mib is unknown, by its name."""
    source: str | None = None
    """Where the values come from, such as nvml."""
    sources: dict[str, str] = Field(default_factory=dict)
    """The same for single values, by name, that come from elsewhere."""
    age_us: int | None = None
    """Time since the device was read last; by the node's CLOCK_MONOTONIC that was at ``mono_us`` less this."""
    stale_since_us: int | None = None
    """When it was read last, by the wall clock: said once a cycle has passed without a reading of it."""
    xids: tuple[Xid, ...] = ()
    """By code; ``health.xid`` says whether the driver tells them at all."""


class GpuUse(Message):
    """What one container holds of one device; a device may have several such owners."""

    uuid: Name
    memory_mib: Measured
    utilisation_ratio: Measured | None = None
    """By the driver's samples of its processes since the cycle before."""
    busy_us: Measured | None = None
    """These added up since it was first seen on the device."""
    busy_error_us: Measured | None = None
    """By how much that may be off: docs/gpus.md says what is in it."""


class ContainerUse(Message):
    """A container by the names of its runtime, and what its control group says of it."""

    runtime: str | None = None
    """docker, containerd, cri-o, podman; None where the group's path does not tell."""
    runtime_id: str | None = None
    pod_uid: str | None = None
    cpu_us: Measured
    """Processor time since the container's start."""
    memory_mib: Measured
    """With the page cache that is charged to it."""
    memory_limit_mib: Measured
    """Reason ``no_limit`` where there is none."""
    throttled_periods: Measured
    """Periods since the start in which it was stopped at its limit of processor time."""
    gpus: tuple[GpuUse, ...] = ()


class ContainerMetrics(Message):
    """A container seen on the node. Its tasks are in the task stream."""

    container: Name
    request_id: str | None = None
    pids: tuple[int, ...] = ()
    cpu_ratio: Measured | None = None
    memory_mib: Measured | None = None
    tasks_us: int | None = None
    """Time in which a task of it was open since the monitor's start, added up over its processes: what the samples of
    ``use.gpus`` are to be compared with. None where it has no ring."""
    pod: str | None = None
    namespace: str | None = None
    """Of a container in a pod, as Kubernetes calls that."""
    use: ContainerUse | None = None
    """None where nothing beyond the processes of the container is known."""


class Heartbeat(Message):
    """What the node list reads of NodeMetrics: most of them is values that change with each, and none of its business.
    ``start_id`` names the monitor's start."""

    node: Name
    start_id: str
    counter: int
    period_us: int
    devices: tuple[HeardDevice, ...]
    labels: dict[str, str] = Field(default_factory=dict)
    cpu_milli: int
    memory_mib: int
    foreign_cpu_milli: int | None = 0
    foreign_memory_mib: int | None = 0
    draining: bool = False
    """True in a monitor's last words: it stops on purpose."""


class NodeMetrics(Heartbeat):
    """A node's heartbeat: everything its monitor sees, every ``period_us``. ``start_id`` names the monitor's start."""

    at_us: int
    mono_us: int
    devices: tuple[DeviceMetrics, ...]
    containers: tuple[ContainerMetrics, ...] = ()
    counters: dict[str, int] = Field(default_factory=dict)
    kubelet_age_us: int | None = None
    """How old is what the kubelet said of ``plugin_holder``; None where none is asked, or it has not answered yet."""
    kubelet_stale: str | None = None
    """Why it is older than it should be: what was said last counts on."""


class NodeState(StrEnum):
    JOINED = "joined"
    READY = "ready"
    DEGRADED = "degraded"
    """Alive, and some of its devices are not healthy."""
    UNREACHABLE = "unreachable"
    """No heartbeat for the grace time: nothing new is placed there."""
    LOST = "lost"
    """No heartbeat for long: its reservations stay counted until it is back or given up."""


class DeviceStanding(StrEnum):
    """Where a device stands in the list of one deadline class."""

    GUARANTEED = "guaranteed"
    TIGHT = "tight"
    FULL = "full"
    AT_RISK = "at_risk"
    EXCLUDED = "excluded"


class ClassStanding(Message):
    """What one device can promise to one more container of one class."""

    standing: DeviceStanding
    slack_us: int | None
    reason: str | None = None
    unproven: bool = False


class DeviceFacts(Device):
    """A device as the node list publishes it for placers."""

    claim_holder: str | None = None
    """Whom Kubernetes gave it by a claim (dynamic resource allocation); None: nobody."""
    classes: dict[str, ClassStanding] = Field(default_factory=dict)

    @property
    def holder(self) -> str | None:
        """Who was given the whole device by somebody else than Laxity."""
        return self.plugin_holder or self.claim_holder


class NodeEvent(Message):
    at_us: int
    node: Name
    state: str
    """One of NodeState, or device_lost, device_back."""
    reason: str | None
    device: str | None = None
    number: int = 0
    """Counts the changes of this node: (node, number) is the event's id."""


class NodeFacts(Message):
    """KV rt_nodes, key ``node.<node>``: written by the active node-list alone, as long as it has the lease.

    Where no other key was written with it, the key holds RecordInside too."""

    node: Name
    state: NodeState
    reason: str | None = None
    at_us: int
    start_id: str | None = None
    changes: int = 0
    """Changes of state so far."""
    events: tuple[NodeEvent, ...] = ()
    """The changes that came with this write: who takes over as the writer says them again."""
    devices: tuple[DeviceFacts, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    cpu_milli: int
    memory_mib: int
    foreign_cpu_milli: int | None = 0
    foreign_memory_mib: int | None = 0
    closed: str | None = None
    """Why Kubernetes lets nothing new onto the node: cordoned, not ready, a taint. Pods that it sends have passed."""


class NodesQuery(Message):
    """rt.nodes: the ordered device list of one deadline class."""

    deadline_class: str | None = Field(default=None, alias="class")
    limit: int = Field(default=100, ge=1, le=10_000)
    after: str | None = None
    models: tuple[str, ...] | None = None
    group: str | None = None
    standing: tuple[DeviceStanding, ...] | None = None


class ListedDevice(Message):
    node: Name
    uuid: Name
    standing: DeviceStanding
    slack_us: int | None
    reason: str | None
    age_us: int
    unproven: bool = False
    closed: str | None = None
    """Why Kubernetes lets nothing new onto its node, as in NodeFacts."""


class NodesReply(Message):
    """A page of the list as it is published. ``after`` names where the next page begins, None at the end."""

    revision: int
    """Of the list: it holds what all changes up to this one (rt.events.list.<class>) have said."""
    deadline_class: str = Field(alias="class")
    devices: tuple[ListedDevice, ...]
    after: str | None
    start_id: str | None = None
    """Names the numbering of the revisions, as in ListDelta; None before the first list is written."""
    counts: dict[DeviceStanding, int] | None = None
    """Devices of each standing in the whole list, whatever the query filters."""


class ListChange(Message):
    """One device in the list of a class: where it was and is; a device that left has no standing and no place."""

    node: Name
    uuid: Name
    was: DeviceStanding | None
    """None: it was not listed."""
    standing: DeviceStanding | None
    slack_us: int | None
    reason: str | None
    unproven: bool
    place: int | None
    """Its place once all changes of this revision are made, 1 the best."""


class ListDelta(Message):
    """rt.events.list.<class>: what one write changed in a list. A gap in ``revision`` asks for rt.nodes again."""

    at_us: int
    deadline_class: str = Field(alias="class")
    start_id: str
    """Names the numbering: another one begins where rt_nodes was lost, and asks for rt.nodes again."""
    revision: int
    """One more than that of the change before, per class."""
    changes: tuple[ListChange, ...]


class ListsRecord(Message):
    """KV rt_nodes, key ``lists``: how far each list has come, and the changes that may not have been said yet."""

    start_id: str
    revisions: dict[str, int]
    """Per class."""
    unsaid: tuple[ListDelta, ...] = ()
    sums: dict[str, int] = Field(default_factory=dict)
    """Per class: a checksum of the list, by which who reads rt_nodes knows that it has all that makes it."""


class RecordInside(Message):
    """KV rt_nodes, key ``node.<node>``, beside NodeFacts: the lists' record, where the node was written alone.

    The newest record counts, be it here or in the key ``lists``. Only node-lists read it."""

    lists: ListsRecord | None = None


class BusEvent(Message):
    """Said by a service when messages may have been missed, and by the placer when the ledger is not its own."""

    at_us: int
    service: Name
    instance: str
    kind: str
    """reconnected, slow_consumer, watch_restarted, dropped, ledger_foreign, ledger_accepted, nodes_lost."""
    detail: str
    gap_us: int | None = None

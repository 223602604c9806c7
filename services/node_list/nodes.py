"""One node as the list sees it: heartbeat, liveness, reservations, warnings; and the facts made of them. Pure state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from services.node_list.kubernetes import claim_holder, merged
from services.node_list.liveness import ALIVE, Liveness
from services.node_list.standing import ClassTask, by_measure, excluded, judge
from shared.admission import Learned
from shared.messages import (
    ClassStanding,
    ContainerRecord,
    DeadlineEvent,
    Device,
    DeviceFacts,
    HeardDevice,
    Heartbeat,
    KubeNodeFacts,
    NodeEvent,
    NodeFacts,
    NodeState,
    Reservation,
    Standing,
    Which,
)

_shown_of_device = attrgetter(*Device.model_fields)
_read_of_device = attrgetter(*Device.model_fields, "parent")
_read_of_node = attrgetter(
    "start_id", "period_us", "labels", "cpu_milli", "memory_mib", "foreign_cpu_milli", "foreign_memory_mib"
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the standings are judged by; from the settings."""

    classes: tuple[ClassTask, ...]
    grace_us: int
    lost_us: int
    tight_ratio: float
    foreign_context_micro: int
    return_ratio: float = 0.0
    return_us: int = 0
    """How a device comes back to a better standing: see Hysteresis."""
    tolerated: tuple[str, ...] = ()
    """Keys of taints that keep nothing of ours away."""


@dataclass(slots=True)
class NodeView:
    """Everything known of one node. ``stale``: what it is judged by has changed since; ``dirty``: its facts may differ
    from what rt_nodes has."""

    name: str
    liveness: Liveness
    metrics: Heartbeat | None = None
    """The last heartbeat that said anything new of what is read here."""
    counter: int = 0
    """Of the last heartbeat."""
    kube: KubeNodeFacts | None = None
    """Where the node is one of Kubernetes."""
    facts: NodeFacts | None = None
    """As published last, or as found in rt_nodes."""
    residents: tuple[Reservation, ...] = ()
    """Set by ``holds`` alone, with the next."""
    on_device: Mapping[str, Sequence[Reservation]] = field(default_factory=dict)
    """The same by uuid of the device."""
    warned: dict[Which, bool] = field(default_factory=dict)
    judged: dict[Which, int] = field(default_factory=dict)
    standings: dict[str, dict[str, ClassStanding]] = field(default_factory=dict)
    """Per device uuid, per class."""
    changes: int = 0
    events: list[NodeEvent] = field(default_factory=list)
    """Changes of state that no write to rt_nodes has carried yet."""
    told: int = 0
    """Number of the last change that we have said."""
    said: NodeState | None = None
    healthy: dict[str, bool] = field(default_factory=dict)
    foreign_us: dict[str, int] = field(default_factory=dict)
    """Per device uuid: the last heartbeat that told of foreign work."""
    revision: int = 0
    stale: bool = False
    dirty: bool = False
    _read: tuple[object, ...] | None = None
    """What is read here of ``metrics``."""

    # --- what comes in ---

    def heartbeat(self, metrics: Heartbeat, now_us: int) -> bool:
        """Takes a heartbeat; False for one that is older than the last of the same start."""
        last = self.metrics
        if last and last.start_id == metrics.start_id and metrics.counter <= self.counter:
            return False
        self.counter = metrics.counter
        # one that says the same is not kept: what lives as long as a heartbeat's period is what collecting costs
        if (read := _read(metrics)) != self._read:
            self.metrics, self._read = metrics, read
            self.stale = self.dirty = True
        self.liveness.heartbeat(metrics, now_us)
        return True

    def kube_says(self, kube: KubeNodeFacts) -> None:
        known = self.kube
        if known is None or known != kube.model_copy(update={"at_us": known.at_us}):
            self.kube = kube
            self.stale = self.dirty = True

    def age(self, now_us: int, policy: Policy) -> None:
        period_us = self.metrics.period_us if self.metrics else 0
        grace_us = max(policy.grace_us, 3 * period_us)
        self.liveness.age(now_us, grace_us, max(policy.lost_us, 2 * grace_us))

    def warning(self, event: DeadlineEvent) -> set[str] | None:
        """at_risk and recovered, as the tracker says them: the devices that it concerns; None where nothing follows."""
        at_risk = event.kind == "at_risk"
        if event.kind not in {"at_risk", "recovered"} or not self._note(event, event.judged, at_risk=at_risk):
            return None
        of = (event.request_id, event.replica, event.generation)
        return {uuid for each in self.residents if each.which == of for uuid in each.devices}

    def records(self, containers: Iterable[ContainerRecord]) -> bool:
        """The tracker's checkpoint: the same, for whoever missed an event."""
        return sum(self._note(c, c.met + c.missed, at_risk=c.standing == Standing.AT_RISK) for c in containers) > 0

    def _note(self, said: DeadlineEvent | ContainerRecord, judged: int, *, at_risk: bool) -> bool:
        """What is older than the last word, by the verdicts that it counts, is ignored; True for what is new."""
        if said.request_id is None or said.replica is None or said.generation is None:
            return False
        of = (said.request_id, said.replica, said.generation)
        if judged < self.judged.get(of, 0):
            return False
        news = self.warned.get(of, False) != at_risk
        self.warned[of], self.judged[of] = at_risk, judged
        return news

    def found(self, facts: NodeFacts | None, revision: int) -> None:
        """rt_nodes as it is; what its writer has said already we need not say."""
        self.revision = revision
        numbered = max(self.told, self.facts.changes if self.facts else 0)
        if facts is None:
            self.facts = None
            return
        if self.facts is None and self.metrics is None:
            self.liveness.resume(facts.state, facts.reason)
            self.said = facts.state
        if facts.state == self.liveness.state:
            self.events = []
        self.facts, numbered = facts, max(numbered, facts.changes)  # older facts do not make numbers be given again
        self.events = [e.model_copy(update={"number": numbered + n}) for n, e in enumerate(self.events, 1)]
        self.changes = numbered + len(self.events)

    def written(self, facts: NodeFacts, revision: int) -> list[NodeEvent]:
        """Our own write is there, or was until another's; returns the changes that are to be said now."""
        if revision >= self.revision:
            self.facts, self.revision = facts, revision
        carried = {event.number for event in facts.events}
        self.events = [event for event in self.events if event.number not in carried]
        news = [event for event in facts.events if event.number > self.told]
        self.told = max((self.told, *carried))
        return news

    # --- what follows from it ---

    def note_changes(self, wall_us: int) -> None:
        """Turns changes of state and of device health into events, each with the next number."""
        state = self.liveness.state
        if state != self.said:
            self._event(wall_us, state, self.liveness.reason)
            self.said = state
        for device in self.metrics.devices if self.metrics else ():
            if self.healthy.get(device.uuid, True) != device.healthy:
                self._event(wall_us, "device_back" if device.healthy else "device_lost", device.reason, device.uuid)
            self.healthy[device.uuid] = device.healthy
        gone = set(self.healthy) - {d.uuid for d in self.metrics.devices} if self.metrics else set()
        for uuid in sorted(gone):
            self._event(wall_us, "device_lost", "its monitor does not list it any more", uuid)
            del self.healthy[uuid]

    def _event(self, wall_us: int, state: str, reason: str | None, device: str | None = None) -> None:
        self.changes += 1
        event = NodeEvent(at_us=wall_us, node=self.name, state=state, reason=reason, device=device, number=self.changes)
        self.events.append(event)
        self.dirty = True

    def holds(self, residents: tuple[Reservation, ...]) -> set[str]:
        """Takes the node's reservations; the devices on which they are not as before."""
        before, now = self.on_device, defaultdict[str, list[Reservation]](list)
        for each in residents:
            for uuid in each.devices:
                now[uuid].append(each)
        self.residents, self.on_device = residents, now
        return {uuid for uuid in before.keys() | now.keys() if before.get(uuid) != now.get(uuid)}

    def judge_devices(
        self, policy: Policy, learned: Learned, of: Collection[str] | None = None
    ) -> dict[str, dict[str, ClassStanding]]:
        """The standing of each device, or of some, in each class, as things are now."""
        self.stale = self.stale and of is not None
        live = {r.which for r in self.residents}
        self.warned = {of: warned for of, warned in self.warned.items() if of in live}
        self.judged = {of: judged for of, judged in self.judged.items() if of in live}
        known = self.metrics.devices if self.metrics else ()
        devices = [device for device in known if of is None or device.uuid in of]
        return {d.uuid: {c.name: self._judge(d, c, policy, learned) for c in policy.classes} for d in devices}

    def _judge(self, device: HeardDevice, wanted: ClassTask, policy: Policy, learned: Learned) -> ClassStanding:
        if self.liveness.state not in ALIVE:
            return excluded(f"node {self.liveness.state}: {self.liveness.reason}")
        if self.liveness.state == NodeState.JOINED:
            return excluded("node joined: one more heartbeat is needed")
        if not device.healthy:
            return excluded(f"device not healthy: {device.reason}")
        if holder := device.plugin_holder or self._claim_holder(device):
            return excluded(f"given to {holder}")
        residents = self.on_device.get(device.uuid, [])
        at_risk = [r.request_id for r in residents if self.warned.get(r.which)]
        foreign = self._foreign(device, policy)
        standing = judge(device, wanted, residents, at_risk, foreign, policy.tight_ratio)
        return standing if foreign else by_measure(standing, device, wanted, residents, learned)

    def _foreign(self, device: HeardDevice, policy: Policy) -> bool:
        """Whether foreign work is there, or was until lately: it comes and goes."""
        if (device.foreign_share_micro or 0) >= policy.foreign_context_micro:
            self.foreign_us[device.uuid] = self.liveness.seen_us
            return True
        seen_us = self.foreign_us.get(device.uuid)
        if seen_us is None or self.liveness.seen_us - seen_us < policy.return_us:
            return seen_us is not None
        del self.foreign_us[device.uuid]
        return False

    def new_facts(self, wall_us: int, tolerated: tuple[str, ...] = ()) -> NodeFacts | None:
        """What rt_nodes should say of the node; None while nothing is known of it but its name."""
        if self.metrics is None:
            return self._facts_unheard(wall_us)
        known = {device.uuid: device for device in self.facts.devices} if self.facts else {}
        return NodeFacts(
            node=self.name,
            state=self.liveness.state,
            reason=self.liveness.reason,
            at_us=wall_us,
            start_id=self.metrics.start_id,
            changes=self.changes,
            events=self._pending(),
            devices=tuple(self._device_facts(device, known) for device in self.metrics.devices),
            **merged(self.metrics, self.kube, tolerated, self.facts.closed if self.facts else None),
        )

    def _facts_unheard(self, wall_us: int) -> NodeFacts | None:
        """A node that was in rt_nodes before we started and has not been heard since: only its state can change."""
        if self.facts is None:
            return None
        excluded_devices = tuple(
            device.model_copy(update={"classes": {c: excluded(f"node {self.liveness.state}") for c in device.classes}})
            if self.liveness.state not in ALIVE
            else device
            for device in self.facts.devices
        )
        said = {
            "state": self.liveness.state,
            "reason": self.liveness.reason,
            "at_us": wall_us,
            "changes": self.changes,
            "events": self._pending(),
            "devices": excluded_devices,
        }
        return self.facts.model_copy(update=said)

    def _pending(self) -> tuple[NodeEvent, ...]:
        """What goes with the next write; the changes said last stay there until there are new ones."""
        return tuple(self.events) or (self.facts.events if self.facts else ())

    def _device_facts(self, device: HeardDevice, known: Mapping[str, DeviceFacts]) -> DeviceFacts:
        """The very object that was published where it says the same."""
        shown, claimed = _shown_of_device(device), self._claim_holder(device)
        classes, before = self.standings.get(device.uuid, {}), known.get(device.uuid)
        if before and (before.classes, before.claim_holder, _shown_of_device(before)) == (classes, claimed, shown):
            return before
        return DeviceFacts(**dict(zip(Device.model_fields, shown, strict=True)), claim_holder=claimed, classes=classes)

    def _claim_holder(self, device: HeardDevice) -> str | None:
        """As last written, until Kubernetes says something."""
        if self.kube is not None:
            return claim_holder(device, self.kube)
        known = self.facts.devices if self.facts else ()
        return next((each.claim_holder for each in known if each.uuid == device.uuid), None)


def _read(metrics: Heartbeat) -> tuple[object, ...]:
    """All that a heartbeat says and that is read later than it comes."""
    return _read_of_node(metrics), *map(_read_of_device, metrics.devices)

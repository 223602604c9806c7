"""What the bridge sees of the bus: the requests of pods in the ledger, and when something became free; no I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from shared.effects import KeyChanged, WatchReplayed
from shared.errors import FieldError
from shared.messages import SOMEBODY, NodeFacts, NodeReservations, Pod, RequestRecord, State
from shared.subjects import LEDGER, NODES, decode, node_key, request_key


@dataclass(frozen=True, slots=True)
class Site:
    """Where one pod has its place; None where it has none."""

    node: str | None
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A request that is for pods, as its record says: `sites` are those of its pods, in their order."""

    request_id: str
    state: State
    final: bool
    pods: tuple[Pod, ...]
    generation: int
    sites: tuple[Site, ...]

    def site(self, uid: str) -> Site:
        return next(site for pod, site in zip(self.pods, self.sites, strict=True) if pod.uid == uid)


class View:
    """`world` counts whatever can make a refused pod fit: something reserved went, or a node's facts changed."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.world = 0
        self.live: dict[str, Known] = {}
        """By request id: those that are not final."""
        self._of_pod: dict[str, str] = {}
        self._moved: set[str] = set()
        self.nodes: set[str] = set()
        """Those that the node list knows."""
        self.counters: Counter[str] = Counter()
        self.plugin_held: dict[str, dict[str, str]] = {}
        """By node and uuid: the pod that a device plugin gave the device to, where that is known."""
        self._held: dict[str, frozenset[tuple[Any, ...]]] = {}
        self._facts: dict[str, Any] = {}

    def lost(self) -> None:
        """Nothing is heard any more: what is known may be old."""
        self.loaded.clear()

    def replayed(self, event: WatchReplayed) -> None:
        """Keys that are not named are gone."""
        if event.bucket == LEDGER:
            for request_id in [name for name in self.live if request_key(name) not in event.keys]:
                self._forget(request_id)
            for key in self._held.keys() - event.keys:
                del self._held[key]
        if event.bucket == NODES:
            for key in self._facts.keys() - event.keys:
                self._node_gone(key)
        self.world += 1
        self.loaded.add(event.bucket)

    def changed(self, change: KeyChanged) -> None:
        kind = change.key.partition(".")[0]
        try:
            if change.bucket == NODES and kind == "node":
                self._facts_changed(change)
            elif change.bucket == LEDGER and kind == "node":
                self._reservations_changed(change)
            elif change.bucket == LEDGER and kind == "request":
                self._record_changed(change)
        except FieldError:
            self.counters[f"malformed.{change.bucket}"] += 1

    def _facts_changed(self, change: KeyChanged) -> None:
        if change.value is None:
            self._node_gone(change.key)
            return
        node, facts = decode(change.key.removeprefix("node.")), NodeFacts.trusted(change.value)
        self.plugin_held[node] = {
            each.uuid: each.plugin_holder
            for each in facts.devices
            if each.plugin_holder and each.plugin_holder != SOMEBODY
        }
        shown = _shown(facts)
        self.world += self._facts.get(change.key) != shown
        self._facts[change.key] = shown
        self.nodes.add(node)

    def _node_gone(self, key: str) -> None:
        if self._facts.pop(key, None) is not None:
            self.nodes.discard(node := decode(key.removeprefix("node.")))
            self.plugin_held.pop(node, None)
            self.world += 1

    def _reservations_changed(self, change: KeyChanged) -> None:
        now = (
            frozenset(map(_size, NodeReservations.trusted(change.value).reservations)) if change.value else frozenset()
        )
        self.world += not self._held.get(change.key, frozenset()) <= now
        self._held[change.key] = now

    def _record_changed(self, change: KeyChanged) -> None:
        request_id = decode(change.key.removeprefix("request."))
        known = _known(RequestRecord.trusted(change.value)) if change.value else None
        if known is None or known.final:
            self._forget(request_id)
        else:
            before = self.live.get(request_id)
            self.live[request_id] = known
            self._of_pod |= {pod.uid: request_id for pod in known.pods}
            if before is None or before.sites != known.sites:
                self._moved.update(pod.uid for pod in known.pods)

    def _forget(self, request_id: str) -> None:
        known = self.live.pop(request_id, None)
        for pod in known.pods if known else ():
            if self._of_pod.get(pod.uid) == request_id:
                del self._of_pod[pod.uid]
                self._moved.add(pod.uid)

    def take_moved(self) -> set[str]:
        """Pods whose places in the ledger are others than when this was last taken."""
        moved, self._moved = self._moved, set()
        return moved

    def reserved(self, node: str) -> dict[str, str]:
        """Who has something of each device of a node, by its uuid: one request id for each."""
        held = self._held.get(node_key(node), frozenset())
        return {device: str(each[0]) for each in held for device in each[_DEVICES]}

    def of_pod(self, uid: str) -> Known | None:
        """The request that a pod is part of, while that goes on."""
        return self.live.get(self._of_pod.get(uid, ""))


def _known(record: RequestRecord) -> Known | None:
    if record.body is None or not record.body.pods:
        return None
    newest = max(each.generation for each in record.replicas)
    sites = tuple(Site(each.node, each.devices) for each in record.replicas)
    return Known(record.request_id, record.state, record.final, record.body.pods, newest, sites)


def _shown(facts: NodeFacts) -> object:
    """What of a node's facts decides whether something fits: not when they were written, nor how devices rank."""
    devices = tuple(d.model_copy(update={"classes": {} if d.classes else None}) for d in facts.devices)
    return facts.model_copy(update={"at_us": 0, "changes": 0, "events": (), "devices": devices})


_DEVICES: Final = 3


def _size(held: Any) -> tuple[Any, ...]:
    """Request id, replica and generation; then its devices; then how much of them, and of the node."""
    return (*held.which, held.devices, held.share_micro, held.device_memory_mib, held.cpu_milli, held.memory_mib)

"""Gives back what pods held that are over, and compares pods with the ledger; no I/O.

Over is a pod that has ended, is deleted, or whose name another one has by now; never one that is only being deleted,
since its containers may still run. What a watch does not show is read from the API server before anything follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.kube_bridge.calls import AskRelease, LookAtPod, PodLooked, ReleaseAnswered
from services.kube_bridge.claims import Claimed, ClassSeen
from services.kube_bridge.seen import NodeSeen, PodSeen
from services.kube_bridge.view import Known, View
from shared.effects import Effect
from shared.messages import State

_RUNS: Final = {State.PLACED, State.STARTED}
_LEAVES: Final = {State.STOPPING}


@dataclass(frozen=True, slots=True)
class Drift:
    """Where a pod and the ledger say different things."""

    kind: str
    uid: str
    text: str
    node: str = ""
    """Of SILENT: where it is."""


@dataclass
class Releasing:
    """`patience_us`: so long the placers themselves may say first how a bound pod ended, since they know its exit code;
    and so long a difference must last to be told.
    """

    view: View
    nodes: Mapping[str, NodeSeen]
    """Of this cluster: what the ledger has on others is not ours to judge."""
    patience_us: int
    pods: dict[str, PodSeen] = field(default_factory=dict)
    """All pods of the cluster by uid."""
    counters: Counter[str] = field(default_factory=Counter)
    claimed: Callable[[], Mapping[str, Claimed]] = dict
    """By node, what claims have."""
    taking_ours: Callable[[], Sequence[ClassSeen]] = tuple
    drifts: dict[tuple[str, str], Drift] = field(default_factory=dict)
    """Those that lasted, by kind and uid."""
    _over: dict[str, int] = field(default_factory=dict)
    """Pods that are over, since when: their requests are looked for."""
    _asked: set[str] = field(default_factory=set)
    _doubted: dict[tuple[str, str], int] = field(default_factory=dict)

    # --- what the API server shows ---

    def changed(self, pod: PodSeen, now_us: int) -> list[Effect]:
        self.pods[pod.uid] = pod
        return self.over(pod.uid, now_us) if pod.ended else self._taken(pod)

    def gone(self, uid: str, now_us: int) -> list[Effect]:
        self.pods.pop(uid, None)
        return self.over(uid, now_us)

    def over(self, uid: str, now_us: int) -> list[Effect]:
        """A hold is of no use any more at once."""
        self._over.setdefault(uid, now_us)
        known = self.view.of_pod(uid)
        return self._release(known) if known is not None and known.state not in _RUNS else []

    def is_over(self, uid: str) -> bool:
        return uid in self._over

    def _taken(self, pod: PodSeen) -> list[Effect]:
        """What is held for a pod that somebody else has bound is of no use any more either."""
        known = self.view.of_pod(pod.uid) if pod.bound_by_others else None
        return self._release(known) if known is not None and known.state not in _RUNS else []

    # --- time ---

    def tick(self, now_us: int) -> list[Effect]:
        """Those that are over and still in the ledger."""
        effects: list[Effect] = []
        for uid, since_us in list(self._over.items()):
            known = self.view.of_pod(uid)
            if known is not None and now_us - since_us >= self.patience_us:
                effects += self._release(known)
            elif known is None and now_us - since_us > 10 * self.patience_us:
                del self._over[uid]  # a hold that was under way when the pod went would be here by now
        return effects

    def compare(self, now_us: int) -> tuple[list[Effect], list[Drift]]:
        """Everything in the ledger against all pods; what to do, and which differences are new."""
        effects: list[Effect] = []
        for known, pod in [(each, pod) for each in self.view.live.values() for pod in each.pods]:
            seen, node = self.pods.get(pod.uid), known.site(pod.uid).node
            if node is not None and node not in self.nodes:
                continue
            if seen is None and known.request_id not in self._asked:
                effects.append(LookAtPod(pod.namespace, pod.name, pod.uid))
            elif seen is not None:
                effects += self.over(pod.uid, now_us) if seen.ended else self._taken(seen)
        return effects, self._lasting(dict(self._differences()), now_us)

    def looked(self, event: PodLooked, now_us: int) -> list[Effect]:
        if event.there is not False or event.uid in self.pods:
            return []
        self.counters["releases.missed"] += event.uid not in self._over
        return self.over(event.uid, now_us)

    # --- releases ---

    def _release(self, known: Known) -> list[Effect]:
        if known.state in _LEAVES or known.request_id in self._asked or not self._is_over(known):
            return []
        self._asked.add(known.request_id)
        self.counters["releases.asked"] += 1
        return [AskRelease(known.request_id)]

    def _is_over(self, known: Known) -> bool:
        """A gang that runs is over when all of it is; one that is only held can never be whole any more."""
        over = [pod.uid in self._over for pod in known.pods]
        if known.state in _RUNS:
            return all(over)
        return any(over) or any(seen.bound_by_others for each in known.pods if (seen := self.pods.get(each.uid)))

    def answered(self, event: ReleaseAnswered) -> None:
        """Where nobody answered the next tick asks again."""
        self._asked.discard(event.request_id)

    # --- differences ---

    def _differences(self) -> Iterator[tuple[tuple[str, str], Drift]]:
        for uid, pod in self.pods.items():
            if not (pod.ours and pod.wants) or pod.ended:
                continue
            if kind := _difference(pod, self.view.of_pod(uid)):
                text = f"{pod.namespace}/{pod.name} ({uid}): {_WORDS[kind]}"
                yield (kind, uid), Drift(kind, uid, text)
        yield from self._kept_by_silent_nodes()
        yield from self._taken_by_others()

    def _kept_by_silent_nodes(self) -> Iterator[tuple[tuple[str, str], Drift]]:
        for known in self.view.live.values():
            for each in known.pods:
                seen, node = self.pods.get(each.uid), self.nodes.get(known.site(each.uid).node or "")
                leaves = seen.being_deleted if seen is not None else each.uid in self._over
                if leaves and node is not None and node.ready is None:
                    text = f"{each.namespace}/{each.name} ({each.uid}): {_WORDS[SILENT]}: {node.name}"
                    yield (SILENT, each.uid), Drift(SILENT, each.uid, text, node.name)

    def _taken_by_others(self) -> Iterator[tuple[tuple[str, str], Drift]]:
        given = {node: {**self.view.plugin_held.get(node, {})} for node in self.nodes}
        for node, claimed in self.claimed().items():
            given.setdefault(node, {}).update(claimed.devices)
        for node, holders in given.items():
            reserved = self.view.reserved(node) if holders else {}
            for uuid in holders.keys() & reserved.keys():
                kind, text = "given_twice", f"given to {holders[uuid]}, and reserved for {reserved[uuid]}"
                yield (kind, uuid), Drift(kind, uuid, f"{node}/{uuid}: {text}")
        for each in self.taking_ours():
            kind, text = "class_takes_ours", f"it stands for {each.stands_for}: kube-scheduler gives devices itself"
            yield (kind, each.name), Drift(kind, each.name, f"DeviceClass {each.name}: {text}")

    def unheard(self) -> list[str]:
        """Nodes that keep what could be others': nobody hears them."""
        return sorted({drift.node for drift in self.drifts.values() if drift.node})

    def _lasting(self, found: Mapping[tuple[str, str], Drift], now_us: int) -> list[Drift]:
        """What is under way, or has not reached us from one of both sides, goes by itself."""
        self._doubted = {key: self._doubted.get(key, now_us) for key in found}
        lasting = {key: drift for key, drift in found.items() if now_us - self._doubted[key] >= self.patience_us}
        new = [drift for key, drift in lasting.items() if key not in self.drifts]
        self.drifts = lasting
        return new


SILENT: Final = "held_by_silent_node"
_WORDS: Final = {
    "no_request": "bound to a node, and no request of the ledger is for it",
    "other_node": "bound to another node than the ledger says",
    "other_devices": "its devices annotation is not what the ledger says",
    "not_bound": "the ledger says that it is bound, and it is not",
    "not_ours": "bound by somebody else while its place was held, which is given back",
    SILENT: "it goes, and what it has stays reserved, since it may still run: its node is not heard",
}


def _difference(pod: PodSeen, known: Known | None) -> str | None:
    if known is None:
        return "no_request" if pod.node else None
    if known.state == State.STARTED and not pod.node:
        return "not_bound"
    if not pod.node:
        return None
    if known.state not in _RUNS:
        return None if known.state in _LEAVES else "not_ours"
    site = known.site(pod.uid)
    if pod.node != site.node:
        return "other_node" if site.node is not None else None
    return "other_devices" if set((pod.devices or "").split(",")) != set(site.devices) else None

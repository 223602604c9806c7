"""Kubernetes' facts about each node for the bus: what it can give, and what others than Laxity reserve; no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from services.kube_bridge.claims import Claimed
from services.kube_bridge.seen import NodeSeen, PodSeen
from services.kube_bridge.view import View
from shared.effects import Effect, Emit
from shared.messages import KubeNodeFacts, Taint
from shared.subjects import Subjects

AGAIN_TICKS: Final = 10
"""After so many ticks a node is told of again: what is said on this subject may be lost."""


class Facts:
    """A node whose facts changed is told of at the next tick, the others in turn."""

    def __init__(self, subjects: Subjects, view: View) -> None:
        self._subjects, self._view = subjects, view
        self.nodes: dict[str, NodeSeen] = {}
        self._told: dict[str, KubeNodeFacts] = {}
        self._on_node: defaultdict[str, set[str]] = defaultdict(set)
        self._node_of: dict[str, str] = {}
        self._doubted: set[str] = set()
        self._gone: set[str] = set()
        self._ticks = 0
        self.changes = 0
        """Counts nodes that came and went."""
        self.claimed: Mapping[str, Claimed] = {}
        """By node."""

    # --- what the API server shows ---

    def node(self, seen: NodeSeen) -> None:
        self.changes += seen.name not in self.nodes
        self.nodes[seen.name] = seen
        self._gone.discard(seen.name)
        self._doubted.add(seen.name)

    def node_gone(self, name: str) -> None:
        if self.nodes.pop(name, None) is not None:
            self.changes += 1
            self._gone.add(name)

    def pod(self, uid: str, seen: PodSeen | None) -> None:
        """Where it is counted: nowhere before it is bound and after it has ended."""
        node = seen.node if seen is not None and not seen.ended else ""
        before = self._node_of.pop(uid, "")
        if before:
            self._on_node[before].discard(uid)
        if node:
            self._node_of[uid] = node
            self._on_node[node].add(uid)
        self._doubted.update(name for name in (before, node) if name in self.nodes)

    def claims(self, claimed: Mapping[str, Claimed]) -> None:
        """All that claims have now."""
        before, self.claimed = self.claimed, claimed
        self._doubted.update(
            name
            for name in before.keys() | claimed.keys()
            if name in self.nodes and before.get(name) != claimed.get(name)
        )

    # --- time ---

    def tick(self, pods: Mapping[str, PodSeen], wall_us: int) -> list[Effect]:
        """Those that changed, and every tenth of the others."""
        self._ticks += 1
        turn = self._ticks % AGAIN_TICKS
        effects = [self._say(self._left(name, wall_us)) for name in sorted(self._gone)]
        for place, name in enumerate(sorted(self.nodes)):
            if name in self._doubted or place % AGAIN_TICKS == turn:
                facts = self._facts(self.nodes[name], pods, wall_us)
                effects.append(self._say(facts))
        self._gone.clear()
        self._doubted.clear()
        return effects

    def _say(self, facts: KubeNodeFacts) -> Effect:
        return Emit(self._subjects.kube_facts(facts.node), facts)

    def _left(self, name: str, wall_us: int) -> KubeNodeFacts:
        return KubeNodeFacts(
            node=name,
            at_us=wall_us,
            cpu_milli=None,
            memory_mib=None,
            foreign_cpu_milli=None,
            foreign_memory_mib=None,
            ready=None,
            gone=True,
        )

    def _facts(self, node: NodeSeen, pods: Mapping[str, PodSeen], wall_us: int) -> KubeNodeFacts:
        there = [pods[uid] for uid in self._on_node[node.name]]
        claimed = self.claimed.get(node.name, Claimed())
        foreign = [pod for pod in there if not pod.made_by_us and not self._reserved(pod.uid, node.name)]
        return KubeNodeFacts(
            node=node.name,
            at_us=wall_us,
            cpu_milli=node.cpu_milli,
            memory_mib=node.memory_mib,
            foreign_cpu_milli=_sum([pod.cpu_milli for pod in foreign]),
            foreign_memory_mib=_sum([pod.memory_mib for pod in foreign]),
            foreign_gpus=sum(pod.nvidia_gpus for pod in foreign),
            labels=dict(node.labels),
            taints=tuple(Taint(key=key, value=value, effect=effect) for key, value, effect in node.taints),
            unschedulable=node.unschedulable,
            ready=node.ready,
            reason=node.reason,
            conditions=dict(node.conditions),
            publishes_ours=node.publishes_ours,
            claimed=dict(claimed.devices),
            claimed_unknown=claimed.unknown,
        )

    def _reserved(self, uid: str, node: str) -> bool:
        known = self._view.of_pod(uid)
        return known is not None and known.site(uid).node == node


def _sum(found: list[int | None]) -> int | None:
    """Unknown where one of them is."""
    known = [each for each in found if each is not None]
    return sum(known) if len(known) == len(found) else None

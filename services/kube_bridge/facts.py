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
GRACE_TICKS: Final = 5
"""For so long what a Binding of ours gave a pod stands for its reservation, where the ledger has not shown that yet."""


class Facts:
    """A node whose facts changed is told of at the next tick, the others in turn."""

    def __init__(self, subjects: Subjects, view: View) -> None:
        self._subjects, self._view = subjects, view
        self.nodes: dict[str, NodeSeen] = {}
        self._told: dict[str, KubeNodeFacts] = {}
        """Without the time."""
        self._on_node: defaultdict[str, dict[str, PodSeen]] = defaultdict(dict)
        self._node_of: dict[str, str] = {}
        self._bound_at: dict[str, int] = {}
        """Ticks at which pods with a Binding of ours were first seen, the latest last; for GRACE_TICKS."""
        self._doubted: set[str] = set()
        """Something that their facts are made of is another than when they were told."""
        self._gone: set[str] = set()
        self._ticks = 0
        self.changes = 0
        """Counts nodes that came and went."""
        self.claimed: Mapping[str, Claimed] = {}
        """By node."""

    # --- what the API server shows ---

    def node(self, seen: NodeSeen) -> None:
        before = self.nodes.get(seen.name)
        self.changes += before is None
        self.nodes[seen.name] = seen
        self._gone.discard(seen.name)
        if before != seen:
            self._doubted.add(seen.name)

    def node_gone(self, name: str) -> None:
        if self.nodes.pop(name, None) is not None:
            self.changes += 1
            self._gone.add(name)
            self._told.pop(name, None)

    def pod(self, uid: str, seen: PodSeen | None) -> None:
        """Where it is counted: nowhere before it is bound and after it has ended."""
        counted = seen if seen is not None and seen.node and not seen.ended else None
        node = self._node_of.get(uid, "")
        before = self._on_node[node].pop(uid) if node else None
        if counted is None:
            self._node_of.pop(uid, None)
            self._bound_at.pop(uid, None)
        else:
            self._node_of[uid] = counted.node
            self._on_node[counted.node][uid] = counted
            if before is None and counted.bound_by_us:
                self._bound_at[uid] = self._ticks
        if _weight(before) != _weight(counted):
            self._doubted.update(each.node for each in (before, counted) if each is not None)

    def claims(self, claimed: Mapping[str, Claimed]) -> None:
        """All that claims have now."""
        before, self.claimed = self.claimed, claimed
        self._doubted.update(
            name
            for name in before.keys() | claimed.keys()
            if name in self.nodes and before.get(name) != claimed.get(name)
        )

    # --- time ---

    def tick(self, wall_us: int) -> list[Effect]:
        """Those that changed, and every tenth of the others."""
        self._ticks += 1
        turn = self._ticks % AGAIN_TICKS
        self._doubt_pods()
        effects = [self._say(_left(name), wall_us) for name in sorted(self._gone)]
        for place, name in enumerate(sorted(self.nodes)):
            if (name in self._doubted and self._is_new(name)) or place % AGAIN_TICKS == turn:
                effects.append(self._say(self._told[name], wall_us))
        self._gone.clear()
        self._doubted.clear()
        return effects

    def _doubt_pods(self) -> None:
        """Those of which the ledger says something else than before, or had time to say something and did not."""
        uids = self._view.take_moved()
        while self._bound_at and self._ticks - next(iter(self._bound_at.values())) > GRACE_TICKS:
            uids.add(uid := next(iter(self._bound_at)))
            del self._bound_at[uid]
        self._doubted.update(self._node_of[uid] for uid in uids if uid in self._node_of)

    def _is_new(self, name: str) -> bool:
        facts = self._facts(self.nodes[name])
        if self._told.get(name) == facts:
            return False
        self._told[name] = facts
        return True

    def _say(self, facts: KubeNodeFacts, wall_us: int) -> Effect:
        return Emit(self._subjects.kube_facts(facts.node), facts.model_copy(update={"at_us": wall_us}))

    def _facts(self, node: NodeSeen) -> KubeNodeFacts:
        there = self._on_node[node.name].values()
        claimed = self.claimed.get(node.name, Claimed())
        foreign = [pod for pod in there if self._is_foreign(pod)]
        return KubeNodeFacts(
            node=node.name,
            at_us=0,
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

    def _is_foreign(self, pod: PodSeen) -> bool:
        """No reservation stands for it. One that our Binding gave it was in the ledger before, and may be shown later
        than the pod: both come on ways of their own."""
        if pod.made_by_us or pod.uid in self._bound_at:
            return False
        known = self._view.of_pod(pod.uid)
        return known is None or known.site(pod.uid).node != pod.node


def _left(name: str) -> KubeNodeFacts:
    return KubeNodeFacts(
        node=name,
        at_us=0,
        cpu_milli=None,
        memory_mib=None,
        foreign_cpu_milli=None,
        foreign_memory_mib=None,
        ready=None,
        gone=True,
    )


def _weight(pod: PodSeen | None) -> object:
    """What of it its node's facts are made of."""
    return pod and (pod.node, pod.made_by_us, pod.cpu_milli, pod.memory_mib, pod.nvidia_gpus)


def _sum(found: list[int | None]) -> int | None:
    """Unknown where one of them is."""
    known = [each for each in found if each is not None]
    return sum(known) if len(known) == len(found) else None

"""What is lost, a node or a device, as the node list says, and who was there and may be placed again; only looks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from services.placer.core.cluster import STATES, Cluster
from services.placer.core.ledger import Ledger
from services.placer.core.records import RUNNABLE
from shared.messages import NodeState, ReplicaRecord, RequestRecord, State

_ALIVE = frozenset({NodeState.READY, NodeState.DEGRADED})
_AWAY = [STATES.index(state) for state in (NodeState.UNREACHABLE, NodeState.LOST)]


def lost_nodes(cluster: Cluster) -> list[str]:
    slots = cluster.all_slots()
    found = slots[cluster.nodes["state"][slots] == STATES.index(NodeState.LOST)]
    return [cluster.name(slot) for slot in found.tolist()]


def unreachable(cluster: Cluster) -> tuple[int, int]:
    """How many nodes cannot be reached, lost ones among them, and how many there are."""
    slots = cluster.all_slots()
    return int(np.isin(cluster.nodes["state"][slots], _AWAY).sum()), len(slots)


def is_lost(cluster: Cluster, node: str) -> bool:
    """A node of which nothing is known is not lost."""
    facts = cluster.facts(node)
    return facts is not None and facts.state == NodeState.LOST


def lost_device(cluster: Cluster, node: str, devices: Iterable[str]) -> str | None:
    """Which of these devices is lost and why, while its node lives."""
    facts = cluster.facts(node)
    if facts is None or facts.state not in _ALIVE:
        return None
    known = {device.uuid: device for device in facts.devices}
    for uuid in devices:
        if uuid not in known:
            return f"{uuid} is not there any more"
        if not known[uuid].healthy:
            return f"{uuid} is not healthy: {known[uuid].reason or 'no reason is known'}"
    return None


def may_run_again(record: RequestRecord) -> bool:
    """Whether its command may run once more though nobody knows that it has ended. Pods that were bound cannot."""
    return record.body is not None and record.body.pods is None and record.body.on_lost == "replace"


def leaves_unwatched(record: RequestRecord) -> bool:
    """Whether it had rather start elsewhere than run on where nobody watches it."""
    body = record.body
    return body is not None and may_run_again(record) and (body.restart == "on_failure" or body.on_risk == "move")


def at_rest(replica: ReplicaRecord) -> bool:
    """It has one place, and may run there: more than two at a time it never has."""
    return replica.state in RUNNABLE and replica.to is None and replica.leaving is None


def stranded(record: RequestRecord, node: str) -> list[ReplicaRecord]:
    """Replicas whose place is there and that may have another one."""
    return [each for each in record.replicas if each.node == node and at_rest(each)] if may_run_again(record) else []


def moving_to(record: RequestRecord, node: str) -> list[ReplicaRecord]:
    """Replicas that are being started there while they are elsewhere."""
    return [each for each in record.replicas if each.to is not None and each.to.node == node]


def on_lost_devices(cluster: Cluster, ledger: Ledger) -> Iterator[tuple[str, int, int]]:
    """Request, replica and generation of everyone on a lost device of a node that lives who asked to be moved."""
    for request_id in ledger.movers:
        record = ledger.records[request_id].value
        for each in record.replicas if record else ():
            if each.node is None or each.state != State.STARTED or not at_rest(each):
                continue
            if lost_device(cluster, each.node, each.devices):
                yield request_id, each.replica, each.generation

"""Where somebody misses a guarantee, as the node list says of devices, and who there wants to be moved; only looks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from services.placer.core.cluster import AT_RISK, Cluster
from services.placer.core.ledger import Ledger


def at_risk(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """By node, the devices with somebody on them who misses a guarantee."""
    rows = cluster.rows_of(cluster.all_slots())
    found: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)
    for row in rows[cluster.devices["risk"][rows] == AT_RISK].tolist():
        found[cluster.name(int(cluster.devices["node"][row]))] += (cluster.device(row).uuid,)
    return dict(found)


def who_wants_away(cluster: Cluster, ledger: Ledger) -> Iterator[tuple[str, int]]:
    """Request and replica of everyone on such a device who asked to be moved (`on_risk: move`)."""
    for node, devices in at_risk(cluster).items():
        for held in ledger.reservations(node):
            stored = ledger.records.get(held.request_id)
            body = stored.value.body if stored and stored.value else None
            if body and body.on_risk == "move" and set(held.devices) & set(devices):
                yield held.request_id, held.replica

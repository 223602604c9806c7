"""How many replicas each node could take, one kind of request after another; decides nothing."""

from __future__ import annotations

import numpy as np

from services.placer.core.accounts import Load
from services.placer.core.cluster import STATES, UNKNOWN
from services.placer.core.columns import Ints
from services.placer.core.demand import Demand
from services.placer.core.feasible import admit
from services.placer.core.filters import Sifted
from services.placer.core.measured import Measured
from services.placer.core.rows import Rows
from shared.messages import SHARE_WHOLE_MICRO, NodeState


def room(sifted: Sifted, limit: int, *, empty: bool = False) -> Ints:
    """Replicas that fit on each node, by node row and at most `limit` each; `empty`: were all reservations gone.

    Exact, since replicas of one request are alike and nodes do not share anything: what fits on a device does not
    depend on the order. A node that has just joined counts as `limit` where empty: what it has is not known yet.
    """
    rows = sifted.possible if empty else sifted.passing
    ask = rows.ask
    node = _per_node(rows, limit, empty=empty)
    if ask.demand.count:
        devices = rows.where(rows.of_device("is_device"))
        each = _per_device(devices, limit, empty=empty)
        total = np.bincount(devices.node, weights=each, minlength=len(node)).astype(np.int64)
        node = np.minimum(node, total // ask.demand.count)
    if empty:
        node[rows.node[rows.of_node("state") == STATES.index(NodeState.JOINED)]] = limit
    return node


def _per_node(rows: Rows, limit: int, *, empty: bool) -> Ints:
    """By the CPU and memory of each node that has one of these rows."""
    demand, column = rows.ask.demand, "capacity" if empty else "free"
    most = np.full(len(rows), limit, np.int64)
    for resource, asked in (("cpu", demand.cpu_milli), ("memory", demand.memory_mib)):
        if asked:
            most = np.minimum(most, rows.of_node(f"{resource}_{column}") // asked)
    node = np.zeros(len(rows.ask.cluster.nodes), np.int64)
    node[rows.node] = most
    return node


def _per_device(rows: Rows, limit: int, *, empty: bool) -> Ints:
    """By the share, memory and deadlines of each device."""
    demand = rows.ask.demand
    share = np.full(len(rows), SHARE_WHOLE_MICRO) if empty else rows.of_device("share_free")
    most: Ints = np.minimum(share // demand.share_micro, limit)
    if demand.device_memory_mib:
        memory = rows.of_device("memory_capacity" if empty else "memory_free")
        most = np.where(memory == UNKNOWN, most, np.minimum(most, memory // demand.device_memory_mib))
    if not len(rows):
        return most
    kinds, cluster = rows.of_device("sharing" if empty else "load"), rows.ask.cluster
    pairs, which = np.unique(kinds * (limit + 1) + most, return_inverse=True)
    depth = []
    for number, deep in zip(*(part.tolist() for part in np.divmod(pairs, limit + 1)), strict=True):
        load = Load(cluster.sharing(number)) if empty else cluster.kinds[number]
        depth.append(_deepest(demand, load, cluster.measured, deep))
    depths: Ints = np.array(depth, np.int64)[which]
    return depths


def _deepest(demand: Demand, load: Load, measured: Measured, most: int) -> int:
    """How many the device takes one after another, by bisection: where it refuses the k-th, it refuses all after it."""
    if most and admit(demand, load, measured, most - 1).admitted:
        return most
    fits, refused = 0, most
    while refused - fits > 1:
        middle = (fits + refused) // 2
        if admit(demand, load, measured, middle - 1).admitted:
            fits = middle
        else:
            refused = middle
    return fits

"""What a decision looks at: the question, and the rows it is asked of, as arrays; filters and scores are elsewhere.

Whatever is said of a row depends on the question and on the row's node alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.placer.core.accounts import Load
from services.placer.core.capabilities import Capabilities, capabilities_of, needs
from services.placer.core.cluster import RESOURCES, UNKNOWN, Cluster
from services.placer.core.columns import Array, Bools, Ints
from services.placer.core.demand import Demand
from services.placer.core.feasible import Verdicts
from services.placer.core.strategies.nodes import Asked
from shared.admission import Sharing
from shared.messages import AllExcept


@dataclass(eq=False)
class Ask:
    """One decision's question. `kept`: what is worked out for it is kept for the next one of its kind.

    Not to be changed (frozen ones take several times as long to make, and each decision makes one).
    """

    cluster: Cluster
    demand: Demand
    capabilities: Mapping[str, Capabilities]
    """Not to be changed: what is remembered goes by which object it is."""
    set_aside: frozenset[str] = frozenset()
    kept: bool = True
    slots: tuple[int, ...] | None = None
    """The fixed sizes of nodes that it may go to; None: any node."""

    @property
    def kind(self) -> Hashable:
        """Everything that what is said of a row depends on: questions of one kind have the same answers."""
        request, gpu = self.demand.request, self.demand.request.gpu
        wanted = request.candidates
        return (
            self.demand.amounts,
            gpu and gpu.models,
            request.realtime,
            self.cluster.measured.key(self.demand),
            tuple(sorted(request.node_selector.items())) if request.node_selector else (),
            (wanted.all_except, "except") if isinstance(wanted, AllExcept) else wanted,
            needs(request),
            id(self.capabilities),
            self.set_aside,
            self.slots,
        )

    def everywhere(self) -> Rows:
        """All rows: nodes for a request without gpu, else devices. The devices of a node stand together."""
        if self.demand.count:
            return Rows(self, self.cluster.all_rows(), self.cluster.nodes_of_all_rows())
        return Rows(self, self.cluster.all_slots())

    def on(self, slots: Ints) -> Rows:
        """The rows of some nodes, node by node; nodes that are not known have none."""
        if self.demand.count:
            return Rows(self, self.cluster.rows_of(slots))
        return Rows(self, slots[self.cluster.nodes["known"][slots]])

    def strangers(self) -> list[str]:
        """Candidates of the request that no node list has named."""
        wanted = self.demand.request.candidates
        names = () if wanted is None or isinstance(wanted, AllExcept) else wanted
        return [name for name in dict.fromkeys(names) if self.cluster.slot(name) is None]

    @cached_property
    def models(self) -> Ints:
        """The codes of the models asked for."""
        gpu = self.demand.request.gpu
        codes = [self.cluster.codes.get(("model", model), UNKNOWN) for model in (gpu and gpu.models) or ()]
        return np.array(codes, np.int64)

    @property
    def asked(self) -> Asked:
        """What strategies see of it."""
        demand = self.demand
        return Asked(demand.count, demand.share_micro, demand.cpu_milli, demand.memory_mib)

    @property
    def resources(self) -> tuple[str, ...]:
        """Those of RESOURCES that it asks for."""
        return RESOURCES if self.demand.count else RESOURCES[:2]

    @cached_property
    def taken(self) -> Ints:
        """What one replica takes of a node, for RESOURCES."""
        demand = self.demand
        return np.array([demand.cpu_milli, demand.memory_mib, demand.count * demand.share_micro])

    def lacking(self, node: str) -> str | None:
        """What the node's backend cannot honour, if anything."""
        can = capabilities_of(node, self.capabilities)
        return "no backend is set for the node: nothing" if can is None else can.lacking(self.demand.request)

    def named(self, names: Iterable[str]) -> Bools:
        """The nodes of these names, as a mask over node rows."""
        mask = np.zeros(len(self.cluster.nodes), np.bool_)
        mask[[slot for name in names if (slot := self.cluster.slot(name)) is not None]] = True
        return mask


def begins(node: Ints) -> Bools:
    """Where another number than before begins."""
    new = np.empty(len(node), np.bool_)
    new[:1] = True
    np.not_equal(node[1:], node[:-1], out=new[1:])
    return new


class Rows:
    """Some rows under question; every column of theirs is an array of their length."""

    def __init__(self, ask: Ask, index: Ints, node: Ints | None = None) -> None:
        """`node`: the node row of each, where it is known already."""
        self.ask, self.index, self._node = ask, index, node
        self._tested: tuple[Verdicts, Ints] | None = None

    def __len__(self) -> int:
        return len(self.index)

    def where(self, chosen: Bools | Ints | slice) -> Rows:
        return Rows(self.ask, self.index[chosen], None if self._node is None else self._node[chosen])

    @property
    def node(self) -> Ints:
        """The node row of each."""
        if self._node is None:
            self._node = self.ask.cluster.devices["node"][self.index] if self.ask.demand.count else self.index
        return self._node

    @cached_property
    def slots(self) -> Ints:
        """The nodes that have some of these rows, in the order of their rows."""
        there = np.zeros(len(self.ask.cluster.nodes), np.bool_)
        there[self.node] = True
        return there.nonzero()[0]

    def of_device(self, column: str) -> Array:
        return self.ask.cluster.devices[column][self.index]

    def of_node(self, column: str) -> Array:
        return self.ask.cluster.nodes[column][self.node]

    def named(self, names: Iterable[str]) -> Bools:
        """Rows of the nodes of these names."""
        return self.ask.named(names)[self.node]

    def where_node(self, holds: Callable[[str], bool]) -> Bools:
        """Rows of nodes of which this holds; asked once for each."""
        mask, name = np.zeros(len(self.ask.cluster.nodes), np.bool_), self.ask.cluster.name
        mask[self.slots] = [holds(name(slot)) for slot in self.slots.tolist()]
        return mask[self.node]

    def verdict(self, column: str) -> Array:
        """A column of the admission test on each device: `admitted`, `slack`, `unproven` or `breaks`."""
        if self._tested is None:
            load = self.of_device("load")
            self._tested = self.ask.cluster.verdicts(self.ask.demand, load), load
        verdicts, load = self._tested
        return verdicts.column(column, load)

    def alone(self, column: str) -> Array:
        """The same if each device were empty."""
        cluster, sharing = self.ask.cluster, self.of_device("sharing")
        empty = np.zeros(len(cluster.codes), np.int64)
        for code in self._ways():
            empty[code] = cluster.kind_number(Load(cluster.sharing(code)))
        return cluster.verdicts(self.ask.demand, empty[self._ways()]).column(column, empty[sharing])

    def by_sharing(self, holds: Callable[[Sharing], bool]) -> Bools:
        """Devices whose way of being shared has a property; asked once for each way."""
        cluster = self.ask.cluster
        answers = np.zeros(len(cluster.codes), np.bool_)
        for code in self._ways():
            answers[code] = holds(cluster.sharing(code))
        mask: Bools = answers[self.of_device("sharing")]
        return mask

    def _ways(self) -> list[int]:
        """The codes of the ways in which these devices are shared."""
        ways: list[int] = np.flatnonzero(np.bincount(self.of_device("sharing"))).tolist()
        return ways

    def per_node(self) -> Ints:
        """How many of these rows the node of each has."""
        run = self.begins().cumsum() - 1
        counts: Ints = np.bincount(run)[run]
        return counts

    def begins(self) -> Bools:
        """Whether a row is the first of its node; the rows of a node stand together."""
        return begins(self.node)

    def best(self, values: Array) -> int:
        """Which place among these rows has the largest value, the first by name among equals."""
        equals = (values == values.max()).nonzero()[0]
        columns = self.ask.cluster.devices if self.ask.demand.count else self.ask.cluster.nodes
        return int(equals[columns["rank"][self.index[equals]].argmin()])

    def best_node(self, column: str) -> tuple[int, str]:
        """The largest value of a column of their nodes, and the first node by name that has it."""
        nodes, slots = self.ask.cluster.nodes, self.slots
        equals = slots[(values := nodes[column][slots]) == (most := values.max())]
        return int(most), self.ask.cluster.name(int(equals[nodes["rank"][equals].argmin()]))

    def node_name(self, place: int) -> str:
        return self.ask.cluster.name(int(self.node[place]))

    def label(self, place: int) -> str:
        """`node-3/gpu-0`, or `node-3` for a request without gpu."""
        return self.ask.cluster.label(int(self.index[place])) if self.ask.demand.count else self.node_name(place)

    def slots_by_name(self) -> Ints:
        """The nodes that have some of these rows, in the order of their names."""
        return self.slots[self.ask.cluster.nodes["rank"][self.slots].argsort()]

    def node_names(self) -> str:
        """`node-1, node-2, node-3 and 4 more`."""
        slots = self.slots_by_name()
        names = ", ".join(self.ask.cluster.name(int(slot)) for slot in slots[:3])
        return f"{names} and {len(slots) - 3} more" if len(slots) > 3 else names

"""What a decision looks at: the question, and the rows it is asked of, as arrays; filters and scores are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.placer.core.accounts import Load
from services.placer.core.capabilities import OTHERS, Capabilities
from services.placer.core.cluster import UNKNOWN, Cluster
from services.placer.core.columns import Array, Bools, Ints
from services.placer.core.demand import Demand
from shared.admission import Sharing
from shared.messages import AllExcept


@dataclass(frozen=True)
class Ask:
    """One decision's question: the demand, and what holds for whole nodes as masks over node rows."""

    cluster: Cluster
    demand: Demand
    capabilities: Mapping[str, Capabilities]
    set_aside: frozenset[str] = frozenset()

    def everywhere(self) -> Rows:
        """All rows: nodes for a request without gpu, else devices."""
        return Rows(self, self.cluster.all_rows() if self.demand.count else self.cluster.all_slots())

    def on(self, slot: int) -> Rows:
        """The rows of one node."""
        return Rows(self, self.cluster.rows_of(slot) if self.demand.count else np.array([slot]))

    def strangers(self) -> list[str]:
        """Candidates of the request that no node list has named."""
        wanted = self.demand.request.candidates
        names = () if wanted is None or isinstance(wanted, AllExcept) else wanted
        return [name for name in dict.fromkeys(names) if self.cluster.slot(name) is None]

    @cached_property
    def chosen(self) -> Bools:
        """Nodes among the candidates of the request."""
        wanted = self.demand.request.candidates
        if isinstance(wanted, AllExcept):
            return ~self._named(wanted.all_except)
        return self._named(wanted or ())

    @cached_property
    def selected(self) -> Bools:
        """Nodes that carry the labels asked for."""
        wanted = self.demand.request.node_selector.items()
        return self._where(lambda node: wanted <= self._labels(node).items())

    @cached_property
    def backed(self) -> Bools:
        """Nodes whose backend honours every field of the request."""
        if self.capabilities.keys() == {OTHERS}:
            return np.full(len(self.cluster.nodes), self.lacking("") is None)
        return self._where(lambda node: self.lacking(node) is None)

    @cached_property
    def aside(self) -> Bools:
        return self._named(self.set_aside)

    @cached_property
    def models(self) -> Ints:
        """The codes of the models asked for."""
        gpu = self.demand.request.gpu
        codes = [self.cluster.codes.get(("model", model), UNKNOWN) for model in (gpu and gpu.models) or ()]
        return np.array(codes, np.int64)

    def lacking(self, node: str) -> str | None:
        """What the node's backend cannot honour, if anything."""
        can = self.capabilities.get(node) or self.capabilities.get(OTHERS)
        return "no backend is set for the node: nothing" if can is None else can.lacking(self.demand.request)

    def _labels(self, node: str) -> Mapping[str, str]:
        facts = self.cluster.facts(node)
        return facts.labels if facts else {}

    def _named(self, names: Iterable[str]) -> Bools:
        mask = np.zeros(len(self.cluster.nodes), np.bool_)
        mask[[slot for name in names if (slot := self.cluster.slot(name)) is not None]] = True
        return mask

    def _where(self, holds: Callable[[str], bool]) -> Bools:
        mask = np.zeros(len(self.cluster.nodes), np.bool_)
        slots = self.cluster.all_slots().tolist()
        mask[slots] = [holds(self.cluster.name(slot)) for slot in slots]
        return mask


class Rows:
    """Some rows under question; every column of theirs is an array of their length."""

    def __init__(self, ask: Ask, index: Ints) -> None:
        self.ask, self.index = ask, index

    def __len__(self) -> int:
        return len(self.index)

    def where(self, mask: Bools) -> Rows:
        return Rows(self.ask, self.index[mask])

    @cached_property
    def node(self) -> Ints:
        """The node row of each."""
        rows: Ints = self.ask.cluster.devices["node"][self.index] if self.ask.demand.count else self.index
        return rows

    def of_device(self, column: str) -> Array:
        return self.ask.cluster.devices[column][self.index]

    def of_node(self, column: str) -> Array:
        return self.ask.cluster.nodes[column][self.node]

    def verdict(self, column: str) -> Array:
        """A column of the admission test on each device: `admitted`, `slack` or `unproven`."""
        return self.ask.cluster.verdicts(self.ask.demand, self.index).column(column, self.of_device("load"))

    def alone(self, column: str) -> Array:
        """The same if each device were empty."""
        cluster, sharing = self.ask.cluster, self.of_device("sharing")
        empty = np.zeros(len(cluster.codes), np.int64)
        for code in self._ways():
            empty[code] = cluster.kind_number(Load(cluster.sharing(code)))
        verdicts = cluster.verdicts(self.ask.demand, self.index[:0])
        verdicts.refresh(empty[self._ways()], cluster.kinds)
        return verdicts.column(column, empty[sharing])

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
        counts: Ints = np.bincount(self.node)[self.node]
        return counts

    def best(self, values: Array) -> int:
        """Which place among these rows has the largest value, the first by name among equals."""
        rank = self.of_device("rank") if self.ask.demand.count else self.of_node("rank")
        return int(np.lexsort((rank, -values))[0])

    def node_name(self, place: int) -> str:
        return self.ask.cluster.name(int(self.node[place]))

    def label(self, place: int) -> str:
        """`node-3/gpu-0`, or `node-3` for a request without gpu."""
        return self.ask.cluster.label(int(self.index[place])) if self.ask.demand.count else self.node_name(place)

    def node_names(self) -> str:
        """`node-1, node-2, node-3 and 4 more`."""
        slots = np.unique(self.node)
        slots = slots[np.argsort(self.ask.cluster.nodes["rank"][slots])]
        names = ", ".join(self.ask.cluster.name(int(slot)) for slot in slots[:3])
        return f"{names} and {len(slots) - 3} more" if len(slots) > 3 else names

"""An outlook from what the cluster is and from the requests that came, counted as they come; places nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.strategies import STRATEGIES, Strategy
from services.placer.core.strategies.fgd import Fgd
from services.placer.core.strategies.laxity import Laxity
from services.placer.core.strategies.outlook import Outlook, Room
from services.placer.core.strategies.workload import Shape, Workload
from shared.messages import PlaceRequest

_FIRST: Final = 64
_EVERY: Final = 4_096


def shape_of(demand: Demand) -> Shape:
    gpu = demand.request.gpu
    models = tuple(gpu.models or ()) if gpu else ()
    return Shape(demand.cpu_milli, demand.count, demand.share_micro, models)


def outlook_on(cluster: Cluster, workload: Workload) -> Outlook:
    """What is expected on the nodes that are known now; a model that comes later counts as one that nobody named."""
    models = [""] * len(cluster.codes)
    for thing, code in cluster.codes.items():
        match thing:
            case ("model", str(name)):
                models[code] = name
    rooms: Counter[Room] = Counter()
    for slot in cluster.all_slots().tolist():
        facts = cluster.facts(cluster.name(slot))
        if facts and facts.devices:
            healthy = sum(device.healthy for device in facts.devices)
            rooms[Room(facts.devices[0].model or "", healthy, facts.cpu_milli)] += 1
    return Outlook(
        workload,
        tuple(models),
        tuple(Room(room.model, room.devices, room.cpu_milli, nodes) for room, nodes in rooms.items()),
    )


def looking_ahead(outlook: Outlook, strategies: Mapping[str, Strategy] = STRATEGIES) -> Mapping[str, Strategy]:
    """The same strategies, those that look ahead with this outlook."""
    ahead = {
        name: replace(strategy, outlook=outlook)
        for name, strategy in strategies.items()
        if isinstance(strategy, Fgd | Laxity)
    }
    return MappingProxyType({**strategies, **ahead})


class Learned:
    """What a placer expects by what it was asked so far; its strategies look ahead with that.

    Renewed after 64 requests, after twice as many, and so on, then every 4,096: what those strategies remember of the
    cluster is worked out anew each time. With each of the last, what came before counts half as much.
    """

    def __init__(self, strategies: Mapping[str, Strategy] = STRATEGIES) -> None:
        self.strategies = strategies
        self._counted: dict[Shape, tuple[int, int]] = {}
        self._noted: dict[str, tuple[int, Demand]] = {}
        """What came since it was renewed: how many replicas of requests that are alike, by what these say."""
        self._total = 0
        self._next = _FIRST

    def note(self, cluster: Cluster, request: PlaceRequest) -> None:
        """A request that is to be decided, each replica counted. Raises FieldError as Demand.of."""
        number, demand = self._noted.get(said := request.body_hash()) or (0, Demand.of(request))
        self._noted[said] = number + request.replicas, demand
        self._total += request.replicas
        if self._total >= self._next:
            self._renew(cluster)

    def _count(self) -> None:
        for more, demand in self._noted.values():
            number, memory_mib = self._counted.get(shape := shape_of(demand), (0, 0))
            self._counted[shape] = number + more, memory_mib + more * demand.memory_mib
        self._noted.clear()

    def _renew(self, cluster: Cluster) -> None:
        self._count()
        self.strategies = looking_ahead(outlook_on(cluster, Workload.counted(self._counted)), self.strategies)
        if self._total >= 2 * _EVERY:
            halves = {shape: (number // 2, memory // 2) for shape, (number, memory) in self._counted.items()}
            self._counted = {shape: half for shape, half in halves.items() if half[0]}
            self._total = sum(number for number, _ in self._counted.values())
        self._next = min(2 * self._total, self._total + _EVERY)

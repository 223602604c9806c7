"""An outlook from what the cluster is and from the requests that came: learns how often each kind comes; places nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.strategies import STRATEGIES, Strategy, registry
from services.placer.core.strategies.fgd import Fgd
from services.placer.core.strategies.laxity import Laxity
from services.placer.core.strategies.outlook import Outlook, Room
from services.placer.core.strategies.workload import Shape, Workload


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


def looking_ahead(outlook: Outlook) -> Mapping[str, Strategy]:
    """All strategies, those that look ahead with this outlook."""
    ahead = {strategy.name: strategy for strategy in (Fgd(outlook), Laxity(outlook))}
    return registry(ahead.get(name, strategy) for name, strategy in STRATEGIES.items())

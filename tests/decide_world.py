"""Clusters and requests to decide about, and what is asked of the decisions."""

from typing import Any

from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import Decision, Fits
from services.placer.core.pipeline import decide
from shared.messages import (
    DeviceFacts,
    Gpu,
    NodeFacts,
    NodeState,
    PlaceRequest,
    Realtime,
    Regime,
)


def device(uuid: str, index: int = 0, **fields: Any) -> DeviceFacts:
    """A healthy time-sliced device of 16 GiB with slices of 2 ms."""
    known: dict[str, Any] = {"model": "H100", "regime": Regime.TIME_SLICED, "slice_us": 2_000, "switch_us": 100}
    known |= {"uuid": uuid, "index": index, "healthy": True, "memory_mib": 16_384}
    return DeviceFacts(**known | fields)


def node(name: str, devices: int | tuple[DeviceFacts, ...] = 1, **fields: Any) -> NodeFacts:
    """A ready node of 8 cores and 32 GiB, its devices being `<name>.0`, `<name>.1`, ..."""
    if isinstance(devices, int):
        devices = tuple(device(f"{name}.{i}", i) for i in range(devices))
    known: dict[str, Any] = {"state": NodeState.READY, "at_us": 0, "cpu_milli": 8_000, "memory_mib": 32_768}
    return NodeFacts(**{"node": name, "devices": devices} | known | fields)


def cluster(*nodes: NodeFacts) -> Cluster:
    made = Cluster()
    for facts in nodes:
        made.set_facts(facts.node, facts, 0)
    return made


def request(gpu: Gpu | None = None, **fields: Any) -> PlaceRequest:
    return PlaceRequest(**{"command": ("serve",), "gpu": gpu} | fields)


def share(share: float, device_mib: int = 0, **fields: Any) -> PlaceRequest:
    return request(Gpu(share=share, memory_mib=device_mib), **fields)


def firm(deadline_us: int = 50_000, runtime_us: int = 8_000, **fields: Any) -> Realtime:
    return Realtime(deadline_us=deadline_us, runtime_us=runtime_us, **fields)


def take(made: Cluster, asked: PlaceRequest, decision: Decision, request_id: str = "other") -> None:
    """Reserves what was decided."""
    assert isinstance(decision, Fits)
    for a in decision.assignments:
        taken = Demand.of(asked).reservation(request_id, a.replica, 1, a.devices)
        made.set_reservations(a.node, (*made.reservations(a.node), taken))


def place(made: Cluster, asked: PlaceRequest, request_id: str = "other", **fields: Any) -> list[str]:
    """Decides and reserves; the nodes by replica."""
    decision = decide(made, asked, 0, **fields)
    take(made, asked, decision, request_id)
    assert isinstance(decision, Fits)
    return [a.node for a in decision.assignments]


def fits(made: Cluster, asked: PlaceRequest, **fields: Any) -> Fits:
    decision = decide(made, asked, 0, **fields)
    assert isinstance(decision, Fits)
    return decision


def total(made: Cluster, asked: PlaceRequest) -> float:
    score = fits(made, asked).score
    assert score
    return score.total


def would_fit_if(decision: Decision) -> tuple[str, ...]:
    assert not isinstance(decision, Fits)
    return decision.would_fit_if


def codes(decision: Decision) -> dict[str, int]:
    assert not isinstance(decision, Fits)
    return {reason.code: reason.count for reason in decision.reasons}


def message(decision: Decision) -> str:
    assert not isinstance(decision, Fits)
    return decision.reasons[0].message

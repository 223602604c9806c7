"""What a monitor tells of devices with a gate: nothing is promised while nobody orders their tasks."""

from __future__ import annotations

from services.monitor.core import Core, GateSaid, Limits, Probed
from services.monitor.probes.base import Capacity, DeviceReading, Reading, Snapshot
from shared.effects import Effect, Emit
from shared.messages import DeviceMetrics, NodeMetrics, Regime

NOTHING = Reading(0.0)
OVERRAN = {
    "device": "G",
    "culprit": "detector",
    "held_us": 20_000,
    "runtime_us": 12_000,
    "touched": ["reader"],
    "over": False,
}
LOST = {"device": "G", "gated": False, "culprit": "detector", "neighbours": ["reader", "sorter"]}
BACK = {"device": "G", "gated": True, "culprit": "detector", "neighbours": []}


def device(uuid: str, regime: Regime) -> DeviceReading:
    return DeviceReading(
        uuid=uuid,
        index=0,
        model="H100",
        regime=regime,
        memory_mib=Reading(1_000.0),
        utilisation_ratio=NOTHING,
        memory_used_mib=NOTHING,
        foreign_share_micro=NOTHING,
        foreign_memory_mib=NOTHING,
    )


class Node:
    def __init__(self) -> None:
        self.core = Core("n", "s", "b", Capacity(1_000, 1_000), limits=Limits(gate_margin_us=500))
        devices = (device("E", Regime.EXCLUSIVE), device("G", Regime.GATED))
        self.core.handle(Probed(Snapshot(devices, (), NOTHING, NOTHING)), 0)
        assert [] == self.core.handle(GateSaid({"beat": {"grants": 3}}, 0), 0)

    def hear(self, told: dict[str, object] | None) -> NodeMetrics | None:
        """The heartbeat that comes of it, if one does."""
        return heartbeat(self.core.handle(GateSaid(told, 7), 0))


def heartbeat(effects: list[Effect]) -> NodeMetrics | None:
    for effect in effects:
        assert isinstance(effect, Emit)
        assert isinstance(effect.body, NodeMetrics)
        return effect.body
    return None


def told(body: NodeMetrics | None) -> dict[str, tuple[bool, str | None, int | None]]:
    assert body is not None
    devices: tuple[DeviceMetrics, ...] = body.devices
    return {d.uuid: (d.healthy, d.reason, d.handover_us) for d in devices}


def test_while_nobody_orders_the_tasks_a_gated_device_promises_nothing() -> None:
    node = Node()
    down = "gate_down: nobody orders the tasks on the device"
    assert {"E": (True, None, None), "G": (False, down, 500)} == told(node.hear(None))
    assert node.hear(None) is None
    assert {"E": (True, None, None), "G": (True, None, 500)} == told(node.hear({"beat": {}}))


def test_an_overrun_that_costs_a_device_its_guarantees_is_told_at_once_with_culprit_and_neighbours() -> None:
    node = Node()
    assert node.hear({"overran": OVERRAN}) is None
    why = "gate_lost: detector held it 20000 us of 12000 us, while reader waited; guarantees gone of reader, sorter"
    assert (False, why, 500) == told(node.hear({"standing": LOST}))["G"]
    assert (True, None, 500) == told(node.hear({"standing": BACK}))["G"]


def test_a_gate_that_says_at_its_start_what_was_lost_is_believed_before_its_first_beat() -> None:
    node = Node()
    node.hear({"standing": LOST})
    node.hear(None)
    down = "gate_down: nobody orders the tasks on the device"
    bodies = [node.hear({"overran": OVERRAN}), node.hear({"standing": LOST}), node.hear({"beat": {}})]
    reasons = [told(body)["G"][1] for body in bodies if body is not None]
    assert [down] * (len(reasons) - 1) == reasons[:-1]
    assert reasons[-1] is not None
    assert reasons[-1].startswith("gate_lost: detector held it 20000 us of 12000 us")


def test_the_counts_of_the_gate_are_in_the_heartbeat() -> None:
    body = Node().hear(None)
    assert body is not None
    assert 3 == body.counters["gate.grants"]

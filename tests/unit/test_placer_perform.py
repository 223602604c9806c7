"""What a start tells its container of the gate of its device."""

from __future__ import annotations

import pytest

from services.placer.core.containers import Start
from services.placer.perform import gate_of
from shared.messages import ContainerLabels, Gpu, Kind, PlaceRequest, Realtime, Regime, Reservation


def start(realtime: Realtime | None, *regimes: Regime | None) -> Start:
    held = Reservation(
        request_id="q",
        replica=0,
        generation=1,
        devices=("GPU-a", "GPU-b")[: len(regimes)],
        share_micro=1_000_000,
        device_memory_mib=0,
        cpu_milli=0,
        memory_mib=0,
    )
    labels = ContainerLabels(container="c", ledger_id="l", node="n", reservation=held)
    return Start(labels, PlaceRequest(image="i", gpu=Gpu(), realtime=realtime), regimes)


def timing(*, gate: bool) -> Realtime:
    return Realtime(deadline_us=1_000, runtime_us=100, kind=Kind.HARD, gate=gate)


@pytest.mark.parametrize(
    "asked, regimes, told",
    [
        (timing(gate=True), (Regime.GATED,), "1"),
        (timing(gate=True), (Regime.EXCLUSIVE, Regime.GATED), "1"),
        (timing(gate=True), (None,), "1"),  # nobody knows
        (timing(gate=True), (Regime.EXCLUSIVE,), "0"),
        (timing(gate=True), (), "0"),
        (timing(gate=False), (Regime.GATED,), "0"),
        (None, (Regime.GATED,), "0"),
    ],
)
def test_a_container_waits_where_it_asked_to_and_its_device_has_a_gate(
    asked: Realtime | None, regimes: tuple[Regime | None, ...], told: str
) -> None:
    assert told == gate_of(start(asked, *regimes))

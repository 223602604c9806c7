"""Settings are read from the environment, and what cannot work is refused at the start with its field."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.monitor.probes.base import Capacity
from services.monitor.probes.cpu import CoreSettings
from services.monitor.probes.gpu import GpuProbe
from services.monitor.service import SERVICE, core_settings, make_probe
from services.monitor.settings import MonitorSettings
from shared.messages import Regime


def settings(monkeypatch: pytest.MonkeyPatch, **values: str) -> MonitorSettings:
    for name, value in {"NODE": "n1", **values}.items():
        monkeypatch.setenv(f"LAXITY_MONITOR_{name}", value)
    return MonitorSettings()


def test_a_fake_node_is_described_by_json(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = '[{"count": 2, "model": "H100", "regime": "gated", "group": "a"}, {"model": "A30", "memory_mib": 24576}]'
    found = settings(monkeypatch, PROBE="fake", FAKE_DEVICES=devices, FAKE_CPU_MILLI="8000", FAKE_MEMORY_MIB="1000")
    probe = make_probe(found)
    assert Capacity(8000, 1000) == probe.capacity()
    assert [("H100", Regime.GATED, "a", 143_771)] * 2 + [("A30", Regime.EXCLUSIVE, None, 24_576)] == [
        (d.model, d.regime, d.group, d.memory_mib.value) for d in probe.read().devices
    ]


def test_labels_and_regimes_of_single_cores_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(monkeypatch, LABELS='{"zone": "a"}', REGIMES='{"1": "exclusive"}', REGIME="gated")
    assert {"zone": "a"} == found.labels
    assert [CoreSettings(Regime.GATED), CoreSettings(Regime.EXCLUSIVE)] == [
        core_settings(found, core) for core in (0, 1)
    ]


def test_stated_slices_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(monkeypatch, SLICE_US="4000", SWITCH_US="30")
    assert CoreSettings(Regime.TIME_SLICED, 4000, 30) == core_settings(found, 0)


def test_slices_may_stay_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CoreSettings(Regime.TIME_SLICED) == core_settings(settings(monkeypatch, MEASURE_SLICES="false"), 0)


@pytest.mark.parametrize(
    "field, value",
    [
        ("NODE", ""),
        ("NODE", "n" * 254),
        ("POLL_US", "5001"),
        ("STALE_AFTER_US", "1999999"),
        ("SLICE_US", "4000"),
        ("REGIME", "shared"),
        ("FAKE_DEVICES", '[{"count": 0}]'),
        ("FAKE_DEVICES", '[{"cuont": 1}]'),
    ],
)
def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch, field: str, value: str) -> None:
    with pytest.raises(ValidationError):
        settings(monkeypatch, **{field: value})


def test_regimes_of_single_gpus_are_stated_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(monkeypatch, PROBE="nvml", NVML_REGIMES='{"GPU-1": "mps"}')
    assert ({"GPU-1": Regime.MPS}, GpuProbe) == (found.nvml_regimes, type(make_probe(found)))


def test_the_driver_gets_less_time_than_the_cycle_in_which_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match="nvml_deadline_us"):
        settings(monkeypatch, PROBE="nvml", NVML_DEADLINE_US="2000000")


def test_the_table_of_the_monitor_listens_to_nothing() -> None:
    assert () == SERVICE.listens
    assert ["events.task.<node>", "metrics.<node>"] == [publishes.subject for publishes in SERVICE.publishes]


@pytest.mark.parametrize(
    "values, gated",
    [
        ({}, False),
        ({"REGIME": "gated"}, True),
        ({"REGIMES": '{"1": "gated"}'}, True),
        ({"NVML_REGIMES": '{"GPU-1": "gated"}', "PROBE": "nvml"}, True),
        ({"REGIME": "gated", "PROBE": "fake"}, False),
    ],
)
def test_a_node_has_a_gate_if_one_of_its_real_devices_is_gated(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], gated: bool
) -> None:
    assert gated is settings(monkeypatch, **values).gated

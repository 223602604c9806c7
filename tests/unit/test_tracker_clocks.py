"""What heartbeats told of a device's clock around a task counts only where it was read then, by the same clock."""

from __future__ import annotations

from typing import Any

import pytest

from services.deadline_tracker.clocks import Clocks
from shared.messages import DeviceMetrics, Measured, NodeMetrics, Regime
from tests.tracker_server import lead, tracker

BEGIN_US, AT_US = 10_000_000, 10_500_000
AGE_US = 300_000
THERMAL, POWER, IDLE = 0x20, 0x04, 0x01


def heartbeat(read_us: int, start_id: str = "s", **health: int | None) -> bytes:
    """A heartbeat whose one device was read then; a value that is None is unknown."""
    measured = {k: Measured(value=v, reason=None if v is not None else "not_supported") for k, v in health.items()}
    unknown = Measured(value=None, reason="not_supported")
    said: dict[str, Any] = {"uuid": "d", "index": 0, "model": "m", "regime": Regime.GATED, "healthy": True}
    device = DeviceMetrics(
        **said, memory_mib=1, utilisation_ratio=unknown, memory_used_mib=unknown, age_us=AGE_US, health=measured
    )
    times = {
        "counter": 1,
        "at_us": 1,
        "mono_us": read_us + AGE_US,
        "period_us": 1_000_000,
        "cpu_milli": 1,
        "memory_mib": 1,
    }
    return NodeMetrics.model_validate({"node": "n1", "start_id": start_id, "devices": (device,), **times}).to_json()


def around(*bodies: bytes, uuid: str = "d") -> tuple[tuple[str, ...], float | None] | None:
    clocks = Clocks()
    for body in bodies:
        clocks.heard(body)
    found = clocks.around(uuid, "s", BEGIN_US, AT_US)
    return None if found is None else (found.reasons, found.speed)


def test_a_clock_that_was_held_back_is_told_with_its_reasons_and_its_speed() -> None:
    body = heartbeat(BEGIN_US, throttle_reasons=THERMAL | POWER, sm_clock_mhz=990, sm_clock_max_mhz=1980)
    assert (("power cap", "thermal slowdown"), 0.5) == around(body)
    clocks = Clocks()
    clocks.heard(body)
    found = clocks.around("d", "s", BEGIN_US, AT_US)
    assert found is not None
    assert "power cap and thermal slowdown, at 990 of 1980 MHz, read 500 ms before it was late" == found.text


@pytest.mark.parametrize(
    "read_us, counts",
    [
        (BEGIN_US - 2_000_001, False),
        (BEGIN_US - 2_000_000, True),
        (AT_US, True),
        (AT_US + 1, False),
    ],
)
def test_a_value_counts_that_was_read_while_the_task_ran_or_not_long_before(read_us: int, counts: bool) -> None:
    assert counts == (around(heartbeat(read_us, throttle_reasons=THERMAL)) is not None)


def test_what_was_read_while_the_task_ran_counts_more_than_what_was_before_and_the_slowest_most() -> None:
    slow, free = ({"throttle_reasons": bits, "sm_clock_mhz": 990, "sm_clock_max_mhz": 1980} for bits in (THERMAL, 0))
    before, first, then = BEGIN_US - 1_000, BEGIN_US + 1_000, BEGIN_US + 2_000
    assert ((), None) == around(heartbeat(before, **slow), heartbeat(first, **free))
    assert (("thermal slowdown",), 0.5) == around(heartbeat(first, **slow), heartbeat(then, **free))
    assert ((), None) == around(heartbeat(before - 1, **slow), heartbeat(before, **free))


def test_unknown_is_not_told_as_a_clock_that_runs_free() -> None:
    assert around(heartbeat(BEGIN_US, throttle_reasons=None)) is None
    assert around(heartbeat(BEGIN_US, sm_clock_mhz=990)) is None
    assert around(heartbeat(BEGIN_US, throttle_reasons=THERMAL), uuid="another") is None
    assert (("thermal slowdown",), None) == around(heartbeat(BEGIN_US, throttle_reasons=THERMAL, sm_clock_max_mhz=1980))


def test_an_idle_device_has_a_low_clock_that_says_nothing() -> None:
    low = {"sm_clock_mhz": 210, "sm_clock_max_mhz": 1980}
    assert ((), None) == around(heartbeat(BEGIN_US, throttle_reasons=IDLE, **low))
    assert (("power cap",), None) == around(heartbeat(BEGIN_US, throttle_reasons=IDLE | POWER, **low))


def test_another_monitor_and_what_is_no_heartbeat_say_nothing_of_it() -> None:
    assert around(heartbeat(BEGIN_US, "of another boot", throttle_reasons=THERMAL)) is None
    assert around(b"{", b'{"devices": 3}') is None


def test_only_heartbeats_of_nodes_that_the_tracker_follows_are_kept() -> None:
    core = tracker()
    assert not core.wants_heartbeat("rt.metrics.n1")
    lead(core)
    assert [True, False] == [core.wants_heartbeat(f"rt.metrics.{token}") for token in ("n1", "=zz")]

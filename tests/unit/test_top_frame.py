"""What ``laxity top`` makes of what it heard: order, ages, narrow terminals, and nothing unknown shown as zero."""

import io
from typing import Any

import pytest
from rich.console import Console

from cli.top.command import after
from cli.top.frame import Wish, picture, rows
from cli.top.seen import RECENT_US, Seen
from shared.deadlines import Standing
from shared.effects import KeyChanged
from shared.messages import (
    ClassStanding,
    ContainerMetrics,
    ContainerRecord,
    ContainerUse,
    DeviceFacts,
    DeviceMetrics,
    DeviceStanding,
    GpuUse,
    Measured,
    NodeDeadlines,
    NodeFacts,
    NodeMetrics,
    NodeState,
    Regime,
    RingInfo,
    TaskBatch,
    TaskEventKind,
)
from shared.subjects import DEADLINES, NODES, node_key

SECOND_US = 1_000_000
BEGIN, END, OVERDUE = TaskEventKind.BEGIN, TaskEventKind.END, TaskEventKind.OVERDUE
DEVICE: dict[str, Any] = {
    "uuid": "GPU-1",
    "index": 0,
    "model": "H100",
    "regime": Regime.GATED,
    "healthy": True,
    "memory_mib": 81_559,
}


def record(name: str, standing: Standing, missed: int = 0) -> ContainerRecord:
    counts: dict[str, int] = dict.fromkeys(("lost", "aborted", "invalid", "late_record", "open"), 0)
    bounds: dict[str, Any] = {"ratio": None, "lower": None, "upper": None, "window_met": 0, "window_missed": 0}
    return ContainerRecord(
        container=name, request_id=name, guarantee=0.99, met=7, missed=missed, standing=standing, **counts, **bounds
    )


def batch(*events: tuple[TaskEventKind, int, int, int, int]) -> TaskBatch:
    """Events: kind, seq, begin_seq, stamp, deadline."""
    kind, seq, begin_seq, stamp, deadline = map(list, zip(*events, strict=True))
    rows = len(events)
    fixed: dict[str, Any] = {"start_id": "s", "counter": 1, "boot_id": "b", "at_us": 0, "watermark_us": 900_000}
    columns = {"ring": [0] * rows, "task": [0] * rows, "name": [0] * rows}
    rings = (RingInfo(ring="r", container="c"),)
    moving = {"kind": kind, "seq": seq, "begin_seq": begin_seq, "stamp_us": stamp, "deadline_us": deadline}
    return TaskBatch(node="n", rings=rings, names=("t",), **fixed, **columns, **moving)


@pytest.fixture
def seen() -> Seen:
    heard = Seen()
    classes = {"fast": ClassStanding(standing=DeviceStanding.GUARANTEED, slack_us=40_000)}
    facts = NodeFacts(
        node="n",
        state=NodeState.READY,
        at_us=0,
        cpu_milli=1,
        memory_mib=1,
        devices=(DeviceFacts(**DEVICE, classes=classes),),
    )
    unknown = Measured(value=None, reason="mig_enabled")
    metrics = NodeMetrics(
        node="n",
        start_id="s",
        counter=1,
        at_us=0,
        mono_us=0,
        period_us=SECOND_US,
        cpu_milli=1,
        memory_mib=1,
        devices=(DeviceMetrics(**DEVICE, utilisation_ratio=unknown, memory_used_mib=Measured(value=559)),),
    )
    heard.key(KeyChanged(NODES, node_key("n"), facts.to_json(), 1))
    heard.heartbeat(metrics, 0)
    return heard


def judged(seen: Seen, *records: ContainerRecord) -> None:
    body = NodeDeadlines(node="n", at_us=0, stream_seq=1, containers=records)
    seen.key(KeyChanged(DEADLINES, node_key("n"), body.to_json(), 1))


def drawn(seen: Seen, width: int = 140, height: int | None = None, now_us: int = 0) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(picture(seen, Wish(), now_us, width, height, "nats://here"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def order(seen: Seen, sort: str) -> list[str]:
    return [row["request"] for row in rows(seen, Wish(sort), 0)["containers"]]


def test_what_needs_attention_comes_first_and_each_order_can_be_had(seen: Seen) -> None:
    judged(seen, record("a", Standing.GOOD, 9), record("b", Standing.AT_RISK, 2), record("c", Standing.UNKNOWN))
    seen.tasks(batch((BEGIN, 1, 0, 0, 50_000), (END, 2, 1, 20_000, 0)), 0)
    found = {sort: order(seen, sort) for sort in ("attention", "misses", "laxity", "name")}
    assert {
        "attention": ["b", "c", "a"],
        "misses": ["a", "b", "c"],
        "laxity": ["c", "a", "b"],
        "name": ["a", "b", "c"],
    } == found


def test_laxity_is_the_least_time_left_of_late_and_a_task_that_goes_on_late_has_none(seen: Seen) -> None:
    seen.tasks(batch((BEGIN, 1, 0, 0, 50_000), (END, 2, 1, 20_000, 0), (BEGIN, 3, 0, 0, 50_000), (END, 4, 3, 1, 0)), 5)
    assert 30_000 == seen.laxity_us(("n", "c"), 5)
    seen.tasks(batch((BEGIN, 5, 0, 100_000, 50_000), (OVERDUE, 5, 5, 160_000, 0)), 6)
    assert 150_000 - 900_000 == seen.laxity_us(("n", "c"), 6)
    assert None is seen.laxity_us(("n", "c"), 7 + RECENT_US)


def test_what_is_not_known_is_said_to_be_so(seen: Seen) -> None:
    judged(seen, record("a", Standing.UNKNOWN))
    lines = drawn(seen)
    (device,) = (line for line in lines if "H100" in line)
    assert ["n", "0", "H100", "unknown"] == device.split()[:4]
    (container,) = (line for line in lines if line.startswith("a "))
    assert "unknown" in container


def test_the_time_of_a_gpu_is_told_by_samples_with_their_error_and_by_tasks_and_is_unknown_if_one_gpu_is(
    seen: Seen,
) -> None:
    judged(seen, record("a", Standing.GOOD))

    def hear(*busy_us: int | None) -> str:
        busy = [Measured(value=us, reason=None if us is not None else "mig_enabled") for us in busy_us]
        error = Measured(value=500_000)
        unknown = Measured(value=None, reason="no_limit")
        gpus = tuple(
            GpuUse(uuid=f"g{at}", memory_mib=unknown, busy_us=us, busy_error_us=error) for at, us in enumerate(busy)
        )
        use = ContainerUse(
            cpu_us=unknown, memory_mib=unknown, memory_limit_mib=unknown, throttled_periods=unknown, gpus=gpus
        )
        container = ContainerMetrics(container="a", tasks_us=12_500_000, use=use)
        seen.heartbeat(seen.metrics["n"].model_copy(update={"containers": (container,)}), 0)
        return next(line for line in drawn(seen, width=200) if line.startswith("a "))

    assert "12.5 s  11 s ± 1 s " in hear(5_000_000, 6_000_000)
    assert "±" not in hear(5_000_000, None)
    assert "±" not in hear()


def test_a_node_that_fell_silent_says_for_how_long_and_is_trouble(seen: Seen) -> None:
    found = rows(seen, Wish(trouble=True), 4 * SECOND_US)
    assert [("n", 4 * SECOND_US, True)] == [(row["node"], row["age_us"], row["silent"]) for row in found["nodes"]]
    assert "oldest heartbeat 4.0 s (n)" in drawn(seen, now_us=4 * SECOND_US)[0]
    assert [] == rows(seen, Wish(trouble=True), SECOND_US)["nodes"]


def test_a_bus_that_is_away_is_told_with_the_age_of_the_picture(seen: Seen) -> None:
    seen.away_us = 0
    assert "the bus is away for 2.5 s" in drawn(seen, now_us=2_500_000)[0]


@pytest.mark.parametrize("width", [20, 40, 80, 100, 200])
def test_a_picture_fits_the_terminal(seen: Seen, width: int) -> None:
    judged(seen, *(record(f"container-{number}", Standing.AT_RISK) for number in range(50)))
    lines = drawn(seen, width, 24)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24 + (width < 100) * 8
    assert any("more" in line for line in lines)


def test_only_lines_with_the_text_are_shown(seen: Seen) -> None:
    judged(seen, record("infer", Standing.GOOD), record("train", Standing.GOOD))
    assert ["train"] == [row["request"] for row in rows(seen, Wish(only="tra"), 0)["containers"]]


def test_a_container_that_is_gone_from_the_records_is_gone_from_the_picture(seen: Seen) -> None:
    judged(seen, record("a", Standing.GOOD), record("b", Standing.GOOD))
    judged(seen, record("b", Standing.GOOD))
    assert ["b"] == order(seen, "name")


KEYS = [
    ("s", Wish("misses")),
    ("ssss", Wish("attention")),
    ("t", Wish(trouble=True)),
    ("tt", Wish()),
    ("x", Wish()),
]


@pytest.mark.parametrize(("pressed", "expected"), KEYS)
def test_a_key_changes_what_is_shown(pressed: str, expected: Wish) -> None:
    wish = Wish()
    for key in pressed:
        wish = after(wish, key)
    assert expected == wish

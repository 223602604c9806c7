"""One picture of ``laxity top``: rows in order of what needs attention, tables that fit the terminal; no bus here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from cli import nodes
from cli.output import table
from cli.top.seen import Seen
from shared.deadlines import Standing
from shared.messages import ContainerMetrics, ContainerRecord, DeviceFacts, DeviceMetrics, DeviceStanding, NodeState
from shared.units import format_mib, format_us

STALE: Final = 3
"""Periods without a heartbeat after which a node's age is red."""
NARROW: Final = 100
"""Columns of a terminal below which the less important ones are left out."""
SORTS: Final = ("attention", "misses", "laxity", "name")
KEYS: Final = "q quit  s sort  t only trouble"
_LEFT_OUT: Final = {"model", "why", "between", "open", "tasks", "GPU time"}
_NO_LAXITY: Final = 1 << 62
_STATES: Final = {NodeState.READY: "green", NodeState.JOINED: "yellow", NodeState.DEGRADED: "yellow"}
_RECORDS: Final = {Standing.GOOD: "green", Standing.AT_RISK: "bold red", Standing.UNKNOWN: "yellow"}
_WORST: Final = {Standing.AT_RISK: 0, Standing.UNKNOWN: 1, Standing.GOOD: 2}

Row = dict[str, Any]
"""What a line says, as plain values; ``trouble`` says whether somebody should look."""


@dataclass(frozen=True)
class Wish:
    """What the person at the keys wants to see."""

    sort: str = "attention"
    trouble: bool = False
    only: str = ""
    """Lines that have this text in a name."""


def rows(seen: Seen, wish: Wish, now_us: int) -> dict[str, list[Row]]:
    """All lines by table, as machines get them too."""
    made = {
        "nodes": sorted(_nodes(seen, now_us), key=lambda row: (not row["trouble"], row["node"])),
        "devices": sorted(_devices(seen), key=lambda row: (not row["trouble"], row["node"], row["index"])),
        "containers": sorted(_containers(seen, now_us), key=_ORDER[wish.sort]),
    }
    return {name: [row for row in found if _wanted(row, wish)] for name, found in made.items()}


def _wanted(row: Row, wish: Wish) -> bool:
    named = (str(row.get(name) or "") for name in ("node", "uuid", "model", "request", "container"))
    return (row["trouble"] or not wish.trouble) and any(wish.only in name for name in named)


def _nodes(seen: Seen, now_us: int) -> Iterable[Row]:
    for name in seen.facts.keys() | seen.metrics.keys():
        facts, metrics, age_us = seen.facts.get(name), seen.metrics.get(name), seen.age_us(name, now_us)
        state = facts.state if facts else NodeState.JOINED
        devices = metrics.devices if metrics else facts.devices if facts else ()
        silent = age_us is not None and metrics is not None and age_us > STALE * metrics.period_us
        yield {
            "node": name,
            "state": state,
            "age_us": age_us,
            "silent": silent,
            "healthy": sum(device.healthy for device in devices),
            "devices": len(devices),
            "lost_records": metrics.counters.get("tasks.lost_records") if metrics else None,
            "why": facts.reason if facts else None,
            "trouble": silent or state not in (NodeState.READY, NodeState.JOINED),
        }


def _devices(seen: Seen) -> Iterable[Row]:
    for name in seen.facts.keys() | seen.metrics.keys():
        facts, metrics = seen.facts.get(name), seen.metrics.get(name)
        judged = {device.uuid: device for device in facts.devices} if facts else {}
        for device in metrics.devices if metrics else judged.values():
            yield _device(name, device, judged.get(device.uuid))


def _device(node: str, device: DeviceMetrics | DeviceFacts, judged: DeviceFacts | None) -> Row:
    measured = device if isinstance(device, DeviceMetrics) else None
    worst = min((each.standing for each in judged.classes.values()), key=_badness, default=None) if judged else None
    slacks = [each.slack_us for each in judged.classes.values() if each.slack_us is not None] if judged else []
    return {
        "node": node,
        "index": device.index,
        "uuid": device.uuid,
        "model": device.model,
        "busy_ratio": measured.utilisation_ratio.value if measured else None,
        "memory_used_mib": measured.memory_used_mib.value if measured else None,
        "memory_mib": device.memory_mib,
        "standing": worst,
        "slack_us": min(slacks, default=None),
        "why": device.reason,
        "trouble": not device.healthy or worst == DeviceStanding.AT_RISK,
    }


def _badness(standing: DeviceStanding) -> int:
    return -list(DeviceStanding).index(standing)


def _containers(seen: Seen, now_us: int) -> Iterable[Row]:
    for (node, container), record in seen.records.items():
        laxity_us = seen.laxity_us((node, container), now_us)
        yield {**_container(node, record, laxity_us), **_device_time(seen.container((node, container)))}


def _device_time(metrics: ContainerMetrics | None) -> Row:
    """By samples, over its GPUs, and by tasks; unknown where one of its GPUs does not tell."""
    used = metrics.use.gpus if metrics and metrics.use else ()
    busy = [gpu.busy_us.value if gpu.busy_us else None for gpu in used]
    error = [gpu.busy_error_us.value if gpu.busy_error_us else None for gpu in used]
    return {
        "gpu_us": _sum(busy),
        "gpu_error_us": _sum(error),
        "tasks_us": metrics.tasks_us if metrics else None,
    }


def _sum(values: Sequence[float | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(sum(known)) if known and len(known) == len(values) else None


def _container(node: str, record: ContainerRecord, laxity_us: int | None) -> Row:
    return {
        "request": record.request_id or record.container,
        "container": record.container,
        "node": node,
        "laxity_us": laxity_us,
        "met": record.met,
        "missed": record.missed,
        "open": record.open,
        "ratio": record.ratio,
        "lower": record.lower,
        "upper": record.upper,
        "guarantee": record.guarantee,
        "standing": record.standing,
        "trouble": record.standing == Standing.AT_RISK or (laxity_us is not None and laxity_us < 0),
    }


def _left(row: Row) -> int:
    return _NO_LAXITY if row["laxity_us"] is None else int(row["laxity_us"])


_ORDER: Final[dict[str, Callable[[Row], tuple[Any, ...]]]] = {
    "attention": lambda row: (_WORST[row["standing"]], not row["trouble"], _left(row), -row["missed"], row["request"]),
    "misses": lambda row: (-row["missed"], row["request"]),
    "laxity": lambda row: (_left(row), row["request"]),
    "name": lambda row: (row["request"], row["node"]),
}


# --- for people ---


def picture(seen: Seen, wish: Wish, now_us: int, width: int, height: int | None, about: str) -> RenderableType:
    """Containers get what is left of the height; ``height`` None draws every line."""
    found = rows(seen, wish, now_us)
    room = None if height is None else max(4, height - 10)
    shares = {"nodes": room and room // 4, "devices": room and room // 4, "containers": room and room // 2}
    parts: list[RenderableType] = [_head(seen, wish, now_us, about)]
    for name, cells in (("containers", _CONTAINER), ("devices", _DEVICE), ("nodes", _NODE)):
        parts += _table(name, found[name], cells, shares[name], narrow=width < NARROW)
    return Group(*parts)


def _head(seen: Seen, wish: Wish, now_us: int, about: str) -> Text:
    told = Text(f"laxity top  {about}  by {wish.sort}{', only trouble' if wish.trouble else ''}  ")
    if seen.away_us is not None:
        return told.append(f"the bus is away for {_seconds(now_us - seen.away_us)}: this is what was", style="bold red")
    oldest = max(seen.heard_us, key=lambda node: now_us - seen.heard_us[node], default=None)
    if oldest is None:
        return told.append("no node was heard yet", style="yellow")
    return told.append(f"oldest heartbeat {_seconds(now_us - seen.heard_us[oldest])} ({oldest})", style="dim")


Cells = dict[str, Callable[[Row], object]]


def _table(name: str, found: Sequence[Row], cells: Cells, most: int | None, *, narrow: bool) -> list[RenderableType]:
    kept = {title: cell for title, cell in cells.items() if not (narrow and title in _LEFT_OUT)}
    shown = found if most is None else found[: max(1, most)]
    lines = [[cell(row) for cell in kept.values()] for row in shown]
    made = table(f"{name} ({len(found)})", kept, lines)
    for column in made.columns:
        column.overflow, column.no_wrap = "ellipsis", True
    more = [Text(f"… {len(found) - len(shown)} more", style="dim")] if len(found) > len(shown) else []
    return [made, *more]


def _seconds(age_us: int | None) -> Text:
    return Text("unknown" if age_us is None else f"{age_us / 1e6:.1f} s")


def _ratio(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"


def _gpu_time(busy_us: int | None, error_us: int | None) -> str:
    return "" if busy_us is None or error_us is None else f"{format_us(busy_us)} ± {format_us(error_us)}"


def _laxity(row: Row) -> Text:
    left_us = row["laxity_us"]
    return Text("") if left_us is None else Text(format_us(left_us), style="red" if left_us < 0 else "")


_NODE: Final[Cells] = {
    "node": lambda row: row["node"],
    "state": lambda row: Text(row["state"], style=_STATES.get(row["state"], "bold red")),
    "heard": lambda row: Text(_seconds(row["age_us"]).plain, style="red" if row["silent"] else ""),
    "devices": lambda row: f"{row['healthy']} of {row['devices']} well",
    "lost": lambda row: row["lost_records"],
    "why": lambda row: row["why"] or "",
}
_DEVICE: Final[Cells] = {
    "node": lambda row: row["node"],
    "#": lambda row: row["index"],
    "model": lambda row: row["model"],
    "busy": lambda row: _ratio(row["busy_ratio"]),
    "memory": lambda row: f"{format_mib(row['memory_used_mib'])} of {format_mib(row['memory_mib'])}",
    "standing": lambda row: Text(row["standing"] or "", style=nodes.STYLES.get(row["standing"], "")),
    "slack": lambda row: "" if row["slack_us"] is None else format_us(row["slack_us"]),
    "why": lambda row: Text(row["why"] or "", style="red"),
}
_CONTAINER: Final[Cells] = {
    "request": lambda row: row["request"],
    "node": lambda row: row["node"],
    "laxity": _laxity,
    "met": lambda row: row["met"],
    "missed": lambda row: Text(str(row["missed"]), style="red" if row["missed"] else ""),
    "open": lambda row: row["open"],
    "tasks": lambda row: "" if row["tasks_us"] is None else format_us(row["tasks_us"]),
    "GPU time": lambda row: _gpu_time(row["gpu_us"], row["gpu_error_us"]),
    "ratio": lambda row: _ratio(row["ratio"]),
    "between": lambda row: f"{_ratio(row['lower'])} and {_ratio(row['upper'])}",
    "wanted": lambda row: _ratio(row["guarantee"]),
    "standing": lambda row: Text(row["standing"], style=_RECORDS[row["standing"]]),
}

"""Traces and clusters from CSV in the form of the openb data; plays nothing."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from services.placer.core.columns import Ints
from services.placer.core.demand import Demand
from services.placer.core.outlooks import shape_of
from services.placer.core.strategies.workload import Workload
from shared.errors import FieldError
from shared.messages import DeviceFacts, NodeFacts, NodeState, PlaceRequest, Regime

SECOND_US: Final = 1_000_000
_ASKS: Final = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec", "replicas", "priority")
"""The columns that say what is asked for."""
_TIMES: Final = ("creation", "deletion")

Row = Mapping[str, str | None]
T = TypeVar("T")


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    `at_us` is when it came, `stay_us` how long it stayed once it ran: None where the trace does not say, or not yet.
    """

    name: str
    request: PlaceRequest
    demand: Demand
    at_us: int | None = None
    stay_us: int | None = None

    @property
    def gpu_micro(self) -> int:
        """Device time of all replicas, in millionths of a device."""
        return self.request.replicas * self.demand.count * self.demand.share_micro


@dataclass(frozen=True, eq=False)
class Trace:
    """`arrivals` in the order of the file."""

    name: str
    arrivals: tuple[Arrival, ...]

    @cached_property
    def workload(self) -> Workload:
        """What is asked for in it, each replica once."""
        demands = (each.demand for each in self.arrivals for _ in range(each.request.replicas))
        return Workload.of((shape_of(demand), demand.memory_mib) for demand in demands)

    @cached_property
    def gpu_micro(self) -> Ints:
        return np.array([each.gpu_micro for each in self.arrivals], np.int64)


def arrivals_of_csv(path: Path) -> tuple[Arrival, ...]:
    """Columns as in openb_pod_list_*.csv; `replicas` and `priority` may be added. All of them wait if they must.

    Lines that ask for the same share one request. Raises FieldError that names file, line and column.
    """
    alike: dict[tuple[str | None, ...], tuple[PlaceRequest, Demand]] = {}
    return tuple(_read(path, lambda _, row: _arrival(row, alike)))


def nodes_of_csv(path: Path, names: Callable[[int, str], str] = lambda _, name: name) -> list[NodeFacts]:
    """Columns as in openb_node_list_*.csv; `labels` (`key=value|key=value`) may be added.

    Device memory and deadlines do not count in such traces. `names` makes a node's name of its place in the file and
    its name there. Raises FieldError that names file, line and column.
    """
    return _read(path, lambda place, row: _node(names(place, _text(row, "sn")), row))


def _read(path: Path, make: Callable[[int, Row], T]) -> list[T]:
    """What `make` makes of each line; lines are counted from 0, and from 2 (below the heading) where one is wrong."""
    made: list[T] = []
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            for place, row in enumerate(csv.DictReader(lines)):
                made.append(make(place, row))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FieldError(str(path), str(error), "a CSV file that can be read") from None
    except FieldError as error:
        raise FieldError(f"{path}: line {len(made) + 2}: {error.field}", error.found, error.allowed) from None
    return made


def _arrival(row: Row, alike: dict[tuple[str | None, ...], tuple[PlaceRequest, Demand]]) -> Arrival:
    key = tuple(row.get(column) for column in _ASKS)
    if key not in alike:
        request = _request(row)
        alike[key] = request, Demand.of(request)
    request, demand = alike[key]
    created, deleted = (_number(row, f"{word}_time") if row.get(f"{word}_time") else None for word in _TIMES)
    at_us = None if created is None else created * SECOND_US
    stay_us = None if deleted is None or created is None else max(0, deleted - created) * SECOND_US
    return Arrival(_text(row, "name"), request, demand, at_us, stay_us)


def _request(row: Row) -> PlaceRequest:
    count, models = _number(row, "num_gpu"), row.get("gpu_spec")
    share = _number(row, "gpu_milli") / 1000 if count else 1.0
    gpu = {"count": count, "share": share, "models": models.split("|") if models else None}
    asked = {name: _number(row, name) for name in ("cpu_milli", "memory_mib")}
    asked |= {name: _number(row, name, signed=True) for name in ("replicas", "priority") if row.get(name)}
    body = {"command": ["trace"], "queue": True, **({"gpu": gpu} if count else {}), **asked}
    return PlaceRequest.from_json(json.dumps(body).encode())


def _node(name: str, row: Row) -> NodeFacts:
    model = row.get("model") or ""
    devices = tuple(
        DeviceFacts(
            uuid=f"{name}.{index}",
            index=index,
            model=model,
            healthy=True,
            memory_mib=None,
            regime=Regime.TIME_SLICED,
            slice_us=2_000,
            switch_us=100,
        )
        for index in range(_number(row, "gpu"))
    )
    return NodeFacts(
        node=name,
        state=NodeState.READY,
        at_us=0,
        devices=devices,
        labels=_labels(row.get("labels") or ""),
        cpu_milli=_number(row, "cpu_milli"),
        memory_mib=_number(row, "memory_mib"),
    )


def _labels(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split("|") if part]
    if not all(key and equals for key, equals, _ in pairs):
        raise FieldError("labels", text, "key=value, several joined by |")
    return {key: value for key, _, value in pairs}


def _number(row: Row, column: str, *, signed: bool = False) -> int:
    text = row.get(column)
    if text is None or not (text.removeprefix("-") if signed else text).isdecimal():
        raise FieldError(column, text, "a whole number")
    return int(text)


def _text(row: Row, column: str) -> str:
    text = row.get(column)
    if not text:
        raise FieldError(column, text, "a name")
    return text

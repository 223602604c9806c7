"""What would make a refused request fit: single changes, each as small as it can be, each tried before it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from services.placer.core.demand import Demand
from services.placer.core.feasible import NO_SLACK, admit
from services.placer.core.filters import DEVICE_FILTERS, NODE_FILTERS, Sifted, sift
from services.placer.core.planners.gang import Plan
from services.placer.core.question import Question
from services.placer.core.rows import Rows
from shared.messages import Gpu, Kind, PlaceRequest, Realtime
from shared.messages.place import DAY_US
from shared.units import format_us

_NEAREST: Final = 8
"""Devices on which a change of timing is looked for."""
_RELEASES: Final = 32
"""Releases that are tried, those that free least first."""


@dataclass(frozen=True)
class Change:
    """`request` is the changed request; of a release, None, and `released` says whose and where."""

    text: str
    request: PlaceRequest | None
    released: tuple[str, str] | None = None


def changes(question: Question, plan: Plan) -> list[Change]:
    """Every kind of change that helps by itself, the smallest of each kind."""
    asked = question.request
    found = [
        change
        for propose in _PROPOSALS
        for change in propose(question)
        if change.request and change.request != asked and replace(question, request=change.request, kept=False).fits()
    ]
    return [*found, *_fewer_replicas(question, plan), *_release(question)]


def _changed(request: PlaceRequest, **fields: Any) -> PlaceRequest:
    return request.model_copy(update=fields)


def _of_gpu(question: Question, text: str, **fields: Any) -> Change:
    gpu = question.request.gpu or Gpu()
    return Change(text, _changed(question.request, gpu=gpu.model_copy(update=fields)))


def _of_realtime(question: Question, text: str, realtime: Realtime, **fields: Any) -> Change:
    return Change(text, _changed(question.request, realtime=realtime.model_copy(update=fields)))


def _but_for(question: Question, *codes: str) -> Rows:
    """The rows that pass every filter but these."""
    filters = DEVICE_FILTERS if question.request.gpu else NODE_FILTERS
    return sift(question.ask.everywhere(), [one for one in filters if one.code not in codes]).passing


# ------------------------------------------------------------------------------------------ less of it


def _less_share(question: Question) -> Iterator[Change]:
    gpu = question.request.gpu
    if gpu is None or gpu.count > 1 or not len(rows := _but_for(question, "not_now.share")):
        return
    share = int(rows.of_device("share_free").max()) / 1_000_000
    if 0 < share < gpu.share:
        yield _of_gpu(question, f"gpu.share is at most {share:g} (asked {gpu.share:g})", share=share)


def _less_memory(question: Question) -> Iterator[Change]:
    gpu = question.request.gpu
    if gpu is None or not gpu.memory_mib:
        return
    rows = _but_for(question, "never.memory", "not_now.memory", "never.memory_unknown", "excluded.unknown_use")
    if most := _nth_largest(rows, rows.of_device("memory_free"), gpu.count):
        text = f"gpu.memory_mib is at most {most[0]} (asked {gpu.memory_mib})"
        yield _of_gpu(question, text, memory_mib=most[0])


def _nth_largest(rows: Rows, values: Any, count: int) -> list[int]:
    """The most that `count` devices of one node have each; nothing where no node has so many. Unknown is 0."""
    order = np.lexsort((-values, rows.node))
    nodes, sorted_values = rows.node[order], values[order]
    last = np.flatnonzero(nodes[count - 1 :] == nodes[: len(nodes) - count + 1])
    return [max(0, int(sorted_values[last + count - 1].max()))] if len(last) else []


def _less_of_node(field: str, column: str, codes: tuple[str, str]) -> Callable[[Question], Iterator[Change]]:
    def propose(question: Question) -> Iterator[Change]:
        asked = getattr(question.request, field)
        if asked and len(rows := _but_for(question, *codes, "excluded.unknown_use")):
            most = max(0, int(rows.of_node(column).max()))
            yield Change(f"{field} is at most {most} (asked {asked})", _changed(question.request, **{field: most}))

    return propose


def _fewer_devices(question: Question) -> Iterator[Change]:
    gpu = question.request.gpu
    if gpu and gpu.count > 1 and len(rows := _but_for(question, "never.devices", "not_now.devices")):
        most = int(rows.per_node().max())
        yield _of_gpu(question, f"gpu.count is at most {most} (asked {gpu.count})", count=most)


def _fewer_replicas(question: Question, plan: Plan) -> Iterator[Change]:
    """As many as the plan had placed when it found no place for the next: places are never taken in vain."""
    if (done := len(plan.assignments)) and not plan.complete and len(question.replicas) == question.request.replicas:
        text = f"replicas is at most {done} (asked {question.request.replicas})"
        yield Change(text, _changed(question.request, replicas=done))


# ------------------------------------------------------------------------------------- somewhere else


def _other_model(question: Question) -> Iterator[Change]:
    gpu = question.request.gpu
    if gpu and gpu.models and len(rows := _but_for(question, "never.model")):
        cluster = question.cluster
        for model in sorted({cluster.device(row).model for row in rows.index.tolist()})[:3]:
            yield _of_gpu(question, f"gpu.models has {model}", models=(*gpu.models, model))


def _other_label(question: Question) -> Iterator[Change]:
    if question.request.node_selector:
        wanted = ", ".join(f"{k}={v}" for k, v in sorted(question.request.node_selector.items()))
        yield Change(f"node_selector does not ask for {wanted}", _changed(question.request, node_selector={}))


def _other_candidate(question: Question) -> Iterator[Change]:
    if question.request.candidates is not None and len(rows := _but_for(question, "excluded.not_candidate")):
        node = rows.node_name(0)
        yield Change(f"candidates has {node}", _changed(question.request, candidates=(node,)))


# ---------------------------------------------------------------------------------------- other timing

_TIMING: Final = ("never.deadline", "not_now.deadline")


def _timing(question: Question, realtime: Realtime, field: str, low: int, high: int) -> int | None:
    """The value in low..high nearest to low that some near device admits, by bisection; None where none does.

    `low` is refused and stands on the side of what was asked; either may be the larger number.
    """
    rows = _but_for(question, *_TIMING)
    slack = rows.verdict("slack") if len(rows) else np.zeros(0, np.int64)
    nearest = np.argsort(np.where(slack == NO_SLACK, -NO_SLACK, slack), kind="stable")[::-1][:_NEAREST]
    loads = [question.cluster.loads[int(row)] for row in rows.index[nearest]]

    def admitted(value: int) -> bool:
        changed = realtime.model_copy(update={field: value})
        demand = Demand.of(_changed(question.request, realtime=changed))
        return any(admit(demand, load).admitted for load in loads)

    if not admitted(high):
        return None
    while abs(high - low) > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if admitted(middle) else (middle, high)
    return high


def _shorter_runtime(question: Question) -> Iterator[Change]:
    realtime = question.request.realtime
    if realtime is None or realtime.runtime_us is None or realtime.segments:
        return
    asked = realtime.runtime_us
    if runtime := _timing(question, realtime, "runtime_us", asked, 1):
        text = f"realtime.runtime_us is at most {runtime} (asked {asked}): {format_us(runtime)}, not {format_us(asked)}"
        yield _of_realtime(question, text, realtime, runtime_us=runtime)


def _longer_deadline(question: Question) -> Iterator[Change]:
    """A deadline past the period would ask for another test, so the period bounds it."""
    realtime = question.request.realtime
    if realtime is None:
        return
    asked, longest = realtime.deadline_us, realtime.period_us or DAY_US
    if longest > asked and (deadline := _timing(question, realtime, "deadline_us", asked, longest)):
        text = f"realtime.deadline_us is at least {deadline} (asked {asked}): {format_us(deadline)}"
        yield _of_realtime(question, text, realtime, deadline_us=deadline)


def _softer(question: Question) -> Iterator[Change]:
    realtime = question.request.realtime
    if realtime is None or realtime.kind is Kind.SOFT:
        return
    for kind in (Kind.FIRM, Kind.SOFT)[realtime.kind is Kind.FIRM :]:
        yield _of_realtime(question, f"realtime.kind is {kind}", realtime, kind=kind)


def _gated(question: Question) -> Iterator[Change]:
    realtime = question.request.realtime
    if realtime and realtime.runtime_us and not realtime.gate:
        yield _of_realtime(question, "realtime.gate is true", realtime, gate=True)


# -------------------------------------------------------------------------------------- somebody leaves


def _release(question: Question) -> Iterator[Change]:
    """The smallest release on one node that makes room for a single replica."""
    if len(question.replicas) > 1:
        return
    sifted = sift(question.ask.everywhere())
    for node, request_id in _releases(question, sifted):
        cluster = question.cluster
        with cluster.trial():
            kept = tuple(r for r in cluster.reservations(node) if r.request_id != request_id)
            cluster.set_reservations(node, kept)
            slot = cluster.slot(node)
            fits = slot is not None and len(sift(question.ask.on(np.array([slot]))).passing) > 0
        if fits:
            yield Change(f"{request_id} on {node} is released", None, (request_id, node))
            return


def _releases(question: Question, sifted: Sifted) -> list[tuple[str, str]]:
    """Node and request of reservations on the nodes nearest to fitting, those that free least first."""
    cluster = question.cluster
    busy = [n for n, one in enumerate(sifted.filters) if one.code.startswith("not_now.")]
    rows = sifted.rows.where(np.isin(sifted.first, busy))
    slots = list(dict.fromkeys(rows.node.tolist()))[:_RELEASES]
    size: dict[tuple[str, str], tuple[int, int, int]] = {}
    for node in (cluster.name(slot) for slot in slots):
        for r in cluster.reservations(node):
            share, cpu, memory = size.get((node, r.request_id), (0, 0, 0))
            held = len(r.devices) * r.share_micro
            size[node, r.request_id] = (share + held, cpu + r.cpu_milli, memory + r.memory_mib)
    return sorted(size, key=lambda which: (size[which], which))[:_RELEASES]


_PROPOSALS: Final[tuple[Callable[[Question], Iterator[Change]], ...]] = (
    _less_share,
    _less_memory,
    _less_of_node("cpu_milli", "cpu_free", ("never.cpu", "not_now.cpu")),
    _less_of_node("memory_mib", "memory_free", ("never.node_memory", "not_now.node_memory")),
    _fewer_devices,
    _other_model,
    _shorter_runtime,
    _longer_deadline,
    _softer,
    _gated,
    _other_label,
    _other_candidate,
)

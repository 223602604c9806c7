"""What would make a refused request fit: single changes, each as small as it can be, each tried before it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from services.placer.core.demand import Demand
from services.placer.core.feasible import admit
from services.placer.core.filters import DEVICE_FILTERS, NODE_FILTERS, sift
from services.placer.core.leaving import Leaving, by_request, leave, leaving, nearest, room_without
from services.placer.core.outcome import Move
from services.placer.core.planners.defrag import moves_for
from services.placer.core.planners.gang import Plan
from services.placer.core.question import Question
from services.placer.core.rows import Rows
from shared.admission import NO_SLACK
from shared.messages import Gpu, Kind, PlaceRequest, Realtime
from shared.messages.place import DAY_US
from shared.units import format_us

_NEAREST: Final = 8
"""Devices on which a change of timing is looked for."""
_RELEASES: Final = 32
"""Releases that are tried, those that free least first, and nodes on which one is looked for."""
_NODES_OF_PAIRS: Final = 8
_RELEASES_FOR_SEVERAL: Final = 8
_MOVES: Final = 8
"""Moves that are tried: each is a decision of its own."""


@dataclass(frozen=True)
class Change:
    """`request` is the changed request; None where others go: `released` says who and where, `moved` whither."""

    text: str
    request: PlaceRequest | None
    released: tuple[tuple[str, str], ...] = ()
    moved: Move | None = None


def changes(question: Question, plan: Plan) -> list[Change]:
    """Every kind of change that helps by itself, the smallest of each kind."""
    asked = question.request
    found = [
        change
        for propose in _PROPOSALS
        for change in propose(question)
        if change.request and change.request != asked and replace(question, request=change.request, kept=False).fits()
    ]
    return [*found, *_fewer_replicas(question, plan), *_release(question), *_move(question)]


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

_TIMING: Final = ("never.deadline", "not_now.deadline", "would_break.deadline")


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
        return any(admit(demand, load, question.cluster.measured).admitted for load in loads)

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


def _release(question: Question) -> list[Change]:
    """The smallest release of one request, else of two, that makes room."""
    if len(question.replicas) > 1:
        return _release_for_several(question)
    ask = question.ask
    for size, most in ((1, _RELEASES), (2, _NODES_OF_PAIRS)):
        for each in leaving(ask, nearest(ask, most), size, by_request)[:_RELEASES]:
            if room_without(ask, each):
                return [_released(tuple(dict.fromkeys((held.request_id, each.node) for held in each.gone)))]
    return []


def _release_for_several(question: Question) -> list[Change]:
    """For replicas on several nodes a request is released on all of these."""
    cluster = question.cluster
    nodes = nearest(question.ask, _RELEASES)
    held: dict[str, list[Leaving]] = {}
    for node in nodes:
        for gone in by_request(cluster.reservations(node)):
            held.setdefault(gone[0].request_id, []).append(Leaving(node, gone))
    for request_id in sorted(held, key=lambda name: (len(held[name]), name))[:_RELEASES_FOR_SEVERAL]:
        with cluster.trial():
            for each in held[request_id]:
                leave(question.ask, each)
            fits = question.fits()
        if fits:
            return [_released(tuple((request_id, each.node) for each in held[request_id]))]
    return []


def _released(released: tuple[tuple[str, str], ...]) -> Change:
    """`a on n1, n2 is released`, or `a and b on n1 are released`."""
    names, nodes = (list(dict.fromkeys(part)) for part in zip(*released, strict=True))
    told = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
    verb = "is" if len(names) == 1 else "are"
    return Change(f"{' and '.join(names)} on {told} {verb} released", None, released)


def _move(question: Question) -> list[Change]:
    """One container that fits elsewhere too, and makes room by going there."""
    return [Change(str(move), None, moved=move) for move in moves_for(question, most=1, tries=_MOVES)]


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

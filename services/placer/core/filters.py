"""Who cannot take a request, and why: one filter per reason, each a mask over rows and one sentence in numbers.

Filters run in order, and each sees only the rows that passed all before it: every row lost is counted once, under the
first reason that rules it out. `waits` says whether time may mend it: a request that some row could take one day is
answered *not now*, any other *never*. docs/placement.md has the table of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from services.placer.core.accounts import Load
from services.placer.core.capabilities import OTHERS
from services.placer.core.cluster import STATES, UNKNOWN
from services.placer.core.columns import Array, Bools, Ints
from services.placer.core.feasible import admit, explained
from services.placer.core.rows import Rows
from shared.admission import NO_SLACK, hard_guarantee
from shared.messages import AllExcept, DeviceFacts, Kind, NodeState, Reason, Regime
from shared.units import format_mib

_TOLD: Final = 8
"""Nodes whose free devices are told one by one."""


@dataclass(frozen=True)
class Filter:
    """`fails` gives the rows ruled out (None: none is), `says` one sentence about those that were.

    The answer for a row depends on its node alone, all of whose rows are there unless ruled out before.
    """

    code: str
    fails: Callable[[Rows], Bools | None]
    says: Callable[[Rows], str]
    waits: bool = True
    settled: bool = True
    """Its answer depends on what the node list says alone, not on what is reserved. Such filters come first."""


@dataclass(frozen=True)
class Sifted:
    """`first` is, for each row asked, the number of the filter that ruled it out, or -1."""

    rows: Rows
    first: Array
    filters: Sequence[Filter]

    @cached_property
    def passing(self) -> Rows:
        return self.rows.where(self.first < 0)

    @cached_property
    def possible(self) -> Rows:
        """Those that could take the request one day."""
        return self.rows.where(np.array([*(f.waits for f in self.filters), True])[self.first])

    @cached_property
    def held_up(self) -> Bools:
        """Which of the rows only what is reserved keeps from taking the request."""
        held_up: Bools = self.first >= sum(one.settled for one in self.filters)
        return held_up

    def reasons(self) -> tuple[Reason, ...]:
        """Why the others were passed over, nearest to fitting first; the counts add up to the rows lost."""
        found = []
        for number in reversed(range(len(self.filters))):
            lost = self.first == number
            if count := int(np.count_nonzero(lost)):
                one, rows = self.filters[number], self.rows.where(lost.nonzero()[0])
                found.append(Reason(code=one.code, count=count, message=one.says(rows)))
        return tuple(found)


def filters_of(rows: Rows) -> Sequence[Filter]:
    """Those that apply to rows of this kind."""
    return DEVICE_FILTERS if rows.ask.demand.count else NODE_FILTERS


def sift(rows: Rows, filters: Sequence[Filter] | None = None) -> Sifted:
    """Sends the rows, all those of their nodes, through the filters."""
    filters = filters_of(rows) if filters is None else filters
    first = np.full(len(rows), -1, np.int8)
    left, place = rows, np.arange(len(rows))
    for number, one in enumerate(filters):
        bad = one.fails(left) if len(left) else None
        if bad is not None and bad.any():
            first[place[bad]] = number
            place = place[~bad]
            left = rows.where(place)
    return Sifted(rows, first, filters)


# ---------------------------------------------------------------------------------- the node as a whole


def _not_candidate(rows: Rows) -> Bools | None:
    wanted = rows.ask.demand.request.candidates
    if isinstance(wanted, AllExcept):
        return rows.named(wanted.all_except)
    return None if wanted is None else ~rows.named(wanted)


def _not_selected(rows: Rows) -> Bools | None:
    wanted, facts = rows.ask.demand.request.node_selector.items(), rows.ask.cluster.facts

    def lacks(node: str) -> bool:
        known = facts(node)
        return known is None or not wanted <= known.labels.items()

    return rows.where_node(lacks) if wanted else None


def _not_backed(rows: Rows) -> Bools | None:
    """Nodes whose backend does not honour every field of the request."""
    ask = rows.ask
    if ask.capabilities.keys() == {OTHERS}:
        return None if ask.lacking("") is None else np.ones(len(rows), np.bool_)
    return rows.where_node(lambda node: ask.lacking(node) is not None)


def _says_selector(rows: Rows) -> str:
    wanted = ", ".join(f"{k}={v}" for k, v in sorted(rows.ask.demand.request.node_selector.items()))
    return f"needs a node with {wanted}, which these are not: {rows.node_names()}"


def _says_backend(rows: Rows) -> str:
    fields = sorted({rows.ask.lacking(rows.ask.cluster.name(slot)) or "" for slot in rows.slots.tolist()})
    return f"{', '.join(fields)} cannot be honoured by the backend of {rows.node_names()}"


def _other_slot(rows: Rows) -> Bools | None:
    return None if rows.ask.slots is None else ~np.isin(rows.of_node("slot"), rows.ask.slots)


def _says_slot(rows: Rows) -> str:
    """`needs a node of SLOT-4 for 4 devices, these are of SLOT-1 (2), SLOT-8 (5)`, nodes without a slot last."""
    sizes = rows.ask.cluster.nodes["slot"][rows.slots]
    there = [f"{f'SLOT-{size}' if size else 'none'} ({(sizes == size).sum()})" for size in sorted({*sizes.tolist()})]
    wanted = " or ".join(f"SLOT-{size}" for size in rows.ask.slots or ()) or "a size that there is"
    return f"needs a node of {wanted} for {rows.ask.demand.count} devices, these are of {', '.join(there)}"


def _set_aside(rows: Rows) -> Bools | None:
    return rows.named(rows.ask.set_aside) if rows.ask.set_aside else None


def _closed(rows: Rows) -> Bools | None:
    """Pods that exist come from Kubernetes' own scheduler, which has looked at that."""
    return None if rows.ask.demand.request.pods is not None else rows.of_node("closed")


def _says_closed(rows: Rows) -> str:
    facts = rows.ask.cluster.facts(rows.node_name(0))
    return f"Kubernetes lets nothing new onto {rows.node_names()}: {(facts and facts.closed) or 'unknown'}"


def _in_state(state: NodeState, says: str) -> Filter:
    number = STATES.index(state)
    return Filter(f"excluded.{state}", lambda rows: rows.of_node("state") == number, _on(says))


def _short(asked: str, column: str) -> Callable[[Rows], Bools | None]:
    """Nodes that have less than is asked; where the column may be unknown, those were passed over before."""

    def fails(rows: Rows) -> Bools | None:
        need = getattr(rows.ask.demand, asked)
        return rows.of_node(column) < need if need else None

    return fails


def _unknown_use(rows: Rows) -> Bools:
    demand = rows.ask.demand
    lost: Bools = (rows.of_node("cpu_free") == UNKNOWN) & (demand.cpu_milli > 0)
    lost |= (rows.of_node("memory_free") == UNKNOWN) & (demand.memory_mib > 0)
    if demand.count and demand.device_memory_mib:
        lost |= rows.of_device("memory_free") == UNKNOWN
    return lost


def _says_cpu(column: str, word: str) -> Callable[[Rows], str]:
    def says(rows: Rows) -> str:
        most, node = rows.best_node(column)
        return f"needs {rows.ask.demand.cpu_milli} milli CPU on one node, {word} is {most} ({node})"

    return says


def _says_memory(column: str, word: str) -> Callable[[Rows], str]:
    def says(rows: Rows) -> str:
        most, node = rows.best_node(column)
        return f"needs {format_mib(rows.ask.demand.memory_mib)} on one node, {word} is {format_mib(most)} ({node})"

    return says


# -------------------------------------------------------------------------------------------- one device


def _other_model(rows: Rows) -> Bools | None:
    return ~np.isin(rows.of_device("model"), rows.ask.models) if len(rows.ask.models) else None


def _says_model(rows: Rows) -> str:
    gpu, cluster = rows.ask.demand.request.gpu, rows.ask.cluster
    things = [cluster.things[number] for number in np.flatnonzero(np.bincount(rows.of_device("model"))).tolist()]
    there = sorted(str(thing[1]) for thing in things if isinstance(thing, tuple))
    return f"needs {' or '.join((gpu and gpu.models) or ())}, these are {', '.join(there[:5])}"


def _no_gate(rows: Rows) -> Bools | None:
    task = rows.ask.demand.task
    return None if task and task.gate else rows.by_sharing(lambda sharing: sharing.regime is Regime.GATED)


def _no_guarantee(rows: Rows) -> Bools | None:
    return rows.by_sharing(lambda s: not hard_guarantee(s)[0]) if rows.ask.demand.kind is Kind.HARD else None


def _says_guarantee(rows: Rows) -> str:
    codes = np.unique(rows.of_device("sharing")).tolist()
    whys = {hard_guarantee(rows.ask.cluster.sharing(code))[1] for code in codes}
    return f"kind hard: {'; '.join(sorted(whys))}"


def _memory_small(column: str) -> Callable[[Rows], Bools | None]:
    def fails(rows: Rows) -> Bools | None:
        need = rows.ask.demand.device_memory_mib
        if not need:
            return None
        values = rows.of_device(column)
        small: Bools = (values < need) & (values != UNKNOWN)
        return small

    return fails


def _memory_unknown(rows: Rows) -> Bools | None:
    """Of healthy devices: a lost one says nothing, and may say it again when it is back."""
    unknown: Bools = (rows.of_device("memory_capacity") == UNKNOWN) & rows.of_device("healthy")
    return unknown if rows.ask.demand.device_memory_mib else None


def _says_device_memory(column: str, word: str) -> Callable[[Rows], str]:
    def says(rows: Rows) -> str:
        best, need = rows.best(values := rows.of_device(column)), format_mib(rows.ask.demand.device_memory_mib)
        return f"needs {need} on one device, {word} is {format_mib(int(values[best]))} ({rows.label(best)})"

    return says


def _no_share(rows: Rows) -> Bools:
    short: Bools = rows.of_device("share_free") < rows.ask.demand.share_micro
    return short


def _says_share(rows: Rows) -> str:
    best = rows.best(values := rows.of_device("share_free"))
    need, most = (_share(int(micro)) for micro in (rows.ask.demand.share_micro, values[best]))
    return f"needs a share of {need} of one device, largest free is {most} ({rows.label(best)}){_crumbs(rows)}"


def _crumbs(rows: Rows) -> str:
    """Where enough is free on some node, but in pieces: how much there, and the largest piece."""
    free, demand, cluster = rows.of_device("share_free"), rows.ask.demand, rows.ask.cluster
    each = np.bincount(rows.node, free).astype(np.int64)
    if (total := int(each.max())) < demand.count * demand.share_micro:
        return ""
    equals = (each == total).nonzero()[0]
    there = int(equals[cluster.nodes["rank"][equals].argmin()])
    block = int(free[rows.node == there].max())
    return f": fragmented, {_share(total)} free on {cluster.name(there)}, largest block {_share(block)}"


def _share(micro: int) -> str:
    return f"{micro / 1_000_000:.6f}".rstrip("0").rstrip(".")


def _late_alone(rows: Rows) -> Bools:
    late: Bools = ~rows.alone("admitted")
    return late


def _says_late_alone(rows: Rows) -> str:
    place = _nearest(rows, rows.alone("slack"))
    sharing = rows.ask.cluster.loads[int(rows.index[place])].sharing
    return f"{admit(rows.ask.demand, Load(sharing), rows.ask.cluster.measured).reason} ({rows.label(place)} empty)"


def _late(rows: Rows) -> Bools | None:
    """The newcomer itself would be late, or nobody in particular."""
    late: Bools = ~rows.verdict("admitted")
    return late & ~rows.verdict("breaks") if late.any() else None


def _breaks(rows: Rows) -> Bools | None:
    """Somebody who is there already would be late."""
    late: Bools = ~rows.verdict("admitted")
    return late if late.any() else None


def _says_late(rows: Rows) -> str:
    place = _nearest(rows, rows.verdict("slack"))
    cluster = rows.ask.cluster
    return (
        f"{explained(rows.ask.demand, cluster.loads[int(rows.index[place])], cluster.measured)} ({rows.label(place)})"
    )


def _nearest(rows: Rows, slack: Ints) -> int:
    """The row that is least short of time; one where time is not what is short comes last."""
    return rows.best(np.where(slack == NO_SLACK, -NO_SLACK, slack))


def _few(rows: Rows) -> Bools | None:
    """Nodes with fewer rows left than the devices of one replica."""
    count = rows.ask.demand.count
    return rows.per_node() < count if count > 1 else None


def _says_few(word: str) -> Callable[[Rows], str]:
    def says(rows: Rows) -> str:
        best = rows.best(values := rows.per_node())
        return f"needs {rows.ask.demand.count} devices on one node, {word} is {values[best]} ({rows.node_name(best)})"

    return says


def _says_fragmented(rows: Rows) -> str:
    """Where enough are free, but nowhere enough together, all that are free are told, node by node."""
    need = rows.ask.demand.count
    if len(rows) < need:
        return _says_few("most free")(rows)
    best, slots = rows.best(values := rows.per_node()), rows.slots_by_name()
    free = np.bincount(rows.node)[slots].tolist()
    told = ", ".join(str(count) for count in free[:_TOLD]) + (f" and {len(free) - _TOLD} more" * (len(free) > _TOLD))
    have = f"{len(free)} nodes have {told} free, largest block {values[best]} ({rows.node_name(best)})"
    return f"fragmented: needs {need} devices on one node, {have}"


def _says_first(says: str, why: Callable[[DeviceFacts], str | None]) -> Callable[[Rows], str]:
    """The first device, and how many more there are."""

    def text(rows: Rows) -> str:
        place = rows.best(np.zeros(len(rows)))
        reason = why(rows.ask.cluster.device(int(rows.index[place])))
        first = f"{says}: {rows.label(place)}{f' ({reason})' if reason else ''}"
        return f"{first} and {len(rows) - 1} more" if len(rows) > 1 else first

    return text


# ------------------------------------------------------------------------------------------ in their order


def _on(says: str) -> Callable[[Rows], str]:
    """A sentence that only needs to name the nodes."""
    return lambda rows: f"{says}: {rows.node_names()}"


def _never(code: str, fails: Callable[[Rows], Bools | None], says: Callable[[Rows], str]) -> Filter:
    return Filter(f"never.{code}", fails, says, waits=False)


def _now(code: str, fails: Callable[[Rows], Bools | None], says: Callable[[Rows], str]) -> Filter:
    return Filter(f"not_now.{code}", fails, says, settled=False)


_THERE = "the largest"
_FREE = "largest free"

_NODE_NEVER: Final = (
    Filter("excluded.not_candidate", _not_candidate, _on("not among the candidates"), waits=False),
    _never("selector", _not_selected, _says_selector),
    _never("slot", _other_slot, _says_slot),
    _never("backend", _not_backed, _says_backend),
    _in_state(NodeState.JOINED, "has just joined, not all of it is known yet"),
    _never("cpu", _short("cpu_milli", "cpu_capacity"), _says_cpu("cpu_capacity", _THERE)),
    _never("node_memory", _short("memory_mib", "memory_capacity"), _says_memory("memory_capacity", _THERE)),
)
_NODE_EXCLUDED: Final = (
    _in_state(NodeState.UNREACHABLE, "no heartbeat"),
    _in_state(NodeState.LOST, "no heartbeat for long"),
    Filter("excluded.closed", _closed, _says_closed),
    Filter("excluded.set_aside", _set_aside, _on("set aside after a failed start")),
)
_UNKNOWN_USE: Final = Filter("excluded.unknown_use", _unknown_use, _on("what others use is unknown"))
_NODE_NOW: Final = (
    _now("cpu", _short("cpu_milli", "cpu_free"), _says_cpu("cpu_free", _FREE)),
    _now("node_memory", _short("memory_mib", "memory_free"), _says_memory("memory_free", _FREE)),
)

NODE_FILTERS: Final = (*_NODE_NEVER, *_NODE_EXCLUDED, _UNKNOWN_USE, *_NODE_NOW)

DEVICE_FILTERS: Final = (
    *_NODE_NEVER,
    _never("no_device", lambda rows: ~rows.of_device("is_device"), _on("has no device")),
    _never("model", _other_model, _says_model),
    _never("memory", _memory_small("memory_capacity"), _says_device_memory("memory_capacity", _THERE)),
    _never("memory_unknown", _memory_unknown, _on("asked for device memory, how much there is is unknown")),
    _never("gate", _no_gate, _on("gated devices take only requests with gate: true and a runtime_us")),
    _never("guarantee", _no_guarantee, _says_guarantee),
    _never("deadline", _late_alone, _says_late_alone),
    _never("devices", _few, _says_few("most that could ever do")),
    *_NODE_EXCLUDED,
    Filter(
        "excluded.unhealthy", lambda rows: ~rows.of_device("healthy"), _says_first("not healthy", lambda d: d.reason)
    ),
    Filter("excluded.taken", lambda rows: rows.of_device("taken"), _says_first("given by others", lambda d: d.holder)),
    Filter("excluded.stale", lambda rows: ~rows.of_device("listed"), _on("in no list of the node list, too old")),
    _UNKNOWN_USE,
    *_NODE_NOW,
    _now("share", _no_share, _says_share),
    _now("memory", _memory_small("memory_free"), _says_device_memory("memory_free", _FREE)),
    _now("deadline", _late, _says_late),
    Filter("would_break.deadline", _breaks, _says_late, settled=False),
    _now("devices", _few, _says_fragmented),
)

"""Transitions of a request's size: what a client asks for, and what its owner learns of each replica's container.

Until an engine has said how it ended, the larger of both sizes is reserved: nothing is promised twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from services.placer.core.capabilities import ALL_CAN_ALL, capabilities_of
from services.placer.core.demand import Demand
from services.placer.core.filters import sift
from services.placer.core.intents import Scope
from services.placer.core.intents_life import Asked, Observed
from services.placer.core.records import (
    HOLDING,
    RESIZE_FAILED,
    RESIZED,
    RESIZING,
    RUNNABLE,
    generation,
    holders,
    moving,
    noted,
    reply_of,
    said,
    size_held,
    size_of,
    with_replica,
)
from services.placer.core.rows import Ask
from shared.effects import Effect, Reply
from shared.errors import FieldError
from shared.messages import (
    PlaceReply,
    PlaceRequest,
    Reason,
    ReplicaRecord,
    RequestRecord,
    Size,
    State,
)


@dataclass(frozen=True)
class SetSize(Asked):
    """Another size for all replicas: those that run are given it by their owner, the others start with it."""

    request_id: str
    cpu_milli: int | None
    memory_mib: int | None
    generation: int | None
    reply: str
    replicas: int = 1

    @property
    def weight(self) -> int:
        return 1 + self.replicas

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        if record is None:
            return self._unknown()
        self._check(record)
        now = size_of(record)
        size = Size(
            cpu_milli=now.cpu_milli if self.cpu_milli is None else self.cpu_milli,
            memory_mib=now.memory_mib if self.memory_mib is None else self.memory_mib,
        )
        replicas = tuple(_resizing(record, each, size) for each in record.replicas)
        if size == now and replicas == record.replicas:
            return self._says(scope, record)
        changed = record.model_copy(update={"size": size, "replicas": replicas})
        if reasons := tuple(_refusals(scope, record, changed)):
            no = PlaceReply(outcome=State.REJECTED, request_id=self.request_id, reasons=reasons)
            return (Reply(self.reply, no),)
        word = RESIZING if _under_way(changed) else RESIZED
        changed = noted(changed, word, scope.wall_us, f"from {said(now)} to {said(size)}")
        scope.draft.replace(record, changed, [each.replica for each in holders(record)])
        return self._says(scope, changed)

    def _check(self, record: RequestRecord) -> None:
        if record.body is None or record.state.final or record.state == State.STOPPING:
            found = f"{self.request_id}, which is {record.state}"
            raise FieldError("request_id", found, "one that runs, is held or waits")
        if moving(record):
            raise FieldError("request_id", f"{self.request_id}, which is being moved", "one that stays where it is")
        if self.generation not in {None, generation(record)}:
            raise FieldError("generation", self.generation, f"{generation(record)}, the present one")

    def _says(self, scope: Scope, record: RequestRecord) -> tuple[Effect, ...]:
        word = RESIZING if _under_way(record) else RESIZED
        return (Reply(self.reply, reply_of(record, scope.draft.ledger_id, outcome=word, **dict(size_of(record)))),)


def _resizing(record: RequestRecord, replica: ReplicaRecord, size: Size) -> ReplicaRecord:
    """A container that runs, or may, keeps its size until its owner has seen the other; what only holds has it now."""
    if replica.state not in HOLDING or replica.resizing == size:
        return replica
    held = size_held(record, replica)
    if replica.resizing is None and held == size:
        return replica
    runs = replica.state in RUNNABLE
    return replica.model_copy(update={"size": held, "resizing": size} if runs else {"size": size})


def _under_way(record: RequestRecord) -> bool:
    return any(each.resizing is not None for each in record.replicas)


# --- whether it can be ---


def _refusals(scope: Scope, record: RequestRecord, changed: RequestRecord) -> Iterator[Reason]:
    """Nodes whose backend resizes nothing, and what does not fit on its node as placement counts it."""
    pairs = zip(record.replicas, changed.replicas, strict=True)
    moved = {now.node for was, now in pairs if now != was and now.resizing is not None and now.node is not None}
    if lacking := {node for node in moved if not _resizes(scope, node)}:
        text = f"resize cannot be honoured by the backend of {', '.join(sorted(lacking))}"
        yield Reason(code="never.backend", count=len(lacking), message=text)
    had, needs = _by_node(record), _by_node(changed)
    scope.draft.free(record)
    for node in sorted(needs):
        yield from _no_room(scope, record, node, had[node], needs[node])
    scope.draft.reserve(record)


def _resizes(scope: Scope, node: str) -> bool:
    can = capabilities_of(node, scope.chooser.capabilities)
    return can is not None and can.resize


def _by_node(record: RequestRecord) -> dict[str, Size]:
    """What the request holds of each node, all its replicas there together."""
    cpu: defaultdict[str, int] = defaultdict(int)
    memory: defaultdict[str, int] = defaultdict(int)
    for each in holders(record):
        assert each.node is not None
        held = size_held(record, each)
        cpu[each.node] += held.cpu_milli
        memory[each.node] += held.memory_mib
    return {node: Size(cpu_milli=cpu[node], memory_mib=memory[node]) for node in cpu}


def _no_room(scope: Scope, record: RequestRecord, node: str, had: Size, needs: Size) -> tuple[Reason, ...]:
    """Judged as if the request had left the node; what does not grow is not asked about."""
    cpu = needs.cpu_milli if needs.cpu_milli > had.cpu_milli else 0
    memory = needs.memory_mib if needs.memory_mib > had.memory_mib else 0
    if not cpu and not memory:
        return ()
    slot = scope.chooser.cluster.slot(node)
    if slot is None:
        return (Reason(code="excluded.unknown_node", count=1, message=f"the node list does not know {node}"),)
    plain = PlaceRequest(request_id=record.request_id, command=("",), cpu_milli=cpu, memory_mib=memory)
    return sift(Ask(scope.chooser.cluster, Demand.of(plain), ALL_CAN_ALL).on(np.array([slot]))).reasons()


# --- what the owner learns ---


@dataclass(frozen=True)
class MarkResized(Observed):
    """The replica has the size that it was being given; `resized` once the last one has."""

    size: Size

    @property
    def key(self) -> Hashable:
        return (super().key, self.size.cpu_milli, self.size.memory_mib)

    def follow(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> tuple[Effect, ...]:
        if replica.state == State.STARTED and replica.resizing == self.size:
            scope.draft.replace(record, self._ended(scope, record, replica), [replica.replica])
        return ()

    def _ended(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> RequestRecord:
        now = replica.model_copy(update={"size": self.size, "resizing": None})
        changed = record.model_copy(update={"replicas": with_replica(record, now)})
        if _under_way(changed) or size_of(changed) != self.size:
            return changed
        return noted(changed, RESIZED, scope.wall_us, said(self.size))


@dataclass(frozen=True)
class MarkResizeFailed(MarkResized):
    """The replica keeps what it had, and the request starts with that again; replicas that took it keep it."""

    reason: str

    def _ended(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> RequestRecord:
        now = replica.model_copy(update={"resizing": None})
        changed = record.model_copy(update={"size": replica.size, "replicas": with_replica(record, now)})
        assert replica.size is not None, "what is resized says what it had"
        stays = f"replica {replica.replica} on {replica.node} stays at {said(replica.size)}"
        return noted(changed, RESIZE_FAILED, scope.wall_us, f"{stays}: {self.reason}")

"""Transitions of a request that has a record: confirm, release, and what its owner learns of its containers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from services.placer.core.bindings import AwaitBinding
from services.placer.core.containers import Cause, Stop
from services.placer.core.intents import Intent, Scope
from services.placer.core.moving import arrived, call_off, called_off, failed, left
from services.placer.core.records import (
    RUNNABLE,
    freed,
    generation,
    never_asked,
    newest,
    nodes_of,
    replica_of,
    reply_of,
    settled,
    sites,
    stepped,
    with_replica,
)
from shared.effects import Effect, Reply
from shared.errors import FieldError
from shared.messages import PlaceReply, Reason, ReplicaRecord, RequestRecord, State, container_name


class Asked(Intent):
    """A transition that somebody asked for by request id and that ends in one reply."""

    request_id: str
    reply: str

    def refused(self, code: int, field: str, found: str, allowed: str) -> tuple[Effect, ...]:
        fault = FieldError(field, found, allowed)
        return (Reply(self.reply, PlaceReply.of_error(fault, self.request_id), (code, str(fault))),)

    def _answer(self, scope: Scope, record: RequestRecord) -> tuple[Effect, ...]:
        return (Reply(self.reply, reply_of(record, scope.draft.ledger_id)),)

    def _unknown(self) -> tuple[Effect, ...]:
        return (Reply(self.reply, PlaceReply(outcome="unknown", request_id=self.request_id)),)


@dataclass(frozen=True)
class Confirm(Asked):
    """held → placed, all replicas; asked again, the same answer. Who is asked starts it where it can.

    Of pods the answer waits until they are bound or are known not to be: whoever asks tells a scheduler so.
    """

    request_id: str
    generation: int
    replica: int | None
    reply: str

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        if record is None:
            return self._unknown()
        if not record.state.final:
            self._check(record)
        if record.state != State.HELD:
            return self._once_bound(scope, record)
        replicas = [each.model_copy(update={"state": State.PLACED}) for each in record.replicas]
        mine = all(scope.chooser.reaches(node) for node in nodes_of(record))
        owner = scope.me if mine else record.owner
        placed = settled(record, replicas, scope.wall_us, confirmed=True, owner=owner)
        scope.draft.put(placed)
        return (*self._once_bound(scope, placed), *scope.starts(placed))

    def _once_bound(self, scope: Scope, record: RequestRecord) -> tuple[Effect, ...]:
        if record.state == State.PLACED and record.body is not None and record.body.pods is not None:
            return (AwaitBinding(self.request_id, self.reply, self),)
        return self._answer(scope, record)

    def _check(self, record: RequestRecord) -> None:
        present = generation(record)
        if self.replica is not None:
            if (replica := replica_of(record, self.replica)) is None:
                raise FieldError("replica", self.replica, f"0 to {len(record.replicas) - 1}")
            present = replica.generation
        if self.generation != present:
            raise FieldError("generation", self.generation, f"{present}, the present one")


@dataclass(frozen=True)
class Release(Asked):
    """Ends a request: final at once where nothing of it can run, else stopping until its owner saw it gone."""

    request_id: str
    reply: str
    replicas: int = 1

    @property
    def weight(self) -> int:
        return 1 + self.replicas

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        if record is None:
            scope.draft.put(never_asked(self.request_id, scope.me, scope.wall_us))
            return self._unknown()
        if record.final or record.state == State.STOPPING:
            return self._answer(scope, record)
        if any(_may_run(each) for each in record.replicas):
            released = stopping(scope, record, "released", State.RELEASED)
        else:
            scope.draft.free(record)
            replicas = tuple(freed(each, State.RELEASED) for each in record.replicas)
            released = stepped(record, State.RELEASED, scope.wall_us, replicas=replicas)
            scope.draft.put(released)
        return self._answer(scope, released)


def stopping(scope: Scope, record: RequestRecord, detail: str, ends_as: State) -> RequestRecord:
    """Everything that may run is to be stopped, and keeps its reservation until it is gone."""
    replicas = tuple(_stopping(each) for each in record.replicas)
    changed = stepped(
        record, State.STOPPING, scope.wall_us, detail=detail, replicas=replicas, ends_as=ends_as, backoff_us=0
    )
    scope.draft.put(changed)
    return changed


def _may_run(replica: ReplicaRecord) -> bool:
    """There, or where it was before."""
    return replica.state in RUNNABLE or replica.leaving is not None


def _stopping(replica: ReplicaRecord) -> ReplicaRecord:
    if replica.state in RUNNABLE:
        return called_off(replica).model_copy(update={"state": State.STOPPING})
    return replica if replica.state.final else freed(replica, State.RELEASED)


# --- what the owner learns of its containers ---


@dataclass(frozen=True)
class Observed(Intent):
    """Something was seen of one replica's container in one generation."""

    request_id: str
    replica: int
    generation: int

    @property
    def key(self) -> Hashable:
        return (type(self).__name__, self.request_id, self.replica, self.generation)

    def plan(self, scope: Scope) -> tuple[Effect, ...]:
        record = scope.draft.record(self.request_id)
        return self.of(scope, record, replica_of(record, self.replica)) if record else ()

    def of(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord | None) -> tuple[Effect, ...]:
        """By which of the replica's places it was seen at."""
        if replica is None or record.body is None or record.owner != scope.me:
            return ()
        if replica.leaving is not None and replica.leaving.generation == self.generation:
            self.behind(scope, record, replica)
        elif replica.to is not None and replica.to.generation == self.generation:
            self.there(scope, record, replica)
        elif replica.generation == self.generation:
            return self.follow(scope, record, replica)
        return ()

    def follow(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> tuple[Effect, ...]:
        """The transition of this replica, which is in the generation that was seen."""
        raise NotImplementedError

    def there(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
        """The same where it was seen at the place to which the replica moves."""

    def behind(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
        """The same where it was seen at the place that the replica leaves."""


@dataclass(frozen=True)
class MarkStarted(Observed):
    """placed → started. What was started and should not run is stopped: this is the look at the key after a start."""

    node: str

    def of(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord | None) -> tuple[Effect, ...]:
        if record.final or (replica is not None and self._was_given_up(replica)):
            name = container_name(scope.draft.ledger_id, self.request_id, self.replica, self.generation)
            return (Stop(self.node, name),)
        return super().of(scope, record, replica)

    def _was_given_up(self, replica: ReplicaRecord) -> bool:
        """Whether the generation that was seen is over; one that is newer than the record is not known to be."""
        return self.generation <= newest(replica) and all(each.generation != self.generation for each in sites(replica))

    def follow(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> tuple[Effect, ...]:
        if replica.state == State.PLACED:
            scope.draft.put(started(scope, record, replica))
        return ()

    def there(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
        arrived(scope, record, replica)


def started(scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> RequestRecord:
    replicas = with_replica(record, replica.model_copy(update={"state": State.STARTED}))
    return settled(record, replicas, scope.wall_us, tries=0, set_aside=())


@dataclass(frozen=True)
class MarkStartFailed(Observed):
    """placed → waiting, its node set aside; failed for good when the tries are used up. A move fails at once.

    A pod whose scheduler held its place goes back to that scheduler: the hold counts as over, a repeat makes a new one.
    """

    reason: str

    def there(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
        failed(scope, record, replica, self.reason)

    def behind(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
        left(scope, record, replica)

    def follow(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> tuple[Effect, ...]:
        if replica.state != State.PLACED or replica.node is None:
            return ()
        if record.confirmed and record.body and record.body.pods and len(record.replicas) == 1:
            self._not_bound(scope, record, replica)
            return ()
        tries = record.tries + 1
        if tries >= scope.rules.most_tries:
            self._failed(scope, record.model_copy(update={"tries": tries}), replica)
            return ()
        replicas = with_replica(record, freed(replica, State.WAITING))
        waits = settled(
            record,
            replicas,
            scope.wall_us,
            detail=f"start on {replica.node} failed: {self.reason}",
            tries=tries,
            backoff_us=scope.rules.backoff_us(tries),
            set_aside=tuple(sorted({*record.set_aside, replica.node})),
        )
        scope.draft.replace(record, waits, [replica.replica])
        return ()

    def _not_bound(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
        """Elsewhere only where its scheduler says so, which knows more of the pod's nodes than the record does."""
        scope.draft.free(record)
        expired = stepped(
            record,
            State.EXPIRED,
            scope.wall_us,
            detail=f"not bound to {replica.node}: {self.reason}",
            final=False,
            confirmed=False,
            reasons=(Reason(code="not_now.binding", count=1, message=f"not bound to {replica.node}: {self.reason}"),),
            replicas=(freed(replica, State.EXPIRED),),
        )
        scope.draft.put(expired)

    def _failed(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
        """One replica that fails for good stops the others and fails the request."""
        detail = f"start on {replica.node} failed, try {record.tries}: {self.reason}"
        replicas = with_replica(record, freed(replica, State.FAILED))
        failed = record.model_copy(update={"replicas": replicas})
        scope.draft.replace(record, failed, [replica.replica])
        if any(map(_may_run, replicas)):
            stopping(scope, failed, detail, State.FAILED)
            return
        ended = tuple(each if each.state.final else freed(each, State.FAILED) for each in replicas)
        scope.draft.put(stepped(failed, State.FAILED, scope.wall_us, detail=detail, replicas=ended))


@dataclass(frozen=True)
class MarkExited(Observed):
    """started → waiting where `restart` says so, else exited, once nothing of it can run elsewhere either. An exit code
    of None is unknown, not 0. Where it was to move it does not.
    """

    exit_code: int | None
    cause: Cause | None = None

    def there(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
        failed(scope, record, replica, f"it ended there with {self._code()}")

    def behind(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
        left(scope, record, replica)

    def follow(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> tuple[Effect, ...]:
        if replica.state == State.STOPPING:
            gone(scope, record, replica)
        if replica.state in RUNNABLE:
            scope.draft.replace(record, self._ended(scope, record, replica), [replica.replica])
        return ()

    def _ended(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> RequestRecord:
        if replica.state == State.PLACED:
            record = started(scope, record, replica)
        if replica.to is not None:
            record = call_off(scope, record, replica, f"it ended with {self._code()}")
            replica = called_off(replica)
        if record.body and record.body.restart == "on_failure" and self.exit_code != 0:
            return self._again(scope, record, replica)
        ended = with_replica(record, self._freed(replica, State.EXITED))
        return settled(record, ended, scope.wall_us, detail=self._detail(replica))

    def _again(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> RequestRecord:
        restarts = record.restarts + 1
        return settled(
            record,
            with_replica(record, self._freed(replica, State.WAITING)),
            scope.wall_us,
            detail=self._detail(replica),
            restarts=restarts,
            backoff_us=scope.rules.backoff_us(restarts),
        )

    def _freed(self, replica: ReplicaRecord, state: State) -> ReplicaRecord:
        return freed(replica, state, self.exit_code, self.cause.reason if self.cause else None)

    def _detail(self, replica: ReplicaRecord) -> str:
        return f"replica {replica.replica} ended on {replica.node} with {self._code()}"

    def _code(self) -> str:
        code = "an unknown exit code" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"{code} ({self.cause})" if self.cause else code


@dataclass(frozen=True)
class MarkGone(Observed):
    """stopping → released (or what the stop ends as), once the backend saw that nothing of it runs."""

    def follow(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> tuple[Effect, ...]:
        if replica.state == State.STOPPING:
            gone(scope, record, replica)
        return ()

    def behind(self, scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
        left(scope, record, replica)


def gone(scope: Scope, record: RequestRecord, replica: ReplicaRecord) -> None:
    """The request is done with once it is gone from the place that it was leaving too."""
    replicas = with_replica(record, freed(replica, State.RELEASED))
    scope.draft.replace(record, settled(record, replicas, scope.wall_us), [replica.replica])

"""What placers are asked and answer: rt.place, rt.confirm, rt.resize, rt.defragment, rt.gone, rt.release; and tell."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shared.errors import FieldError
from shared.messages.base import Message, Name, Own
from shared.subjects import MAX_NAME_BYTES

DAY_US = 86_400_000_000


Micros = Annotated[int, Field(gt=0, le=DAY_US)]
Mebibytes = Annotated[int, Field(ge=0, le=1 << 40)]
Milli = Annotated[int, Field(ge=0, le=1_000_000_000)]


class Kind(StrEnum):
    """How much a deadline binds: hard by a sound test, firm by measurement, soft as well as it goes."""

    HARD = "hard"
    FIRM = "firm"
    SOFT = "soft"


class State(StrEnum):
    """Where a request is in its life."""

    QUEUED = "queued"
    HELD = "held"
    PLACED = "placed"
    STARTED = "started"
    WAITING = "waiting"
    STOPPING = "stopping"
    EXITED = "exited"
    RELEASED = "released"
    REJECTED = "rejected"
    FAILED = "failed"
    EXPIRED = "expired"

    @property
    def final(self) -> bool:
        """True where nothing follows. An expired hold is not final: RequestRecord knows the difference."""
        return self in _FINAL


_FINAL = {State.EXITED, State.RELEASED, State.REJECTED, State.FAILED, State.EXPIRED}


class Gpu(Message):
    """What one replica needs of GPUs. A share is per device and never summed across devices."""

    count: int = Field(default=1, ge=1, le=1024)
    share: float = Field(default=1.0, gt=0, le=1)
    memory_mib: Mebibytes = 0
    """On each device."""
    models: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _several_are_whole(self) -> Self:
        if self.count > 1 and self.share < 1:
            raise FieldError("share", self.share, f"1 or absent: count {self.count} takes whole devices")
        return self


class Realtime(Message):
    """The timing of one replica's tasks: deadline D (from a task's start), period T, runtime C."""

    deadline_us: Micros
    period_us: Micros | None = None
    """Least time between two starts; the deadline where absent."""
    runtime_us: Micros | None = None
    """Device time of one task, worst case; needed for hard and firm."""
    kind: Kind = Kind.FIRM
    guarantee: float = Field(default=0.99, gt=0, lt=1)
    host_us: int = Field(default=0, ge=0, le=DAY_US)
    segments: tuple[Micros, ...] | None = None
    gate: bool = False
    window: tuple[int, int] | None = None
    """(m, k): at least m of any k consecutive tasks."""
    profile: Name | None = None
    """What is learned of its times is learned for all that name it; the image and the runtime where absent."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.runtime_us is None and self.kind != Kind.SOFT:
            raise FieldError("runtime_us", "nothing", f"a whole number above 0: kind {self.kind} needs it")
        if self.window and not 1 <= self.window[0] <= self.window[1] <= 10_000:
            raise FieldError("window", list(self.window), "[m, k] with 1 <= m <= k <= 10000")
        if self.segments and self.runtime_us is not None and sum(self.segments) > self.runtime_us:
            raise FieldError("segments", sum(self.segments), f"a sum of at most runtime_us = {self.runtime_us}")
        return self


class Secret(Message):
    """An environment value by reference: the text itself never travels on the bus."""

    secret: Name


class Volume(Message):
    source: Annotated[str, Field(min_length=1, max_length=4096)]
    target: Annotated[str, Field(min_length=1, max_length=4096)]
    read_only: bool = True


class AllExcept(Message):
    all_except: tuple[Name, ...]


class Pod(Message):
    namespace: Name
    name: Name
    uid: Name


_CLIENT_ONLY = {
    "place_by": "place_by_us, microseconds since 1970: only our command line knows relative times",
    "cpu": "cpu_milli: only our command line reads Kubernetes quantities",
    "memory": "memory_mib: only our command line reads Kubernetes quantities",
}


class PlaceRequest(Message):
    """Place and start one container, or a gang of them whole."""

    name: Annotated[str, Field(max_length=MAX_NAME_BYTES)] | None = None
    request_id: Name | None = None
    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    command: tuple[str, ...] | None = None
    env: dict[str, str | Secret] = Field(default_factory=dict)
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = ()
    volumes: tuple[Volume, ...] = ()
    shm_mib: Mebibytes | None = None
    user: str | None = None
    gpu: Gpu | None = None
    cpu_milli: Milli = 0
    memory_mib: Mebibytes = 0
    realtime: Realtime | None = None
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    replicas: int = Field(default=1, ge=1, le=10_000)
    spread_over: Literal["node", "pack"] | None = None
    node_selector: dict[str, str] = Field(default_factory=dict)
    candidates: tuple[Name, ...] | AllExcept | None = None
    pods: tuple[Pod, ...] | None = None
    strategy: str = "deadline"
    place_by_us: int | None = Field(default=None, ge=0, le=1 << 53)
    queue: bool = False
    hold_us: Annotated[int, Field(gt=0, le=3_600_000_000)] | None = None
    restart: Literal["never", "on_failure"] = "never"
    on_risk: Literal["notify", "move"] = "notify"
    """What follows where a guarantee is missed on its device, or that is lost: an event alone, or a move elsewhere."""
    on_lost: Literal["replace", "stay"] = "replace"
    """What follows where its node is lost and answers nobody: it is placed again, and may run twice unseen; or it
    stays, since it must never run twice."""
    dry_run: bool = False

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """A small body is read once, also where its stored copy comes as well; those that differ from it in the id
        alone share all else that it says.
        """
        return _read(cls, body) if len(body) <= SMALL_BYTES else cls._checked(body)

    @classmethod
    def _checked(cls, body: bytes) -> Self:
        request = super().from_json(body)
        for word in unknown_fields(body):
            if word in _CLIENT_ONLY:
                raise FieldError(word, "a word of our command line", _CLIENT_ONLY[word])
        return request

    @model_validator(mode="after")
    def _something_to_run(self) -> Self:
        if self.image is None and not self.command and self.pods is None:
            raise FieldError("command", "nothing", "a command, an image, or pods to bind")
        if self.realtime and self.gpu is None:
            raise FieldError("gpu", "nothing", "what the real-time tasks run on: realtime needs gpu")
        return self

    def body_hash(self) -> str:
        """Identity of the request's content: its id and its candidates do not count.

        Nor does what is as it would be unsaid: a field that a later version adds leaves the hashes in the ledger valid.
        """
        return self.content_hash

    @cached_property
    def content_hash(self) -> str:
        content = self.model_dump(mode="json", exclude=_NO_CONTENT, exclude_defaults=True)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        made = super().model_copy(update=update, deep=deep)
        if update and not update.keys() <= _NO_CONTENT:
            made.__dict__.pop("content_hash", None)
        return made


_NO_CONTENT = {"request_id", "candidates"}

SMALL_BYTES = 4096
"""Bodies up to it are remembered as they were read, the last 256 of them and of what they say beside their id: a few
MiB at most."""

_ID = re.compile(rb'"request_id"[ \t\r\n]*:[ \t\r\n]*"([ !#-\[\]-~]{1,253})"')
"""With a name that stands as it is in JSON and that needs no further look."""


@lru_cache(maxsize=256)
def _read(model: type[PlaceRequest], body: bytes) -> Any:
    before, name, after = _apart(body)
    first = _first(model, before, after)
    if first:
        return first[0].model_copy(update={"request_id": name.decode()})
    request = model._checked(body)  # noqa: SLF001  # its own
    if name and request.request_id == name.decode():
        first.append(request)
    return request


@lru_cache(maxsize=256)
def _first(model: type[PlaceRequest], before: bytes, after: bytes) -> list[PlaceRequest]:
    """The first request that says what stands around an id, once it is there."""
    del model, before, after
    return []


def _apart(body: bytes) -> tuple[bytes, bytes, bytes]:
    """What stands before the id, the id, and what stands behind it. No id unless it is plain that it is this one: a
    variable in ``env`` may have that name, and a name can be written with escapes.
    """
    said_once = body.count(b'request_id"') == 1 and b"\\u00" not in body
    parts = _ID.split(body, 1) if said_once else []
    return (parts[0], parts[1], parts[2]) if parts[1:] else (body, b"", b"")


def unknown_fields(body: bytes, model: type[Message] = PlaceRequest) -> list[str]:
    """Names in a valid body that this version ignores; they come back as warnings, so that a typo is not silent."""
    if len(body) > SMALL_BYTES:
        return _unknown(body, model)
    before, name, after = _apart(body)
    return list(_unknown_around(before, after, model, bool(name)))


@lru_cache(maxsize=256)
def _unknown_around(before: bytes, after: bytes, model: type[Message], has_id: bool) -> tuple[str, ...]:
    return tuple(_unknown(before + (b'"request_id":""' if has_id else b"") + after, model))


def _unknown(body: bytes, model: type[Message]) -> list[str]:
    return sorted(set(json.loads(body)) - set(model.model_fields))


class Placement(Own):
    """Where one replica is (to be) run."""

    replica: int
    node: Name
    devices: tuple[str, ...]
    share: float | None = None
    generation: int | None = None
    state: str | None = None
    container: str | None = None


class Score(Message):
    total: float
    by: dict[str, float] = Field(default_factory=dict)


class RunnerUp(Message):
    node: str
    total: float


class Reason(Message):
    """Why devices were passed over: a code of the taxonomy, how many, and the numbers in words."""

    code: str
    count: int
    message: str


class PlannedMove(Message):
    """One replica that would start at ``node`` on ``devices``, then stop where it is now."""

    request_id: Name
    replica: int
    from_node: Name
    from_devices: tuple[str, ...]
    node: Name
    devices: tuple[str, ...]


class FieldFault(Message):
    field: str
    found: str
    allowed: str


class PlaceReply(Own):
    """The one answer to rt.place, rt.confirm, rt.resize, rt.defragment, rt.gone and rt.release."""

    outcome: str
    request_id: str | None
    duplicate: bool = False
    generation: int | None = None
    placements: tuple[Placement, ...] = ()
    score: Score | None = None
    runner_up: RunnerUp | None = None
    position: int | None = None
    reasons: tuple[Reason, ...] = ()
    would_fit_if: tuple[str, ...] = ()
    error: FieldFault | None = None
    dry_run: bool = False
    fits_more: int | None = None
    fits_by_size: Mapping[int, Annotated[int, Field(ge=0)]] | None = None
    """Of a dry run whose strategy has fixed sizes: for each, how many more requests of so many devices would fit."""
    moves: tuple[PlannedMove, ...] = ()
    """Moves of others, in their order, after which it would fit. Of a dry run nothing is moved. Of rt.defragment they
    are begun one after another, each planned again as things are then."""
    exit_code: int | None = None
    end_reason: str | None = None
    """Of what it ended, as its backend says in one word: OOMKilled, Evicted, DeadlineExceeded, NodeLost, SIGSEGV, …;
    None where no more than the exit code is known."""
    unproven: bool = False
    """A firm deadline was admitted on its declaration, before it was measured."""
    measured: str | None = None
    """By which measured response times a firm request is placed where its first replica is, in numbers."""
    warnings: tuple[str, ...] = ()
    cpu_milli: int | None = None
    """Of rt.resize: what each replica has, or is being given; 0 is no limit."""
    memory_mib: int | None = None
    freed: int | None = None
    """Of rt.gone: how many reservations were given back."""

    @classmethod
    def of_error(cls, fault: FieldError, request_id: str | None = None) -> Self:
        error = FieldFault(field=fault.field, found=fault.found, allowed=fault.allowed)
        return cls(outcome="error", request_id=request_id, error=error)


class ConfirmRequest(Message):
    request_id: Name
    generation: int = Field(ge=1, le=1 << 31)
    replica: int | None = Field(default=None, ge=0, le=10_000)


class ReleaseRequest(Message):
    request_id: Name


class DefragmentRequest(Message):
    """Let others move so that this one, which waits, fits."""

    request_id: Name


class GoneRequest(Message):
    """An operator's word that a node which is unreachable or lost is gone for good, and all that ran there with it."""

    node: Name


class ResizeRequest(Message):
    """Change what each replica has of its node, while it runs; what is absent stays as it is.

    Never 0: a limit that a container runs with cannot be taken away.
    """

    request_id: Name
    cpu_milli: int | None = Field(default=None, ge=1, le=1_000_000_000)
    memory_mib: int | None = Field(default=None, ge=1, le=1 << 40)
    generation: int | None = Field(default=None, ge=0, le=1 << 31)
    """Whose size is meant: with another present generation it is an error."""

    @model_validator(mode="after")
    def _something_changes(self) -> Self:
        if self.cpu_milli is None and self.memory_mib is None:
            raise FieldError("cpu_milli", "nothing", "a whole number, or memory_mib, or both")
        return self


PULLING = "pulling"
"""Of a PlaceEvent: an image is being pulled for the request's start."""


class PlaceEvent(Own):
    """One step of a request's life.

    ``state`` also says ``accepted``, ``resizing``, ``resized``, ``resize_failed``, ``moving``, ``moved`` and
    ``move_failed``, which are no states; ``detail`` of a move says which replica goes from where to where.
    ``pulling`` is no step either: ``step`` is 0, ``detail`` says in numbers how far the pull of the image is, and the
    next one is at least a second later. It is told for as long as the start waits for the pull.
    """

    at_us: int
    request_id: Name
    state: str
    generation: int
    step: int
    name: str | None = None
    placements: tuple[Placement, ...] = ()
    reasons: tuple[Reason, ...] = ()
    would_fit_if: tuple[str, ...] = ()
    moves: tuple[PlannedMove, ...] = ()
    """Of ``moving`` and ``moved``: which replica, from where to where."""
    exit_code: int | None = None
    end_reason: str | None = None
    """As in PlaceReply; of one that is ``waiting`` to be started again this and ``exit_code`` say how it ended."""
    detail: str | None = None

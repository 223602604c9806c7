"""What a core may ask of its shell, and what every core may hear from it: plain data, no I/O.

A core is ``handle(event, now_us) -> list[effect]``. Publish, Emit, Reply, Ack and ReadFrom are carried out inline, in
order; every other effect is slow, runs as a task of the shell, and ends in an event, also when it fails.

What there is much of is a named tuple: a frozen dataclass takes three times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from shared.messages import Message

# --- events that any core may get ---


@dataclass(frozen=True, slots=True)
class Tick:
    """A timer of the service's table came round. ``wall_us`` for what people read and for place_by."""

    name: str
    wall_us: int


class Received(NamedTuple):
    """A decoded message. ``reply`` is where an answer goes ("" = nowhere); ``seq`` its stream sequence (0 = live)."""

    subject: str
    message: Message
    reply: str = ""
    seq: int = 0
    wall_us: int = 0
    raw: bytes = b""
    """The body as it came, for what the model does not know."""
    headers: Mapping[str, str] = MappingProxyType({})
    ack: int = 0
    """Token to name in an Ack (work-queue messages only)."""
    redelivered: bool = False
    stored_us: int = 0
    """Wall clock of the server when a stream took it (0 = live)."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A core message as it came, for who looks into few of many."""

    subject: str
    body: bytes


class KeyChanged(NamedTuple):
    """A key of a watched bucket has a new value; None means deleted. The same revision may come twice."""

    bucket: str
    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class WatchBegins:
    """A watch delivers all that is there, at start or after a gap, and then says WatchReplayed. A server may have lost
    its last writes meanwhile, or come back from a backup: revisions from before do not compare with those that follow.
    """

    bucket: str


@dataclass(frozen=True, slots=True)
class WatchReplayed:
    """A watch has delivered all that is there, at start or after a gap; keys not named here are gone."""

    bucket: str
    keys: frozenset[str]


WatchEvent = WatchBegins | KeyChanged | WatchReplayed


@dataclass(frozen=True, slots=True)
class CommitDone:
    """How a Commit ended. ``current`` are the keys as read again after a conflict or an unknown outcome."""

    commit: int
    outcome: CommitOutcome
    revisions: Mapping[str, int] = field(default_factory=dict)
    current: tuple[KeyChanged, ...] = ()
    detail: str = ""


class CommitOutcome(StrEnum):
    WRITTEN = "written"
    CONFLICT = "conflict"
    UNKNOWN = "unknown"
    """A time-out: it may have been written; ``current`` tells."""
    REFUSED = "refused"
    """The server refuses it for good (too long, too many): nothing was written."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to the bus was lost; core messages may be missed until Reconnected."""


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection is back; watches replay by themselves."""

    gap_us: int


@dataclass(frozen=True, slots=True)
class ReadingFrom:
    """What is heard of a ``stream`` from now on begins at ``start_seq``, without a gap; said once for a ReadFrom."""

    subject: str
    start_seq: int


@dataclass(frozen=True, slots=True)
class Draining:
    """The service is asked to stop; what the core wants to say last it says now."""


# --- effects ---


class Publish(NamedTuple):
    """An event that may not be lost: stored in RT_EVENTS, at least once, in order per subject.

    ``event_id`` derives from what happened, so that a repeat has the same; it is ``ce-id`` and ``Nats-Msg-Id``.
    ``chained``: written with the expected last sequence of its subject, so that a late retry cannot land behind its
    successor (task batches).
    """

    subject: str
    body: Message
    event_id: str
    event_type: str
    chained: bool = False


class Emit(NamedTuple):
    """A message that may be lost (metrics)."""

    subject: str
    body: Message


class Reply(NamedTuple):
    """The one answer to a request; ``error`` is (code, text) for the headers of the NATS services convention."""

    to: str
    body: Message
    error: tuple[int, str] | None = None


class Ack(NamedTuple):
    """A work-queue message is dealt with; ``delay_us`` set: deliver it again after that."""

    token: int
    delay_us: int | None = None


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """A ``stream`` of the service's table is read from ``start_seq`` on, instead of from where it has come to."""

    subject: str
    start_seq: int


class Write(NamedTuple):
    """One key of a commit: its new value (None deletes) and the revision it must have now (0 = absent).

    ``fence``: the key that must have that revision instead, such as a lease; only where nothing else is written.
    """

    key: str
    value: bytes | None
    expected: int
    ttl_s: int | None = None
    fence: str | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """All writes or none, in one bucket; slow, ends in CommitDone with the same number."""

    commit: int
    bucket: str
    writes: tuple[Write, ...]


Effect = Any
"""Cores of single services have effects of their own; the shell looks each up by its type."""

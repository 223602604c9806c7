"""The table that says what a service listens to, publishes and does on a timer; nothing here runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from shared.effects import Effect
from shared.errors import FieldError
from shared.messages import Message
from shared.metrics import Metric, Sample

Fault = Callable[[FieldError, str | None], Message]
"""The body that answers a malformed request; its second argument is the request id when one could be read."""


class Core(Protocol):
    """A pure state machine: the same events at the same times give the same effects."""

    def handle(self, event: object, now_us: int) -> list[Effect]: ...

    def check(self) -> None:
        """Assert every invariant."""

    def story(self, id: str) -> list[str]:  # noqa: A002  # the word of DESIGN §3
        """What happened to one thing, for people."""
        ...


class Outside(Protocol):
    """Something beside the bus that a service cannot do its work without."""

    @property
    def trouble(self) -> str:
        """Why the service is not ready; empty where nothing is wrong."""
        ...

    def numbers(self) -> Iterable[Sample]:
        """For /metrics."""
        ...


@dataclass(frozen=True)
class Listen:
    """One subject or bucket that a service hears.

    ``subject`` leaves the prefix out; for kind ``watch`` it is a bucket's name, of which those ``keys`` are watched.
    ``request``: one answer each, shared through ``queue``. ``core``: lossy; with ``unread`` it comes as Unread.
    ``stream``: in order, from the sequence that ``start`` names once all watches have replayed (0: only what is new;
    None: nothing until a ReadFrom). ``work``: one durable consumer shared by all who name it, acknowledged by the core
    with Ack. Of ``core`` and ``stream`` what ``wanted`` declines by its subject is dropped before it is decoded.
    """

    subject: str
    kind: Literal["request", "core", "stream", "work", "watch"]
    model: type[Message] | None = None
    about: str = ""
    keys: str = ">"
    queue: str | None = None
    stream: str | None = None
    durable: str | None = None
    start: Callable[[Any], int | None] | None = None
    wanted: Callable[[Any, str], bool] | None = None
    unread: bool = False
    fault: Fault | None = None


@dataclass(frozen=True)
class Publishes:
    """One kind of message that a service says."""

    subject: str
    kind: Literal["event", "metric", "kv", "reply"]
    model: type[Message]
    about: str = ""


@dataclass(frozen=True)
class Every:
    """A timer: the core gets Tick(name); one that was not handled yet is not sent again."""

    name: str
    period_us: int
    about: str = ""


@dataclass(frozen=True)
class Service:
    """A service at a glance."""

    name: str
    about: str
    listens: tuple[Listen, ...] = ()
    publishes: tuple[Publishes, ...] = ()
    every: tuple[Every, ...] = ()
    metrics: tuple[Metric, ...] = ()
    """What ``numbers`` may tell at /metrics, beside what every service tells."""
    numbers: Callable[[Any], Iterable[Sample]] | None = None
    """From its core, between two events: it only reads."""

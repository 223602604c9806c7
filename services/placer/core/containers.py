"""What the placer's core asks of backends and hears from them: plain data; the shell carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shared.effects import KeyChanged
from shared.messages import ContainerLabels, PlaceRequest, Regime, Size

# --- effects: slow, each ends in one of the events below ---


class Start(NamedTuple):
    """Start a container, or find that it was started; ends in Started, StartFailed or StartUnknown."""

    labels: ContainerLabels
    request: PlaceRequest
    regimes: tuple[Regime | None, ...] = ()
    """How each device of the reservation is shared, in its order; None where its node's facts do not say."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End a container and forget it; ends in Stopped or StopFailed."""

    node: str
    container: str


@dataclass(frozen=True, slots=True)
class Resize:
    """Give a running container these limits, 0 leaves one as it is; ends in Resized, ResizeFailed or ResizeUnknown."""

    node: str
    container: str
    size: Size


@dataclass(frozen=True, slots=True)
class Remove:
    """Forget what is left of a container that ended; no event: the next list shows whether it worked."""

    node: str
    container: str


@dataclass(frozen=True, slots=True)
class ListNode:
    """What runs on a node; ends in Listed or ListFailed."""

    node: str
    glance: bool = False
    """What its backend knows without asking will do."""


@dataclass(frozen=True, slots=True)
class Read:
    """Read keys of the ledger from the server, past the watch; ends in ReadDone."""

    keys: tuple[str, ...]
    listed: Listed | None = None
    """What is judged once they are read, and when that list was asked for."""
    asked_us: int = 0


# --- events ---


@dataclass(frozen=True, slots=True)
class Cause:
    """Of what a container ended, beyond its exit code, as its backend says it."""

    reason: str
    """One word for programs: OOMKilled, Evicted, DeadlineExceeded, Error, SIGSEGV, ..."""
    message: str = ""
    """More of it for people."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.message else self.reason


class Found(NamedTuple):
    """A container as a backend saw it; `labels` None where they cannot be read."""

    node: str
    container: str
    labels: ContainerLabels | None
    running: bool
    exit_code: int | None = None
    cause: Cause | None = None
    """Of its end; None where nobody knows more than the code, or there is no more."""


class Started(NamedTuple):
    """The command was executed; it may have ended since."""

    found: Found


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The command does not run, and nothing is left of the try."""

    node: str
    container: str
    reason: str


@dataclass(frozen=True, slots=True)
class StartUnknown:
    """Nobody answered: it may run, and what it is in is not ours to undo, such as a pod that somebody else made."""

    node: str
    container: str
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """A start is still pulling its image; told to people, and changes nothing."""

    labels: ContainerLabels
    text: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing of it runs."""

    node: str
    container: str


@dataclass(frozen=True, slots=True)
class StopFailed:
    """It may still run."""

    node: str
    container: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resized:
    """It runs with these limits, or has ended."""

    node: str
    container: str
    size: Size


@dataclass(frozen=True, slots=True)
class ResizeFailed:
    """It has the limits that it had."""

    node: str
    container: str
    size: Size
    reason: str


@dataclass(frozen=True, slots=True)
class ResizeUnknown:
    """Nobody answered: it may have either limits."""

    node: str
    container: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A backend's watch saw a container end, this one or an earlier one."""

    found: Found


@dataclass(frozen=True, slots=True)
class Listed:
    node: str
    found: tuple[Found, ...]
    complete: bool = True
    """False: what was there may be missing, and what is gone was there a moment ago."""


@dataclass(frozen=True, slots=True)
class ListFailed:
    """The node or its engine does not answer: nothing is known of its containers."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReadDone:
    current: tuple[KeyChanged, ...]
    listed: Listed | None = None
    asked_us: int = 0


@dataclass(frozen=True, slots=True)
class PlaceStreamAt:
    """Last sequence of the stream of requests when this placer started: what is older was nobody's but ours."""

    seq: int

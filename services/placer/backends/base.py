"""What the placer asks of whatever runs containers; the backends themselves live beside this file.

The placer decides in its ledger and a backend carries it out, so a backend decides nothing: it does not choose devices,
does not restart what ended, does not remove what it does not know. Several placers, each with a backend object of its
own, look after the same containers at the same time, and each may be killed between any two steps. So everything that
a backend must remember lies where the other placers' backend objects see it: in the engine, or in files.

A container is in one of three conditions:

- *unknown*: ``list`` does not show it. Nothing of it runs, nothing of it is left but what the monitor may still read.
- *running*: its command was executed and has not ended.
- *exited*: its command ended. It stays so, with its exit code, until ``remove`` or ``stop``; it never runs again.

Errors: every method raises BackendError, with a text for the requester, where the engine or the machine refuses.
Any other exception is a bug of the backend and ends the service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from services.placer.core.capabilities import Capabilities
from services.placer.core.containers import Cause
from shared.messages.ledger import ContainerLabels
from shared.messages.nodes import Regime
from shared.messages.place import PlaceRequest


@dataclass(frozen=True)
class StartSpec:
    """One start: what to run, and the labels from which its reservation can be rebuilt."""

    labels: ContainerLabels
    request: PlaceRequest
    env: Mapping[str, str] = field(default_factory=dict)
    """What the placer adds to the request's own environment; wins over it."""
    regimes: tuple[Regime | None, ...] = ()
    """How each device of the reservation is shared, in its order; None, or missing, where nobody knows."""
    progress: Callable[[str], None] = field(default=lambda _: None, compare=False)
    """Told how far a long wait is, such as the pull of an image, in words for people; at most once a second."""


class Seen(NamedTuple):
    """One container as the backend sees it now."""

    node: str
    container: str
    labels: ContainerLabels | None
    """None where something carries our name but no labels that can be read: leave it alone and raise an alarm."""
    state: Literal["running", "exited"]
    exit_code: int | None = None
    """Of an exited one; 128 + signal where a signal ended it; None where nobody saw the end (unknown, not 0)."""
    cause: Cause | None = None
    """Of an exited one: what it ended of, where more is known than its code."""
    pid: int | None = None
    """Of the command, where it is a process of this machine and runs."""


class Backend(Protocol):
    """Starts, stops and sees containers. One object per placer process; all methods may run at the same time."""

    @property
    def name(self) -> str:
        """As nodes name it in their facts: process, fake, docker, kubernetes."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What requests may ask of it; the pipeline refuses the others before they are placed."""
        ...

    async def start(self, spec: StartSpec) -> Seen:
        """Start the container on ``spec.labels.node``, or find that it was started; idempotent by its name.

        Called once a request is placed, and again by whoever takes it over. Two starts of one name, from any placers
        at any time, run the command once: the second one finds the first and returns what it sees of it, which may
        be ``exited``. So whoever starts must have read the ledger after any stop of that name.

        Returns when the command was executed: the caller records *started* (and what follows if it has exited).
        BackendError: the command does not run and nothing is left of the try; the caller frees the reservation, sets
        the node aside and shows the text as the reason. Cancelled: it may or may not have started; start again or stop.
        BackendSilentError for a pod that somebody else made: the same may be so; the caller keeps the reservation.
        """
        ...

    async def stop(self, node: str, container: str) -> None:
        """End the container, politely first, and forget it; afterwards ``list`` does not show it.

        Called for a release, for a container that the ledger says should not run, for the former place of a move.
        Idempotent: a container that has exited, is unknown, or is being stopped by somebody else is no error.
        Returns when nothing of it runs: the caller frees the reservation. ``watch`` may post its end before that.
        BackendError: it may still run; the caller keeps the reservation and asks again later.
        """
        ...

    async def list(self, node: str) -> list[Seen]:
        """All running and exited containers of ``node``, whoever started them.

        Called at the placer's start and at every reconciliation. A container that is being started or stopped by
        somebody at that moment may be missing; one that has run since before the call and still does is not.
        """
        ...

    async def glance(self, node: str) -> Sequence[Seen] | None:
        """What ``list`` would show, as far as it is known without asking the engine; None where that must be asked.

        What it shows was so a moment ago, and what has run since before the call may be missing. So reconciliation
        takes from it what it shows, and concludes nothing from what it does not: then it calls ``list``.
        """
        ...

    async def watch(self, post: Callable[[Seen], None]) -> None:
        """Post each container of any node that exits, also those that had exited before; runs for ever.

        Called once at the placer's start, as a root task. Each exit is posted once per call of ``watch``; another
        placer's watch posts it too, so the caller acts only on what it owns. What is missed is found by ``list``.
        """
        ...

    async def resize(self, node: str, container: str, *, cpu_milli: int, memory_mib: int) -> None:
        """Give a running container these limits; 0 leaves one as it is. Idempotent, and the command notices nothing.

        Called for a request of another size, and again by whoever takes it over. Returns when the limits hold: the
        caller frees what is not needed any more. What is asked of one that has exited does not matter. Labels may go
        on saying what it started with.
        BackendError: it is unknown, or it keeps the limits that it had, both of them; the caller frees what was meant
        for it. BackendSilentError: it may have either; the caller keeps the larger of both and asks again.
        Only where ``capabilities.resize`` says so; others raise BackendError.
        """
        ...

    async def remove(self, node: str, container: str) -> None:
        """Forget an exited container. Called once the ledger has its exit; idempotent, and a running one is kept."""
        ...

"""What a backend can do for a request, as plain facts that the pipeline checks; no backend lives here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """A request that asks for more than its node's backend can do is refused with a reason, never quietly cut down."""

    needs_command: bool = False
    """True where an image alone says nothing: the request must carry a command."""
    images: bool = False
    volumes: bool = False
    ports: bool = False
    secrets: bool = False
    """Whether environment values may be references to secrets."""
    user: bool = False
    shm: bool = False

"""What a connection hands over: messages, the answer of nobody, and what happens to the link; nothing here is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

NOBODY = "503"
"""The status of an answer that says that nobody listens."""
_STATUS = "Status"  # under these two names the client files the inline status of a message
_DESCRIPTION = "Description"


@dataclass(frozen=True, slots=True)
class Msg:
    """A message as it came. ``status`` is the server's own inline status (``100``, ``409`` …), "" for all others."""

    subject: str
    body: bytes
    reply: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return self.headers.get(_STATUS, "") if not self.body else ""

    @property
    def description(self) -> str:
        return self.headers.get(_DESCRIPTION, "")


@dataclass(frozen=True, slots=True)
class NoResponders:
    """Nobody listens on the subject of a request: said by the server at once."""

    subject: str


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """What happened to the connection: lost, back (after ``gap_us``), closed for good, or trouble on a subject."""

    kind: Literal["lost", "back", "closed", "slow_consumer", "handler_failed", "error"]
    detail: str = ""
    gap_us: int = 0

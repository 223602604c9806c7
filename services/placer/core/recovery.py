"""The recovery path: stored copies of requests wait here until the ledger knows them or their grace is over.

The live path has no memory: a placer that dies or hangs with a request in hand takes it along. The stored copy of
the request has no reply subject, so whoever decides it here answers nobody; its events tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.effects import Ack, Received
from shared.messages import PlaceRequest


@dataclass(frozen=True, slots=True)
class Copy:
    """A request that is stored, perhaps more than once, and that no key stands for yet."""

    request: PlaceRequest
    due_us: int
    tokens: dict[int, int]
    """By stream sequence: what to acknowledge it with."""

    @property
    def acks(self) -> tuple[int, ...]:
        return tuple(self.tokens.values())


class Recovery:
    """Copies by request id. One that is delivered again only brings a new token: its grace goes on."""

    def __init__(self, grace_us: int) -> None:
        self._grace_us = grace_us
        self._copies: dict[str, Copy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def needs_none(self, request: PlaceRequest) -> str | None:
        """Why a copy is never replayed: a counter's name, None where it may have to be."""
        if request.request_id is None:
            return "replay.no_id"  # it cannot be told from one that was handled
        if request.hold_us or request.dry_run:
            return "replay.for_now"  # it was a question about a moment that is over
        return None

    def keep(self, message: Received, request: PlaceRequest, now_us: int) -> None:
        """Wait for the grace from now on; another message with the same id is a copy of the same request."""
        assert request.request_id is not None
        new = Copy(request, now_us + self._grace_us, {})
        self._copies.setdefault(request.request_id, new).tokens[message.seq] = message.ack

    def known(self, request_id: str) -> list[Ack]:
        """The ledger has a key for it."""
        copy = self._copies.pop(request_id, None)
        return [Ack(token) for token in copy.acks] if copy else []

    def give_back(self) -> list[Ack]:
        """Let others have them at once."""
        back = [Ack(token, delay_us=0) for copy in self._copies.values() for token in copy.acks]
        self._copies.clear()
        return back

    def due(self, now_us: int, at_once: Callable[[int], bool]) -> list[Copy]:
        """Copies to decide here now; `at_once` says by stream sequence which need no grace."""
        due = [copy for copy in self._copies.values() if copy.due_us <= now_us or at_once(max(copy.tokens))]
        for copy in due:
            assert copy.request.request_id is not None
            del self._copies[copy.request.request_id]
        return due

"""What a decision can be: it fits, not now, or never; values only, nothing here decides."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Reason, RunnerUp, Score


@dataclass(unsafe_hash=True, slots=True)
class Assignment:
    """Where one replica goes; `devices` are uuids, none for a request without gpu. As all here not to be changed
    (frozen ones take several times as long to make, and each decision makes some).
    """

    replica: int
    node: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """One replica starts at `to`, then stops on `node`, where it has `devices`."""

    request_id: str
    node: str
    devices: tuple[str, ...]
    to: Assignment

    def __str__(self) -> str:
        replica = f"{self.request_id}/{self.to.replica}"
        if self.to.node == self.node:
            return f"{replica} moves to {', '.join(self.to.devices)} of {self.node}"
        return f"{replica} moves from {self.node} to {self.to.node}"


@dataclass(unsafe_hash=True, slots=True)
class Fits:
    """A place for every replica asked for.

    `score` is that of the first replica, `runner_up` the best device for it on another node. `unproven`: a firm
    deadline was admitted on its declaration, before it was measured. `measured`: by which times the first one was.
    """

    assignments: tuple[Assignment, ...]
    score: Score | None = None
    runner_up: RunnerUp | None = None
    unproven: bool = False
    measured: str | None = None


@dataclass(frozen=True, slots=True)
class NotNow:
    """It does not fit now; it could when others leave, or when a node comes (back)."""

    reasons: tuple[Reason, ...]
    would_fit_if: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Never:
    """It would not fit if all known nodes were empty and healthy: waiting cannot help."""

    reasons: tuple[Reason, ...]
    would_fit_if: tuple[str, ...] = ()


MAX_GANG_NODES = 999
"""A batch of the ledger holds 1,000 keys, one of them the request's own."""

Decision = Fits | NotNow | Never

"""Whether a node is alive: one small state machine per node, judged by the local receive time of its heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Heartbeat, NodeState

ALIVE = frozenset({NodeState.JOINED, NodeState.READY, NodeState.DEGRADED})
READY_AFTER = 2
"""Heartbeats in a row before a node that joined, or came back, is ready: one alone may be the last of its kind."""


@dataclass(slots=True)
class Liveness:
    """``seen_us`` is local and monotonic: what a node's own clock says plays no part (cases T1, T2, T4)."""

    seen_us: int
    state: NodeState = NodeState.JOINED
    reason: str | None = None
    streak: int = 0

    def heartbeat(self, metrics: Heartbeat, now_us: int) -> None:
        self.seen_us = now_us
        self.streak += 1
        sick = [device.uuid for device in metrics.devices if not device.healthy]
        if metrics.draining:
            self.streak = 0
            self.state, self.reason = NodeState.UNREACHABLE, "its monitor was stopped"
        elif self.streak < READY_AFTER:
            self.state, self.reason = NodeState.JOINED, None
        elif sick:
            self.state, self.reason = NodeState.DEGRADED, f"not healthy: {', '.join(sorted(sick))}"
        else:
            self.state, self.reason = NodeState.READY, None

    def resume(self, state: NodeState, reason: str | None) -> None:
        """As another observer left it: a node that was ready needs no second heartbeat to be ready for us."""
        self.state, self.reason = state, reason
        self.streak = READY_AFTER if state in ALIVE else 0

    def age(self, now_us: int, grace_us: int, lost_us: int) -> None:
        """Judges silence. Both bounds are for this node: at least three of its own heartbeat periods."""
        silent_us = now_us - self.seen_us
        if silent_us > lost_us and self.state != NodeState.LOST:
            self.state, self.reason = NodeState.LOST, _silent(silent_us, lost_us)
        elif silent_us > grace_us and self.state in ALIVE:
            self.state, self.reason = NodeState.UNREACHABLE, _silent(silent_us, grace_us)
            self.streak = 0

    def rebase(self, gap_us: int, now_us: int) -> None:
        """We ourselves heard nothing for a while (suspended, disconnected): that time counts against nobody."""
        self.seen_us = min(self.seen_us + gap_us, now_us)


def _silent(silent_us: int, allowed_us: int) -> str:
    return f"no heartbeat for {silent_us / 1e6:.1f} s, allowed {allowed_us / 1e6:.1f} s"

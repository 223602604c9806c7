"""The independent subscriber: a connection of its own that writes down what comes over the bus; it asks nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from rich.text import Text

from cli import events
from cli.client import connected
from shared.bus import StoredMsg
from shared.clock import SystemClock
from shared.effects import KeyChanged, WatchEvent
from shared.messages import ContainerRecord, DeadlineEvent, NodeDeadlines, NodeFacts
from shared.streams import bucket_stream
from shared.subjects import DEADLINES, EVENTS_STREAM, LEDGER, NODES
from shared.testing.invariants import EventChecker, LedgerChecker

KEPT_LINES = 200
FEEL_US = 20_000
KEPT_WAKES = 500
"""The last ten seconds: when the machine is busiest."""


@dataclass(frozen=True)
class Warned:
    """at_risk or recovered, and when it was heard (monotonic)."""

    event: DeadlineEvent
    heard_us: int


class Recorder:
    """Everything stored on ``rt.events.>`` and in the ledger, in order; what the buckets say now is for the view."""

    def __init__(self) -> None:
        self.events = EventChecker()
        self.ledger = LedgerChecker()
        self.warnings: list[Warned] = []
        self.heard_us: dict[tuple[str, int], int] = {}
        """When each miss was heard (monotonic), by ring and sequence of its begin."""
        self.facts: dict[str, NodeFacts] = {}
        self.records: dict[str, ContainerRecord] = {}
        """By request id; of the demo's containers each has one."""
        self.lines: deque[Text] = deque(maxlen=KEPT_LINES)
        self.told: Callable[[Text, str], object] = _nobody
        self._clock = SystemClock()
        self._late_us: deque[int] = deque(maxlen=KEPT_WAKES)
        self._moved = asyncio.Event()

    @contextlib.asynccontextmanager
    async def recording(self, url: str) -> AsyncIterator[None]:
        async with connected(url) as client:
            bus = client.bus
            work: list[Any] = [
                bus.follow(EVENTS_STREAM, bus.subjects.events, 1, self._event),
                bus.follow(bucket_stream(LEDGER, "rt"), f"$KV.{LEDGER}.>", 1, self._ledger),
                bus.watch(NODES, self._node),
                bus.watch(DEADLINES, self._deadlines),
                self._feel(),
            ]
            tasks = [asyncio.create_task(each) for each in work]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something recorded; False where it did not come in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return condition()
        return True

    def states(self, request_id: str) -> list[str]:
        """The states of a request so far, as its events tell them."""
        steps = self.events.states[request_id]
        return [steps[number].state for number in sorted(steps)]

    def judged(self, request_id: str) -> int:
        """Verdicts on a request's tasks so far, as the tracker's checkpoint has them."""
        record = self.records.get(request_id)
        return record.met + record.missed if record else 0

    def delays_us(self) -> list[int]:
        """From each missed task's deadline to hearing of it; both by this machine's monotonic clock."""
        both = self.heard_us.keys() & self.events.due_us.keys()
        return sorted(self.heard_us[of] - self.events.due_us[of] for of in both)

    def wake_delay_us(self) -> int:
        """How late nine of ten wakes of this process were: what a busy machine adds to every hop."""
        return int(quantiles(self._late_us, n=10)[-1]) if len(self._late_us) > 1 else 0

    async def _feel(self) -> None:
        while True:
            due_us = self._clock.now_us() + FEEL_US
            await self._clock.sleep_us(FEEL_US)
            self._late_us.append(self._clock.now_us() - due_us)

    async def _event(self, message: StoredMsg) -> None:
        now_us = self._clock.now_us()
        if not self.events.feed(message.subject, message.body, message.headers):
            return
        kind = message.subject.split(".")[2]
        if kind == "deadline":
            self._deadline(DeadlineEvent.trusted(message.body), now_us)
        if kind not in ("task", "list"):
            line = events.line(message.subject, json.loads(message.body))
            self.lines.append(line)
            self.told(line, kind)
        self._moved.set()

    def _deadline(self, event: DeadlineEvent, now_us: int) -> None:
        if event.kind == "missed":
            self.heard_us[event.ring or "", event.seq or 0] = now_us
        elif event.kind != "noisy":
            self.warnings.append(Warned(event, now_us))

    async def _ledger(self, message: StoredMsg) -> None:
        key = message.subject.removeprefix(f"$KV.{LEDGER}.")
        deleted = message.headers.get("KV-Operation") in {"DEL", "PURGE"} or "Nats-Marker-Reason" in message.headers
        self.ledger.feed(key, None if deleted else message.body, message.headers, message.pending)
        self._moved.set()

    async def _node(self, change: WatchEvent) -> None:
        if isinstance(change, KeyChanged) and change.value and change.key.startswith("node."):
            facts = NodeFacts.trusted(change.value)
            self.facts[facts.node] = facts
            self._moved.set()

    async def _deadlines(self, change: WatchEvent) -> None:
        if isinstance(change, KeyChanged) and change.value and change.key.startswith("node."):
            for record in NodeDeadlines.trusted(change.value).containers:
                self.records[record.request_id or record.container] = record
            self._moved.set()


def _nobody(line: Text, kind: str) -> None:
    """Looks at what is told."""
    del line, kind

"""What the monitor's root tasks need of the runtime that runs them."""

from __future__ import annotations

from typing import Protocol

from shared.bus.bus import Bus
from shared.clock import Clock
from shared.log import Logger


class Shell(Protocol):
    """Where they tell what they see; the core hears of it as an event."""

    @property
    def bus(self) -> Bus: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def log(self) -> Logger: ...

    @property
    def unsent(self) -> int: ...

    def post(self, event: object) -> None: ...

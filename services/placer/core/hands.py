"""What this placer has in hand with its backends: one thing at a time per container and per node, nothing twice."""

from __future__ import annotations

from itertools import takewhile

from services.placer.core.containers import ListNode, Resize, Start, Stop

REMEMBERED_US = 60_000_000
"""How long the end of a start, stop or resize is remembered: longer than any list takes."""


class Hands:
    """Starts, stops, resizes and lists under way."""

    def __init__(self) -> None:
        self._containers: dict[str, Start | Stop | Resize] = {}
        self._lists: dict[str, int] = {}
        self._ended_us: dict[str, int] = {}

    def take(self, effect: Start | Stop | Resize | ListNode, now_us: int) -> bool:
        """False where something is under way for the same container or node: it is not begun a second time."""
        if isinstance(effect, ListNode):
            if effect.node in self._lists:
                return False
            self._lists[effect.node] = now_us
            return True
        container = effect.labels.container if isinstance(effect, Start) else effect.container
        return self._containers.setdefault(container, effect) is effect

    def starts(self, container: str) -> bool:
        """A start of it is under way."""
        return isinstance(self._containers.get(container), Start)

    def ended(self, container: str, now_us: int) -> Start | Stop | Resize | None:
        """What was in hand for a container."""
        self._ended_us.pop(container, None)  # they stand in the order of their times
        self._ended_us[container] = now_us
        return self._containers.pop(container, None)

    def listed(self, node: str) -> int | None:
        """When the list that has ended was asked for."""
        return self._lists.pop(node, None)

    def busy(self, container: str, since_us: int) -> bool:
        """A start, stop or resize of it is under way, or ended after `since_us`."""
        return container in self._containers or self._ended_us.get(container, -1) >= since_us

    def tidy(self, now_us: int) -> None:
        for name in list(takewhile(lambda name: now_us - self._ended_us[name] >= REMEMBERED_US, self._ended_us)):
            del self._ended_us[name]

    def __len__(self) -> int:
        return len(self._containers) + len(self._lists)

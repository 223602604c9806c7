"""The ordered list of one deadline class: one changed device is taken out and put in again, nothing else moves."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from shared.messages import ClassStanding, DeviceStanding

Device = tuple[str, str]
"""Node and uuid."""
Key = tuple[int, int, str, str]

_ORDER = {standing: place for place, standing in enumerate(DeviceStanding)}


def rank(device: Device, standing: ClassStanding) -> Key:
    """Best first: by standing, then the widest slack, then the name; an unknown slack comes after every known one."""
    slack = -standing.slack_us if standing.slack_us is not None else 1 << 62
    return (_ORDER[standing.standing], slack, *device)


class Ranking:
    """All devices of one class in order. Finding a place costs O(log N)."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._of: dict[Device, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, device: Device, standing: ClassStanding) -> None:
        key = rank(device, standing)
        if self._of.get(device) != key:
            self.drop(device)
            insort(self._keys, key)
            self._of[device] = key

    def drop(self, device: Device) -> None:
        key = self._of.pop(device, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, key)]

    def after(self, device: Device | None) -> Iterator[Device]:
        """Devices in order, from the one behind ``device``; raises KeyError when it is not in the list."""
        start = 0 if device is None else bisect_right(self._keys, self._of[device])
        return ((node, uuid) for _, _, node, uuid in self._keys[start:])

"""The ordered list of one deadline class: one changed device is taken out and put in again, nothing else moves."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence

from shared.lists import PLACE_OF, Device, Key, rank
from shared.messages import ClassStanding, DeviceStanding


def key_of(device: Device, standing: ClassStanding) -> Key:
    return rank(device, standing.standing, standing.slack_us)


class Ranking:
    """All devices of one class in order. Finding a place costs O(log N)."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._of: dict[Device, ClassStanding] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def of(self, device: Device) -> ClassStanding | None:
        """What the list says of a device; None where it is not in it."""
        return self._of.get(device)

    def put(self, device: Device, standing: ClassStanding) -> None:
        was = self._of.get(device)
        self._of[device] = standing
        key = key_of(device, standing)
        if was is not None and (old := key_of(device, was)) != key:
            del self._keys[bisect_left(self._keys, old)]
            insort(self._keys, key)
        elif was is None:
            insort(self._keys, key)

    def drop(self, device: Device) -> None:
        was = self._of.pop(device, None)
        if was is not None:
            del self._keys[bisect_left(self._keys, key_of(device, was))]

    def place(self, key: Key, leaving: Sequence[Key], coming: Sequence[Key]) -> int:
        """Where ``key`` stands, 1 the best, once ``leaving`` are gone and ``coming`` are there, both sorted."""
        return 1 + bisect_left(self._keys, key) - bisect_left(leaving, key) + bisect_left(coming, key)

    def after(self, key: Key | None, standings: Iterable[DeviceStanding] = DeviceStanding) -> Iterator[Key]:
        """In order, from what stands behind ``key``, whether that is still in the list or not; only these standings."""
        for place in sorted(PLACE_OF[standing] for standing in standings):
            first, end = self._range(place)
            start = first if key is None else max(first, bisect_right(self._keys, key))
            yield from (self._keys[index] for index in range(start, end))

    def counts(self) -> dict[DeviceStanding, int]:
        """How many devices have each standing."""
        ranges = {standing: self._range(place) for standing, place in PLACE_OF.items()}
        return {standing: end - first for standing, (first, end) in ranges.items()}

    def _range(self, place: int) -> tuple[int, int]:
        """Of the devices with the standing in this place of the order: the first, and the one behind the last."""
        first, end = (bisect_left(self._keys, (each, -1 << 63, "", "")) for each in (place, place + 1))
        return first, end

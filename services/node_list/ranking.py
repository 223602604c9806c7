"""The ordered list of one deadline class: one changed device is taken out and put in again, nothing else moves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from sortedcontainers import SortedList

from shared.lists import PLACE_OF, Device, Key, rank
from shared.messages import ClassStanding, DeviceStanding


def key_of(device: Device, standing: ClassStanding) -> Key:
    return rank(device, standing.standing, standing.slack_us)


class Ranking:
    """All devices of one class in order. Finding a place costs O(log N)."""

    def __init__(self) -> None:
        self._keys = SortedList()
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
            self._keys.remove(old)
            self._keys.add(key)
        elif was is None:
            self._keys.add(key)

    def drop(self, device: Device) -> None:
        was = self._of.pop(device, None)
        if was is not None:
            self._keys.remove(key_of(device, was))

    def place(self, key: Key, leaving: Sequence[Key], coming: Sequence[Key]) -> int:
        """Where ``key`` stands, 1 the best, once ``leaving`` are gone and ``coming`` are there, both sorted."""
        there: int = self._keys.bisect_left(key)
        return 1 + there - bisect_left(leaving, key) + bisect_left(coming, key)

    def after(self, key: Key | None, standings: Iterable[DeviceStanding] = DeviceStanding) -> Iterator[Key]:
        """In order, from what stands behind ``key``, whether that is still in the list or not; only these standings."""
        for place in sorted(PLACE_OF[standing] for standing in standings):
            first, end = self._range(place)
            start = first if key is None else max(first, self._keys.bisect_right(key))
            yield from self._keys.islice(start, end)

    def counts(self) -> dict[DeviceStanding, int]:
        """How many devices have each standing."""
        ranges = {standing: self._range(place) for standing, place in PLACE_OF.items()}
        return {standing: end - first for standing, (first, end) in ranges.items()}

    def slacks_us(self, standing: DeviceStanding) -> tuple[int, ...]:
        """The widest, the middle and the narrowest slack of those with a standing; empty where none is known."""
        place = PLACE_OF[standing]
        first, end = (self._keys.bisect_left((place, edge, "", "")) for edge in (-1 << 63, 1 << 62))
        return tuple(-self._keys[at][1] for at in (first, (first + end) // 2, end - 1)) if first < end else ()

    def _range(self, place: int) -> tuple[int, int]:
        """Of the devices with the standing in this place of the order: the first, and the one behind the last."""
        first, end = (self._keys.bisect_left((each, -1 << 63, "", "")) for each in (place, place + 1))
        return first, end

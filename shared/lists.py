"""The order of a deadline class's list, and how whoever follows one keeps it exact without polling; no I/O, no clock.

Changes are absolute and numbered per class. A list read page by page is of several moments, perhaps from instances
that lag; made exact by the changes from the oldest of its pages on, it is that of the newest one or later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import DeviceStanding, ListChange, ListDelta, ListedDevice, NodesQuery, NodesReply

Device = tuple[str, str]
"""Node and uuid."""
Key = tuple[int, int, str, str]

PLACE_OF = {standing: place for place, standing in enumerate(DeviceStanding)}
PAGE = 1_000
"""Devices that are asked for at once."""


def rank(device: Device, standing: DeviceStanding, slack_us: int | None) -> Key:
    """Best first: by standing, then the widest slack, then the name; an unknown slack comes after every known one."""
    return (PLACE_OF[standing], -slack_us if slack_us is not None else 1 << 62, *device)


@dataclass(frozen=True, slots=True)
class Listed:
    """What a list says of one device."""

    standing: DeviceStanding
    slack_us: int | None
    reason: str | None
    unproven: bool


@dataclass
class Follower:
    """One class's list: subscribe to ``rt.events.list.<class>`` first, then ask ``wants`` and ``read`` the answer until
    it wants nothing; each change goes through ``hear``, whenever it comes."""

    deadline_class: str
    limit: int = PAGE
    devices: dict[Device, Listed] = field(default_factory=dict)
    start_id: str | None = None
    revision: int = 0
    wants: NodesQuery | None = None
    """What to ask on rt.nodes next; None: the list is exactly that of ``revision``."""
    _newest: int = 0
    """The newest revision of the pages read so far."""
    _early: list[ListDelta] = field(default_factory=list)
    """What was heard while pages are read."""

    def __post_init__(self) -> None:
        self._read_again()

    def hear(self, delta: ListDelta) -> None:
        """A change, in whatever order: what is known already is left out, a gap makes the list be read again."""
        if delta.deadline_class != self.deadline_class:
            return
        if self.wants is not None:
            self._early.append(delta)
        elif delta.start_id != self.start_id or delta.revision > self.revision + 1:
            self._read_again()
            self._early.append(delta)
        elif delta.revision == self.revision + 1:
            self.revision = delta.revision
            for change in delta.changes:
                self._make(change)

    def read(self, page: NodesReply) -> None:
        """The answer to what it wanted."""
        if self.wants is None or self.wants.after is None:
            self.devices, self.start_id, self.revision, self._newest = {}, page.start_id, page.revision, page.revision
        elif page.start_id != self.start_id:
            return self._read_again()
        self.revision, self._newest = min(self.revision, page.revision), max(self._newest, page.revision)
        for device in page.devices:
            self.devices[device.node, device.uuid] = _listed(device)
        self.wants = self._query(page.after)
        if page.after is None:
            self._catch_up()
        return None

    def ordered(self) -> list[tuple[Device, Listed]]:
        """The list, best first."""
        return sorted(self.devices.items(), key=lambda one: rank(one[0], one[1].standing, one[1].slack_us))

    def _catch_up(self) -> None:
        """All pages are read: makes what has changed meanwhile, or reads again where a part of it was not heard."""
        self.wants, early, self._early = None, self._early, []
        for delta in sorted(early, key=lambda each: each.revision):
            if delta.start_id == self.start_id:
                self.hear(delta)
        if self.revision < self._newest or any(delta.start_id != self.start_id for delta in early):
            self._read_again()

    def _read_again(self) -> None:
        self.wants = self._query(None)

    def _query(self, after: str | None) -> NodesQuery:
        return NodesQuery(deadline_class=self.deadline_class, limit=self.limit, after=after)

    def _make(self, change: ListChange) -> None:
        if change.standing is None:
            self.devices.pop((change.node, change.uuid), None)
        else:
            listed = Listed(change.standing, change.slack_us, change.reason, change.unproven)
            self.devices[change.node, change.uuid] = listed


def _listed(device: ListedDevice) -> Listed:
    return Listed(device.standing, device.slack_us, device.reason, device.unproven)

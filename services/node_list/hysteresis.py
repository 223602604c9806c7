"""When a device may return to a better standing: never at the edge, so that small changes do not make it flap."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.node_list.standing import ClassTask
from shared.lists import PLACE_OF, Device
from shared.messages import ClassStanding, DeviceStanding

OWN = frozenset({DeviceStanding.AT_RISK, DeviceStanding.EXCLUDED})
"""Left as soon as what caused them says so: verdicts, heartbeats and probes have a hysteresis of their own."""


@dataclass
class Hysteresis:
    """A better standing is left at once. It is taken again at once where the slack exceeds its edge by ``ratio`` of the
    deadline, else once nothing worse was seen for ``after_us``."""

    tight_ratio: float
    ratio: float
    after_us: int
    _since_us: dict[tuple[Device, str], int] = field(default_factory=dict)
    """Since when a device of a class has been better than its list says."""

    def settle(
        self, device: Device, wanted: ClassTask, listed: ClassStanding | None, found: ClassStanding, now_us: int
    ) -> ClassStanding:
        """What the list shall say of it, which says ``listed`` now and for which ``found`` was just found."""
        better = listed is not None and PLACE_OF[found.standing] < PLACE_OF[listed.standing]
        if listed is None or not better or listed.standing in OWN or found.slack_us is None:
            self._since_us.pop((device, wanted.name), None)
            return found
        waits_us = now_us - self._since_us.setdefault((device, wanted.name), now_us)
        if waits_us >= self.after_us:
            return found
        may = self._may(found.standing, listed.standing, found.slack_us, wanted.deadline_us)
        if may == found.standing:
            return found
        reason = found.reason or f"just above the edge of {found.standing}"
        return found.model_copy(update={"standing": may, "reason": f"{reason}; held back against flapping"})

    def due(self, now_us: int) -> set[str]:
        """Nodes of which a device has waited long enough."""
        return {node for ((node, _), _), since_us in self._since_us.items() if now_us - since_us >= self.after_us}

    def forget(self, device: Device) -> None:
        """It is gone."""
        self._since_us = {of: since_us for of, since_us in self._since_us.items() if of[0] != device}

    def _may(self, found: DeviceStanding, listed: DeviceStanding, slack_us: int, deadline_us: int) -> DeviceStanding:
        """The best standing, not better than ``found``, whose edge the slack exceeds by enough."""
        margin_us = round(self.ratio * deadline_us)
        if found == DeviceStanding.GUARANTEED and slack_us >= round(self.tight_ratio * deadline_us) + margin_us:
            return DeviceStanding.GUARANTEED
        return DeviceStanding.TIGHT if slack_us >= margin_us else listed

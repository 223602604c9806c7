"""What the node believes of its gate: which gated devices keep their guarantees, and why others do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shared.errors import clip
from shared.messages import DeviceMetrics, Regime

DOWN: Final = "gate_down: nobody orders the tasks on the device"


class Gates:
    """Fed with what the gate's process says: beats with counts, overruns, and standings of devices."""

    def __init__(self, margin_us: int) -> None:
        self.counts: Mapping[str, int] = {}
        """Since the gate's start: grants, overruns, ended; unread and unkept, what one gate leaves to the next."""
        self._margin_us = margin_us
        self._up = True
        self._overran: dict[str, str] = {}
        self._lost: dict[str, str] = {}

    def take(self, told: Mapping[str, Any] | None) -> bool:
        """One line; None says that there is no gate. True if what a device can promise has changed."""
        before = self._up, dict(self._lost)
        if told is None:
            self._up = False
            self._lost.clear()  # the next gate says again because of whom, before its first beat
            return before[0]
        self._up = self._up or "beat" in told
        self.counts = told.get("beat", self.counts)
        if said := told.get("overran"):
            self._overran[said["device"]] = _overrun(said)
        if said := told.get("standing"):
            self._stand(said)
        return before != (self._up, self._lost)

    def judged(self, device: DeviceMetrics) -> DeviceMetrics:
        """The device as it may be told: a gated one whose gate does not hold promises nothing."""
        if device.regime != Regime.GATED:
            return device
        why = self._lost.get(device.uuid) if self._up else DOWN
        ill = {"healthy": False, "reason": clip(why)} if why and device.healthy else {}
        return device.model_copy(update={"handover_us": self._margin_us, **ill})

    def _stand(self, said: Mapping[str, Any]) -> None:
        uuid = said["device"]
        if said["gated"]:
            self._lost.pop(uuid, None)
            return
        touched = ", ".join(said["neighbours"]) or "nobody"
        self._lost[uuid] = f"gate_lost: {self._overran.get(uuid, said['culprit'])}; guarantees gone of {touched}"


def _overrun(said: Mapping[str, Any]) -> str:
    waited = f", while {', '.join(said['touched'])} waited" if said["touched"] else ""
    return f"{said['culprit']} held it {said['held_us']} us of {said['runtime_us']} us{waited}"

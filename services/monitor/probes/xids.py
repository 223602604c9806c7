"""The errors that a driver reports of its GPUs (XIDs), counted by code, and which of them make a device ill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.monitor.probes.base import Reading, XidReading
from services.monitor.probes.nvml_process import AskedXids
from services.monitor.probes.reasons import Reason

FATAL: Final = {xid: Reason(f"xid_{xid}") for xid in (48, 62, 64, 74, 79, 95, 119, 120)}
"""After these a GPU cannot be relied on. 13, 31 and 43 are a program's own fault, 63 and 92 tell what was repaired."""
MAX_XID: Final = 999
NONE_YET: Final = 0
"""As ``DCGM_FI_DEV_XID_ERRORS`` has it: no XID has this number."""


@dataclass(slots=True)
class _Seen:
    count: int
    at_us: int
    at_s: float


class Xids:
    """Of all GPUs, by uuid and GPU instance (None: the whole GPU).

    A device is ill from a fatal XID until ``quiet_s`` after the last one: no event says that it is well again.
    """

    def __init__(self, quiet_s: float, counts: Counter[str]) -> None:
        self._quiet_s, self._counts = quiet_s, counts
        self._seen: dict[tuple[str, int | None], dict[int, _Seen]] = {}
        self._reasons: dict[str, str | None] = {}

    def take(self, gpu: str, asked: AskedXids, now_s: float) -> list[int]:
        """What a GPU said since it was asked before; the fatal ones. A code that cannot be one is counted."""
        self._reasons[gpu] = asked.reason
        told = [each for each in asked.value or () if 0 < each[0] <= MAX_XID]
        if refused := len(asked.value or ()) - len(told):
            self._counts["nvml.xid.implausible"] += refused
        for xid, instance, at_us in told:
            seen = self._seen.setdefault((gpu, instance), {}).setdefault(xid, _Seen(0, 0, now_s))
            seen.count, seen.at_us, seen.at_s = seen.count + 1, max(seen.at_us, at_us), now_s
        return [xid for xid, _, _ in told if xid in FATAL]

    def told(self, gpu: str, instance: int | None) -> tuple[XidReading, ...]:
        """Of a GPU or of one of its MIG devices, with those that concern the whole GPU."""
        found: dict[int, XidReading] = {}
        for xid, seen in self._of(gpu, instance):
            had = found.get(xid, XidReading(xid, 0, 0))
            found[xid] = XidReading(xid, had.count + seen.count, max(had.at_us, seen.at_us))
        return tuple(found[xid] for xid in sorted(found))

    def last(self, gpu: str, instance: int | None) -> Reading:
        """The newest code; unknown where the driver does not tell them."""
        if reason := self._reasons.get(gpu):
            return Reading(None, reason)
        told = self.told(gpu, instance)
        return Reading(max(told, key=lambda seen: seen.at_us).xid if told else NONE_YET)

    def fault(self, gpu: str, instance: int | None, now_s: float) -> str | None:
        """The newest fatal one that is not long enough ago."""
        recent = [
            (seen.at_us, xid)
            for xid, seen in self._of(gpu, instance)
            if xid in FATAL and now_s - seen.at_s < self._quiet_s
        ]
        return FATAL[max(recent)[1]] if recent else None

    def _of(self, gpu: str, instance: int | None) -> Iterable[tuple[int, _Seen]]:
        for whose in {None, instance}:
            yield from self._seen.get((gpu, whose), {}).items()

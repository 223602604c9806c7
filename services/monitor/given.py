"""Which devices of the node a kubelet gave to pods by device plugins: those are not Laxity's to give; no I/O.

What is unknown is not free: an answer that does not come leaves what was said last, and who is missing in an answer is
given up after several only, since a kubelet that was restarted tells of no pods at first.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from services.monitor.pod_resources import Holding
from shared.errors import clip
from shared.messages import SOMEBODY, DeviceMetrics

RELEASE_AFTER: Final = 5
"""Answers in a row without it, until a device is free again."""
_OF_GPUS: Final = re.compile(r"nvidia\.com/(gpu|mig-)")
"""Resources of NVIDIA's plugin that are GPUs or parts of them."""
_UUID: Final = re.compile(r"(GPU|MIG)-")
_SHARED: Final = re.compile(r"(::|-)\d+$")
"""What plugins that share devices put behind the uuid: NVIDIA's ``::3``, others ``-3``."""


class _Held(NamedTuple):
    resource: str
    who: str
    """The holder in words."""


@dataclass(frozen=True, slots=True)
class KubeletSaid:
    """Event: all that pods hold; None where it did not answer, and why."""

    holdings: tuple[Holding, ...] | None
    failed: str = ""


class Given:
    """``counts``: answers, and questions without one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._held: dict[str, _Held] = {}
        """By id of the plugin."""
        self._missing: Counter[str] = Counter()
        self._heard_us: int | None = None
        self._failed = ""

    def take(self, said: KubeletSaid, now_us: int) -> None:
        self._failed = said.failed
        if said.holdings is None:
            self.counts["kubelet.failed"] += 1
            self._missing.clear()
            return
        self.counts["kubelet.answers"] += 1
        now = _in_words(said.holdings)
        for each in [each for each in self._held if each not in now]:
            self._missing[each] += 1
            if self._missing[each] >= RELEASE_AFTER:
                del self._held[each], self._missing[each]
        for each in now:
            del self._missing[each]
        self._held |= now
        self._heard_us = now_us

    def marked(self, devices: tuple[DeviceMetrics, ...]) -> tuple[DeviceMetrics, ...]:
        """Each that is held says by whom."""
        if self._heard_us is None:
            return tuple(each.model_copy(update={"plugin_holder": SOMEBODY}) for each in devices)
        if not self._held:
            return devices
        known = {each.uuid for each in devices} | {each.parent for each in devices if each.parent}
        by_uuid = {_uuid(name, known): held.who for name, held in self._held.items()}
        hidden = next((held.who for name, held in self._held.items() if _is_any(name, held, known)), None)
        holders = [by_uuid.get(each.uuid) or by_uuid.get(each.parent or "") or hidden for each in devices]
        pairs = zip(devices, holders, strict=True)
        return tuple(each.model_copy(update={"plugin_holder": who}) if who else each for each, who in pairs)

    def told(self, now_us: int) -> dict[str, Any]:
        """For the heartbeat."""
        age_us = None if self._heard_us is None else now_us - self._heard_us
        return {"kubelet_age_us": age_us, "kubelet_stale": self._failed or None}


def _in_words(holdings: tuple[Holding, ...]) -> dict[str, _Held]:
    """By id; a device that is shared has several."""
    return {each.id: _Held(each.resource, clip(f"pod {each.pod} by {each.resource}")) for each in holdings}


def _uuid(name: str, known: set[str]) -> str:
    """Of which device this is an id: of itself, or of one that is shared."""
    return name if name in known else _SHARED.sub("", name)


def _is_any(name: str, held: _Held, known: set[str]) -> bool:
    """It is a GPU, and its id is no uuid: it may be any of the node's."""
    return bool(_OF_GPUS.match(held.resource) and not _UUID.match(name) and _uuid(name, known) not in known)

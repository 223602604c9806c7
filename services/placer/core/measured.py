"""What rt_learned says of response times, and what that says of a demand on a device; shared.admission has the rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Set

from services.placer.core.accounts import Load
from services.placer.core.demand import Demand
from shared.admission import EXPLORED, DeviceType, Learned, Verdict, explores, measured
from shared.effects import KeyChanged
from shared.errors import FieldError
from shared.messages import LearnedProfile


class Measured:
    """`explored`: the part of the firm requests for which a likely bound will do where nothing is proven."""

    def __init__(self, explored: float = EXPLORED, counters: Counter[str] | None = None) -> None:
        self._explored, self._counters = explored, Counter[str]() if counters is None else counters
        self._learned = Learned()
        self._keys: dict[str, tuple[DeviceType, str]] = {}

    def heard(self, change: KeyChanged) -> DeviceType | None:
        """A change of the bucket; the type of the devices that it concerns. What cannot be read is counted."""
        if not change.key.startswith("profile."):
            return None
        try:
            message = LearnedProfile.trusted(change.value) if change.value else None
        except FieldError:
            self._counters["malformed.learned"] += 1
            return None
        if message is not None:
            self._keys[change.key] = self._learned.hear(message)
        elif change.key in self._keys:
            self._learned.put(*self._keys[change.key], None)
        device, _ = self._keys.get(change.key, (None, ""))
        return device

    def replayed(self, keys: Set[str]) -> None:
        """The bucket has these keys and no others."""
        for key in self._keys.keys() - keys:
            self._learned.put(*self._keys.pop(key), None)

    def key(self, demand: Demand) -> Hashable:
        """All of it that a verdict on this demand depends on; () is nothing."""
        if not self._learned.version or demand.tenant is None:
            return ()
        return self._learned.version, demand.tenant, self._explores(demand)

    def found(self, demand: Demand, load: Load, more: int = 0) -> Verdict | None:
        """Whether all keep their deadlines as measured, `more` like it being there; None where nothing says so."""
        tenant = demand.tenant
        if tenant is None or load.device is None or load.tenants is None or not self._learned.knows(load.device):
            return None
        there = load.tenants + (tenant,) * more
        return measured(self._learned, load.device, there, tenant, explore=self._explores(demand))

    def _explores(self, demand: Demand) -> bool:
        return bool(self._explored) and explores(demand.request.request_id or "", self._explored)

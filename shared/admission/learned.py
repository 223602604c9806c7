"""What was learned of response times, as bounds, and whether a device takes a firm container by them; it draws nothing.

One distribution per profile, type of device and set of neighbours. Where a set was not seen often enough, its bound
is composed of those that were, and widened by how far composing was off where it can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil
from typing import Final, NamedTuple

from shared.admission.response_times import NEVER_US, ResponseTimes
from shared.admission.slowdown import Beside, Way, composed_us, error, left_out
from shared.admission.tasks import Verdict, room
from shared.messages import LearnedProfile, LearnedTimes, Regime
from shared.units import format_ratio, format_us

MOST_SETS: Final = 64
"""Sets of neighbours kept of one profile on one type of device; who learned least lately goes first."""
IN_SETS: Final = 0.95
"""A composed bound holds beside so many of the sets of neighbours: 19 to compare with are needed."""
EXPLORED: Final = 0.01
"""The part of the requests that may go where less is known."""


class DeviceType(NamedTuple):
    """Devices on which a profile is taken to run alike."""

    model: str
    regime: Regime


@dataclass(frozen=True, slots=True)
class Bound:
    """Of the tasks of a profile beside some neighbours. None is too few to say; NEVER_US that too many do not end.

    `likely_us`: the next task takes no longer, with the probability asked for. `proven_us`: that is so with confidence.
    """

    likely_us: int | None
    proven_us: int | None
    samples: int
    composed: bool = False

    def decides_us(self, *, explore: bool) -> int | None:
        """What has to lie within the deadline."""
        return self.likely_us if explore and self.proven_us is None else self.proven_us


@dataclass(frozen=True, slots=True)
class Tenant:
    """One container on a device; `deadline_us` None where nothing is promised to it by what was measured."""

    name: str = field(compare=False)
    profile: str
    deadline_us: int | None
    guarantee: float


class Profile:
    """What was learned of one profile on one type of device, by set of neighbours."""

    def __init__(self, times: Mapping[Beside, ResponseTimes] | None = None) -> None:
        self.times = dict(times or {})
        """Who learned last comes last."""
        self._seen: dict[float, dict[Beside, float]] = {}
        self._left_out: dict[tuple[float, Way], dict[Beside, float]] = {}

    def add(self, beside: Beside, times_us: Iterable[int]) -> None:
        times = self.times.pop(beside, None) or ResponseTimes()
        times.add(times_us)
        self.times[beside] = times
        while len(self.times) > MOST_SETS:
            del self.times[next(iter(self.times))]
        self._seen.clear()
        self._left_out.clear()

    @property
    def total(self) -> int:
        """How many tasks are known."""
        return sum(map(len, self.times.values()))

    def seen_us(self, ratio: float) -> dict[Beside, float]:
        """The likely bound beside each set of neighbours of which enough was seen, and beside which tasks end."""
        if ratio not in self._seen:
            bounds = {beside: times.likely_us(ratio) for beside, times in self.times.items()}
            self._seen[ratio] = {beside: us for beside, us in bounds.items() if us is not None and 0 < us < NEVER_US}
        return self._seen[ratio]

    def left_out(self, ratio: float, way: Way) -> dict[Beside, float]:
        """The same as composed of the others."""
        if (ratio, way) not in self._left_out:
            self._left_out[ratio, way] = left_out(self.seen_us(ratio), way)
        return self._left_out[ratio, way]

    def error(self, ratio: float, way: Way) -> float:
        """How far composing is off, see `slowdown.error`."""
        return error(self.seen_us(ratio), self.left_out(ratio, way))

    def message(self, device: DeviceType, profile: str, at_us: int) -> LearnedProfile:
        columns = tuple(_columns(beside, times) for beside, times in self.times.items())
        return LearnedProfile(profile=profile, model=device.model, regime=device.regime, at_us=at_us, times=columns)

    @classmethod
    def of(cls, message: LearnedProfile) -> Profile:
        rows = {each.beside: zip(each.bin, each.newer, each.older, strict=True) for each in message.times}
        return cls({beside: _times(list(each)) for beside, each in rows.items()})


class Learned:
    """All profiles; `version` changes with whatever a bound may depend on."""

    def __init__(self) -> None:
        self.version = 0
        self._profiles: dict[DeviceType, dict[str, Profile]] = {}
        self._widening: dict[tuple[DeviceType, float], tuple[Way, float | None, float | None]] = {}

    def put(self, device: DeviceType, name: str, profile: Profile | None) -> None:
        """What is known of it from now on; None is nothing."""
        of_type = self._profiles.setdefault(device, {})
        of_type.pop(name, None)
        if profile:
            of_type[name] = profile
        self.version += 1
        self._widening = {key: value for key, value in self._widening.items() if key[0] != device}

    def hear(self, message: LearnedProfile) -> tuple[DeviceType, str]:
        """What a message says is known from now on; of which profile on which type of device that is."""
        device = DeviceType(message.model, message.regime)
        self.put(device, message.profile, Profile.of(message))
        return device, message.profile

    def get(self, device: DeviceType, name: str) -> Profile | None:
        return self._profiles.get(device, {}).get(name)

    def knows(self, device: DeviceType) -> bool:
        """Whether anything was learned on this type of device."""
        return bool(self._profiles.get(device))

    def bound(self, device: DeviceType, name: str, beside: Beside, ratio: float) -> Bound | None:
        """How long the tasks of a profile take beside these neighbours; None where nothing says so."""
        profile = self.get(device, name)
        if profile is None:
            return None
        own = profile.times.get(beside)
        if own and (likely := own.likely_us(ratio)) is not None:
            return Bound(likely, own.proven_us(ratio), len(own))
        way, by_likely, by_proven = self._widened(device, ratio)
        composed = composed_us(profile.seen_us(ratio), beside, way)
        if composed is None or by_likely is None:
            return None
        proven = None if by_proven is None else ceil(composed * by_proven)
        return Bound(ceil(composed * by_likely), proven, len(own or ()), composed=True)

    def _widened(self, device: DeviceType, ratio: float) -> tuple[Way, float | None, float | None]:
        """The way to compose, and by how much what was composed is widened for the likely and for the proven bound.

        Both are quotients of a bound that was seen and of what the other sets of neighbours say of it, by the rule of
        split conformal prediction over all sets seen on this type of device.
        """
        if (device, ratio) not in self._widening:
            profiles = list(self._profiles.get(device, {}).values())
            way = min(Way, key=lambda way: sum(profile.error(ratio, way) for profile in profiles))
            compared = [(p.times[beside], us) for p in profiles for beside, us in p.left_out(ratio, way).items()]
            likely = [(times.likely_us(ratio), us) for times, us in compared]
            proven = [(times.proven_us(ratio), us) for times, us in compared]
            self._widening[device, ratio] = (way, _quotient(likely), _quotient(proven))
        return self._widening[device, ratio]

    def admit(
        self, device: DeviceType, residents: Sequence[Tenant], newcomer: Tenant, *, explore: bool = False
    ) -> Verdict | None:
        """Whether all to whom something is promised keep it once the newcomer is there; None where nothing says so.

        Each of them needs its proven bound to lie within its deadline; one that does not decides, also where of others
        nothing is known. With `explore` the likely bound will do where there is no proven one.
        """
        found, known, unproven = list[tuple[int, Tenant, Bound, Beside]](), True, False
        for tenant, beside in _with_neighbours((*residents, newcomer)):
            if tenant.deadline_us is None:
                continue
            bound = self.bound(device, tenant.profile, beside, tenant.guarantee)
            time_us = bound.decides_us(explore=explore) if bound else None
            if bound and time_us is not None:
                found.append((tenant.deadline_us - time_us, tenant, bound, beside))
                unproven |= bound.proven_us is None
            else:
                known = False
        if not found:
            return None
        slack, tenant, bound, beside = min(found, key=lambda each: each[0])
        if slack >= 0 and not known:
            return None
        reason = _explained(tenant, bound, (tenant.deadline_us or 0) - slack, beside, slack)
        return Verdict(slack >= 0, "measured", slack, reason, unproven, late=tenant.name if slack < 0 else None)


def explores(request_id: str, part: float = EXPLORED) -> bool:
    """Whether a request is one of the few that may go where less is known: always the same, for the same id."""
    digest = blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < part * (1 << 64)


def _with_neighbours(tenants: Sequence[Tenant]) -> Iterator[tuple[Tenant, Beside]]:
    for place, tenant in enumerate(tenants):
        yield tenant, tuple(sorted(other.profile for other in (*tenants[:place], *tenants[place + 1 :])))


def _quotient(pairs: Iterable[tuple[int | None, float]]) -> float | None:
    """What the quotients lie below in IN_SETS of the cases; None where too few can be compared."""
    quotients = sorted(bound / composed for bound, composed in pairs if bound is not None)
    place = ceil((len(quotients) + 1) * IN_SETS - 1e-9)
    return quotients[place - 1] if place <= len(quotients) else None


def _explained(tenant: Tenant, bound: Bound, time_us: int, beside: Beside, slack_us: int) -> str:
    others = ", ".join(beside) or "nobody"
    if time_us >= NEVER_US:
        return f"more tasks of {tenant.name} than it may have do not end beside {others} ({bound.samples} seen)"
    how = "composed" if bound.composed else f"{bound.samples} seen"
    taken = f"{format_ratio(tenant.guarantee)} of the tasks of {tenant.name} take at most {format_us(time_us)}"
    return f"{taken} beside {others} ({how}), deadline {format_us(tenant.deadline_us)}: {room(slack_us)}"


def _columns(beside: Beside, times: ResponseTimes) -> LearnedTimes:
    newer, older = times.dump()
    bins = sorted(newer.keys() | older.keys())
    counts = [[each.get(bin_, 0) for bin_ in bins] for each in (newer, older)]
    return LearnedTimes(beside=beside, bin=bins, newer=counts[0], older=counts[1])


def _times(rows: Sequence[tuple[int, int, int]]) -> ResponseTimes:
    newer = {bin_: count for bin_, count, _ in rows if count}
    return ResponseTimes(newer, {bin_: count for bin_, _, count in rows if count})

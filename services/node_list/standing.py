"""What one device can promise to one more container of a class: the admission tests of its regime, pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shared.admission import (
    DeviceType,
    Learned,
    RtTask,
    Sharing,
    Tenant,
    Verdict,
    admit_kind,
    deciding,
    hard_guarantee,
    measured,
    tenant_of,
)
from shared.messages import (
    SHARE_WHOLE_MICRO,
    ClassStanding,
    DeviceStanding,
    HeardDevice,
    Kind,
    Regime,
    Reservation,
)


@dataclass(frozen=True, slots=True)
class ClassTask:
    """A deadline class as one more task."""

    name: str
    deadline_us: int
    runtime_us: int
    period_us: int
    profile: str = ""
    """What was learned of it judges the class, too; "" is nothing."""
    guarantee: float = 0.99

    def task(self, regime: Regime) -> RtTask:
        gate = regime == Regime.GATED
        return RtTask(f"class {self.name}", self.runtime_us, self.period_us, self.deadline_us, gate=gate)


def excluded(reason: str) -> ClassStanding:
    return ClassStanding(standing=DeviceStanding.EXCLUDED, slack_us=None, reason=reason)


def judge(
    device: HeardDevice,
    wanted: ClassTask,
    residents: Sequence[Reservation],
    at_risk: Iterable[str],
    foreign: bool,
    tight_ratio: float,
) -> ClassStanding:
    """The standing of a healthy device on a node that is alive.

    ``at_risk`` names residents whose guarantee ratio fell below its bound; ``foreign``: work that declared nothing
    runs on the device, which counts as one more context.
    """
    if names := sorted(at_risk):
        reason = f"{', '.join(names)} misses its guarantee here"
        return ClassStanding(standing=DeviceStanding.AT_RISK, slack_us=None, reason=reason)
    if sum(r.share_micro for r in residents) >= SHARE_WHOLE_MICRO:
        return ClassStanding(standing=DeviceStanding.FULL, slack_us=None, reason="no share is left")
    return _admission(Sharing.of(device), wanted, tuple(residents), foreign, tight_ratio)


@lru_cache(maxsize=1 << 16)
def _admission(
    sharing: Sharing, wanted: ClassTask, residents: tuple[Reservation, ...], foreign: bool, tight_ratio: float
) -> ClassStanding:
    """Remembered: a heartbeat comes every second, and what the test looks at seldom changes with it."""
    tasks, contexts = resident_tasks(residents)
    sound, why = hard_guarantee(sharing)
    kind = Kind.HARD if sound else Kind.FIRM
    verdict = admit_kind(kind, sharing, tasks, wanted.task(sharing.regime), contexts + foreign)
    reason = verdict.reason + ("; foreign work on the device counts as a context" if foreign else "")
    if not verdict.admitted:
        return ClassStanding(standing=DeviceStanding.FULL, slack_us=verdict.slack_us, reason=reason)
    slack = verdict.slack_us
    if not sound:
        return ClassStanding(
            standing=DeviceStanding.TIGHT, slack_us=slack, reason=f"{why}; by declared runtimes {reason}", unproven=True
        )
    narrow = slack is not None and slack < tight_ratio * wanted.deadline_us
    standing = DeviceStanding.TIGHT if narrow else DeviceStanding.GUARANTEED
    return ClassStanding(standing=standing, slack_us=slack, reason=reason if narrow else None)


def resident_tasks(residents: Sequence[Reservation]) -> tuple[list[RtTask], int]:
    """The residents' declared tasks, and how many declared none (contexts that may always be busy)."""
    declared = [RtTask.of(f"{r.request_id}/{r.replica}", r.realtime) for r in residents if r.realtime]
    tasks = [task for task in declared if task]
    return tasks, len(residents) - len(tasks)


# ------------------------------------------------------------------------------------- by what was learned


_DECLARED = frozenset({DeviceStanding.GUARANTEED, DeviceStanding.TIGHT, DeviceStanding.FULL})


def by_measure(
    declared: ClassStanding,
    device: HeardDevice,
    wanted: ClassTask,
    residents: Sequence[Reservation],
    learned: Learned,
) -> ClassStanding:
    """The standing that declarations give, or the one that measured response times give where they say enough.

    Who is known to be late closes any device. Where a sound test is known, its word stands in all else; so it does
    beside a hard resident, and where no share is left.
    """
    of_type = DeviceType(device.model, device.regime)
    if declared.standing not in _DECLARED or not wanted.profile or not learned.knows(of_type):
        return declared
    found = _measured(learned, learned.version, of_type, wanted, tuple(residents))
    verdict = deciding(found, device.regime, [each.kind for each in residents])
    if verdict is None or (verdict.admitted and sum(each.share_micro for each in residents) >= SHARE_WHOLE_MICRO):
        return declared
    standing = DeviceStanding.TIGHT if verdict.admitted else DeviceStanding.FULL
    return ClassStanding(standing=standing, slack_us=verdict.slack_us, reason=verdict.reason)


@lru_cache(maxsize=1 << 14)
def _measured(
    learned: Learned,
    version: int,  # noqa: ARG001  # what it is remembered by
    device: DeviceType,
    wanted: ClassTask,
    residents: tuple[Reservation, ...],
) -> Verdict | None:
    tenants = [tenant_of(f"{each.request_id}/{each.replica}", each.realtime) for each in residents]
    newcomer = Tenant(f"class {wanted.name}", wanted.profile, wanted.deadline_us, wanted.guarantee)
    return measured(learned, device, tenants, newcomer)

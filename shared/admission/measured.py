"""What measured response times make of a verdict on declarations: the one rule of the placer and of the node list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from shared.admission.learned import DeviceType, Learned, Tenant
from shared.admission.tasks import Verdict
from shared.messages import Kind, Realtime, Regime

_WITHOUT_SOUND_TEST: Final = frozenset({Regime.TIME_SLICED, Regime.MPS})


def tenant_of(name: str, timing: Realtime | None) -> Tenant | None:
    """None where nothing can be learned of it. Only to a firm one something is promised by what was measured."""
    if timing is None or timing.profile is None:
        return None
    deadline_us = timing.deadline_us if timing.kind is Kind.FIRM else None
    return Tenant(name, timing.profile, deadline_us, timing.guarantee)


def measured(
    learned: Learned, device: DeviceType, residents: Sequence[Tenant | None], newcomer: Tenant, *, explore: bool = False
) -> Verdict | None:
    """What `Learned.admit` says; None also where one of the residents is somebody of whom nothing can be learned."""
    known = [tenant for tenant in residents if tenant]
    return learned.admit(device, known, newcomer, explore=explore) if len(known) == len(residents) else None


def deciding(found: Verdict | None, regime: Regime, residents: Iterable[Kind | None]) -> Verdict | None:
    """What was found, where it decides whatever the declarations say.

    Who is known to be late closes any device. One is opened only where no sound test is known, and beside none hard.
    """
    if found is None or not found.admitted:
        return found
    return found if regime in _WITHOUT_SOUND_TEST and Kind.HARD not in residents else None


def by_measure(declared: Verdict, found: Verdict | None, regime: Regime, residents: Iterable[Kind | None]) -> Verdict:
    """What decides; else what was declared, which is no longer unproven where what was found is not."""
    if found is None:
        return declared
    return deciding(found, regime, residents) or replace(declared, unproven=declared.unproven and found.unproven)

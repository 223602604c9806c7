"""Who is admitted by which test: kind by kind, regime by regime; the tests of one regime lie beside it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from shared.admission.gated import gated, outside_gate
from shared.admission.tasks import RtTask, Sharing, Verdict, refused, room
from shared.admission.time_sliced import sliced, time_sliced
from shared.messages import Kind, Regime
from shared.units import format_us


def hard_guarantee(sharing: Sharing) -> tuple[bool, str]:
    """Whether the regime can promise a hard deadline at all, and why (THEORY, table)."""
    match sharing.regime:
        case Regime.EXCLUSIVE | Regime.MIG:
            return True, "one tenant"
        case Regime.GATED:
            return True, "one task at a time, earliest deadline first"
        case Regime.MPS:
            return False, "no hard guarantee: no sound test is known for containers that run at once (MPS)"
    if sharing.measured() is None:
        return False, "no hard guarantee: time-sliced, and slice and switch cost were not measured"
    return False, "no hard guarantee: time-sliced, the order of work is the driver's and is not enforced"


def admit_kind(
    kind: Kind,
    sharing: Sharing,
    residents: Sequence[RtTask],
    newcomer: RtTask | None,
    best_effort_contexts: int = 0,
) -> Verdict:
    """Whether the device takes one more container of this kind, every resident that it could hurt re-checked.

    Hard needs a sound test; firm (before there is a profile) the same test, marked unproven; soft yields and
    is refused only where it would break a hard resident or where the regime has no place for it.
    `newcomer` None is a container that declared no runtime; such residents are `best_effort_contexts`.
    """
    if kind is Kind.SOFT:
        return _soft(sharing, residents, newcomer, best_effort_contexts)
    if newcomer is None:
        return refused(f"{kind} needs a declared runtime")
    newcomer = replace(newcomer, kind=kind)
    if kind is Kind.FIRM:
        return replace(_firm(sharing, residents, newcomer, best_effort_contexts), unproven=True)
    sound, why = hard_guarantee(sharing)
    return admit(sharing, residents, newcomer, best_effort_contexts) if sound else refused(why)


def admit(sharing: Sharing, residents: Sequence[RtTask], newcomer: RtTask, best_effort_contexts: int = 0) -> Verdict:
    """The regime's own test for one more hard container, all residents re-checked (THEORY sections 1 and 2).

    It is only the arithmetic: whether its answer is a hard guarantee is `hard_guarantee`'s to say.
    """
    return _TESTS[sharing.regime](sharing, residents, newcomer, best_effort_contexts)


# ------------------------------------------------------------------------------------------ the kinds


def _firm(sharing: Sharing, residents: Sequence[RtTask], newcomer: RtTask, contexts: int) -> Verdict:
    """The regime's test; where there is none, the device must be empty."""
    untestable = sharing.regime is Regime.TIME_SLICED and sharing.measured() is None
    if sharing.regime is Regime.MPS or untestable:
        return _one_tenant(sharing, residents, newcomer, contexts)
    return admit(sharing, residents, newcomer, contexts)


def _soft(sharing: Sharing, residents: Sequence[RtTask], newcomer: RtTask | None, contexts: int) -> Verdict:
    """Best effort: admitted unless the regime has no place for it or a hard resident would be broken.

    At a gate, where a part that has begun blocks whoever comes, a firm resident is not broken either.
    """
    regime, holds_hard = sharing.regime, any(task.kind is Kind.HARD for task in residents)
    holds_promise = any(task.kind is not Kind.SOFT for task in residents)
    if regime in (Regime.EXCLUSIVE, Regime.MIG) and (residents or contexts):
        return refused(_occupied(sharing, residents, contexts))
    if regime is Regime.GATED and (why := outside_gate(newcomer)):
        return refused(why)
    if holds_hard and regime is Regime.MPS:
        return refused("beside a hard container no test covers it (MPS)")
    if holds_hard and regime is Regime.TIME_SLICED:
        return _beside_hard(sharing, residents, contexts)
    if holds_promise and regime is Regime.GATED and newcomer is not None:
        verdict = admit(sharing, residents, replace(newcomer, kind=Kind.SOFT), contexts)
        if not verdict.admitted:
            return verdict
    return Verdict(admitted=True, test="best effort", slack_us=None, reason="best effort: nothing is promised")


def _beside_hard(sharing: Sharing, residents: Sequence[RtTask], contexts: int) -> Verdict:
    """One more context on a time-sliced device, whatever it does: do its hard residents still hold?"""
    hard = [task for task in residents if task.kind is Kind.HARD]
    verdict = sliced(sharing, hard, len(residents) + contexts)
    return verdict if not verdict.admitted else replace(verdict, test="best effort", slack_us=None)


# ------------------------------------------------------------------------------- exclusive, MIG, MPS


def _one_tenant(sharing: Sharing, residents: Sequence[RtTask], newcomer: RtTask, contexts: int) -> Verdict:
    """Section 2 with one container: the device is empty and the task fits its deadline and period alone."""
    if residents or contexts:
        return refused(_occupied(sharing, residents, contexts))
    runtime_us, period_us = newcomer.runtime_us + newcomer.overrun_us, newcomer.period_us - newcomer.host_us
    if runtime_us > period_us:
        return refused(f"{newcomer.name} needs {format_us(runtime_us)} every {format_us(period_us)}")
    slack = newcomer.deadline_us - newcomer.host_us - runtime_us
    reason = f"alone it needs {format_us(newcomer.deadline_us - slack)} of {format_us(newcomer.deadline_us)}"
    return Verdict(slack >= 0, "one tenant", slack, f"{reason}: {room(slack)}")


def _no_test(sharing: Sharing, _residents: Sequence[RtTask], _newcomer: RtTask, _contexts: int) -> Verdict:
    return refused(hard_guarantee(sharing)[1])


def _occupied(sharing: Sharing, residents: Sequence[RtTask], contexts: int) -> str:
    others = len(residents) + contexts
    which = f"{residents[0].name} and {others - 1} more" if residents and others > 1 else ""
    which = which or (residents[0].name if residents else f"{others} of no declared runtime")
    return f"needs the device alone ({sharing.regime}), it holds {which}"


_TESTS: Final[dict[Regime, Callable[[Sharing, Sequence[RtTask], RtTask, int], Verdict]]] = {
    Regime.EXCLUSIVE: _one_tenant,
    Regime.MIG: _one_tenant,
    Regime.GATED: gated,
    Regime.TIME_SLICED: time_sliced,
    Regime.MPS: _no_test,
}

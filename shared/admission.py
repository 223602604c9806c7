"""Whether a device can take one more container: a pure test per sharing regime; knows no node and no ledger."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import Final

from shared.messages import Kind, Realtime, Regime
from shared.units import format_ratio, format_us


@dataclass(frozen=True, slots=True)
class RtTask:
    """The recurring task of one container: C runtime, T period, D deadline, H host part, in microseconds.

    Segments are the lengths of its uninterrupted device parts; what the runtime has beyond them is one more.
    Raises ValueError for times that no task can have.
    """

    name: str
    runtime_us: int
    period_us: int
    deadline_us: int
    host_us: int = 0
    segments: tuple[int, ...] | None = None
    kind: Kind = Kind.HARD
    gate: bool = False

    def __post_init__(self) -> None:
        if min(self.runtime_us, self.period_us, self.deadline_us) < 1 or self.host_us < 0:
            raise ValueError(f"runtime, period and deadline are above 0, the host part is not below: {self}")
        if self.segments and (min(self.segments) < 1 or sum(self.segments) > self.runtime_us):
            raise ValueError(f"segments are above 0 and add up to at most the runtime: {self}")

    @classmethod
    def of(cls, name: str, realtime: Realtime) -> "RtTask | None":
        """The task that a request declares, its period the deadline where absent; None without a runtime."""
        if realtime.runtime_us is None:
            return None
        return cls(
            name=name,
            runtime_us=realtime.runtime_us,
            period_us=realtime.period_us or realtime.deadline_us,
            deadline_us=realtime.deadline_us,
            host_us=realtime.host_us,
            segments=realtime.segments,
            kind=realtime.kind,
            gate=realtime.gate,
        )

    def parts(self) -> tuple[int, ...]:
        """The lengths of all device parts; they add up to the runtime."""
        declared = self.segments or ()
        rest = self.runtime_us - sum(declared)
        return (*declared, rest) if rest else declared


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a device is shared. Slice and switch cost are measured; None is unknown, never 0."""

    regime: Regime
    slice_us: int | None = None
    switch_us: int | None = None
    handover_us: int = 0

    def __post_init__(self) -> None:
        slice_us = 1 if self.slice_us is None else self.slice_us
        if slice_us < 1 or min(self.handover_us, self.switch_us or 0) < 0:
            raise ValueError(f"a slice is above 0, switch and hand-over are not below: {self}")

    def measured(self) -> tuple[int, int] | None:
        """Slice and switch cost, when both are known."""
        if self.slice_us is None or self.switch_us is None:
            return None
        return self.slice_us, self.switch_us


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a test. Slack is the room left at the tightest point, negative what is short, else None.

    `unproven` marks a firm container that is admitted on its declaration, before it was measured. `late` is the name of
    the task whose deadline the test finds not kept, where it is one task's.
    """

    admitted: bool
    test: str
    slack_us: int | None
    reason: str
    unproven: bool = False
    late: str | None = None


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
        return _refused(f"{kind} needs a declared runtime")
    newcomer = replace(newcomer, kind=kind)
    if kind is Kind.FIRM:
        return replace(_firm(sharing, residents, newcomer, best_effort_contexts), unproven=True)
    sound, why = hard_guarantee(sharing)
    return admit(sharing, residents, newcomer, best_effort_contexts) if sound else _refused(why)


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
    """Best effort: admitted unless the regime has no place for it or a hard resident would be broken."""
    regime, holds_hard = sharing.regime, any(task.kind is Kind.HARD for task in residents)
    if regime in (Regime.EXCLUSIVE, Regime.MIG) and (residents or contexts):
        return _refused(_occupied(sharing, residents, contexts))
    if regime is Regime.GATED and (why := _outside_gate(newcomer)):
        return _refused(why)
    if holds_hard and regime is Regime.MPS:
        return _refused("beside a hard container no test covers it (MPS)")
    if holds_hard and regime is Regime.TIME_SLICED:
        return _beside_hard(sharing, residents, contexts)
    if holds_hard and newcomer is not None:
        verdict = admit(sharing, residents, replace(newcomer, kind=Kind.SOFT), contexts)
        if not verdict.admitted:
            return verdict
    return Verdict(admitted=True, test="best effort", slack_us=None, reason="best effort: nothing is promised")


def _beside_hard(sharing: Sharing, residents: Sequence[RtTask], contexts: int) -> Verdict:
    """One more context on a time-sliced device, whatever it does: do its hard residents still hold?"""
    hard = [task for task in residents if task.kind is Kind.HARD]
    verdict = _sliced(sharing, hard, len(residents) + contexts)
    return verdict if not verdict.admitted else replace(verdict, test="best effort", slack_us=None)


# ------------------------------------------------------------------------------- exclusive, MIG, MPS


def _one_tenant(sharing: Sharing, residents: Sequence[RtTask], newcomer: RtTask, contexts: int) -> Verdict:
    """Section 2 with one container: the device is empty and the task fits its deadline and period alone."""
    if residents or contexts:
        return _refused(_occupied(sharing, residents, contexts))
    job = _job(newcomer, handover_us=0)
    if job.runtime > job.period:
        return _refused(f"{newcomer.name} needs {format_us(job.runtime)} every {format_us(job.period)}")
    slack = job.deadline - job.runtime
    reason = f"alone it needs {format_us(newcomer.deadline_us - slack)} of {format_us(newcomer.deadline_us)}"
    return Verdict(slack >= 0, "one tenant", slack, f"{reason}: {_room(slack)}")


def _no_test(sharing: Sharing, _residents: Sequence[RtTask], _newcomer: RtTask, _contexts: int) -> Verdict:
    return _refused(hard_guarantee(sharing)[1])


def _occupied(sharing: Sharing, residents: Sequence[RtTask], contexts: int) -> str:
    others = len(residents) + contexts
    which = f"{residents[0].name} and {others - 1} more" if residents and others > 1 else ""
    which = which or (residents[0].name if residents else f"{others} of no declared runtime")
    return f"needs the device alone ({sharing.regime}), it holds {which}"


# ---------------------------------------------------------------------------------------------- gated


@dataclass(frozen=True, slots=True)
class _Job:
    """The device part of a task as the gate sees it: a sporadic job, times in microseconds."""

    name: str
    runtime: int
    period: int
    deadline: int


def _job(task: RtTask, handover_us: int) -> _Job:
    """The host part may come before or after the device part, so it takes its length from period and deadline.

    Device parts of one container then arrive at least T - H apart and have D - H from their arrival.
    """
    host = task.host_us
    return _Job(task.name, task.runtime_us + handover_us, task.period_us - host, task.deadline_us - host)


@dataclass(frozen=True, slots=True)
class GatedTotals:
    """The three numbers per gated device that the O(1) test needs (THEORY section 2.1)."""

    density: Fraction = Fraction(0)
    longest_us: int = 0
    shortest_deadline_us: int | None = None

    def plus(self, task: RtTask, handover_us: int = 0) -> "GatedTotals":
        """The totals with one more task; a soft one yields always, so it only blocks."""
        job = _job(task, handover_us)
        longest, shortest = max(self.longest_us, job.runtime), self.shortest_deadline_us
        if task.kind is Kind.SOFT:
            return replace(self, longest_us=longest)
        room = min(job.period, job.deadline)
        density = self.density + (Fraction(job.runtime, room) if room > 0 else 2)  # 2: more than any device has
        shortest = job.deadline if shortest is None else min(shortest, job.deadline)
        return GatedTotals(density, longest, shortest)

    def fit(self) -> bool:
        """Sufficient: sum of C / min(D, T) <= 1 - C_max / D_min. False is no verdict: ask the O(n) test."""
        if self.shortest_deadline_us is None:
            return True
        return self.density <= 1 - Fraction(self.longest_us, max(1, self.shortest_deadline_us))


def gated_linear(tasks: Sequence[RtTask], handover_us: int = 0) -> Verdict:
    """Sufficient test for non-preemptive EDF of a whole set, O(n) after sorting (THEORY section 2.2).

    Soft tasks yield always: they have no demand, but one that has started blocks whoever comes.
    """
    jobs = sorted((_job(t, handover_us) for t in tasks if t.kind is not Kind.SOFT), key=lambda j: j.deadline)
    soft = [_job(t, handover_us) for t in tasks if t.kind is Kind.SOFT]
    for job in jobs:
        if min(job.period, job.deadline) <= 0:
            return _refused(f"the host part of {job.name} leaves its device part no time", "gated linear")
    utilisation = sum((Fraction(job.runtime, job.period) for job in jobs), Fraction(0))
    if utilisation > 1:
        heaviest = max(jobs, key=lambda j: Fraction(j.runtime, j.period))
        share = format_ratio(utilisation)
        reason = f"needs {share} of the device's time, more than all, most for {heaviest.name}"
        return _refused(reason, "gated linear")
    if not jobs:
        return Verdict(admitted=True, test="gated linear", slack_us=None, reason="nothing is promised yet")
    tightest = min(_points(jobs, soft), key=lambda point: point.slack)
    slack = floor(tightest.slack)
    return Verdict(slack >= 0, "gated linear", slack, tightest.explain(), late=tightest.name if slack < 0 else None)


@dataclass(frozen=True, slots=True)
class _Point:
    """Demand and blocking at the relative deadline of one task, `name`; `heaviest` has the largest part in it."""

    name: str
    deadline: int
    demand: Fraction
    blocker: _Job | None
    heaviest: _Job

    @property
    def slack(self) -> Fraction:
        return self.deadline - self.demand - (self.blocker.runtime if self.blocker else 0)

    def explain(self) -> str:
        blocking = format_us(self.blocker.runtime) if self.blocker else "none"
        text = f"demand {format_us(ceil(self.demand))} by {format_us(self.deadline)}, blocking {blocking}"
        slack, culprit = floor(self.slack), self.heaviest
        if self.blocker and self.blocker.runtime > culprit.runtime:
            culprit = self.blocker
        return f"{text}: {_room(slack)}{f' because of {culprit.name}' if slack < 0 else ''}"


def _points(jobs: Sequence[_Job], soft: Sequence[_Job]) -> list[_Point]:
    """The test at each deadline, of jobs sorted by deadline.

    Of jobs with equal deadlines only the last one's point has their whole demand; it is the tightest of them.
    """
    deadlines, blockers = [job.deadline for job in jobs], _longest_after(jobs, soft)
    constant = rate = Fraction(0)
    points, heaviest = [], jobs[0]
    for job in jobs:
        share = Fraction(job.runtime, job.period)
        constant += job.runtime - share * job.deadline
        rate += share
        heaviest = max(heaviest, job, key=lambda j: j.runtime)
        blocker = blockers[bisect_right(deadlines, job.deadline)]
        points.append(_Point(job.name, job.deadline, constant + rate * job.deadline, blocker, heaviest))
    return points


def _longest_after(jobs: Sequence[_Job], soft: Sequence[_Job]) -> list[_Job | None]:
    """For each place in the order: the longest job from there on, soft ones standing behind all."""
    longest = max(soft, key=lambda j: j.runtime, default=None)
    after = [longest]
    for job in reversed(jobs):
        longest = job if longest is None or job.runtime > longest.runtime else longest
        after.append(longest)
    return after[::-1]


def _gated(sharing: Sharing, residents: Sequence[RtTask], newcomer: RtTask, contexts: int) -> Verdict:
    """The tests of section 2, cheap first; they hold only while everything on the device uses the gate."""
    if contexts:
        return _refused(f"{contexts} containers on the device do not use its gate")
    for task in (newcomer, *residents):
        if why := _outside_gate(task):
            return _refused(why)
    tasks, handover_us = (*residents, newcomer), sharing.handover_us
    totals = GatedTotals()
    for task in tasks:
        totals = totals.plus(task, handover_us)
    verdict = gated_linear(tasks, handover_us)  # also when the quick test suffices: it has the slack
    return replace(verdict, test="gated quick") if totals.fit() else verdict


def _outside_gate(task: RtTask | None) -> str | None:
    """Why the task has no place on a gated device, if so."""
    if task is None:
        return "a gated device takes only requests with gate: true and a runtime_us"
    return None if task.gate else f"{task.name} has no gate: true, which a gated device requires"


# ---------------------------------------------------------------------------------------- time-sliced


def slices(task: RtTask, slice_us: int) -> int:
    """N, how many slices one task needs: the sum of ceil(G / L) over its device parts G."""
    return sum(-(-part // slice_us) for part in task.parts())


def response_bound_us(task: RtTask, neighbours: int, slice_us: int, switch_us: int) -> int:
    """R(nu) = H + G + theta N + (L + theta) nu N, the longest response beside nu other contexts.

    Source: Wang, Liu, Wong, Kim, GCAPS, ECRTS 2024, Eqs. 1-5 and 15 (THEORY section 1).
    Assumes round robin with slice L, switch cost theta, D <= T, one task outstanding per container.
    """
    count = slices(task, slice_us)
    own = task.host_us + task.runtime_us + switch_us * count
    return own + (slice_us + switch_us) * neighbours * count


def nu_max(task: RtTask, slice_us: int, switch_us: int) -> int:
    """The most other contexts beside which the task still meets its deadline; negative: not even alone."""
    room = task.deadline_us - response_bound_us(task, 0, slice_us, switch_us)
    return room // ((slice_us + switch_us) * slices(task, slice_us))


def _time_sliced(sharing: Sharing, residents: Sequence[RtTask], newcomer: RtTask, contexts: int) -> Verdict:
    """Section 1: the number of other contexts is at most nu_max of everyone to whom something is promised."""
    promised = [task for task in residents if task.kind is not Kind.SOFT]
    return _sliced(sharing, [*promised, newcomer], len(residents) + contexts)


def _sliced(sharing: Sharing, promised: Sequence[RtTask], neighbours: int) -> Verdict:
    measured = sharing.measured()
    if measured is None:
        return _refused("slice and switch cost of the device were not measured", "time-sliced")
    for task in promised:
        if task.deadline_us > task.period_us:
            reason = f"deadline {format_us(task.deadline_us)} of {task.name} is over its period"
            return _refused(f"{reason} {format_us(task.period_us)}: the test does not cover it", "time-sliced")
    slack, task = min(
        ((t.deadline_us - response_bound_us(t, neighbours, *measured), t) for t in promised), key=lambda p: p[0]
    )
    text = f"{task.name} needs {format_us(task.deadline_us - slack)} of {format_us(task.deadline_us)}"
    most = max(0, nu_max(task, *measured))
    text = f"{text} beside {neighbours} other contexts, at most {most} fit"
    late = task.name if slack < 0 else None
    return Verdict(slack >= 0, "time-sliced", slack, f"{text}: {_room(slack)}", late=late)


# ------------------------------------------------------------------------------------------- wording


def _refused(reason: str, test: str = "none") -> Verdict:
    """A refusal that no amount of time would mend, hence without slack."""
    return Verdict(admitted=False, test=test, slack_us=None, reason=reason)


def _room(slack_us: int) -> str:
    return f"{format_us(-slack_us)} short" if slack_us < 0 else f"{format_us(slack_us)} to spare"


_TESTS: Final[dict[Regime, Callable[[Sharing, Sequence[RtTask], RtTask, int], Verdict]]] = {
    Regime.EXCLUSIVE: _one_tenant,
    Regime.MIG: _one_tenant,
    Regime.GATED: _gated,
    Regime.TIME_SLICED: _time_sliced,
    Regime.MPS: _no_test,
}

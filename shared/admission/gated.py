"""The tests of gated devices: non-preemptive, earliest deadline first (THEORY section 2); cheap ones first."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, inf, lcm
from typing import Final

from shared.admission.tasks import RtTask, Sharing, Verdict, refused, room
from shared.messages import Kind
from shared.units import format_ratio, format_us

EXACT_STEPS: Final = 500
"""After so many times the exact test gives up, undecided: an admission may not take longer than some milliseconds."""
ROUNDING: Final = 1e-9
"""Relative: further from each other than this, two sums of floats compare as the exact ones do."""


@dataclass(frozen=True, slots=True)
class Job:
    """The device part of a task as the gate sees it: a sporadic job, times in microseconds."""

    name: str
    runtime: int
    period: int
    deadline: int


def job_of(task: RtTask, sharing: Sharing) -> Job:
    """The host part may come before or after the device part, so it takes its length from period and deadline.

    Device parts of one container then arrive at least T - H apart and have D - H from their arrival. A part holds the
    device for its runtime, for what it overruns (as seen, or as the gate lets it) and for the hand-over.
    """
    over_us = max(task.overrun_us, sharing.margin_us) + sharing.handover_us
    return Job(task.name, task.runtime_us + over_us, task.period_us - task.host_us, task.deadline_us - task.host_us)


@dataclass(frozen=True, slots=True)
class GatedTotals:
    """The three numbers per gated device that the O(1) test needs (THEORY section 2.1)."""

    density: float = 0.0
    longest_us: int = 0
    shortest_deadline_us: int | None = None

    def plus(self, task: RtTask, sharing: Sharing) -> "GatedTotals":
        """The totals with one more task; a soft one yields always, so it only blocks."""
        job = job_of(task, sharing)
        longest, shortest = max(self.longest_us, job.runtime), self.shortest_deadline_us
        if task.kind is Kind.SOFT:
            return replace(self, longest_us=longest)
        least = min(job.period, job.deadline)
        density = self.density + (job.runtime / least if least > 0 else inf)
        shortest = job.deadline if shortest is None else min(shortest, job.deadline)
        return GatedTotals(density, longest, shortest)

    def fit(self) -> bool:
        """Sufficient: sum of C / min(D, T) <= 1 - C_max / D_min. False is no verdict: ask the O(n) test."""
        if self.shortest_deadline_us is None:
            return True
        return self.density + self.longest_us / max(1, self.shortest_deadline_us) <= 1 - ROUNDING


def gated_linear(tasks: Sequence[RtTask], sharing: Sharing) -> Verdict:
    """Sufficient test for non-preemptive EDF of a whole set, O(n) after sorting (THEORY section 2.2).

    Soft tasks yield always: they have no demand, but one that has started blocks whoever comes.
    """
    jobs = _Jobs.of(tasks, sharing)
    return jobs.hopeless("gated linear") or _verdict("gated linear", jobs.linear())


def gated_exact(tasks: Sequence[RtTask], sharing: Sharing, tick_us: int = 0, steps: int = EXACT_STEPS) -> Verdict:
    """Necessary and sufficient: demand and blocking fit into each time by which something is due (THEORY section 2.3).

    `tick_us` is the least time between two events: a task that blocks began so much earlier than those that it blocks,
    in continuous time (0) by as little as you like. It gives up, refusing as undecided, after so many steps.
    The times are searched from the last one down and the slack found so far says which can be left out, as in QPA
    (Zhang, Burns, Schedulability analysis for real-time systems with EDF scheduling, IEEE TC 58(9), 2009).
    """
    jobs = _Jobs.of(tasks, sharing, tick_us)
    return jobs.hopeless("gated exact") or jobs.exact(steps)


def gated(sharing: Sharing, residents: Sequence[RtTask], newcomer: RtTask, contexts: int) -> Verdict:
    """The tests of section 2, cheap first; they hold only while everything on the device uses the gate.

    The linear test is asked also where the quick one suffices: it has the slack.
    """
    if contexts:
        return refused(f"{contexts} containers on the device do not use its gate")
    tasks = (*residents, newcomer)
    for task in (newcomer, *residents):
        if why := outside_gate(task):
            return refused(why)
    jobs = _Jobs.of(tasks, sharing)
    if impossible := jobs.hopeless("gated linear"):
        return impossible
    tightest = jobs.linear()
    if tightest and tightest.slack < 0:
        return jobs.exact(EXACT_STEPS)
    return _verdict("gated quick" if jobs.totals().fit() else "gated linear", tightest)


def outside_gate(task: RtTask | None) -> str | None:
    """Why the task has no place on a gated device, if so."""
    if task is None:
        return "a gated device takes only requests with gate: true and a runtime_us"
    return None if task.gate else f"{task.name} has no gate: true, which a gated device requires"


# ------------------------------------------------------------------------------------ a set, by deadline


@dataclass(frozen=True, slots=True)
class _Point:
    """Demand and blocking at one time, by which a part of `name` is due; `heaviest` has the largest part in it."""

    name: str
    at: int
    demand: int
    blocking: int
    blocker: Job | None
    heaviest: Job

    @property
    def slack(self) -> int:
        return self.at - self.demand - self.blocking

    def explain(self) -> str:
        blocking = format_us(self.blocking) if self.blocker else "none"
        text = f"demand {format_us(self.demand)} by {format_us(self.at)}, blocking {blocking}"
        slack, culprit = self.slack, self.heaviest
        if self.blocker and self.blocker.runtime > culprit.runtime:
            culprit = self.blocker
        return f"{text}: {room(slack)}{f' because of {culprit.name}' if slack < 0 else ''}"


def _verdict(test: str, tightest: _Point | None) -> Verdict:
    if tightest is None:
        return Verdict(admitted=True, test=test, slack_us=None, reason="nothing is promised yet")
    slack = tightest.slack
    return Verdict(slack >= 0, test, slack, tightest.explain(), late=tightest.name if slack < 0 else None)


def _whole(parts: Sequence[tuple[int, int]]) -> int:
    """The sum of some fractions, rounded up; exact where floats might be too rough."""
    about = sum([part / of for part, of in parts])
    if abs(about - round(about)) > ROUNDING:
        return ceil(about)
    return ceil(sum((Fraction(*part) for part in parts), Fraction(0)))


@dataclass(frozen=True, slots=True)
class _Jobs:
    """The jobs of a set in the order of their deadlines, and for each place the longest from there on, soft ones last.

    Of jobs with equal deadlines each one's point has the demand of all of them.
    """

    jobs: list[Job]
    deadlines: list[int]
    longest: list[Job | None]
    tick: int

    @classmethod
    def of(cls, tasks: Sequence[RtTask], sharing: Sharing, tick_us: int = 0) -> "_Jobs":
        soft = [job_of(task, sharing) for task in tasks if task.kind is Kind.SOFT]
        jobs = [job_of(task, sharing) for task in tasks if task.kind is not Kind.SOFT]
        jobs.sort(key=lambda job: job.deadline)
        longest = max(soft, key=lambda job: job.runtime, default=None)
        after = [longest]
        for job in reversed(jobs):
            longest = job if longest is None or job.runtime > longest.runtime else longest
            after.append(longest)
        return cls(jobs, [job.deadline for job in jobs], after[::-1], tick_us)

    def hopeless(self, test: str) -> Verdict | None:
        """The refusal of a set that no device could serve, whatever its order of work."""
        for job in self.jobs:
            if min(job.period, job.deadline) <= 0:
                return refused(f"the host part of {job.name} leaves its device part no time", test)
        about = sum(job.runtime / job.period for job in self.jobs)
        if about < 1 - ROUNDING or (utilisation := self._utilisation()) <= 1:
            return None
        heaviest = max(self.jobs, key=lambda job: Fraction(job.runtime, job.period))
        share = format_ratio(utilisation)
        return refused(f"needs {share} of the device's time, more than all, most for {heaviest.name}", test)

    def totals(self) -> GatedTotals:
        """What the quick test looks at."""
        blocker = self.longest[len(self.jobs)]
        longest = max([job.runtime for job in self.jobs], default=0)
        density = sum([job.runtime / min(job.period, job.deadline) for job in self.jobs])
        return GatedTotals(density, max(longest, blocker.runtime if blocker else 0), min(self.deadlines, default=None))

    def _utilisation(self) -> Fraction:
        return sum((Fraction(job.runtime, job.period) for job in self.jobs), Fraction(0))

    def _point(self, at: int, demand: int, name: str) -> _Point:
        """Of the demand by one time, with what may block then."""
        end = bisect_right(self.deadlines, at)
        heaviest = max(self.jobs[:end], key=lambda job: job.runtime)
        return _Point(name, at, demand, self._blocking(end), self.longest[end], heaviest)

    def _blocking(self, place: int) -> int:
        """By those from this place on, and by soft ones."""
        blocker = self.longest[place]
        return max(0, blocker.runtime - self.tick) if blocker else 0

    # ------------------------------------------------------------------------------------------ linear

    def linear(self) -> _Point | None:
        """The tightest of the deadlines when demand grows as fluid; exact where floats might be too rough."""
        if not self.jobs:
            return None
        slacks, constant, rate, total = list[float](), 0.0, 0.0, 0
        for place, job in enumerate(self.jobs):
            share = job.runtime / job.period
            constant, rate, total = constant + job.runtime - share * job.deadline, rate + share, total + job.runtime
            blocker = self.longest[bisect_right(self.deadlines, job.deadline, place)]
            slacks.append(job.deadline * (1 - rate) - constant - (blocker.runtime if blocker else 0))
        bound = min(slacks) + ROUNDING * (self.deadlines[-1] + total)
        close = [job for job, slack in zip(self.jobs, slacks, strict=True) if slack <= bound]
        return min((self._fluid(job) for job in close), key=lambda point: point.slack)

    def _fluid(self, job: Job) -> _Point:
        """Demand in whole microseconds, rounded up."""
        whole, parts, at = 0, list[tuple[int, int]](), job.deadline
        for each in self.jobs[: bisect_right(self.deadlines, at)]:
            grown, left = divmod(each.runtime * (at - each.deadline), each.period)
            whole += each.runtime + grown
            if left:
                parts.append((left, each.period))
        return self._point(at, whole + _whole(parts), job.name)

    # ------------------------------------------------------------------------------------------- exact

    def exact(self, steps: int) -> Verdict:
        """The deadlines of the first jobs decide most refusals; those of the later ones are searched only then."""
        if not self.jobs:
            return _verdict("gated exact", None)
        first = min(self.jobs, key=lambda job: self._slack(job.deadline))
        at, slack, name = first.deadline, self._slack(first.deadline), first.name
        for end in (None, *reversed(self.deadlines[1:])):
            if slack < 0:
                break
            last = self._horizon(slack) if end is None else end - 1
            start = self.deadlines[-1] if end is None else self.deadlines[bisect_left(self.deadlines, end) - 1]
            found, steps = self._search(start, last, slack, steps)
            if found is not None:
                at, slack, name = found[0], self._slack(found[0]), found[1]
            elif steps <= 0:
                return refused("the exact test came to no end", "gated exact")
        return _verdict("gated exact", self._point(at, self._demand(at), name))

    def _demand(self, at: int) -> int:
        """The demand bound: the work released at or after 0 that is due by `at`, at most."""
        due = self.jobs[: bisect_right(self.deadlines, at)]
        return sum([((at - job.deadline) // job.period + 1) * job.runtime for job in due])

    def _slack(self, at: int) -> int:
        return at - self._demand(at) - self._blocking(bisect_right(self.deadlines, at))

    def _search(self, start: int, last: int, slack: int, steps: int) -> tuple[tuple[int, str] | None, int]:
        """The time after `start` and up to `last` with the least slack below `slack`, and the steps that are left.

        Blocking is the same in all that time. As demand only falls on the way down, no time from demand + blocking +
        (the least slack so far) on is tighter. The first time that is late is enough.
        """
        found = None
        at, name = self._due(last)
        while at > start and steps > 0 and slack >= 0:
            here, steps = self._slack(at), steps - 1
            if here < slack:
                slack, found = here, (at, name)
            at, name = self._due(min(at - 1, at - here + slack))
        return (found, steps) if at <= start or slack < 0 else (None, 0)

    def _due(self, until: int) -> tuple[int, str]:
        """The last time up to `until` by which a part is due, and of which task."""
        at, name = 0, ""
        for job in self.jobs[: bisect_right(self.deadlines, until)]:
            last = until - (until - job.deadline) % job.period
            if last > at:
                at, name = last, job.name
        return at, name

    def _horizon(self, slack: int) -> int:
        """No later time is tighter: demand is below its fluid form, or repeats from one hyperperiod to the next."""
        spare: float | Fraction = 1 - sum(job.runtime / job.period for job in self.jobs)
        if spare < 1e-6:  # too close to what floats cannot tell apart
            spare = 1 - self._utilisation()
        repeats = self.deadlines[-1] + lcm(*(job.period for job in self.jobs))
        if not spare:
            return repeats
        offset = sum(job.runtime * (1 - job.deadline / job.period) for job in self.jobs)
        fluid = (offset + self._blocking(len(self.jobs)) + slack) / float(spare)
        return min(repeats, max(self.deadlines[-1], ceil(fluid * (1 + ROUNDING)) + 1))

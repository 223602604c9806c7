"""The admission tests against an exact oracle, and the oracle against simulated devices with adversarial releases."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.admission import (
    GatedTotals,
    RtTask,
    Sharing,
    admit,
    admit_kind,
    gated_exact,
    gated_linear,
    nu_max,
    response_bound_us,
)
from shared.messages import Kind, Regime

GATED = Sharing(Regime.GATED)

# ------------------------------------------------------------------------------------------ task sets


@st.composite
def tasks(draw: st.DrawFn, name: str = "t", kinds: tuple[Kind, ...] = (Kind.HARD,), host: int = 0) -> RtTask:
    """A task of a few units of time; its deadline lies on either side of its period."""
    period = draw(st.sampled_from([2, 3, 4, 5, 6, 8, 10, 12]))
    return RtTask(
        name=name,
        runtime_us=draw(st.integers(1, max(1, period // 2))),
        period_us=period,
        deadline_us=draw(st.integers(1, 16)),
        host_us=draw(st.integers(0, host)),
        kind=draw(st.sampled_from(kinds)),
        gate=True,
    )


def task_sets(kinds: tuple[Kind, ...] = (Kind.HARD,), host: int = 0) -> st.SearchStrategy[list[RtTask]]:
    return st.lists(tasks(kinds=kinds, host=host), min_size=1, max_size=4)


def utilisation(tasks: Sequence[RtTask]) -> Fraction:
    return sum((Fraction(t.runtime_us, t.period_us) for t in tasks), Fraction(0))


def admitted(tasks: Sequence[RtTask], sharing: Sharing) -> list[RtTask]:
    """Those that the device takes when they come one after the other."""
    residents: list[RtTask] = []
    for task in tasks:
        if admit_kind(task.kind, sharing, residents, task).admitted:
            residents.append(task)
    return residents


# ----------------------------------------------------------------- the exact test (THEORY section 2.3)


@dataclass(frozen=True)
class Violation:
    """A moment by which more is demanded than fits, and the task that blocks when it starts just before."""

    at: int
    blocker: RtTask | None


def demand(tasks: Sequence[RtTask], at: int) -> int:
    """The demand bound: the work released at or after 0 that is due by `at`, at most."""
    return sum(max(0, (at - t.deadline_us) // t.period_us + 1) * t.runtime_us for t in tasks)


def violation(tasks: Sequence[RtTask]) -> Violation | None:
    """George, Rivierre and Spuri (INRIA RR-2966, 1996) for integer times, where blocking is max(C - 1).

    Demand less time does not grow from one hyperperiod to the next when U <= 1, so one of them is enough.
    """
    last = lcm(*(t.period_us for t in tasks)) + max(t.deadline_us for t in tasks)
    for at in sorted({at for t in tasks for at in range(t.deadline_us, last + 1, t.period_us)}):
        later = [t for t in tasks if t.deadline_us > at]
        blocker = max(later, key=lambda t: t.runtime_us, default=None)
        if demand(tasks, at) + (blocker.runtime_us - 1 if blocker else 0) > at:
            return Violation(at, blocker)
    return None


def exactly_schedulable(tasks: Sequence[RtTask]) -> bool:
    return utilisation(tasks) <= 1 and violation(tasks) is None


@given(task_sets(kinds=(Kind.HARD, Kind.FIRM)))
@settings(max_examples=500, deadline=None)
def test_the_exact_test_looks_at_fewer_times_and_finds_the_same(tasks: list[RtTask]) -> None:
    verdict = gated_exact(tasks, GATED, tick_us=1, steps=100_000)
    assert exactly_schedulable(tasks) == verdict.admitted


@given(task_sets())
@settings(max_examples=300, deadline=None)
def test_the_slack_of_the_exact_test_is_the_least_over_all_times(tasks: list[RtTask]) -> None:
    verdict = gated_exact(tasks, GATED, steps=100_000)
    if not verdict.admitted:
        return
    last = lcm(*(t.period_us for t in tasks)) + max(t.deadline_us for t in tasks)
    times = {at for t in tasks for at in range(t.deadline_us, last + 1, t.period_us)}
    blocking = {at: max((t.runtime_us for t in tasks if t.deadline_us > at), default=0) for at in times}
    assert min(at - demand(tasks, at) - blocking[at] for at in times) == verdict.slack_us


# ------------------------------------------------------------------------------ a simulated gated device


@dataclass(frozen=True, order=True)
class Release:
    """One job: order by deadline is the order of the gate."""

    due: int
    at: int
    runtime: int


def first_late(releases: Sequence[Release], handover: int = 0) -> Release | None:
    """The first job that non-preemptive EDF ends after it was due, if any."""
    coming, waiting, now = sorted(releases, key=lambda r: (r.at, r.due)), list[Release](), -(10**9)
    while coming or waiting:
        now = max(now, coming[0].at) if not waiting else now
        while coming and coming[0].at <= now:
            heappush(waiting, coming.pop(0))
        job = heappop(waiting)
        now += job.runtime + handover
        if now > job.due:
            return job
    return None


def periodic(task: RtTask, start: int, until: int) -> list[Release]:
    """As often as the task may."""
    times = range(start, until, task.period_us)
    return [Release(at + task.deadline_us, at, task.runtime_us) for at in times]


def sporadic(task: RtTask, gaps: Sequence[int], jitter: Sequence[int]) -> list[Release]:
    """With extra gaps between the starts, and a host part of which some lies before the device part.

    What remains of the host part is still to come, so the device part is due that much earlier than the task;
    the gate orders by the arrival plus D - H, which is never later.
    """
    releases, start = [], 0
    for gap, before in zip(gaps, jitter, strict=True):
        start += gap
        arrival = start + min(before, task.host_us)
        releases.append(Release(arrival + task.deadline_us - task.host_us, arrival, task.runtime_us))
        start += task.period_us
    return releases


def witness(tasks: Sequence[RtTask], found: Violation) -> list[Release]:
    """The releases that make a violation visible: the blocker one unit before all that are due."""
    due = [release for t in tasks if t.deadline_us <= found.at for release in periodic(t, 0, found.at + 1)]
    blocking = found.blocker
    return due + ([Release(blocking.deadline_us - 1, -1, blocking.runtime_us)] if blocking else [])


# -------------------------------------------------------------------------------------------- gated


@given(task_sets())
@settings(max_examples=400, deadline=None)
def test_what_the_quick_test_admits_the_linear_one_admits_and_so_does_the_exact_one(tasks: list[RtTask]) -> None:
    totals = GatedTotals()
    for task in tasks:
        totals = totals.plus(task, GATED)
    linear = gated_linear(tasks, GATED).admitted
    assert linear or not totals.fit()
    assert exactly_schedulable(tasks) or not linear


@given(task_sets(), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_the_exact_test_admits_what_never_misses_in_simulation_and_nothing_else(
    tasks: list[RtTask], blocking: int
) -> None:
    while utilisation(tasks) > 1:
        tasks = tasks[1:]
    if found := violation(tasks):
        assert first_late(witness(tasks, found)) is not None
        return
    early = tasks[blocking % len(tasks)]
    until = 2 * lcm(*(t.period_us for t in tasks)) + 16
    others = [release for t in tasks if t is not early for release in periodic(t, 0, until)]
    assert first_late(others + periodic(early, -1, until)) is None


@given(task_sets(kinds=(Kind.HARD, Kind.FIRM), host=3), st.integers(0, 2), st.data())
@settings(max_examples=200, deadline=None)
def test_an_admitted_set_never_misses_whatever_its_releases_and_host_parts(
    tasks: list[RtTask], handover_us: int, data: st.DataObject
) -> None:
    some = st.lists(st.integers(0, 4), min_size=12, max_size=12)
    releases = [
        release
        for task in admitted(tasks, Sharing(Regime.GATED, handover_us=handover_us))
        for release in sporadic(task, data.draw(some), data.draw(some))
    ]
    assert first_late(releases, handover_us) is None


@given(task_sets(kinds=(Kind.HARD, Kind.SOFT)), st.lists(st.integers(0, 60), max_size=8), st.data())
@settings(max_examples=200, deadline=None)
def test_soft_tasks_that_yield_never_make_an_admitted_set_miss(
    tasks: list[RtTask], soft_times: list[int], data: st.DataObject
) -> None:
    taken = admitted(tasks, GATED)
    soft = [t for t in taken if t.kind is Kind.SOFT]
    never = 10**9  # the gate takes a soft task only when nobody else waits
    releases = [Release(never, at, data.draw(st.sampled_from(soft)).runtime_us) for at in soft_times if soft]
    for task in taken:
        if task.kind is Kind.HARD:
            releases += periodic(task, data.draw(st.integers(0, 4)), 72)
    assert first_late(releases) is None


@given(task_sets())
@settings(max_examples=200, deadline=None)
def test_for_deadlines_equal_to_periods_the_oracle_agrees_with_jeffay_stanat_and_martel(tasks: list[RtTask]) -> None:
    """RTSS 1991, theorem 4.1: for each i and T_1 < L < T_i: L >= C_i + sum over j < i of floor((L-1)/T_j) C_j."""
    implicit = sorted(
        (RtTask(t.name, t.runtime_us, t.period_us, t.period_us) for t in tasks), key=lambda t: t.period_us
    )
    theorem = utilisation(implicit) <= 1 and all(
        length >= task.runtime_us + sum((length - 1) // t.period_us * t.runtime_us for t in implicit[:place])
        for place, task in enumerate(implicit)
        for length in range(implicit[0].period_us + 1, task.period_us)
    )
    assert theorem == exactly_schedulable(implicit)


@given(task_sets(), tasks(name="new"))
@settings(max_examples=200, deadline=None)
def test_runtimes_that_grow_by_more_than_the_slack_no_longer_fit(residents: list[RtTask], new: RtTask) -> None:
    verdict = admit(GATED, residents, new)
    assert verdict.admitted == (verdict.slack_us is not None and verdict.slack_us >= 0)
    if verdict.slack_us is not None:
        over = Sharing(Regime.GATED, handover_us=max(0, verdict.slack_us) + 1)
        assert not admit(over, residents, new).admitted


@given(task_sets(), tasks(name="new"), st.permutations(range(5)))
def test_a_verdict_depends_on_the_set_and_not_on_who_came_first(
    residents: list[RtTask], new: RtTask, order: list[int]
) -> None:
    everyone = [*residents, new]
    shuffled = [everyone[i] for i in order if i < len(everyone)]
    first, second = admit(GATED, residents, new), admit(GATED, shuffled[1:], shuffled[0])
    assert (first.admitted, first.slack_us) == (second.admitted, second.slack_us)


# ----------------------------------------------------------------------------------------- time-sliced


def round_robin_response(
    task: RtTask, neighbours: Sequence[int], slice_us: int, switch_us: int, waits: Sequence[int]
) -> int:
    """How long the task takes on a device that turns between contexts, none of it preempted within a slice.

    `neighbours` says how much of its slice each other context uses; `waits` how many of them are passed
    before each device part first gets its turn (all of them is the worst).
    """
    now = task.host_us
    for part, wait in zip(task.parts(), waits, strict=True):
        left, passed = part, neighbours[:wait]
        while left > 0:
            now += sum(switch_us + used for used in passed)
            ran = min(slice_us, left)
            now, left, passed = now + switch_us + ran, left - ran, neighbours
    return now


@st.composite
def sliced_tasks(draw: st.DrawFn) -> RtTask:
    parts = tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)))
    deadline = draw(st.integers(1, 800))
    return RtTask("t", sum(parts), 800, deadline, host_us=draw(st.integers(0, 5)), segments=parts)


@given(sliced_tasks(), st.integers(0, 5), st.integers(1, 8), st.integers(0, 3))
def test_the_response_bound_is_reached_by_the_worst_round_robin(
    task: RtTask, others: int, slice_us: int, switch_us: int
) -> None:
    busy, waits = [slice_us] * others, [others] * len(task.parts())
    expected = round_robin_response(task, busy, slice_us, switch_us, waits)
    assert expected == response_bound_us(task, others, slice_us, switch_us)


@given(sliced_tasks(), st.integers(1, 8), st.integers(0, 3), st.data())
@settings(max_examples=200)
def test_what_the_time_sliced_test_admits_never_misses_in_a_round_robin(
    task: RtTask, slice_us: int, switch_us: int, data: st.DataObject
) -> None:
    neighbours: list[int] = []
    sharing = Sharing(Regime.TIME_SLICED, slice_us, switch_us)
    while len(neighbours) < 5 and admit(sharing, [], task, best_effort_contexts=len(neighbours) + 1).admitted:
        neighbours.append(data.draw(st.integers(0, slice_us)))
    if not admit(sharing, [], task, best_effort_contexts=len(neighbours)).admitted:
        return
    waits = [data.draw(st.integers(0, len(neighbours))) for _ in task.parts()]
    assert round_robin_response(task, neighbours, slice_us, switch_us, waits) <= task.deadline_us


@given(sliced_tasks(), st.integers(1, 8), st.integers(0, 3))
def test_nu_max_is_the_last_number_of_neighbours_that_fits(task: RtTask, slice_us: int, switch_us: int) -> None:
    most = nu_max(task, slice_us, switch_us)
    sharing = Sharing(Regime.TIME_SLICED, slice_us, switch_us)
    fits = [admit(sharing, [], task, best_effort_contexts=n).admitted for n in (max(0, most), max(0, most + 1))]
    assert [most >= 0, False] == fits

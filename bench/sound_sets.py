"""Random sets of containers, admitted as a device would and simulated: what `bench.sound` and its test count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from random import Random
from typing import Final

import numpy as np

from shared.admission import (
    GatedRows,
    Newcomer,
    RtTask,
    Sharing,
    admit,
    admit_kind,
    gated_exact,
    nu_max,
    response_bound_us,
    slices,
)
from shared.admission.gated_rows import Bools, Ints
from shared.messages import Kind, Regime
from shared.testing.devices import (
    FAR,
    Container,
    Job,
    Sets,
    gated_misses,
    just_before,
    run,
    sporadic,
    time_sliced_misses,
)
from shared.testing.devices.policies import Gate

MOST: Final = 20
"""Containers on one device."""
GATED: Final = Sharing(Regime.GATED)
_STEPS: Final = (200, 4_000)
"""Jobs per device: few leave more than the first before their first idle moment, and some never have one."""
_TICKS: Final = 1_000
"""In a microsecond: a gate is simulated in finer time than containers declare, as good as continuous."""
_SAMPLE: Final = 500
"""One in so many answers of the arrays is asked again singly."""
_PERIODS: Final = ((2, 3, 4, 6), (2, 4, 8), (3, 6, 9), (5, 10), (2, 3, 6, 12))
_PHASES: Final = 600

# ---------------------------------------------------------------------------------------------- gated


def gated_sets(number: int, chance: Random, sooner_us: int = 0) -> Counter[str]:
    """Sets that grow one container at a time, near what the device can take; all of them run.

    With `sooner_us` they are judged by deadlines so much sooner than admitted, which the simulation must notice.
    """
    counts: Counter[str] = Counter(offered=number)
    rows = GatedRows(number, MOST)
    draw = np.random.default_rng(chance.getrandbits(64))
    wanted, form = draw.integers(1, MOST + 1, number), draw.integers(0, 4, number)
    for _ in range(MOST + 4):
        left = (rows.count < wanted).nonzero()[0]
        offer = _offer(left, wanted[left], form[left], draw)
        answers, is_open = rows.ask(left, offer)
        taken = answers.admitted.copy()
        for place in is_open.nonzero()[0].tolist():
            taken[place] = admit(GATED, _tasks(rows, left[place]), _task(offer, place)).admitted
        counts["asked"] += len(left)
        counts["exact"] += int(is_open.sum())
        counts["differ"] += _differences(rows, left, offer, answers.admitted, is_open)
        rows.add(left[taken], offer[taken])
    counts.update(_simulated_gate(rows, sooner_us, draw))
    return counts


def _offer(left: Ints, wanted: Ints, form: Ints, draw: np.random.Generator) -> Newcomer:
    """One more container for each: about its part of the whole, due before, at, or after its period, or any of these.

    Half of the sets have times of a few microseconds, where one more or less decides.
    """
    number = len(left)
    period = np.where(left % 2, draw.integers(4, 80, number), np.exp(draw.uniform(7, 14, number)).astype(np.int64))
    share = draw.uniform(0.1, 1.9, number) / wanted
    runtime = np.maximum(1, (period * np.minimum(share, 0.9)).astype(np.int64))
    which = np.where(form == 3, draw.integers(0, 3, number), form)
    shorter = runtime + ((period - runtime) * draw.random(number)).astype(np.int64)
    longer = period + (2 * period * draw.random(number)).astype(np.int64)
    return Newcomer.of(number, runtime, period, np.choose(which, [shorter, period, longer]))


def _task(offer: Newcomer, place: int) -> RtTask:
    times = (int(column[place, 0]) for column in (offer.runtime, offer.period, offer.deadline))
    return RtTask("new", *times, gate=True)


def _tasks(rows: GatedRows, row: int) -> list[RtTask]:
    columns = (rows.columns[name][row, : rows.count[row]].tolist() for name in ("runtime", "period", "deadline"))
    return [RtTask("", *times, gate=True) for times in zip(*columns, strict=True)]


def _differences(rows: GatedRows, left: Ints, offer: Newcomer, admitted: Bools, is_open: Bools) -> int:
    """Of some of the answers that were not left open, those that the test of one device does not give."""
    some = [place for place in range(0, len(left), _SAMPLE) if not is_open[place]]
    single = (admit(GATED, _tasks(rows, left[place]), _task(offer, place)).admitted for place in some)
    return sum(bool(admitted[place]) is not alone for place, alone in zip(some, single, strict=True))


def _simulated_gate(rows: GatedRows, sooner_us: int, draw: np.random.Generator) -> Counter[str]:
    kept = (rows.count > 0).nonzero()[0]
    runtime, period, deadline = (rows.columns[name][kept] * _TICKS for name in ("runtime", "period", "deadline"))
    deadline -= sooner_us * _TICKS
    held = np.arange(runtime.shape[1]) < rows.count[kept, None]
    at, blocker = held.nonzero()
    first = np.where(held[at], 1, FAR)
    first[np.arange(len(at)), blocker] = 0
    worst = Sets(runtime[at], period[at], deadline[at], first)
    late, unseen = gated_misses(worst, _STEPS[0], until_idle=True)
    late[unseen], unseen[unseen] = gated_misses(worst[unseen], _STEPS[1], until_idle=True)
    anywhere = np.where(held, (period * draw.random(period.shape)).astype(np.int64), FAR)

    def gaps(some: Ints, who: Ints) -> Ints:
        return (period[some, who] * np.maximum(0, draw.uniform(-1, 0.5, len(some)))).astype(np.int64)

    late_too, _ = gated_misses(Sets(runtime, period, deadline, anywhere), 12 * MOST, until_idle=False, gaps=gaps)
    missed = np.zeros(len(kept), np.bool_)
    missed[at[late]] = True
    found = {"admitted": len(kept), "missed": int((missed | late_too).sum()), "unseen": int(unseen.sum())}
    return Counter(found | {"containers": int(held.sum()), "runs": len(at) + len(kept)})


# ---------------------------------------------------------------------------------------- time-sliced


def time_sliced_sets(number: int, chance: Random, sooner_us: int = 0) -> Counter[str]:
    """Sets with as many contexts beside them, always busy, as the test admits; `sooner_us` as in `gated_sets`."""
    counts: Counter[str] = Counter(offered=number)
    taken: list[tuple[Sharing, list[RtTask], int]] = []
    for _ in range(number):
        sharing = Sharing(Regime.TIME_SLICED, chance.choice((1, 5, 50, 2_000)), chance.choice((0, 1, 10, 100)))
        size = chance.choice((1, 2, 2, 3, 4, 6, 8, 12, MOST))
        tasks = [_turning(sharing, chance.randint(max(1, size - 2), MOST), chance) for _ in range(size)]
        busy = min(MOST, *(nu_max(task, *sharing.measured() or (1, 0)) + 1 for task in tasks)) - len(tasks)
        verdict = admit(sharing, tasks[:-1], tasks[-1], max(0, busy))
        counts["differ"] += verdict.admitted is not (busy >= 0)
        if verdict.admitted:
            taken.append((sharing, tasks, busy))
            counts["containers"] += len(tasks)
    counts["admitted"] = len(taken)
    counts["missed"] = len(_late_in_turns(taken, sooner_us))
    return counts


def _turning(sharing: Sharing, beside: int, chance: Random) -> RtTask:
    """One task of a few slices; its deadline often fits so many neighbours to the microsecond."""
    slice_us, switch_us = sharing.measured() or (1, 0)
    runtime_us = chance.randint(1, 6 * slice_us)
    alone = RtTask("", runtime_us, FAR, FAR)
    bound_us = response_bound_us(alone, beside, slice_us, switch_us)
    deadline_us = max(1, bound_us + chance.choice((0, 0, -1, chance.randint(0, bound_us))))
    return RtTask("", runtime_us, deadline_us + chance.choice((0, chance.randint(0, 2 * bound_us))), deadline_us)


def _late_in_turns(taken: Sequence[tuple[Sharing, list[RtTask], int]], sooner_us: int) -> set[int]:
    """Each task in turn has its turn after all others, released together; which sets were late."""
    sets, devices, owner, turns = list[list[list[int]]](), list[tuple[int, int]](), list[int](), 0
    empty = [1, 1, FAR, FAR]
    for place, (sharing, tasks, busy) in enumerate(taken):
        slice_us, switch_us = sharing.measured() or (1, 0)
        rows = [[task.runtime_us, task.period_us, task.deadline_us - sooner_us] for task in tasks]
        others = [[FAR, 1, FAR, 0]] * busy + [empty] * (MOST - busy - len(tasks))
        for victim, row in enumerate(rows):
            beside = [[*other, 0] for other in rows[:victim] + rows[victim + 1 :]]
            sets.append([*others, *beside, [*row, 0]])
            turns = max(turns, (slices(tasks[victim], slice_us) + 1) * (len(tasks) + busy))
        devices += [(slice_us, switch_us)] * len(tasks)
        owner += [place] * len(tasks)
    if not sets:
        return set()
    columns = Sets(*np.array(sets, np.int64).transpose(2, 0, 1))
    late = time_sliced_misses(columns, *np.array(devices, np.int64).T, turns=turns)
    return {owner[row] for row in late.nonzero()[0].tolist()}


# ---------------------------------------------------------------------------------------- small sets


def small_sets(number: int, chance: Random) -> Counter[str]:
    """Sets of a few ticks, each with every phase of every task, against the exact test in whole ticks."""
    sets = [_small(chance) for _ in range(number)]
    exact = np.array([gated_exact(tasks, GATED, tick_us=1, steps=100_000).admitted for tasks in sets])
    late = np.zeros(number, np.bool_)
    for size in sorted({len(tasks) for tasks in sets}):
        alike = [place for place, tasks in enumerate(sets) if len(tasks) == size]
        late[alike] = _late_in_any_phase([sets[place] for place in alike])
    linear = np.array([admit(GATED, tasks[1:], tasks[0]).admitted for tasks in sets])
    found = {
        "admitted": int(exact.sum()),
        "disagree": int((exact == late).sum()),
        "unsound": int((linear & late).sum()),
    }
    return Counter(found | {"sets": number, "online": int(linear.sum())})


def _small(chance: Random) -> list[RtTask]:
    while True:
        periods = chance.choices(chance.choice(_PERIODS), k=chance.choice((1, 2, 2, 3, 3, 3, 4)))
        tasks = [RtTask("", chance.randint(1, max(1, p // 2)), p, chance.randint(1, 16), gate=True) for p in periods]
        if prod(periods) <= _PHASES and sum(task.runtime_us / task.period_us for task in tasks) < 1 + 1e-9:
            return tasks


def _late_in_any_phase(sets: Sequence[list[RtTask]]) -> Bools:
    """For two hyperperiods and more; all sets have as many tasks."""
    owner, phases = list[int](), list[tuple[int, ...]]()
    for place, tasks in enumerate(sets):
        each = list(product(*(range(task.period_us) for task in tasks)))
        phases += each
        owner += [place] * len(each)
    times = np.array([[(t.runtime_us, t.period_us, t.deadline_us) for t in tasks] for tasks in sets], np.int64)
    at = np.array(owner)
    columns = Sets(*times[at].transpose(2, 0, 1), np.array(phases, np.int64))
    until = 2 * 12 * 3 + 16
    steps = int(np.ceil(until / times[:, :, 1]).sum(1).max())
    late, _ = gated_misses(columns, steps, until_idle=False)
    return np.bincount(at[late], minlength=len(sets)) > 0


# ------------------------------------------------------------------------------------ event by event


def single_devices(number: int, chance: Random) -> Counter[str]:
    """Whole devices with all that containers may do within their declarations; only soft ones may be late."""
    counts: Counter[str] = Counter(offered=number, missed=0)
    for place in range(number):
        sharing, simulate = (_a_gate(chance), _at_the_gate) if place % 2 else (_a_ring(chance), _in_turns)
        tasks: list[RtTask] = []
        for _ in range(chance.randint(1, 12)):
            task = _any_task(len(tasks), chance, sharing)
            if admit_kind(task.kind, sharing, tasks, task).admitted:
                tasks.append(task)
        jobs = simulate(sharing, tasks, chance)
        counts["admitted"] += bool(tasks)
        counts["jobs"] += len(jobs)
        counts["missed"] += any(job.missed(0) for job in jobs if tasks[int(job.container)].kind is not Kind.SOFT)
    return counts


def _a_gate(chance: Random) -> Sharing:
    return Sharing(Regime.GATED, handover_us=chance.choice((0, 1, 7)), margin_us=chance.choice((0, 0, 5)))


def _a_ring(chance: Random) -> Sharing:
    return Sharing(Regime.TIME_SLICED, slice_us=chance.choice((1, 3, 10)), switch_us=chance.choice((0, 1)))


def _any_task(name: int, chance: Random, sharing: Sharing) -> RtTask:
    """Soft ones only at a gate: on a ring they are admitted whatever becomes of firm ones."""
    gated, period_us = sharing.regime is Regime.GATED, chance.choice((20, 50, 100, 400, 1_000))
    runtime_us = chance.randint(1, max(1, period_us // chance.choice((2, 6, 12))))
    return RtTask(
        name=str(name),
        runtime_us=runtime_us,
        period_us=period_us,
        deadline_us=chance.randint(period_us // 2, 2 * period_us if gated else period_us),
        host_us=chance.choice((0, 0, period_us // 10)),
        segments=chance.choice((None, (1,) * min(3, runtime_us), (-(-runtime_us // 2),))),
        kind=chance.choice((Kind.HARD, Kind.HARD, Kind.FIRM, Kind.SOFT)) if gated else Kind.FIRM,
        gate=True,
    )


def _at_the_gate(sharing: Sharing, tasks: Sequence[RtTask], chance: Random) -> list[Job]:
    """Either the worst releases or any; runtimes up to the declared one, or beyond it as far as the margin goes."""
    if tasks and chance.random() < 0.5:
        releases = [each.releases_us for each in just_before(tasks, chance.randrange(len(tasks)))]
    else:
        releases = [_sporadic(task, chance) for task in tasks]
    containers = [
        Container(task.name, task, times, _runtimes(task, 2 * sharing.margin_us, chance), _before(task, chance))
        for task, times in zip(tasks, releases, strict=True)
    ]
    return run(sharing, containers, 5_000, Gate(sharing.handover_us, ends_overruns=True))


def _in_turns(sharing: Sharing, tasks: Sequence[RtTask], chance: Random) -> list[Job]:
    """Any releases, beside as many contexts that are always busy as are admitted."""
    containers = [
        Container(task.name, task, _sporadic(task, chance), _runtimes(task, 0, chance), _before(task, chance))
        for task in tasks
    ]
    most = min((nu_max(task, *sharing.measured() or (1, 0)) for task in tasks), default=0)
    busy = [Container(f"-{n}", RtTask("", 9, 9, FAR), None) for n in range(min(most + 1, MOST) - len(tasks))]
    chance.shuffle(both := [*containers, *busy])
    return [job for job in run(sharing, both, 5_000) if not job.container.startswith("-")]


def _sporadic(task: RtTask, chance: Random) -> Iterator[int]:
    return sporadic(chance.randint(0, 1_000), task.period_us, chance, chance.choice((0, 3, task.period_us)))


def _runtimes(task: RtTask, most_over_us: int, chance: Random) -> dict[int, int]:
    """Of some jobs: longer than declared at most by this, or shorter."""
    return {
        number: chance.choice((task.runtime_us + chance.randint(0, most_over_us), chance.randint(1, task.runtime_us)))
        for number in range(0, 200, 3)
    }


def _before(task: RtTask, chance: Random) -> int:
    """How much of the host part comes before the device part."""
    return chance.randint(0, task.host_us)

"""Whether the tracker names who caused a miss, and finds noisy neighbours: ``make bench-culprit``.

Random devices in each regime, filled as admission would, in virtual time and judged by a real tracker through batches
of a real monitor's making. One task after the other is made to run too long; whoever misses then must be told of its
container. Noisy neighbours come to devices that others use already. Without a fault nothing may be said of anybody.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Final

from bench.culprit_world import BEAT_US, World
from bench.report import tell
from shared.admission import RtTask, Sharing, admit
from shared.messages import CauseKind, DeadlineEvent, Kind, Regime
from shared.testing.devices import Container, sporadic

REGIMES: Final = (Regime.GATED, Regime.TIME_SLICED, Regime.MPS)
TARGET: Final = 0.95
WITHIN_TASKS, WITHIN_US = 20, 1_000_000
WARM_US: Final = 2_000_000
"""Before the first fault: so long it takes to learn what neighbours take from each other (MPS)."""
APART_US: Final = 500_000
"""Between two faults."""
CAPPED: Final = 0.95
"""Speed of a device whose power is capped, as it is usual on busy ones."""
HOUR_US: Final = 3_600_000_000
_JOBS: Final = 5_000


def devices(regime: Regime, chance: Random) -> tuple[Sharing, list[Container]]:
    """One device with two to six containers: jitter in their releases and runtimes, host parts, segments."""
    sharing = {
        Regime.GATED: Sharing(regime, handover_us=chance.choice((50, 200, 1_000))),
        Regime.TIME_SLICED: Sharing(regime, chance.choice((500, 1_000, 2_000)), chance.choice((20, 50))),
    }.get(regime, Sharing(regime))
    busy = regime is Regime.TIME_SLICED and chance.random() < 0.3
    tasks: list[RtTask] = []
    wanted = chance.randint(2, 6)
    for _ in range(60):
        task = _task(str(len(tasks)), regime, chance)
        room = 2 * task.runtime_us <= task.deadline_us
        fits = room if regime is Regime.MPS else admit(sharing, tasks, task, int(busy)).admitted
        if len(tasks) < wanted and fits:
            tasks.append(task)
    containers = [_container(task, regime, chance) for task in tasks]
    if busy:
        soft = RtTask("busy", 30_000, HOUR_US, HOUR_US, kind=Kind.SOFT)
        containers.append(Container("busy", soft, None))
    return sharing, containers


def _task(name: str, regime: Regime, chance: Random) -> RtTask:
    period_us = chance.randint(10_000, 80_000)
    runtime_us = int(period_us * chance.uniform(0.03, 0.35))
    longest = 1.5 if regime is Regime.GATED else 1.0
    return RtTask(
        name,
        runtime_us,
        period_us,
        int(period_us * chance.uniform(0.6, longest)),
        host_us=chance.choice((0, 0, int(runtime_us * chance.uniform(0, 0.5)))),
        segments=(runtime_us // 3,) * 2 if regime is Regime.TIME_SLICED and chance.random() < 0.3 else None,
        kind=Kind.HARD if regime is Regime.GATED else Kind.FIRM,
        gate=regime is Regime.GATED,
    )


def _container(task: RtTask, regime: Regime, chance: Random) -> Container:
    return Container(
        f"c{task.name}",
        task,
        sporadic(chance.randint(0, task.period_us), task.period_us, chance, task.period_us // 2),
        {number: max(1, int(task.runtime_us * chance.uniform(0.6, 1))) for number in range(_JOBS)},
        before_us=chance.randint(0, task.host_us),
        pressure_milli=chance.randint(50, 150) if regime is Regime.MPS else 0,
    )


# ------------------------------------------------------------------------------------------- overruns


def overruns(regime: Regime, number: int, chance: Random, speed: float | None = None) -> Counter[str]:
    """So many overruns that made somebody miss: whether the first miss after each names the container as its cause.

    `speed`: that of the device's clock, which its driver tells.
    """
    counts: Counter[str] = Counter()
    while counts["hurt"] < number:
        sharing, containers = devices(regime, chance)
        if len(containers) < 2:
            continue
        world = World(sharing, [slower(each, speed or 1) for each in containers])
        world.speed = speed
        said = world.advance(WARM_US)
        counts["without_a_fault"] += sum(event.kind in ("missed", "noisy") for event in said)
        for _ in range(8):
            culprit = chance.choice([each for each in containers if each.name != "busy"])
            task = culprit.task
            by_us = int(task.runtime_us * chance.uniform(0.5, 2) + task.deadline_us * chance.uniform(0, 0.7))
            world.device.overrun(culprit.name, by_us)
            said = world.advance(world.device.now_us + APART_US)
            counts.update(_judged([event for event in said if event.kind == "missed"], culprit.name))
            counts["alarms"] += sum(event.kind == "noisy" for event in said)
    return counts


def slower(container: Container, speed: float) -> Container:
    """What runs on a device whose clock is held back: all of its time goes with the clock."""
    took_us = {number: int(us / speed) for number, us in container.runtimes_us.items()}
    return replace(container, runtimes_us=took_us)


def slowed(regime: Regime, number: int, chance: Random, *, told: bool) -> Counter[str]:
    """So many misses on devices whose clock is at a third to two thirds: what is named first, the device or somebody.

    `told`: whether the driver tells of the clock.
    """
    counts: Counter[str] = Counter()
    while counts["misses"] < number:
        sharing, containers = devices(regime, chance)
        if len(containers) < 2:
            continue
        speed = chance.uniform(0.33, 0.67)
        world = World(sharing, [slower(each, speed) for each in containers])
        world.speed = speed if told else None
        world.advance(BEAT_US)
        for event in world.advance(BEAT_US + WARM_US):
            if event.kind == "missed" and event.because:
                first = event.because[0]
                device, nobody = first.cause is CauseKind.THROTTLED, first.container is None
                counts.update(misses=1, device=int(device), accused=int(not nobody), unknown=int(nobody and not device))
    return counts


def _judged(missed: list[DeadlineEvent], culprit: str) -> Counter[str]:
    counts = Counter(injected=1, hurt=int(bool(missed)), misses=len(missed))
    for place, event in enumerate(missed):
        said = answer(event, culprit)
        counts[f"misses_{said}"] += 1
        if place == 0:
            counts[said] += 1
    return counts


def answer(event: DeadlineEvent, culprit: str) -> str:
    """right, wrong or unknown: whether the first cause of a miss is this container's overrun."""
    first = event.because[0] if event.because else None
    if first is None or first.cause is CauseKind.UNKNOWN:
        return "unknown"
    kind = CauseKind.ITSELF if event.container == culprit else CauseKind.OVERRAN
    return "right" if (first.cause, first.container) == (kind, culprit) else "wrong"


# ------------------------------------------------------------------------------------- noisy neighbours


def noisy(number: int, chance: Random, pressure: Callable[[Random], int]) -> Counter[str]:
    """So many neighbours that come to a device used at once, busy for a part of the time or always.

    For each container that was there: whether the neighbour was found, and after how many of its tasks and how long.
    """
    counts: Counter[str] = Counter()
    for _ in range(number):
        residents = list(_quiet(chance))
        world = World(Sharing(Regime.MPS), residents)
        world.advance(WARM_US)
        runtime_us = chance.randint(5_000, 40_000)
        task = RtTask("n", runtime_us, int(runtime_us * chance.uniform(1.2, 3)), HOUR_US, kind=Kind.SOFT)
        always = chance.random() < 0.5
        start_us = world.device.now_us
        releases = None if always else sporadic(start_us, task.period_us, chance, task.period_us)
        world.add(Container("noise", task, releases, pressure_milli=pressure(chance)))
        said = world.advance(start_us + 3 * WITHIN_US)
        for resident in residents:
            counts.update(_found(world, said, resident.name, start_us))
    return counts


def _quiet(chance: Random) -> Iterator[Container]:
    for place in range(chance.randint(1, 3)):
        runtime_us = chance.randint(2_000, 10_000)
        period_us = int(runtime_us * chance.uniform(3, 6))
        task = RtTask(f"c{place}", runtime_us, period_us, 10 * period_us, kind=Kind.FIRM)
        took = {number: int(runtime_us * chance.uniform(0.9, 1)) for number in range(_JOBS)}
        yield Container(task.name, task, sporadic(chance.randint(0, period_us), period_us, chance, period_us), took)


def _found(world: World, said: list[DeadlineEvent], victim: str, start_us: int) -> Counter[str]:
    told = [event for event in said if event.kind == "noisy" and event.container == victim]
    right = [event for event in told if event.because and event.because[0].container == "noise"]
    counts = Counter(pairs=1, alarms=len(told), others=len(told) - len(right))
    if right:
        at_us = right[0].at_us
        ended = [job for job in world.jobs.values() if job.container == victim and job.end_us is not None]
        tasks = sum(start_us < (job.end_us or 0) <= at_us for job in ended)
        in_time = tasks <= WITHIN_TASKS or at_us - start_us <= WITHIN_US
        counts.update(found=1, in_time=int(in_time), tasks=tasks, took_ms=(at_us - start_us) // 1_000)
    return counts


def quiet(regime: Regime, number: int, chance: Random) -> Counter[str]:
    """Devices where everybody keeps to what it declared, for 10 s each: alarms, of how many pairs of neighbours."""
    counts: Counter[str] = Counter()
    for _ in range(number):
        if regime is Regime.MPS:
            sharing, containers = Sharing(regime), list(_quiet(chance))
        else:
            sharing, containers = devices(regime, chance)
        world = World(sharing, containers)
        said = world.advance(10_000_000)
        counts["pairs"] += len(containers) * (len(containers) - 1)
        counts["tasks"] += len(world.jobs)
        counts["alarms"] += sum(event.kind == "noisy" for event in said)
    return counts


# ------------------------------------------------------------------------------------------- the bench


def loud(chance: Random) -> int:
    """By how many thousandths a noisy neighbour slows the others down."""
    return chance.randint(500, 1_500)


def report(counts: Counter[str]) -> None:
    names = [str(regime) for regime in REGIMES]
    ratios = {f"{name}_right": counts[f"{name}_right"] / max(1, counts[f"{name}_hurt"]) for name in names}
    for name in names:
        ratios[f"capped_{name}_right"] = counts[f"capped_{name}_right"] / max(1, counts[f"capped_{name}_hurt"])
        for way in ("told", "not_told"):
            slow = f"slowed_{way}_{name}"
            ratios[f"{slow}_device"] = counts[f"{slow}_device"] / max(1, counts[f"{slow}_misses"])
    ratios["noisy_in_time"] = counts["noisy_in_time"] / max(1, counts["noisy_pairs"])
    pairs = sum(counts[f"quiet_{name}_pairs"] for name in names)
    alarms = sum(counts[f"quiet_{name}_alarms"] for name in names)
    accused = alarms + sum(counts[f"{name}_without_a_fault"] for name in names if name != Regime.MPS)
    ratios["false_alarms_per_pair"] = alarms / max(1, pairs)
    tell(
        "culprit",
        figures=counts,
        ratios={name: round(ratio, 4) for name, ratio in ratios.items()},
        holds={
            "a culprit is named rightly in 95 % of overruns": min(ratios[f"{name}_right"] for name in names) >= TARGET,
            "also on a device whose power is capped": min(ratios[f"capped_{name}_right"] for name in names) >= TARGET,
            "a clock that is told to be held back is named": min(ratios[f"slowed_told_{n}_device"] for n in names)
            >= TARGET,
            "a noisy neighbour is found within 20 tasks or 1 s, in 95 %": ratios["noisy_in_time"] >= TARGET,
            "nobody is accused where nobody does anything": accused == 0,
            "false alarms below 1 in 1,000 pairs and 10 s": ratios["false_alarms_per_pair"] <= 1e-3,
        },
        notes="All simulated, in virtual time; the tracker and the monitor's rules are the real ones. hurt: overruns "
        "after which somebody missed; right, wrong, unknown: what the first miss said; misses_: all misses. Noisy: the "
        "neighbour slows the others by a half to one and a half. Quiet: nobody has any effect but by sharing. On MPS "
        "devices with overruns each slows the others by 5 to 15 %: alarms before the first fault are of these. Capped: "
        "overruns on a device whose clock is at 95 % and says so. Slowed: misses on devices whose clock is at a third "
        "to two thirds, told by the driver or not, and whether the device is named first.",
    )


def measure(number: int, seed: int) -> Counter[str]:
    counts: Counter[str] = Counter()

    def note(name: str, found: Counter[str]) -> None:
        counts.update({f"{name}_{key}": value for key, value in found.items()})
        print(name, dict(found), flush=True)

    for regime in REGIMES:
        note(str(regime), overruns(regime, number, Random(f"{seed} overruns {regime}")))
        note(f"capped_{regime}", overruns(regime, max(1, number // 5), Random(f"{seed} capped {regime}"), CAPPED))
        for told in (True, False):
            found = slowed(regime, number, Random(f"{seed} slowed {regime}"), told=told)
            note(f"slowed_{'told' if told else 'not_told'}_{regime}", found)
        note(f"quiet_{regime}", quiet(regime, max(1, number // 20), Random(f"{seed} quiet {regime}")))
    note("noisy", noisy(max(1, number // 5), Random(f"{seed} noisy"), loud))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overruns", type=int, default=1_000, help="in each regime, that made somebody miss")
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    report(measure(args.overruns, args.seed))


if __name__ == "__main__":
    main()

"""Whether response times stay within the bounds that are learned of them, in simulated devices: ``make bench-predict``.

Each workload runs on; of its first tasks some are learned from, and the tasks after those are what a bound is for.
LAXITY_BENCH_WORKLOADS is how many workloads for each way to share a device, and half as many sets of neighbours that
nobody has seen before.
"""

from __future__ import annotations

import argparse
import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Final

from bench.predict_worlds import WORLDS, Kind, beside, device_of, responses
from bench.report import tell
from shared.admission import Learned, Profile, ResponseTimes, Way

SIZES: Final = (30, 100, 300, 1_000, 10_000)
RATIO: Final = 0.99
COVERED: Final = (0.985, 0.995)
HELD_OUT: Final = 5_000
BLOCKS: Final = 20
"""Of each workload so many times others of its tasks are learned from, where it has enough."""


@dataclass(slots=True)
class Found:
    """What was seen of the bounds that were learned from so many tasks."""

    covered: list[float] = field(default_factory=list)
    """Of the tasks held out, those within the likely bound; one figure per bound."""
    width: list[float] = field(default_factory=list)
    """The likely bound, as a multiple of the quantile of the tasks held out."""
    proven: list[float] = field(default_factory=list)
    proven_width: list[float] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)

    def take(self, likely_us: int | None, proven_us: int | None, held_out: Sequence[int]) -> None:
        """`held_out` in order."""
        quantile_us = held_out[int(RATIO * len(held_out))]
        for name, bound_us, covered, width in (
            ("likely", likely_us, self.covered, self.width),
            ("proven", proven_us, self.proven, self.proven_width),
        ):
            if bound_us is None:
                self.unknown[name] += 1
                continue
            covered.append(bisect_right(held_out, bound_us) / len(held_out))
            width.append(bound_us / quantile_us)

    def figures(self) -> Iterator[tuple[str, float]]:
        if self.covered:
            yield "covered", round(fmean(self.covered), 4)
            yield "width", round(fmean(self.width), 3)
        if self.proven:
            yield "proven_covered", round(fmean(self.proven), 4)
            yield "proven_width", round(fmean(self.proven_width), 3)
            yield "proven_holds", round(fmean([covered >= RATIO for covered in self.proven]), 3)
        total = len(self.covered) + self.unknown["likely"]
        yield "unknown", round(self.unknown["likely"] / total, 3)
        yield "not_proven", round(self.unknown["proven"] / total, 3)


# ----------------------------------------------------------------------------------------- sets seen


def seen(
    workloads: int, seed: int, sizes: Sequence[int] = SIZES, held_out: int = HELD_OUT, ratio: float = RATIO
) -> dict[str, Found]:
    """By the number of tasks learned from, over all worlds; and by world, for the most tasks but one."""
    found: dict[str, Found] = defaultdict(Found)
    for world in WORLDS:
        for number in range(workloads):
            chance = Random(f"{seed} {world} {number}")
            kinds = [Kind.drawn(f"{place}", chance) for place in range(1 + number % 4)]
            times = responses(world, kinds, max(sizes) + held_out, chance)[0]
            learn, test = times[: max(sizes)], sorted(times[max(sizes) : max(sizes) + held_out])
            for size in sizes:
                for start in range(0, min(len(learn), size * BLOCKS) - size + 1, size):
                    held = ResponseTimes()
                    held.add(learn[start : start + size])
                    bounds = held.likely_us(ratio), held.proven_us(ratio)
                    found[f"{size}"].take(*bounds, test)
                    if size == sizes[-2]:
                        found[f"{world}_{size}"].take(*bounds, test)
    return found


# ------------------------------------------------------------------------------------- sets composed

KINDS: Final = 6


def composed(
    sets: int,
    seed: int,
    count: int = 1_000,
    learned_sets: int = 60,
    held_out: int = 2_000,
    worlds: Sequence[str] = WORLDS,
) -> tuple[dict[str, Found], dict[str, float]]:
    """By world: bounds beside sets of neighbours of which none was seen, and how far composing is off in each way."""
    found: dict[str, Found] = defaultdict(Found)
    errors: dict[str, float] = {}
    for world in worlds:
        chance = Random(f"{seed} {world}")
        kinds = [Kind.drawn(f"k{number}", chance) for number in range(KINDS)]
        device, profiles = device_of(world, chance)[0], {kind.name: Profile() for kind in kinds}
        for _ in range(learned_sets):
            _learn(profiles, world, chance.choices(kinds, k=chance.randrange(1, 4)), count, chance)
        learned = Learned()
        for name, profile in profiles.items():
            learned.put(device, name, profile)
        errors |= _errors(world, profiles)
        for kinds_there in _unseen(profiles, kinds, sets, chance):
            bound = learned.bound(device, kinds_there[0].name, beside(kinds_there[1:]), RATIO)
            test = sorted(responses(world, kinds_there, held_out, chance)[0])
            found[world].take(bound and bound.likely_us, bound and bound.proven_us, test)
    return found, errors


def _learn(profiles: dict[str, Profile], world: str, kinds: Sequence[Kind], count: int, chance: Random) -> None:
    for place, times in enumerate(responses(world, kinds, count, chance)):
        others = [*kinds[:place], *kinds[place + 1 :]]
        profiles[kinds[place].name].add(beside(others), times)


def _errors(world: str, profiles: dict[str, Profile]) -> Iterator[tuple[str, float]]:
    for way in Way:
        compared = sum(len(profile.left_out(RATIO, way)) for profile in profiles.values())
        off = sum(profile.error(RATIO, way) for profile in profiles.values())
        yield f"{world}_error_{way}", round(off / max(1, compared), 4)


def _unseen(profiles: dict[str, Profile], kinds: Sequence[Kind], sets: int, chance: Random) -> Iterator[list[Kind]]:
    """Sets of two to four, the first of which has not been seen beside the others."""
    while sets:
        there = chance.choices(kinds, k=chance.randrange(3, 5))
        if beside(there[1:]) not in profiles[there[0].name].times:
            sets -= 1
            yield there


# --------------------------------------------------------------------------------------------- report


def report(workloads: int, seed: int) -> None:
    by_size = seen(workloads, seed)
    by_world, errors = composed(max(1, workloads // 2), seed)
    figures = {f"seen_{size}_{name}": value for size, each in by_size.items() for name, value in each.figures()}
    figures |= {f"composed_{world}_{name}": value for world, each in by_world.items() for name, value in each.figures()}
    low, high = COVERED
    covered = {size: fmean(found.covered) for size, found in by_size.items() if found.covered}
    unseen = [covered for found in by_world.values() for covered in found.covered]
    tell(
        "predict",
        figures=figures | errors,
        ratios={},
        holds={
            **{
                f"after {size} tasks the 99 % bound covers 98.5 to 99.5 %": low <= covered[f"{size}"] <= high
                for size in SIZES
                if f"{size}" in covered
            },
            "too few tasks give no bound": not by_size["30"].covered,
            "beside neighbours never seen it covers at least 98.5 %": low <= fmean(unseen),
        },
        notes=f"All simulated, in virtual time; {workloads} workloads for each of {len(WORLDS)} ways to share a device,"
        f" seed {seed}; nothing was tuned on it. Tasks held out come after those learned from.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=int(os.environ.get("LAXITY_BENCH_WORKLOADS", "40")))
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args()
    report(args.workloads, args.seed)


if __name__ == "__main__":
    main()

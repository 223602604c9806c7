"""How much of a real cluster each strategy can fill, beside what was published: ``make bench-openb``.

Every run goes through the placer's own core. All of it takes long; ARGS chooses, for example
``ARGS="--traces default --seeds 42 43 --policies fgd laxity"``. Percentages do not depend on the machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Final

from bench import report as form
from bench.openb_departures import Waiting, departures
from bench.openb_replay import Replay, replay
from bench.openb_trace import TRACES, Run, in_file_order, published, runs, shuffled

LEVELS: Final = (60, 80, 90, 95, 100, 110, 120, 130)
EXACT: Final = ("fgd", "bestfit", "dotprod", "gpu-packing", "gpu-clustering")
POLICIES: Final = (*EXACT, "random", "laxity")
FRESH: Final = (2001, 2002, 2003)
"""Seeds of own shuffles; the weights of `laxity` were chosen on other ones (docs/placement.md)."""
CLOSE: Final = 0.01
BEST_DEFAULT: Final = 96.2
MOST_COST: Final = 0.1
RATE_PER_S: Final = 5_000


@dataclass(frozen=True)
class Task:
    """`order`: published, fresh (an own shuffle), ties (drawn anew for each arrival), file (the order of the file)."""

    trace: str
    policy: str
    seed: int
    order: str = "published"
    twice: bool = False

    def run(self) -> Run:
        if self.order == "fresh":
            return shuffled(self.trace, self.seed)
        (run,) = runs(self.trace, [self.seed])
        return in_file_order(run) if self.order == "file" else run


@dataclass(frozen=True)
class Found:
    """What a task found; allocation in % of all devices by % of arrived demand."""

    task: Task
    allocation: dict[int, float]
    decisions_per_s: float
    digest: str
    off: float | None = None
    """The largest difference from the published allocation at any listed percent."""
    fragments_off: float | None = None
    again: str = ""
    """The digest of the second run."""


def perform(task: Task) -> Found:
    run = task.run()
    done = replay(run, task.policy, random_ties=task.order == "ties")
    again = replay(run, task.policy).digest if task.twice else ""
    off, fragments_off = (None, None) if task.order != "published" else _off(task, done)
    curve = done.allocation_curve()
    at = {level: curve[min(level, max(curve))] for level in LEVELS}
    return Found(task, at, done.decisions_per_s, done.digest, off, fragments_off, again)


def _off(task: Task, done: Replay) -> tuple[float | None, float | None]:
    allocation = published(task.trace, task.policy, task.seed)
    fragments = published(task.trace, task.policy, task.seed, fragments=True)
    return _most(done.allocation_curve(), allocation), _most(done.fragment_curve(), fragments)


def _most(found: dict[int, float], expected: dict[int, float]) -> float | None:
    return max((abs(found[level] - value) for level, value in expected.items()), default=None)


def tasks(args: argparse.Namespace) -> Iterator[Task]:
    for trace in args.traces:
        seeds = [run.seed for run in runs(trace, args.seeds)]
        for policy in args.policies:
            yield from (Task(trace, policy, seed, twice=seed == seeds[0] and args.twice) for seed in seeds)
    for trace in args.traces if args.fresh else ():
        yield from (Task(trace, policy, seed, "fresh") for policy in ("fgd", "laxity") for seed in args.fresh)
    for order in ("ties", "file") if args.robust else ():
        seeds = [run.seed for run in runs("default", args.seeds)][:3]
        yield from (Task("default", policy, seed, order) for policy in ("fgd", "laxity") for seed in seeds)


@dataclass
class Book:
    """All that was found, to be asked for means."""

    found: list[Found] = field(default_factory=list)

    def of(self, policy: str, trace: str, order: str = "published", seeds: Iterable[int] | None = None) -> list[Found]:
        return [
            one
            for one in self.found
            if (one.task.policy, one.task.trace, one.task.order) == (policy, trace, order)
            and (seeds is None or one.task.seed in seeds)
        ]

    def mean(self, level: int, policy: str, trace: str, order: str = "published") -> float | None:
        values = [one.allocation[level] for one in self.of(policy, trace, order)]
        return fmean(values) if values else None

    def traces(self, policy: str, order: str) -> list[str]:
        return [trace for trace in TRACES if self.of(policy, trace, order)]

    def cost(self, policy: str, order: str) -> float | None:
        """Points of allocation at 130 % that another order costs on `default`, on the same seeds."""
        other = self.of(policy, "default", order)
        usual = self.of(policy, "default", seeds={one.task.seed for one in other})
        if not other or len(usual) != len(other):
            return None
        return fmean(one.allocation[130] for one in usual) - fmean(one.allocation[130] for one in other)


def holds(book: Book) -> dict[str, bool]:
    """The targets of which this run can tell."""
    said: dict[str, bool] = {}
    for policy in EXACT:
        offs = [
            off
            for one in book.found
            if one.task.policy == policy
            for off in (one.off, one.fragments_off)
            if off is not None
        ]
        if offs:
            said[f"{policy}: allocation and fragments as published, within {CLOSE}"] = max(offs) <= CLOSE + 1e-9
    if again := [one for one in book.found if one.again]:
        said["the same placements in two runs"] = all(one.again == one.digest for one in again)
    said |= {f"laxity above fgd, {name}": yes for name, yes in _above(book)}
    if (mean := book.mean(130, "laxity", "default")) is not None:
        said[f"laxity on default at least {BEST_DEFAULT}"] = mean >= BEST_DEFAULT
    for order in ("ties", "file"):
        if (cost := book.cost("laxity", order)) is not None:
            said[f"laxity on default: {order} cost at most {MOST_COST}"] = cost <= MOST_COST
    return said


def _above(book: Book) -> Iterator[tuple[str, bool]]:
    for order in ("published", "fresh"):
        for trace in book.traces("laxity", order):
            for level in (100, 130):
                ours, theirs = book.mean(level, "laxity", trace, order), book.mean(level, "fgd", trace, order)
                if ours is not None and theirs is not None:
                    yield f"{trace}, {order}, {level} %", ours > theirs


def table(book: Book) -> Iterator[str]:
    yield (
        f"{'trace':12} {'order':10} {'strategy':15} {'runs':>4} "
        + " ".join(f"{level:>6}" for level in LEVELS)
        + "   off  frag off  1/s"
    )
    for order in ("published", "fresh", "ties", "file"):
        for trace in TRACES:
            for policy in POLICIES:
                if found := book.of(policy, trace, order):
                    yield _line(trace, order, policy, found)


def _line(trace: str, order: str, policy: str, found: Sequence[Found]) -> str:
    means = " ".join(f"{fmean(one.allocation[level] for one in found):6.2f}" for level in LEVELS)
    rate = median(one.decisions_per_s for one in found)
    offs = _worst(one.off for one in found), _worst(one.fragments_off for one in found)
    return f"{trace:12} {order:10} {policy:15} {len(found):4} {means} {offs[0]:>6} {offs[1]:>6} {rate:6.0f}"


def _worst(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.3f}" if known else "-"


def report(book: Book, waits: Sequence[Waiting]) -> dict[str, object]:
    ratios = {
        f"laxity_over_fgd_{trace}_{order}": round(ours / theirs, 5)
        for order in ("published", "fresh")
        for trace in book.traces("laxity", order)
        if (ours := book.mean(130, "laxity", trace, order)) and (theirs := book.mean(130, "fgd", trace, order))
    }
    figures: dict[str, object] = {
        f"{policy}_{trace}_{order}_{level}": round(mean, 3)
        for order in ("published", "fresh", "ties", "file")
        for policy in POLICIES
        for trace in book.traces(policy, order)
        for level in (100, 130)
        if (mean := book.mean(level, policy, trace, order)) is not None
    }
    for policy in POLICIES:
        if rates := [one.decisions_per_s for one in book.found if one.task.policy == policy]:
            figures[f"{policy}_decisions_per_cpu_s"] = round(median(rates))
    figures["departures"] = [asdict(one) for one in waits]
    return form.found(
        "openb",
        figures,
        ratios,
        holds(book),
        "the placer's own core in virtual time; nodes and requests are those of the openb trace",
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", nargs="+", default=list(TRACES), choices=TRACES)
    parser.add_argument("--seeds", nargs="+", type=int, help="published seeds (all that have an order file)")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--fresh", nargs="*", type=int, default=list(FRESH), help="seeds of own shuffles")
    parser.add_argument("--departures", nargs="*", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--no-robust", dest="robust", action="store_false", help="leave out random ties and file order")
    parser.add_argument("--no-twice", dest="twice", action="store_false", help="run nothing a second time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    return parser.parse_args()


def main() -> None:
    args, book, waits = arguments(), Book(), list[Waiting]()
    with ProcessPoolExecutor(args.jobs) as pool:
        for one in pool.map(perform, tasks(args)):
            book.found.append(one)
            print(_line(one.task.trace, one.task.order, f"{one.task.policy} {one.task.seed}", [one]), flush=True)
        for wait in pool.map(departures, args.departures):
            waits.append(wait)
            print(wait, flush=True)
    print(
        "\nmeans over the runs; off: largest difference from the published figure at any percent",
        *table(book),
        sep="\n",
    )
    said = report(book, waits)
    for name, yes in holds(book).items():
        print(f"{'holds' if yes else 'FAILS'}: {name}")
    form.keep(said)


if __name__ == "__main__":
    main()

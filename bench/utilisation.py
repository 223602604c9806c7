"""The node with the lowest utilisation can be the wrong one: four choosers on simulated devices.

Devices hold residents already: many patient ones that come all at once (crowd) or a single long one at a gate (long),
which leaves much time and no promptness; few (few) or short ones (short), which leave less time and promptness. A
stream of containers arrives. Four choosers place it, all by the placer's own decisions, and time passes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean
from typing import Final

from bench.report import tell
from bench.shared_devices import GATED, TIME_SLICED, Chooser, Kept, Placing, Wanted, node, played, total
from services.placer.core.strategies.binpack import Binpack
from services.placer.core.strategies.deadline import Deadline
from services.placer.core.strategies.spread import Spread
from shared.admission import RtTask, Sharing, Verdict, admit
from shared.messages import NodeFacts

MINUTE_US: Final = 60_000_000
PROMISED: Final = 0.99
"""The part of its tasks that each container wants to be met."""
OURS: Final = Chooser("guarantees", Deadline(), told=True)
CHOOSERS: Final = (
    Chooser("lowest utilisation", Spread(cpu=0, memory=0, gpu=1, name="utilisation")),
    Chooser("bin packing", Binpack()),
    Chooser("spread", Spread(cpu=0, memory=1, gpu=0)),
    OURS,
)
"""What is told no deadlines knows exactly how much of each device's time everybody needs, and never gives out more."""


def task(name: str, runtime_us: int, period_us: int) -> RtTask:
    """Due by the end of its period."""
    return RtTask(name, runtime_us, period_us, period_us, gate=True)


@dataclass(frozen=True, slots=True)
class Place:
    """A kind of node: how its device is shared, and who is on it; `together`: released all at the same times."""

    name: str
    sharing: Sharing
    residents: tuple[RtTask, ...]
    together: bool = False

    @property
    def utilisation(self) -> float:
        return sum(each.runtime_us / each.period_us for each in self.residents)

    def wanted(self, node: str) -> list[Wanted]:
        phase_us = 0 if self.together else None
        return [Wanted(f"{node}/{index}", each, phase_us) for index, each in enumerate(self.residents)]


CROWD: Final = Place("crowd", TIME_SLICED, (task("camera", 15_500, 600_000),) * 14, together=True)
FEW: Final = Place("few", TIME_SLICED, (task("tracker", 11_500, 100_000),) * 4)
LONG: Final = Place("long", GATED, (task("trainer", 200_000, 1_000_000),))
SHORT: Final = Place("short", GATED, (task("lidar", 8_000, 80_000),) * 5)
PLACES: Final = (LONG, CROWD, FEW, SHORT)
"""From the least used to the most used."""
OF_EACH: Final = 3
DETECTOR: Final = task("detector", 6_000, 70_000)
NEWCOMERS: Final = (DETECTOR, task("captioner", 11_500, 250_000), task("digest", 60_000, 1_000_000))


def newcomers(number: int, seed: int) -> list[Wanted]:
    chance = Random(f"newcomers {seed}")
    return [Wanted(f"{each.name}-{index}", each) for index, each in enumerate(chance.choices(NEWCOMERS, k=number))]


def nodes() -> Iterator[tuple[Place, NodeFacts]]:
    for place in PLACES:
        for number in range(OF_EACH):
            yield place, node(f"{place.name}-{number}", place.sharing)


# ------------------------------------------------------------------------------------ one more container


@dataclass(frozen=True, slots=True)
class OneMore:
    """A detector put on one kind of node: what the list says of it, and what came of it."""

    place: Place
    verdict: Verdict
    newcomer: Kept
    residents: Kept


def one_more(place: Place, horizon_us: int, seeds: Sequence[int]) -> OneMore:
    verdict = admit(place.sharing, place.residents, DETECTOR)
    newcomer, residents = Kept(), Kept()
    for seed in seeds:
        held = {"": [*place.wanted(place.name), Wanted("new", DETECTOR)]}
        found = played(held, {"": place.sharing}, horizon_us, seed)
        newcomer += found.pop("new")
        residents += total(found.values())
    return OneMore(place, verdict, newcomer, residents)


# -------------------------------------------------------------------------------------------- a stream


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a stream: who was admitted, all tasks, and how many containers, residents too, had their promise."""

    offered: int
    admitted: int
    kept: Kept
    broken: int


def outcome(chooser: Chooser, offered: int, horizon_us: int, seed: int) -> Outcome:
    placing, sharings = Placing(chooser, [facts for _, facts in nodes()]), dict[str, Sharing]()
    for place, facts in nodes():
        sharings[facts.node] = place.sharing
        for resident in place.wanted(facts.node):
            placing.hold(resident, facts.node)
    admitted = sum(placing.ask(each) for each in newcomers(offered, seed))
    found = played(placing.held, sharings, horizon_us, seed)
    broken = sum(each.ratio < PROMISED for each in found.values())
    return Outcome(offered, admitted, total(found.values()), broken)


# ------------------------------------------------------------------------------------------ the report


@dataclass(frozen=True)
class Found:
    """All of it, for the report and the picture."""

    one_more: list[OneMore]
    outcomes: dict[str, dict[int, list[Outcome]]]
    """By chooser and by how many were offered, one for each seed."""


def measure(horizon_us: int, offered: Sequence[int], seeds: Sequence[int]) -> Found:
    return Found(
        [one_more(place, horizon_us, seeds) for place in PLACES],
        {
            chooser.name: {number: [outcome(chooser, number, horizon_us, seed) for seed in seeds] for number in offered}
            for chooser in CHOOSERS
        },
    )


def report(found: Found) -> None:
    print(f"{'node':<8} utilisation  admitted  misses of a detector there")
    for one in found.one_more:
        admitted = "yes" if one.verdict.admitted else "no"
        print(f"{one.place.name:<8} {one.place.utilisation:<12.0%} {admitted:<9} {1 - one.newcomer.ratio:.1%}")
    print(f"\n{'chooser':<20} offered  admitted  tasks met  containers broken")
    for name, outcomes in found.outcomes.items():
        for number, each in outcomes.items():
            admitted, broken = (mean(values) for values in zip(*((o.admitted, o.broken) for o in each), strict=True))
            print(f"{name:<20} {number:<8} {admitted:<9.1f} {_met(each):<10.3%} {broken:.1f}")
    least, *_ = sorted(found.one_more, key=lambda one: one.place.utilisation)
    ours = [each for outcomes in found.outcomes[OURS.name].values() for each in outcomes]
    tell(
        "utilisation",
        figures=dict(_figures(found)),
        ratios={},
        holds={
            "on the node with the lowest utilisation a detector misses": least.newcomer.missed > 0,
            "the list does not offer it": not least.verdict.admitted,
            "where the list admits it nobody misses": not any(
                one.newcomer.missed + one.residents.missed for one in found.one_more if one.verdict.admitted
            ),
            "placed by guarantees nobody misses": not any(each.kept.missed for each in ours),
            "by utilisation, packing and spreading somebody does": all(
                any(each.broken for each in outcomes[max(outcomes)])
                for name, outcomes in found.outcomes.items()
                if name != OURS.name
            ),
        },
        notes="All simulated. Broken: containers, residents too, that met less than 99 % of their tasks.",
    )


def _met(outcomes: Sequence[Outcome]) -> float:
    return total(each.kept for each in outcomes).ratio


def _figures(found: Found) -> Iterator[tuple[str, float]]:
    for one in found.one_more:
        yield f"{one.place.name}_utilisation", round(one.place.utilisation, 3)
        yield f"{one.place.name}_missed_ratio", round(1 - one.newcomer.ratio, 4)
    for chooser, outcomes in found.outcomes.items():
        for number, each in outcomes.items():
            name = f"{chooser.replace(' ', '_')}_{number}"
            yield f"{name}_admitted", round(mean(o.admitted for o in each), 1)
            yield f"{name}_met_ratio", round(_met(each), 5)
            yield f"{name}_broken", round(mean(o.broken for o in each), 1)


def draw(file: Path, found: Found) -> None:
    """The same file for the same findings; needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "laxity", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        bars, met, broken = figure.subplots(1, 3)
        names = [one.place.name for one in found.one_more]
        bars.bar(names, [100 * one.place.utilisation for one in found.one_more], color="lightgrey", label="utilisation")
        missed = [100 * (1 - one.newcomer.ratio) for one in found.one_more]
        bars.bar(names, missed, width=0.4, color="firebrick", label="misses of a detector put there")
        bars.set_ylabel("%")
        bars.set_ylim(0, 65)
        for name, outcomes in found.outcomes.items():
            offered = list(outcomes)
            width = 2.5 if name == OURS.name else 1.2
            met.plot(offered, [100 * _met(each) for each in outcomes.values()], label=name, linewidth=width)
            counts = [mean(o.broken for o in each) for each in outcomes.values()]
            broken.plot(offered, counts, label=name, linewidth=width)
        met.set_ylabel("tasks that met their deadline, %")
        broken.set_ylabel("containers with less than 99 % met")
        for axes in (met, broken):
            axes.set_xlabel("containers that arrived")
            axes.grid(alpha=0.3)
        for axes in (bars, broken):
            axes.legend(loc="upper left")
        figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=MINUTE_US // 1_000_000)
    parser.add_argument("--offered", type=int, nargs="+", default=[0, 12, 24, 36, 48])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="an SVG file for the picture")
    args = parser.parse_args()
    found = measure(args.seconds * 1_000_000, args.offered, range(args.seeds))
    report(found)
    if args.plot:
        draw(args.plot, found)


if __name__ == "__main__":
    main()

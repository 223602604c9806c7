"""``laxity simulate``: a trace through the placer's own core in virtual time, by one strategy beside the other."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from cli.output import Exit, Output, table
from cli.simulate import NODES_FILE, REQUESTS_FILE
from shared.errors import FieldError

if TYPE_CHECKING:
    from cli.simulate.play import Played
    from cli.simulate.result import Result
    from cli.simulate.trace import Trace
    from shared.messages import NodeFacts

HELP = "play a trace in virtual time and compare strategies"
_COLUMNS: Final = (
    *("strategy", "arrived %", "allocated %", "fragmented %", "waiting %"),
    *("placed", "refused", "expired", "waiting", "had to wait", "decisions/s"),
)


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="requests: a CSV file, or what laxity ledger export wrote")
    parser.add_argument("--nodes", type=Path, help="the cluster, in the same form; an exported folder has its own")
    parser.add_argument("--strategy", default="deadline", metavar="A,B,C", help="one or several (deadline)")
    parser.add_argument("--profiles", metavar="JSON", help="strategies with other parameters, as placers have them")
    parser.add_argument(
        "--arrivals", default="file", metavar="file|shuffle:SEED", help="their order (file: as the trace has it)"
    )
    parser.add_argument(
        "--departures", action="store_true", help="use the trace's times: requests leave, and who waits is tried again"
    )
    parser.add_argument("--stretch", type=float, default=1.0, metavar="X", help="how long all stay, times X (1)")
    parser.add_argument("--seed", type=int, help="equals and the strategy random by this chance; else equals by name")
    parser.add_argument(
        "--foresight", action="store_true", help="strategies know what the whole trace asks for, instead of learning it"
    )
    parser.add_argument("--placements", action="store_true", help="also where each request went")
    drawn = "allocation and fragmentation over arrived demand, .png or .svg (needs laxity[plots])"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=drawn)
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="who is on which device at the end")


def run(args: Namespace, output: Output) -> Exit:
    from cli.simulate.result import body_of, result

    _check(args)
    trace, nodes = _read(args)
    played = [_play(args, trace, nodes, strategy) for strategy in args.strategy.split(",")]
    results = [result(each, over_time=args.departures) for each in played]
    if args.plot:
        from cli.simulate.plot import plot

        plot(args.plot, trace.name, results)
    if args.picture:
        from cli.simulate.picture import picture

        args.picture.write_text(picture(played), encoding="utf-8")
    body: dict[str, Any] = {"trace": trace.name, "nodes": len(nodes), "results": [body_of(each) for each in results]}
    if args.placements:
        body["placements"] = _placements(played)
    output.result(body, lambda console: _show(console, args, played, results))
    return Exit.OK


def _check(args: Namespace) -> None:
    """What would otherwise be found out only after the work."""
    if args.plot:
        from cli.simulate.plot import check

        check(args.plot)
    if args.picture and args.picture.suffix != ".svg":
        raise FieldError("--picture", args.picture.name, "a name that ends with .svg")
    if not args.stretch > 0:
        raise FieldError("--stretch", args.stretch, "above 0")


def _read(args: Namespace) -> tuple[Trace, list[NodeFacts]]:
    from cli.simulate.recorded import arrivals_of_records, nodes_of_records
    from cli.simulate.trace import Trace, arrivals_of_csv, nodes_of_csv

    folder = args.trace.is_dir()
    requests = args.trace / REQUESTS_FILE if folder else args.trace
    nodes = args.nodes or (args.trace / NODES_FILE if folder else None)
    if nodes is None:
        raise FieldError("--nodes", None, "the file with the cluster's nodes")
    arrivals = arrivals_of_csv(requests) if requests.suffix == ".csv" else arrivals_of_records(requests)
    return Trace(args.trace.name, arrivals), nodes_of_csv(nodes) if nodes.suffix == ".csv" else nodes_of_records(nodes)


def _play(args: Namespace, trace: Trace, nodes: list[NodeFacts], strategy: str) -> Played:
    from cli.simulate.play import Play
    from cli.simulate.schedule import Plan
    from cli.simulate.world import World
    from services.placer.core.strategies.profiles import with_profiles

    arrivals = Plan(_shuffle(args.arrivals), args.departures, args.stretch).of(trace)
    tie = "" if args.seed is None else str(args.seed)
    strategies = with_profiles(_profiles(args.profiles))
    world = World(nodes, strategy, trace.workload, foresight=args.foresight, tie=tie, strategies=strategies)
    return Play(world, arrivals).through()


def _profiles(text: str | None) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(profile, dict) for profile in found.values()):
        raise FieldError("--profiles", text, 'an object such as {"tight": {"strategy": "binpack", "gpu": 10}}')
    return found


def _shuffle(text: str) -> int | None:
    word, _, seed = text.partition(":")
    if text == "file":
        return None
    if word != "shuffle" or not seed.isdecimal():
        raise FieldError("--arrivals", text, "file, or shuffle:SEED with a whole number")
    return int(seed)


def _placements(played: list[Played]) -> list[dict[str, str]]:
    """A line for each request in order of arrival: its name, and by strategy where it went."""
    from cli.simulate.result import where

    return [
        {"request": arrival.name, **{each.world.strategy: where(each, each.fates[number]) for each in played}}
        for number, arrival in enumerate(played[0].arrivals)
    ]


# --- for people ---


def _show(console: Console, args: Namespace, played: list[Played], results: list[Result]) -> None:
    when = "means over the time of arrivals" if args.departures else "after the last arrival"
    console.print(table(f"{args.trace.name}, {when}", _COLUMNS, map(_row, results)))
    if args.placements:
        console.print()
        lines = _placements(played)
        console.print(table("", ("request", *(each.strategy for each in results)), [tuple(x.values()) for x in lines]))


def _row(found: Result) -> tuple[object, ...]:
    percent = (found.arrived, found.allocated, found.fragmented, found.waiting_demand)
    counts = (found.placed, found.refused, found.expired, found.waiting, found.had_to_wait, found.decisions_per_s)
    return (found.strategy, *(None if value is None else f"{value:.2f}" for value in percent), *counts)

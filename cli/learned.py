"""``laxity learned``: what is known of response times, and having it forgotten; and the numbers behind a standing."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

from cli import client as clients
from cli.client import Client
from cli.output import CommandError, Exit, Output, clock_time
from shared.admission import NEVER_US, Bound, DeviceType, Learned, Profile
from shared.effects import CommitOutcome, Write
from shared.messages import DeviceFacts, LearnedProfile, Realtime, Reservation
from shared.subjects import LEARNED
from shared.units import format_ratio, format_us

HELP = "list what was learned of response times, or have it forgotten"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("word", nargs="?", choices=("list", "forget"), default="list")
    parser.add_argument("profile", nargs="?", help="only this one")
    parser.add_argument("--model", help="only on devices of this model")


def run(args: Namespace, output: Output) -> Exit:
    found = asyncio.run(_forget(args) if args.word == "forget" else _list(args))
    if args.word == "forget":
        output.result({"forgotten": len(found)}, lambda console: console.print(f"{len(found)} profiles forgotten"))
    else:
        output.result({"profiles": [each.model_dump(mode="json") for each in found]}, lambda c: c.print(_table(found)))
    return Exit.OK


async def _list(args: Namespace) -> list[LearnedProfile]:
    async with clients.of(args) as client:
        return [message for _, message, _ in _chosen(args, await keys(client))]


async def _forget(args: Namespace) -> list[LearnedProfile]:
    """What is added to a profile meanwhile is deleted with it: the last word is the operator's."""
    async with clients.of(args) as client:
        chosen = list(_chosen(args, await keys(client)))
        for key, _, revision in chosen:
            done = await client.bus.commit(LEARNED, [Write(key, None, revision)])
            if done.outcome != CommitOutcome.WRITTEN:
                raise CommandError(f"{key} changed meanwhile, or cannot be written: {done.detail}", Exit.REFUSED)
    return [message for _, message, _ in chosen]


Key = tuple[str, LearnedProfile, int]


def _chosen(args: Namespace, found: Iterable[Key]) -> Iterator[Key]:
    for key, message, revision in found:
        if args.profile in (None, message.profile) and args.model in (None, message.model):
            yield key, message, revision


async def keys(client: Client) -> list[Key]:
    """All profiles with their keys and revisions, in the order of the keys."""
    found = sorted((await client.read_bucket(LEARNED)).items())
    return [(k, LearnedProfile.trusted(v), revision) for k, (v, revision) in found if k.startswith("profile.")]


async def all_learned(client: Client) -> Learned:
    learned = Learned()
    for _, message, _ in await keys(client):
        learned.hear(message)
    return learned


def _table(found: Sequence[LearnedProfile]) -> Table:
    table = Table("profile", "device", "beside", "tasks", "99 % likely", "99 % proven", "learned")
    for message in found:
        for beside, times in Profile.of(message).times.items():
            bounds = [_time(each) for each in (times.likely_us(0.99), times.proven_us(0.99))]
            where = f"{message.model}, {message.regime}"
            others = ", ".join(beside) or "nobody"
            table.add_row(message.profile, where, others, f"{len(times)}", *bounds, clock_time(message.at_us))
    return table


def _time(time_us: int | None) -> str:
    return "never" if time_us is not None and time_us >= NEVER_US else format_us(time_us)


# ----------------------------------------------------------------------------- the numbers behind a standing


def numbers(learned: Learned, device: DeviceFacts, held: Sequence[Reservation]) -> Iterator[str]:
    """Of each container on a device that has a profile: its bounds beside the others, and its deadline."""
    for resident in held:
        others = [_profile(other) for other in held if other is not resident]
        timing, known = resident.realtime, [other for other in others if other]
        if timing is None or timing.profile is None:
            continue
        which, beside = f"{resident.request_id}/{resident.replica}", tuple(sorted(known))
        if len(known) < len(others):
            yield f"{which} ({timing.profile}): nothing is learned of some of its neighbours"
            continue
        bound = learned.bound(DeviceType(device.model, device.regime), timing.profile, beside, timing.guarantee)
        yield f"{which} ({timing.profile}) beside {', '.join(beside) or 'nobody'}: {_bounds(bound, timing)}"


def _profile(resident: Reservation) -> str | None:
    return resident.realtime.profile if resident.realtime else None


def _bounds(bound: Bound | None, timing: Realtime) -> str:
    deadline = f"deadline {format_us(timing.deadline_us)}"
    if bound is None:
        return f"unknown, too little was seen; {deadline}"
    how = "composed of other neighbours" if bound.composed else f"{bound.samples} tasks seen"
    share = format_ratio(timing.guarantee)
    return f"{share} take at most {_time(bound.likely_us)}, proven {_time(bound.proven_us)} ({how}); {deadline}"

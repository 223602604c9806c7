"""``laxity nodes``: the ordered list of devices of one deadline class, best first."""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser, Namespace

from rich.console import Console
from rich.text import Text

from cli import client as clients
from cli.output import Exit, Output, table
from shared.messages import DeviceStanding, ListedDevice, NodesQuery, NodesReply
from shared.units import format_us

HELP = "show what each device can still promise, best first"
STYLES = {
    DeviceStanding.GUARANTEED: "green",
    DeviceStanding.TIGHT: "yellow",
    DeviceStanding.FULL: "blue",
    DeviceStanding.AT_RISK: "red",
    DeviceStanding.EXCLUDED: "dim",
}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--class", dest="deadline_class", help="deadline class (the first in the settings)")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--after", help="the page behind this one, as the last page named it")
    parser.add_argument("--model", action="append", help="only devices of these models")
    parser.add_argument("--group", help="only devices of this group")
    parser.add_argument("--standing", action="append", choices=[str(s) for s in DeviceStanding], help="only these")


def query(args: Namespace) -> NodesQuery:
    """Built from text, so that a wrong value is told as a field of the message."""
    fields = {"class": args.deadline_class, "limit": args.limit, "after": args.after, "standing": args.standing}
    fields |= {"models": args.model, "group": args.group}
    said = {name: value for name, value in fields.items() if value is not None}
    return NodesQuery.from_json(json.dumps(said).encode())


def run(args: Namespace, output: Output) -> Exit:
    reply = asyncio.run(_ask(args))
    output.result(reply, lambda console: show(console, reply))
    return Exit.OK


async def _ask(args: Namespace) -> NodesReply:
    async with clients.of(args) as client:
        return await client.ask(client.subjects.nodes, query(args), NodesReply)


def show(console: Console, reply: NodesReply) -> None:
    title = f"class {reply.deadline_class}, revision {reply.revision} of its list"
    columns = ("#", "node", "device", "standing", "slack", "age", "why")
    console.print(table(title, columns, (row(place, device) for place, device in enumerate(reply.devices, 1))))
    if reply.counts is not None:
        console.print(Text(", ").join(Text(f"{n} {each}", style=STYLES[each]) for each, n in reply.counts.items()))
    if reply.after:
        console.print(f"more: --after {reply.after}")


def row(place: int, device: ListedDevice) -> tuple[object, ...]:
    marks = [word for word, on in (("unproven", device.unproven), ("closed", device.closed)) if on]
    said = f"{device.standing} ({', '.join(marks)})" if marks else device.standing
    standing = Text(said, style="dim" if device.closed else STYLES[device.standing])
    slack = "none" if device.slack_us is None else format_us(device.slack_us)
    why = "; ".join(each for each in (device.closed, device.reason) if each)
    return (place, device.node, device.uuid, standing, slack, format_us(device.age_us), why)

"""``laxity defragment``: has a few containers moved so that a waiting request fits, or only says which would be."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace

from rich.console import Console
from rich.text import Text

from cli import client as clients
from cli import place
from cli.client import Client
from cli.output import CommandError, Exit, Output
from cli.place import dry_run, move_line, why
from shared.messages import DefragmentRequest, PlaceReply, RequestRecord, State
from shared.subjects import LEDGER, request_key

HELP = "have others moved so that a waiting request fits"
_WAITING = frozenset({State.QUEUED, State.WAITING})


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("request_id")
    parser.add_argument("--dry-run", action="store_true", help="only say which moves that would take")


def run(args: Namespace, output: Output) -> Exit:
    reply = asyncio.run(_ask(args))
    output.result(reply, lambda console: show(console, reply))
    if reply.outcome == "error":
        return Exit.USAGE
    return Exit.REFUSED if reply.outcome == "unknown" or (reply.reasons and not reply.moves) else Exit.OK


async def _ask(args: Namespace) -> PlaceReply:
    async with clients.of(args) as client:
        if args.dry_run:
            return (await plan(client, args.request_id)).model_copy(update={"request_id": args.request_id})
        return await client.ask(client.subjects.defragment, DefragmentRequest(request_id=args.request_id), PlaceReply)


async def plan(client: Client, request_id: str) -> PlaceReply:
    """The dry run of what of the request waits; its reply names the moves."""
    record = await client.read_key(LEDGER, request_key(request_id), RequestRecord)
    if record is None or record.body is None:
        raise CommandError(f"the ledger has no request {request_id}", Exit.REFUSED)
    if record.state not in _WAITING:
        raise CommandError(f"{request_id} is {record.state}: it waits for no room", Exit.REFUSED)
    waiting = sum(each.state in _WAITING for each in record.replicas)
    size = dict(record.size) if record.size else {}
    return await dry_run(client, record.body.model_copy(update={"replicas": waiting} | size))


def show(console: Console, reply: PlaceReply) -> None:
    """The moves in their order, or why there are none."""
    if reply.moves:
        fits = "would fit after" if reply.dry_run else "will be tried again after"
        console.print(f"{reply.request_id} {fits} {len(reply.moves)} move(s):")
        for number, move in enumerate(reply.moves, 1):
            console.print(Text(f"  {number}. {move_line(move)}"))
    elif reply.error or reply.outcome == "unknown":
        place.show(console, reply)
    elif reply.reasons:
        console.print(f"{reply.request_id}: no plan was found")
        for line in why(reply):
            console.print(Text(f"  {line}"))
    else:
        console.print(f"{reply.request_id}: {', '.join(reply.warnings) or 'fits without a move'}")

"""``laxity defragment``: which containers would have to move so that a waiting request fits; nothing is moved."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace

from rich.console import Console
from rich.text import Text

from cli import client as clients
from cli.client import Client
from cli.output import CommandError, Exit, Output
from cli.place import dry_run, move_line, why
from shared.messages import PlaceReply, RequestRecord, State
from shared.subjects import LEDGER, request_key

HELP = "plan moves of others that let a waiting request fit"
_WAITING = frozenset({State.QUEUED, State.WAITING})


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("request_id")
    parser.add_argument(
        "--dry-run", action="store_true", required=True, help="only plan: nothing carries moves out yet"
    )


def run(args: Namespace, output: Output) -> Exit:
    reply = asyncio.run(_planned(args))
    output.result(reply, lambda console: show(console, reply))
    return Exit.OK if reply.moves or reply.placements else Exit.REFUSED


async def _planned(args: Namespace) -> PlaceReply:
    async with clients.of(args) as client:
        reply = await plan(client, args.request_id)
    return reply.model_copy(update={"request_id": args.request_id})


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
    if reply.placements:
        console.print(f"{reply.request_id} fits without a move")
    elif reply.moves:
        console.print(f"{reply.request_id} would fit after {len(reply.moves)} move(s):")
        for number, move in enumerate(reply.moves, 1):
            console.print(Text(f"  {number}. {move_line(move)}"))
    else:
        console.print(f"{reply.request_id}: no plan was found")
        for line in why(reply):
            console.print(Text(f"  {line}"))

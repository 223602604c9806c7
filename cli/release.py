"""``laxity release``: ends a request, whatever state it is in, and waits until nothing of it runs."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace

from cli import client as clients
from cli.client import Client
from cli.output import CommandError, Exit, Output
from cli.place import show
from shared.messages import PlaceReply, ReleaseRequest
from shared.units import duration_us

HELP = "end a request and wait until nothing of it runs"
POLL_S = 0.2


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("request_id")
    parser.add_argument("--wait", default="10s", metavar="DURATION", help="until it has stopped (10s)")


def run(args: Namespace, output: Output) -> Exit:
    reply = asyncio.run(_release(args))
    output.result(reply, lambda console: show(console, reply))
    if reply.outcome == "error":
        return Exit.USAGE
    if reply.outcome == "stopping":
        return Exit.UNDECIDED
    return Exit.REFUSED if reply.outcome == "unknown" else Exit.OK


async def _release(args: Namespace) -> PlaceReply:
    async with clients.of(args) as client:
        until_us = client.clock.now_us() + duration_us(args.wait)
        while True:
            reply = await ask(client, args.request_id)
            if reply.outcome != "stopping" or client.clock.now_us() >= until_us:
                return reply
            await asyncio.sleep(POLL_S)


async def ask(client: Client, request_id: str) -> PlaceReply:
    """The state that follows; repeated within its time-out, since a repeat is harmless."""
    request = ReleaseRequest(request_id=request_id)
    for _ in range(2):
        try:
            return await client.ask(client.subjects.release, request, PlaceReply)
        except CommandError as error:
            if error.code != Exit.NO_ANSWER or not await client.listens("placer"):
                raise
    return await client.ask(client.subjects.release, request, PlaceReply)

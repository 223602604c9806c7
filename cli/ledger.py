"""``laxity ledger``: what only an operator may say about a ledger that was lost, restored or rewound."""

from __future__ import annotations

import asyncio
import secrets
from argparse import ArgumentParser, Namespace

from cli import client as clients
from cli import release
from cli.client import Client
from cli.output import CommandError, Exit, Output
from shared.effects import CommitOutcome, Write
from shared.messages import LedgerIdentity, PlaceReply, RequestRecord
from shared.subjects import LEDGER, request_key

HELP = "accept a ledger that was restored, or forget what no ledger explains"
IDENTITY = "ledger"


def arguments(parser: ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", required=True, metavar="accept|forget")
    accept = words.add_parser("accept", help="go on with the ledger as it is, former ledger ids being our own")
    accept.add_argument("former", nargs="*", metavar="LEDGER_ID", help="as the alarm or a container's labels name it")
    forget = words.add_parser("forget", help="remove the containers of a request that the ledger does not know")
    forget.add_argument("request_id")


def run(args: Namespace, output: Output) -> Exit:
    work = _accept if args.word == "accept" else _forget
    return asyncio.run(work(args, output))


async def _accept(args: Namespace, output: Output) -> Exit:
    async with clients.of(args) as client:
        identity = await accept(client, args.former)
    former = ", ".join(identity.former) or "none"
    output.result(
        identity, lambda console: console.print(f"ledger {identity.ledger_id} accepted, former ids: {former}")
    )
    return Exit.OK


async def accept(client: Client, former: list[str]) -> LedgerIdentity:
    """Write the identity anew, which ends the placers' alarm; made up where there is none any more."""
    found = await client.bus.get(LEDGER, IDENTITY)
    now = LedgerIdentity.trusted(found[0]) if found else None
    if now is None:
        now = LedgerIdentity(ledger_id=secrets.token_hex(8), former=(), created_at_us=client.clock.wall_us())
    known = tuple(dict.fromkeys([*now.former, *(name for name in former if name != now.ledger_id)]))
    made = LedgerIdentity(ledger_id=now.ledger_id, former=known, created_at_us=now.created_at_us)
    done = await client.bus.commit(LEDGER, [Write(IDENTITY, made.to_json(), found[1] if found else 0)])
    if done.outcome != CommitOutcome.WRITTEN:
        raise CommandError(f"the ledger changed meanwhile, or cannot be written: {done.detail}", Exit.REFUSED)
    return made


async def _forget(args: Namespace, output: Output) -> Exit:
    async with clients.of(args) as client:
        if await client.read_key(LEDGER, request_key(args.request_id), RequestRecord):
            raise CommandError(f"the ledger knows {args.request_id}: use laxity release", Exit.USAGE)
        reply = await release.ask(client, args.request_id)
    output.result(reply, lambda console: console.print(_told(reply)))
    return Exit.USAGE if reply.outcome == "error" else Exit.OK


def _told(reply: PlaceReply) -> str:
    return f"{reply.request_id} is written as released: containers of it that are found will be removed"

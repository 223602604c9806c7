"""``laxity ledger``: saves it, and what only an operator may say about one that was lost, restored or rewound."""

from __future__ import annotations

import asyncio
import json
import secrets
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cli import client as clients
from cli import place, release
from cli.client import Client
from cli.output import CommandError, Exit, Output
from cli.simulate import NODES_FILE, REQUESTS_FILE
from shared.bus.snapshot import CHUNK_BYTES
from shared.effects import CommitOutcome, Write
from shared.errors import BusError
from shared.messages import GoneRequest, LedgerIdentity, PlaceReply, RequestRecord
from shared.subjects import LEDGER, NODES, request_key

HELP = "back up, restore and export the ledger, accept one that was lost, or say what is gone for good"
IDENTITY = "ledger"
DESCRIBED, PACKED = "backup.json", "stream.tar.s2"
"""The files of a backup, as `nats stream backup` names them too; the first is written last."""
EXPORTED = {REQUESTS_FILE: (LEDGER, "request."), NODES_FILE: (NODES, "node.")}
"""The files of an export, each the values of some keys of a bucket, one a line."""


def arguments(parser: ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", required=True, metavar="backup|restore|export|accept|forget|gone")
    backup = words.add_parser("backup", help="write the ledger as it is now into a new folder, at any time")
    backup.add_argument("folder", type=Path)
    restore = words.add_parser("restore", help="make the ledger of a backup; stop all placers before")
    restore.add_argument("folder", type=Path)
    restore.add_argument(
        "--replace", action="store_true", help="in place of the one that is there, which goes to FOLDER.replaced"
    )
    export = words.add_parser("export", help="write its requests and the nodes, as laxity simulate reads them")
    export.add_argument("folder", type=Path)
    accept = words.add_parser("accept", help="go on with the ledger as it is, former ledger ids being our own")
    accept.add_argument("former", nargs="*", metavar="LEDGER_ID", help="as the alarm or a container's labels name it")
    forget = words.add_parser("forget", help="remove the containers of a request that the ledger does not know")
    forget.add_argument("request_id")
    gone = words.add_parser("gone", help="give back all that is reserved on a node that will not come back")
    gone.add_argument("node")


def run(args: Namespace, output: Output) -> Exit:
    work = {"backup": _backup, "restore": _restore, "export": _export, "accept": _accept}
    return (work | {"forget": _forget, "gone": _gone})[args.word](args, output)


def _backup(args: Namespace, output: Output) -> Exit:
    count = _save(args, args.folder)
    output.result(
        {"folder": str(args.folder), "keys": count}, lambda console: console.print(f"{count} keys in {args.folder}")
    )
    return Exit.OK


def _save(args: Namespace, folder: Path) -> int:
    """Write a backup into a new folder; how many keys it has."""
    _make(folder)

    async def fetch() -> dict[str, Any]:
        async with clients.of(args) as client:
            with _told_plainly():
                return await client.bus.backup(LEDGER, packed.write)

    with (folder / PACKED).open("wb") as packed:
        made = asyncio.run(fetch())
    (folder / DESCRIBED).write_text(json.dumps(made, indent=2) + "\n")
    return int(made["state"]["messages"])


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True)  # requests carry what people put into their environment
    except OSError as error:
        raise CommandError(f"{folder}: {error.strerror}, allowed: a folder that can be made", Exit.USAGE) from None


def _export(args: Namespace, output: Output) -> Exit:
    _make(args.folder)
    counts = dict.fromkeys(EXPORTED, 0)
    for name, values in asyncio.run(_values(args)).items():
        (args.folder / name).write_bytes(b"".join(value + b"\n" for value in values))
        counts[name] = len(values)
    said = " and ".join(f"{count} lines in {args.folder / name}" for name, count in counts.items())
    output.result({"folder": str(args.folder), "lines": counts}, lambda console: console.print(said))
    return Exit.OK


async def _values(args: Namespace) -> dict[str, list[bytes]]:
    """What each file of an export gets, in the order of the keys."""
    async with clients.of(args) as client:
        found = {name: await client.read_bucket(bucket) for name, (bucket, _) in EXPORTED.items()}
    return {
        name: [value for key, (value, _) in sorted(found[name].items()) if key.startswith(prefix)]
        for name, (_, prefix) in EXPORTED.items()
    }


def _restore(args: Namespace, output: Output) -> Exit:
    folder: Path = args.folder
    try:
        made = json.loads((folder / DESCRIBED).read_bytes())
        packed = (folder / PACKED).open("rb")
    except (OSError, ValueError):
        found = f"{folder}: found no whole backup, allowed: a folder with {DESCRIBED} and {PACKED}"
        raise CommandError(found, Exit.USAGE) from None

    async def send() -> None:
        async with clients.of(args) as client:
            chunks = iter(partial(packed.read, CHUNK_BYTES), b"")
            with _told_plainly():
                await client.bus.restore(LEDGER, made, chunks, replace=args.replace)

    with packed:
        asyncio.run(_nobody_decides(args))
        if args.replace:
            _save(args, folder.with_name(f"{folder.name}.replaced"))
        asyncio.run(send())
    count = made["state"]["messages"]
    output.result({"keys": count}, lambda console: console.print(f"{count} keys restored; start the placers"))
    return Exit.OK


async def _nobody_decides(args: Namespace) -> None:
    async with clients.of(args) as client:
        if await client.listens("placer"):
            raise CommandError("a placer runs: stop all placers, restore, and start them again", Exit.REFUSED)


@contextmanager
def _told_plainly() -> Iterator[None]:
    """What the server refuses, as the command's own end."""
    try:
        yield
    except BusError as error:
        hint = "; --replace puts it in place of the one that is there" if "in use" in str(error) else ""
        raise CommandError(f"{error}{hint}", Exit.REFUSED) from None


def _accept(args: Namespace, output: Output) -> Exit:
    identity = asyncio.run(_written(args))
    former = ", ".join(identity.former) or "none"
    output.result(
        identity, lambda console: console.print(f"ledger {identity.ledger_id} accepted, former ids: {former}")
    )
    return Exit.OK


async def _written(args: Namespace) -> LedgerIdentity:
    async with clients.of(args) as client:
        return await accept(client, args.former)


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


def _forget(args: Namespace, output: Output) -> Exit:
    reply = asyncio.run(_forgotten(args))
    output.result(reply, lambda console: console.print(_told(reply)))
    return Exit.USAGE if reply.outcome == "error" else Exit.OK


async def _forgotten(args: Namespace) -> PlaceReply:
    async with clients.of(args) as client:
        if await client.read_key(LEDGER, request_key(args.request_id), RequestRecord):
            raise CommandError(f"the ledger knows {args.request_id}: use laxity release", Exit.USAGE)
        return await release.ask(client, args.request_id)


def _told(reply: PlaceReply) -> str:
    return f"{reply.request_id} is written as released: containers of it that are found will be removed"


def _gone(args: Namespace, output: Output) -> Exit:
    reply = asyncio.run(_asked(args, GoneRequest(node=args.node)))
    lines = place.why(reply) if reply.error else [f"{args.node}: {reply.freed} reservation(s) given back"]
    output.result(reply, lambda console: console.print("\n".join(lines), markup=False))
    return Exit.USAGE if reply.outcome == "error" else Exit.OK


async def _asked(args: Namespace, request: GoneRequest) -> PlaceReply:
    async with clients.of(args) as client:
        return await client.ask(client.subjects.gone, request, PlaceReply)

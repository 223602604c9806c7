"""``laxity place``: sends the request of a file, waits for its decision, and prints where it went and why."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli import client as clients
from cli import request_file
from cli.client import Client
from cli.output import Exit, Output, table
from services.placer.core.records import said
from shared.bus import Msg, NoResponders
from shared.clock import SystemClock
from shared.errors import FieldError, OutcomeUnknownError, RefusedError
from shared.messages import PULLING, FieldFault, PlaceEvent, PlaceReply, PlaceRequest, PlannedMove, Size
from shared.subjects import PLACE_STREAM
from shared.units import UnitError, duration_us

HELP = "place the request in a file, wait for the decision, print it and why"

REPEAT_US = 2_000_000
"""How long one try waits for its answer: a repeat with the same id is always safe."""
LOOK_AGAIN_US = 5_000_000
"""How often a waiting request is asked after although no event said that it moved."""
_WAITING = frozenset({"accepted", "queued", PULLING})
_REFUSED = frozenset({"rejected", "failed", "expired"})


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("-f", "--file", type=Path, required=True, help="YAML file with one request")
    parser.add_argument("--wait", default="10s", metavar="DURATION", help="for a decision, such as 30s or 0s (10s)")
    parser.add_argument("--strategy", metavar="NAME", help="a strategy or a profile, instead of the one in the file")
    parser.add_argument("--dry-run", action="store_true", help="say what would happen and change nothing")
    parser.add_argument("--compare", metavar="A,B,C", help="with --dry-run: by these strategies, side by side")


def run(args: Namespace, output: Output) -> Exit:
    try:
        wait_us = duration_us(args.wait)
    except UnitError as error:
        raise FieldError("--wait", error.found, error.allowed) from None
    try:
        request = request_file.read(args.file, SystemClock().wall_us())
    except FieldError as error:
        raise FieldError(f"{args.file}: {error.field}", error.found, error.allowed) from None
    if args.strategy:
        request = request.model_copy(update={"strategy": args.strategy})
    if args.compare is not None:
        return asyncio.run(_compare(args, output, request))
    if args.dry_run:
        request = request.model_copy(update={"dry_run": True})
    return asyncio.run(_place(args, output, request, wait_us))


async def _place(args: Namespace, output: Output, request: PlaceRequest, wait_us: int) -> Exit:
    async with clients.of(args) as client:
        reply = await decide(client, request, wait_us, output.note)
    if reply is None:
        reply = PlaceReply(outcome="undecided", request_id=request.request_id)
    output.result(reply, lambda console: show(console, reply))
    return code_of(reply)


async def _compare(args: Namespace, output: Output, request: PlaceRequest) -> Exit:
    """One dry run for each strategy: each is decided like any other, on what is there at its moment."""
    if not args.dry_run:
        raise FieldError("--compare", args.compare, "only with --dry-run: a request is placed by one strategy")
    names = list(dict.fromkeys(args.compare.split(",")))
    async with clients.of(args) as client:
        replies = {name: await dry_run(client, request.model_copy(update={"strategy": name})) for name in names}
    output.result({"compare": replies}, lambda console: console.print(compared(replies)))
    return max(code_of(reply) for reply in replies.values())


async def dry_run(client: Client, request: PlaceRequest) -> PlaceReply:
    """What would come of it now. It goes without its id: one that is known would be answered with its state."""
    asked = request.model_copy(update={"request_id": None, "dry_run": True})
    return await client.ask(client.subjects.place, asked, PlaceReply)


def code_of(reply: PlaceReply) -> Exit:
    if reply.outcome in {"queued", "undecided"}:
        return Exit.OK if reply.dry_run else Exit.UNDECIDED
    if reply.outcome == "error":
        return Exit.USAGE
    return Exit.REFUSED if reply.outcome in _REFUSED else Exit.OK


async def decide(client: Client, request: PlaceRequest, wait_us: int, note: Callable[[str], None]) -> PlaceReply | None:
    """The decision, or the last answer within ``wait_us``; None where nobody answered."""
    assert request.request_id is not None
    moved = asyncio.Event()

    async def hear(msg: Msg) -> None:
        event = PlaceEvent.trusted(msg.body)
        if event.state == PULLING:
            note(f"{event.state}: {event.detail}")
        if event.state not in _WAITING:
            moved.set()

    listening = await client.bus.subscribe(client.subjects.place_event(request.request_id), hear)
    try:
        return await _until_decided(client, request, wait_us, moved, note)
    finally:
        await listening.stop()


async def _until_decided(
    client: Client, request: PlaceRequest, wait_us: int, moved: asyncio.Event, note: Callable[[str], None]
) -> PlaceReply | None:
    until_us = client.clock.now_us() + wait_us
    first: PlaceReply | None = None
    stored = False
    while True:
        moved.clear()
        if await client.listens("placer"):
            reply = await ask(client, request)
            if reply is not None:
                duplicate = first.duplicate if first else reply.duplicate
                first = reply.model_copy(update={"duplicate": duplicate})
                if reply.outcome != "queued" or reply.dry_run:
                    return first
        elif not stored:
            stored = await _store(client, request, note)
        left_us = until_us - client.clock.now_us()
        if left_us <= 0:
            return first
        await _within(min(left_us, LOOK_AGAIN_US), moved)


async def ask(client: Client, request: PlaceRequest) -> PlaceReply | None:
    """One try; None where no answer came in time."""
    try:
        answer = await client.bus.request(client.subjects.place, request.to_json(), REPEAT_US)
    except OutcomeUnknownError:
        return None
    return None if isinstance(answer, NoResponders) else reply_in(answer, request.request_id)


def reply_in(answer: Msg, request_id: str | None) -> PlaceReply:
    """The reply; an error that came in headers alone is made one."""
    if answer.body:
        return PlaceReply.trusted(answer.body)
    text = answer.headers.get("Nats-Service-Error", "an empty answer")
    fault = FieldFault(field="(body)", found=text, allowed="a request")
    return PlaceReply(outcome="error", request_id=request_id, error=fault)


async def _store(client: Client, request: PlaceRequest, note: Callable[[str], None]) -> bool:
    """Leave it for a placer that comes later; True where a stream keeps it."""
    try:
        there = await client.stream_info(PLACE_STREAM) is not None
    except RefusedError:  # a mere client may not look: where there are permissions, there are streams
        there = True
    if not there:
        note("no placer runs, and no stream keeps requests yet: waiting for one")
        return False
    await client.bus.publish(client.subjects.place, request.to_json())
    note(f"no placer runs: {request.request_id} is stored and will be decided when one comes, within an hour")
    return True


async def _within(wait_us: int, event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(wait_us / 1_000_000):
            await event.wait()
    except TimeoutError:
        pass


# --- for people ---

_STYLES = {
    "resized": "green",
    "resizing": "yellow",
    "placed": "green",
    "started": "green",
    "held": "green",
    "queued": "yellow",
    "undecided": "yellow",
}


def show(console: Console, reply: PlaceReply) -> None:
    """The decision and why."""
    style = _STYLES.get(reply.outcome, "red")
    head = Text(reply.outcome, style=f"bold {style}").append(f" {reply.request_id or ''}", style="bold")
    marks = [("dry run", reply.dry_run), ("duplicate", reply.duplicate), ("unproven", reply.unproven)]
    told = [word for word, on in marks if on]
    told += [f"place {reply.position}"] if reply.position is not None else []
    told += [f"exit code {reply.exit_code}"] if reply.exit_code is not None else []
    told += [reply.end_reason] if reply.end_reason else []
    console.print(head.append(f" ({', '.join(told)})" if told else "", style="not bold"))
    if reply.placements:
        console.print(table("", ("replica", "node", "devices", "share", "generation"), _placements(reply)))
    for line in (*([reply.measured] if reply.measured else []), *why(reply)):
        console.print(Text(f"  {line}"))


def _placements(reply: PlaceReply) -> list[tuple[object, ...]]:
    return [
        (p.replica, p.node, ", ".join(p.devices) or "none", "none" if p.share is None else p.share, p.generation)
        for p in reply.placements
    ]


def move_line(move: PlannedMove) -> str:
    """`lora/0 from node-1 (GPU-a) to node-2 (GPU-b)`."""
    devices, to = (", ".join(each) or "no device" for each in (move.from_devices, move.devices))
    return f"{move.request_id}/{move.replica} from {move.from_node} ({devices}) to {move.node} ({to})"


def compared(replies: Mapping[str, PlaceReply]) -> Table:
    """A line for each strategy: what it would do, how it judges that, and how many more would fit before."""
    columns = ("strategy", "outcome", "where", "score", "next best", "fits more", "moves", "why")
    return table("", columns, ((name, *_compared(reply)) for name, reply in replies.items()))


def _compared(reply: PlaceReply) -> Iterator[object]:
    yield reply.outcome
    yield "; ".join(f"{p.node} {', '.join(p.devices)}".strip() for p in reply.placements) or "none"
    yield f"{reply.score.total:.2f}" if reply.score else "none"
    yield f"{reply.runner_up.node} {reply.runner_up.total:.2f}" if reply.runner_up else "none"
    yield reply.fits_more
    yield len(reply.moves)
    fault = f"{reply.error.field}: {reply.error.allowed}" if reply.error else ""
    yield reply.reasons[0].message if reply.reasons else fault


def why(reply: PlaceReply) -> list[str]:
    """Everything that explains the decision, a line each."""
    lines = []
    if reply.error:
        lines.append(f"{reply.error.field}: found {reply.error.found}, allowed: {reply.error.allowed}")
    if reply.score:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in reply.score.by.items())
        lines.append(f"score {reply.score.total:.2f}" + (f" ({parts})" if parts else ""))
    if reply.runner_up:
        lines.append(f"next best was {reply.runner_up.node} with {reply.runner_up.total:.2f}")
    if reply.cpu_milli is not None and reply.memory_mib is not None:
        lines.append(f"each replica: {said(Size(cpu_milli=reply.cpu_milli, memory_mib=reply.memory_mib))}")
    lines += [f"{reason.count} x {reason.code}: {reason.message}" for reason in reply.reasons]
    lines += [f"would fit if {change}" for change in reply.would_fit_if]
    if reply.fits_more is not None:
        lines.append(f"{reply.fits_more} more such requests would fit")
    if reply.fits_by_size is not None:
        sizes = ", ".join(f"{number} of {size}" for size, number in reply.fits_by_size.items())
        lines.append(f"of whole devices would fit: {sizes}")
    lines += [f"would fit after move {number}: {move_line(each)}" for number, each in enumerate(reply.moves, 1)]
    return lines + [f"warning: {text}" for text in reply.warnings]

"""``laxity resize``: gives a request another size while it runs, and waits until it has it or was refused it."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from cli import client as clients
from cli.client import Client
from cli.output import Exit, Output
from cli.place import show
from shared.bus import Msg
from shared.errors import FieldError
from shared.messages import PlaceEvent, PlaceReply, Reason, ResizeRequest
from shared.units import UnitError, cpu_milli, duration_us, memory_mib

HELP = "give a request more or less CPU and memory while it runs"
LOOK_AGAIN_US = 1_000_000
"""How often it is asked again although no event said that it ended: the same size again changes nothing."""
_CODES = {"resized": Exit.OK, "resizing": Exit.UNDECIDED, "error": Exit.USAGE}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("request_id")
    parser.add_argument("--cpu", metavar="QUANTITY", help="of each replica, such as 1500m or 2; absent: as it is")
    parser.add_argument("--memory", metavar="QUANTITY", help="of each replica, such as 2Gi; absent: as it is")
    parser.add_argument("--wait", default="10s", metavar="DURATION", help="until it has its new size (10s)")


def run(args: Namespace, output: Output) -> Exit:
    sizes = {
        "cpu_milli": _read("--cpu", args.cpu, cpu_milli),
        "memory_mib": _read("--memory", args.memory, memory_mib),
    }
    if not any(sizes.values()):
        raise FieldError("--cpu", args.cpu or "nothing", "more than 0, or --memory, or both")
    request = ResizeRequest(request_id=args.request_id, **sizes)
    reply = asyncio.run(_resize(args, request, _read("--wait", args.wait, duration_us) or 0))
    output.result(reply, lambda console: show(console, reply))
    return _CODES.get(reply.outcome, Exit.REFUSED)


def _read(option: str, text: str | None, convert: Callable[[str], int]) -> int | None:
    try:
        return None if text is None else convert(text)
    except UnitError as error:
        raise FieldError(option, error.found, error.allowed) from None


async def _resize(args: Namespace, request: ResizeRequest, wait_us: int) -> PlaceReply:
    """An engine's refusal is told by an event alone: who asks again asks for another try."""
    heard: asyncio.Queue[PlaceEvent] = asyncio.Queue()

    async def hear(msg: Msg) -> None:
        heard.put_nowait(PlaceEvent.trusted(msg.body))

    async with clients.of(args) as client:
        listening = await client.bus.subscribe(client.subjects.place_event(request.request_id), hear)
        try:
            return await _until_ended(client, request, client.clock.now_us() + wait_us, heard)
        finally:
            await listening.stop()


async def _until_ended(
    client: Client, request: ResizeRequest, until_us: int, heard: asyncio.Queue[PlaceEvent]
) -> PlaceReply:
    while True:
        reply = await client.ask(client.subjects.resize, request, PlaceReply)
        left_us = until_us - client.clock.now_us()
        if reply.outcome != "resizing" or left_us <= 0:
            return reply
        refused = await _refusal(heard, min(left_us, LOOK_AGAIN_US))
        if refused is not None:
            reason = Reason(code="failed.resize", count=1, message=refused.detail or "")
            return reply.model_copy(update={"outcome": refused.state, "reasons": (reason,)})


async def _refusal(heard: asyncio.Queue[PlaceEvent], wait_us: int) -> PlaceEvent | None:
    """None where it may have ended well, or after a time without news."""
    try:
        async with asyncio.timeout(wait_us / 1_000_000):
            while True:
                event = await heard.get()
                if event.state == "resize_failed":
                    return event
                if event.state != "resizing":
                    return None
    except TimeoutError:
        return None

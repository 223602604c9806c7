"""``laxity top``: a live picture of nodes, devices, containers, the time that tasks have left and misses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Final

from rich.live import Live

from cli import client as clients
from cli.client import Client
from cli.output import CommandError, Exit, Output
from cli.top.frame import KEYS, SORTS, Wish, picture, rows
from cli.top.seen import Seen
from shared.bus import Msg
from shared.effects import KeyChanged, WatchEvent, WatchReplayed
from shared.messages import NodeMetrics, TaskBatch
from shared.streams import bucket_stream
from shared.subjects import DEADLINES, NODES

HELP = "watch nodes, devices, containers, laxity and misses, what needs attention first"
EVERY_S: Final = 0.5
FIRST_S: Final = 3.0
"""How long one frame waits for a heartbeat of each node."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print one frame and end, as where no terminal shows it")
    parser.add_argument("--sort", choices=SORTS, default=SORTS[0], help="order of the containers")
    parser.add_argument("--only", default="", metavar="TEXT", help="lines with this in a name")
    parser.add_argument("--trouble", action="store_true", help="only what needs attention")


def run(args: Namespace, output: Output) -> Exit:
    wish = Wish(args.sort, args.trouble, args.only)
    once = args.once or output.machine or not sys.stdout.isatty()
    return asyncio.run(_top(args, output, wish, once=once))


async def _top(args: Namespace, output: Output, wish: Wish, *, once: bool) -> Exit:
    async with clients.of(args) as client:
        if await client.stream_info(bucket_stream(NODES, client.subjects.prefix)) is None:
            raise CommandError(f"no node-list has written at {client.url}", Exit.NO_ANSWER)
        seen = Seen()
        async with _hearing(client, seen) as replayed:
            if once:
                await _first(seen, replayed)
                now_us = client.clock.now_us()
                output.result(
                    rows(seen, wish, now_us),
                    lambda console: console.print(picture(seen, wish, now_us, console.width, None, client.url)),
                )
            else:
                await _live(client, output, seen, wish)
    return Exit.OK


@contextlib.asynccontextmanager
async def _hearing(client: Client, seen: Seen) -> AsyncIterator[asyncio.Event]:
    """While it lasts ``seen`` follows the bus; the event tells that both buckets were read once."""
    left, replayed = {NODES, DEADLINES}, asyncio.Event()

    async def key(event: WatchEvent) -> None:
        if isinstance(event, KeyChanged):
            seen.key(event)
        elif isinstance(event, WatchReplayed):
            left.discard(event.bucket)
            if not left:
                replayed.set()

    async def heartbeat(msg: Msg) -> None:
        seen.heartbeat(NodeMetrics.trusted(msg.body), client.clock.now_us())

    async def tasks(msg: Msg) -> None:
        seen.tasks(TaskBatch.trusted(msg.body), client.clock.now_us())

    await client.bus.subscribe(f"{client.subjects.prefix}.metrics.*", heartbeat)
    await client.bus.subscribe(f"{client.subjects.prefix}.events.task.*", tasks)
    watching = [asyncio.create_task(client.bus.watch(bucket, key)) for bucket in (NODES, DEADLINES)]
    try:
        yield replayed
    finally:
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def _first(seen: Seen, replayed: asyncio.Event) -> None:
    """Until everything was there once, or as long as that takes at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_S):
            await replayed.wait()
            while seen.facts.keys() - seen.heard_us.keys():  # noqa: ASYNC110  # it is heard by several
                await asyncio.sleep(0.05)


async def _live(client: Client, output: Output, seen: Seen, wish: Wish) -> None:
    pressed = asyncio.Event()
    keys: list[str] = []

    def press(key: str) -> None:
        keys.append(key)
        pressed.set()

    console = output.people
    with _keys(press), Live(console=console, screen=True, auto_refresh=False) as live:
        while "q" not in keys:
            for key in keys:
                wish = after(wish, key)
            keys.clear()
            pressed.clear()
            now_us, up = client.clock.now_us(), client.bus.connection.is_up
            seen.away_us = None if up else seen.away_us or now_us
            about = f"{client.url}  {KEYS}" if console.width >= len(client.url) + len(KEYS) + 60 else KEYS
            live.update(picture(seen, wish, now_us, console.width, console.height, about), refresh=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await pressed.wait()


def after(wish: Wish, key: str) -> Wish:
    """What a key makes of it."""
    if key == "s":
        return replace(wish, sort=SORTS[(SORTS.index(wish.sort) + 1) % len(SORTS)])
    return replace(wish, trouble=not wish.trouble) if key == "t" else wish


@contextlib.contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Each key as it is pressed; none where nobody types."""
    if not sys.stdin.isatty():
        yield
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def read() -> None:
        for key in os.read(descriptor, 64).decode(errors="ignore"):
            press(key)

    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

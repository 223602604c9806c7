"""What a person sees while the demo runs: a live picture on a terminal, lines of progress everywhere else."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Protocol

from rich.console import Console, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cli import nodes
from cli.client import Client
from cli.demo.recorder import Recorder
from cli.demo.script import listed
from cli.output import table
from shared.deadlines import Standing
from shared.messages import ContainerRecord, ListedDevice
from shared.units import format_us

REFRESH_S = 0.5
LISTED = 11
TAIL = 14
_STANDINGS = {Standing.GOOD: "green", Standing.AT_RISK: "bold red", Standing.UNKNOWN: "yellow"}
_SELDOM = frozenset({"place", "node", "bus"})
"""Kinds of events of which each gets a line where no live picture shows them."""


class View(Protocol):
    def say(self, text: str) -> None:
        """The next act, or what came of one."""
        ...


class Lines:
    """Progress as lines; misses are many and only counted."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def told(self, line: Text, kind: str) -> None:
        if kind in _SELDOM or "at_risk" in line.plain or "recovered" in line.plain:
            self._console.print(Text("    ").append(line), soft_wrap=True)


class Picture:
    """The list, the containers and the last events, drawn again twice a second."""

    def __init__(self, console: Console, recorder: Recorder) -> None:
        self._live = Live(console=console, auto_refresh=False, screen=False)
        self._recorder = recorder
        self._acts: list[str] = []
        self._listed: list[ListedDevice] = []

    def say(self, text: str) -> None:
        self._acts.append(text)

    async def draw(self, client: Client) -> None:
        with self._live:
            while True:
                self._listed = await listed(client)
                self._live.update(self._picture(), refresh=True)
                await asyncio.sleep(REFRESH_S)

    def _picture(self) -> RenderableType:
        layout = Layout(size=LISTED + TAIL + 6)
        layout.split_column(Layout(name="above", size=LISTED + 3), Layout(name="below"))
        layout["above"].split_row(
            Layout(Panel(_list(self._listed), title="node list, best first")),
            Layout(Panel(_containers(self._recorder), title="containers")),
        )
        acts = Text("\n".join(self._acts[-TAIL:]), overflow="ellipsis", no_wrap=True)
        last = Text("\n", overflow="ellipsis", no_wrap=True).join([*self._recorder.lines][-TAIL:])
        layout["below"].split_row(Layout(Panel(acts, title="what is asked for")), Layout(Panel(last, title="events")))
        return layout


def _list(devices: list[ListedDevice]) -> Table:
    rows = [
        (place, each.node, f"…{each.uuid[-5:]}", Text(each.standing, style=nodes.STYLES[each.standing]), _slack(each))
        for place, each in enumerate(devices[:LISTED], 1)
    ]
    return table("", ("#", "node", "device", "standing", "slack"), rows)


def _slack(device: ListedDevice) -> str:
    return "" if device.slack_us is None else format_us(device.slack_us // 1000 * 1000)


def _containers(recorder: Recorder) -> Table:
    rows = [_container(name, each) for name, each in sorted(recorder.records.items())]
    return table("", ("request", "met", "missed", "ratio of guarantee"), rows)


def _container(name: str, record: ContainerRecord) -> tuple[object, ...]:
    ratio = "unknown" if record.ratio is None else f"{100 * record.ratio:.0f}"
    told = Text(f"{ratio} of {100 * record.guarantee:.0f} % ").append(
        record.standing, style=_STANDINGS[record.standing]
    )
    return (name, record.met, record.missed, told)


@contextlib.asynccontextmanager
async def watching(console: Console, client: Client, recorder: Recorder) -> AsyncIterator[View]:
    """The picture where somebody looks, lines where a log is written."""
    if not console.is_terminal or os.environ.get("CI"):
        lines = Lines(console)
        recorder.told = lines.told
        yield lines
        return
    picture = Picture(console, recorder)
    drawing = asyncio.create_task(picture.draw(client))
    try:
        yield picture
    finally:
        drawing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await drawing

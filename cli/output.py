"""What every command prints and how it ends: results on stdout, notes on stderr, exit codes; no command lives here."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.errors import LaxityError
from shared.messages import Message

PIPE_WIDTH = 160
"""Columns of tables that no terminal shows."""


class Exit(IntEnum):
    """Exit codes of ``laxity``; docs/cli.md explains each to those who write scripts."""

    OK = 0
    """Done: placed, started, held, released, shown."""
    REFUSED = 1
    """Decided against: rejected, failed, expired, unknown; or a check of the demo did not hold."""
    USAGE = 2
    """The command line, a file or a field of a request is wrong."""
    UNDECIDED = 3
    """Queued or stored, and not decided within the time given with --wait."""
    NO_ANSWER = 4
    """No server, or no service that answers."""


class CommandError(LaxityError):
    """Ends a command with a text on stderr and an exit code."""

    def __init__(self, text: str, code: Exit) -> None:
        self.code = code
        super().__init__(text)


class Output:
    """Tables for people or, with ``machine``, JSON: one object, or one a line where there are many."""

    def __init__(self, *, machine: bool) -> None:
        self.machine = machine
        self.people = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)

    def result(self, body: Message | Mapping[str, Any], show: Callable[[Console], None]) -> None:
        """The outcome of a command: ``body`` for machines, ``show`` draws it for people."""
        if self.machine:
            sys.stdout.write(as_json(body) + "\n")
            sys.stdout.flush()
        else:
            show(self.people)

    def note(self, text: str) -> None:
        """What a person should know and a script need not."""
        self._notes.print(Text(text, style="dim"))

    def error(self, text: str) -> None:
        self._notes.print(Text("laxity: ", style="red").append(text))


def as_json(body: Message | Mapping[str, Any]) -> str:
    if isinstance(body, Message):
        return body.to_json().decode()
    return json.dumps(body, ensure_ascii=False, default=_plain)


def _plain(value: object) -> Any:
    if isinstance(value, Message):
        return json.loads(value.to_json())
    raise TypeError(f"{type(value).__name__} is not JSON")


UNBROKEN = frozenset({"node", "device", "devices", "standing", "instance"})
"""Columns of names, which people copy."""


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """A plain table; None is shown as unknown, never as zero."""
    made = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column in UNBROKEN)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(shown(cell)) for cell in row))
    return made


def shown(value: object) -> str:
    return "unknown" if value is None else str(value)


def clock_time(at_us: int) -> str:
    """A wall-clock time of today's kind: 14:03:07.123, local."""
    at = datetime.datetime.fromtimestamp(at_us / 1_000_000, datetime.UTC).astimezone()
    return at.strftime("%H:%M:%S.%f")[:-3]

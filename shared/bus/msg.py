"""What a connection hands over: messages, the answer of nobody, and what happens to the link; nothing here is sent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Self, TypeVar

from shared.errors import BusError

Found = TypeVar("Found")

NOBODY = "503"
"""The status of an answer that says that nobody listens."""
_STATUS = "Status"  # under these two names the client files the inline status of a message
_DESCRIPTION = "Description"
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""Of a header."""
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class Headers(Mapping[str, str]):
    """Of a message, as they came or are to be sent; read when somebody asks: of most messages nobody does."""

    __slots__ = ("_found", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._found: dict[str, str] | None = None

    @classmethod
    def of(cls, lines: str) -> Self:
        """To be sent: ``name: value`` and CRLF for each, in which nothing needs the client's care."""
        return cls(f"NATS/1.0\r\n{lines}\r\n".encode())

    def _read(self) -> dict[str, str]:
        if self._found is None:
            self._found = _parsed(self.raw)
        return self._found

    def __getitem__(self, name: str) -> str:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def _parsed(raw: bytes) -> dict[str, str]:
    """``NATS/1.0``, behind it the inline status and its description if there is one, then a header a line."""
    first, *rest = raw.decode("utf-8", "replace").split("\r\n")
    found = dict[str, str]()
    status, _, description = first.partition(" ")[2].strip().partition(" ")
    if status.isdigit():
        found[_STATUS] = status
    if description:
        found[_DESCRIPTION] = description
    lines = (line.partition(":") for line in rest)
    return found | {name.strip(): value.strip() for name, colon, value in lines if colon}


def written(headers: Mapping[str, str] | None) -> bytes | None:
    """Headers as they are sent, nothing for none; None where a name or a value needs the client's care."""
    if isinstance(headers, Headers):
        return headers.raw
    if not headers:
        return b""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    plain = all(map(_NAME.fullmatch, headers)) and lines.count("\r") == len(headers) == lines.count("\n")
    return Headers.of(lines).raw if plain else None


class Msg(NamedTuple):
    """A message as it came. ``status`` is the server's own inline status (``100``, ``409`` …), "" for all others."""

    subject: str
    body: bytes
    reply: str = ""
    headers: Mapping[str, str] = NO_HEADERS

    @property
    def status(self) -> str:
        return self.headers.get(_STATUS, "") if not self.body else ""

    @property
    def description(self) -> str:
        return self.headers.get(_DESCRIPTION, "")


@dataclass(frozen=True, slots=True)
class NoResponders:
    """Nobody listens on the subject of a request: said by the server at once."""

    subject: str


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """What happened to the connection: lost, back (after ``gap_us``), closed for good, or trouble on a subject."""

    kind: Literal["lost", "back", "closed", "slow_consumer", "handler_failed", "error"]
    detail: str = ""
    gap_us: int = 0


def ends(answer: asyncio.Future[Found]) -> Callable[[Found | BusError], None]:
    """What ends the future with an answer or an error, unless it has ended already."""

    def end(found: Found | BusError) -> None:
        if answer.done():
            return
        if isinstance(found, BusError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    return end

"""Subjects and key-value keys of the bus, and the encoding of their variable tokens; no I/O lives here.

Every variable token (node, container, request id) is encoded, so that no name can add a token, a wildcard or a
reply subject: each byte of its UTF-8 outside ``[A-Za-z0-9_-]`` becomes ``=XX`` in upper-case hex. The body of a
message keeps the original.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.errors import FieldError

MAX_NAME_BYTES = 253
"""Longest original of a token, in bytes of its UTF-8 (a DNS name's limit: longer names cannot be host or pod names)."""

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_PLAIN_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_BYTES}}}")
"""Most names: they are their own tokens."""
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")

EVENTS_STREAM = "RT_EVENTS"
PLACE_STREAM = "RT_PLACE"
LEARNED = "rt_learned"
LEDGER = "rt_ledger"
NODES = "rt_nodes"
DEADLINES = "rt_deadlines"
LISTS_KEY = "lists"
"""Key of rt_nodes: how far the lists of all classes have come."""


def encode(name: str, field: str = "name") -> str:
    """The token that stands for ``name`` in a subject or key; raises FieldError naming ``field``."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError:
        raise FieldError(field, name, "text that can be written as UTF-8") from None
    if not 0 < len(raw) <= MAX_NAME_BYTES:
        raise FieldError(field, f"{len(raw)} bytes", f"1 to {MAX_NAME_BYTES} bytes of UTF-8")
    return "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in raw)


def decode(token: str) -> str:
    """The name behind a token; raises FieldError when the token is not the encoding of any name."""
    if _PLAIN_NAME.fullmatch(token):
        return token
    if not _TOKEN.fullmatch(token):
        raise FieldError("token", token, "letters, digits, '_', '-' and =XX")
    raw = _ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), token.encode())
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise FieldError("token", token, "UTF-8 behind its =XX") from None
    if encode(name, "token") != token:
        raise FieldError("token", token, "the shortest encoding: plain characters are not escaped")
    return name


_NO_TOKENS = {"", "*", ">"}
"""Nothing is sent to a subject that has one of them."""


@dataclass(frozen=True)
class Subjects:
    """All subjects under one prefix, so that several clusters can share a server."""

    prefix: str = "rt"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.prefix):
            raise FieldError("prefix", self.prefix, "letters, digits, '_' and '-'")

    @property
    def place(self) -> str:
        return f"{self.prefix}.place"

    @property
    def confirm(self) -> str:
        return f"{self.prefix}.confirm"

    @property
    def release(self) -> str:
        return f"{self.prefix}.release"

    @property
    def resize(self) -> str:
        return f"{self.prefix}.resize"

    @property
    def defragment(self) -> str:
        return f"{self.prefix}.defragment"

    @property
    def gone(self) -> str:
        return f"{self.prefix}.gone"

    @property
    def nodes(self) -> str:
        return f"{self.prefix}.nodes"

    @property
    def pods(self) -> str:
        return f"{self.prefix}.pods"

    @property
    def events(self) -> str:
        return f"{self.prefix}.events.>"

    def place_event(self, request_id: str) -> str:
        return f"{self.prefix}.events.place.{encode(request_id, 'request_id')}"

    def task_events(self, node: str) -> str:
        return f"{self.prefix}.events.task.{encode(node, 'node')}"

    def deadline_event(self, node: str, container: str) -> str:
        return f"{self.prefix}.events.deadline.{encode(node, 'node')}.{encode(container, 'container')}"

    def node_event(self, node: str) -> str:
        return f"{self.prefix}.events.node.{encode(node, 'node')}"

    def list_event(self, deadline_class: str) -> str:
        return f"{self.prefix}.events.list.{encode(deadline_class, 'class')}"

    def bus_event(self, service: str) -> str:
        return f"{self.prefix}.events.bus.{encode(service, 'service')}"

    def metrics(self, node: str) -> str:
        return f"{self.prefix}.metrics.{encode(node, 'node')}"

    def kube_facts(self, node: str) -> str:
        return f"{self.metrics(node)}.kube"

    def reply_refused(self, reply: str) -> bool:
        """True for a reply subject that could forge a message of ours or of the server, or reach many at once."""
        tokens = reply.split(".")
        return tokens[0] == self.prefix or reply.startswith("$") or not _NO_TOKENS.isdisjoint(tokens)


def node_key(node: str) -> str:
    """Key of a node's reservations in the ledger, and of its facts in rt_nodes."""
    return f"node.{encode(node, 'node')}"


def request_key(request_id: str) -> str:
    """Key of a request's record in the ledger."""
    return f"request.{encode(request_id, 'request_id')}"


def profile_key(profile: str, model: str, regime: str) -> str:
    """Key of what was learned of a profile on one type of device, in rt_learned."""
    return f"profile.{encode(profile, 'profile')}.{encode(model, 'model')}.{encode(regime, 'regime')}"


def lease_key(holder: str) -> str:
    """Key of a lease: ``leader``, or a placer's own name."""
    return f"lease.{encode(holder, 'lease')}"

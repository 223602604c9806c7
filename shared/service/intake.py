"""From the bus into the inbox: subscriptions of the table, decoding, and what happens to what cannot be decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from shared.bus import Bus, Listening, Msg, StoredMsg
from shared.clock import Clock
from shared.effects import KeyChanged, Received, Unread, WatchEvent, WatchReplayed
from shared.errors import FieldError
from shared.log import Logger
from shared.messages import MAX_BODY_BYTES, Message
from shared.service.discovery import Discovery, Endpoint
from shared.service.inbox import Inbox
from shared.service.table import Listen
from shared.subjects import MAX_NAME_BYTES

BAD_REQUEST = 400
TOO_LARGE = 413


class Shell(Protocol):
    """What the intake needs of the runtime."""

    bus: Bus
    clock: Clock
    log: Logger
    inbox: Inbox
    discovery: Discovery

    def count(self, name: str, n: int = 1) -> None: ...

    async def answer(self, to: str, body: bytes, error: tuple[int, str] | None) -> None: ...


class Intake:
    """One Listen of the table at work."""

    def __init__(self, shell: Shell, listen: Listen, wanted: Callable[[str], bool] | None = None) -> None:
        self._shell = shell
        self._listen = listen
        self._wanted = wanted
        self._subject = f"{shell.bus.subjects.prefix}.{listen.subject}"

    async def subscribe(self) -> Listening:
        """For requests and core messages."""
        bus, queue = self._shell.bus, self._listen.queue or ""
        if self._listen.kind == "request":
            return await bus.subscribe(self._subject, self._on_request, queue, self._request_at_once)
        return await bus.subscribe(self._subject, self._on_core, queue)

    async def follow(self, start_seq: int) -> None:
        await self._shell.bus.follow(_needed(self._listen.stream), self._subject, start_seq, self._on_stored)

    async def pull(self) -> None:
        await self._shell.bus.pull(
            _needed(self._listen.stream), _needed(self._listen.durable), self._on_work, self._work_at_once
        )

    async def watch(self, replayed: Callable[[], None]) -> None:
        inbox = self._shell.inbox

        async def on_event(event: WatchEvent) -> None:
            if isinstance(event, KeyChanged):
                await inbox.put(event)
                return
            inbox.post(event)  # never waits: a key that is read meanwhile would come before it
            if isinstance(event, WatchReplayed):
                replayed()

        await self._shell.bus.watch(self._listen.subject, on_event, self._listen.keys, inbox.offer)

    # --- requests ---

    def _request_at_once(self, msg: Msg) -> bool:
        """Where it is read: one that is right while there is room. All others are the handler's."""
        if not self._shell.inbox.has_room or self._shell.bus.subjects.reply_refused(msg.reply):
            return False
        message = self._read(msg.body)
        self._began(msg.reply)
        return self._shell.inbox.offer(self._received(msg, message, msg.reply))

    async def _on_request(self, msg: Msg) -> None:
        shell, reply = self._shell, msg.reply
        if reply and shell.bus.subjects.reply_refused(reply):
            shell.count("reply_refused")
            reply = ""
        endpoint = self._began(reply)
        try:
            message = self._read(msg.body)
        except FieldError as fault:
            await self._refuse(msg, reply, endpoint, fault)
            return
        await shell.inbox.put(self._received(msg, message, reply))

    def _began(self, reply: str) -> Endpoint:
        endpoint = self._shell.discovery.endpoints[self._listen.subject]
        self._shell.discovery.began(endpoint, reply, self._shell.clock.now_us())
        return endpoint

    async def _refuse(self, msg: Msg, reply: str, endpoint: Endpoint, fault: FieldError) -> None:
        shell = self._shell
        shell.count(f"malformed.{self._listen.subject}")
        shell.log.info("malformed request", subject=msg.subject, fault=str(fault))
        if not reply:
            endpoint.failed(str(fault))
            return
        too_large = len(msg.body) > MAX_BODY_BYTES
        body = b""
        if self._listen.fault is not None:
            body = self._listen.fault(fault, None if too_large else request_id_of(msg.body)).to_json()
        await shell.answer(reply, body, (TOO_LARGE if too_large else BAD_REQUEST, str(fault)))

    # --- what nobody waits for ---

    async def _on_core(self, msg: Msg) -> None:
        if self._wanted is not None and not self._wanted(msg.subject):
            return
        if self._listen.unread:
            await self._shell.inbox.put(Unread(msg.subject, msg.body))
            return
        message = self._decoded(msg.subject, msg.body)
        if message is not None:
            await self._shell.inbox.put(self._received(msg, message, ""))

    async def _on_stored(self, stored: StoredMsg) -> None:
        if self._wanted is not None and not self._wanted(stored.subject):
            return
        message = self._decoded(stored.subject, stored.body)
        if message is not None:
            await self._shell.inbox.put(self._stored(stored, message, 0))

    def _work_at_once(self, stored: StoredMsg) -> bool:
        if not self._shell.inbox.has_room:
            return False
        message = self._read(stored.body)
        return self._shell.inbox.offer(self._stored(stored, message, self._shell.bus.ack_token(stored)))

    async def _on_work(self, stored: StoredMsg) -> None:
        token = self._shell.bus.ack_token(stored)
        message = self._decoded(stored.subject, stored.body)
        if message is None:
            await self._shell.bus.ack(token)  # it would only come again
            return
        await self._shell.inbox.put(self._stored(stored, message, token))

    def _decoded(self, subject: str, body: bytes) -> Message | None:
        """None for what is malformed: counted, logged, skipped."""
        try:
            return self._read(body)
        except FieldError as fault:
            self._shell.count(f"malformed.{self._listen.subject}")
            self._shell.log.info("malformed message skipped", subject=subject, fault=str(fault))
            return None

    def _read(self, body: bytes) -> Message:
        """Raises FieldError."""
        model = self._listen.model
        assert model is not None, f"{self._listen.subject}: needs a model"
        # a stream may hold large batches of our own; the server's limit bounds them
        return model.trusted(body) if self._listen.kind == "stream" else model.from_json(body)

    def _received(self, msg: Msg, message: Message, reply: str) -> Received:
        return Received(
            subject=msg.subject,
            message=message,
            reply=reply,
            wall_us=self._shell.clock.wall_us(),
            raw=msg.body,
            headers=msg.headers,
        )

    def _stored(self, stored: StoredMsg, message: Message, token: int) -> Received:
        return Received(
            stored.subject,
            message,
            "",
            stored.seq,
            self._shell.clock.wall_us(),
            stored.body,
            stored.headers,
            token,
            stored.delivered > 1,
            stored.at_us,
        )


def request_id_of(body: bytes) -> str | None:
    """The request id of a body that is malformed elsewhere; None when there is none to be read."""
    try:
        found = json.loads(body)
        request_id = found.get("request_id") if isinstance(found, dict) else None
        if isinstance(request_id, str) and 0 < len(request_id.encode()) <= MAX_NAME_BYTES:
            return request_id
    except (ValueError, RecursionError):
        pass  # no JSON, or a name that is no UTF-8: nothing to name in the answer
    return None


def _needed(value: str | None) -> str:
    assert value is not None, "a stream listen names its stream, a work listen also its durable"
    return value

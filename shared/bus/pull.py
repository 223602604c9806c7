"""Sharing the messages of a stream among workers: one durable consumer, each message acknowledged by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from shared.bus.endless import Endless, Mend, Told
from shared.bus.follow import StoredAtOnce, StoredHandler, stored
from shared.bus.jetstream import ApiError, JetStream
from shared.bus.msg import Msg
from shared.bus.pulse import HEARTBEAT_S, Pulse

ACK_WAIT_S = 10
"""A message not acknowledged within it goes to another worker."""
MAX_ACK_PENDING = 20_000
BATCH = 256
EXPIRES_S = 5
KEPT_TOKENS = 65_536
"""Messages that a worker may have unacknowledged; of older ones the token is forgotten and they come again."""
_NS = 1_000_000_000


class Acks:
    """How messages that were handed out are acknowledged: a token each, good until used or 65,536 later."""

    def __init__(self, js: JetStream) -> None:
        self._js = js
        self._replies: dict[int, str] = {}
        self._tokens = itertools.count(1)

    def token(self, reply: str) -> int:
        token = next(self._tokens)
        self._replies[token] = reply
        if len(self._replies) > KEPT_TOKENS:
            del self._replies[next(iter(self._replies))]
        return token

    async def ack(self, token: int, delay_us: int | None = None) -> None:
        """Done with it; with ``delay_us``: bring it again after that. A token used before is ignored (case B19)."""
        reply = self._replies.pop(token, None)
        if reply is None:
            return
        body = b"+ACK" if delay_us is None else b"-NAK " + json.dumps({"delay": delay_us * 1000}).encode()
        await self._js.connection.publish(reply, body)


class Pull(Endless):
    """Ask for messages again and again, over restarts of the server and a deleted consumer."""

    def __init__(
        self,
        js: JetStream,
        stream: str,
        durable: str,
        handler: StoredHandler,
        told: Told,
        mend: Mend,
        at_once: StoredAtOnce = lambda _: False,
    ) -> None:
        super().__init__(js, stream, told, mend)
        self._durable = durable
        self._handler = handler
        self._at_once = at_once

    async def once(self) -> str:
        await self._create()
        return await self._session()

    async def _create(self) -> None:
        """The same for every worker, so whoever comes first makes it."""
        config: dict[str, Any] = {
            "durable_name": self._durable,
            "name": self._durable,
            "ack_policy": "explicit",
            "ack_wait": ACK_WAIT_S * _NS,
            "max_ack_pending": MAX_ACK_PENDING,
            "deliver_policy": "all",
            "max_deliver": -1,
        }
        path = f"{self._stream}.{self._durable}"
        try:
            await self._js.call(f"CONSUMER.CREATE.{path}", {"stream_name": self._stream, "config": config})
        except ApiError as error:
            self._log.warning("consumer kept as it is", error=str(error))
            await self._js.call(f"CONSUMER.INFO.{path}")

    async def _session(self) -> str:
        """Pull after pull on one link; returns why it had to end."""
        connection = self._js.connection
        lost = connection.lost
        request = _Request(self._handler, self._at_once)
        inbox = connection.new_inbox()
        listening = await connection.subscribe(f"{inbox}.*", request.on_message, limit=0, at_once=request.at_once)
        try:
            for number in itertools.count(1):
                request.begin()
                body = json.dumps({"batch": BATCH, "expires": EXPIRES_S * _NS, "idle_heartbeat": HEARTBEAT_S * _NS})
                subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._durable}"
                await connection.publish(subject, body.encode(), reply=f"{inbox}.{number}", hold=False)
                if why := await request.ended(lost):
                    return why
        finally:
            await listening.stop()
        raise AssertionError("counting never ends")


class _Request:
    """One request for a batch: it ends when it is full, runs out, or something is wrong."""

    def __init__(self, handler: StoredHandler, at_once: StoredAtOnce) -> None:
        self._handler = handler
        self._at_once = at_once
        self._left = 0
        self._pulse = Pulse()

    def begin(self) -> None:
        self._left = BATCH
        self._pulse.begin()

    async def ended(self, lost: asyncio.Future[None]) -> str:
        """ "" when the next one may follow, else why not."""
        return await self._pulse.until_end(lost)

    def at_once(self, msg: Msg) -> bool:
        if not msg.body or not self._at_once(stored(msg)[0]):
            return False
        self._pulse.word()
        self._handled()
        return True

    async def on_message(self, msg: Msg) -> None:
        self._pulse.word()
        if msg.status:
            self._on_status(msg)
            return
        try:
            with self._pulse.handling():
                await self._handler(stored(msg)[0])
        finally:
            self._handled()

    def _handled(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._pulse.end("")

    def _on_status(self, msg: Msg) -> None:
        if msg.status in {"404", "408"} or (msg.status == "409" and "Batch Completed" in msg.description):
            self._pulse.end("")
        elif msg.status != "100":
            self._pulse.end(f"{msg.status} {msg.description}")

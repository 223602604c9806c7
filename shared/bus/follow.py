"""Following a stream or a bucket in order and without gaps: a consumer of our own, made anew whenever in doubt.

The client's own watchers stop at a server restart (case B10); here a gap, silence, a lost link or a deleted consumer
ends a session, and the next one starts at the last sequence + 1, or with the whole bucket again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from shared.bus.atomic import value_of
from shared.bus.endless import Endless, Mend, Told
from shared.bus.jetstream import JetStream, StoredMsg
from shared.bus.msg import Msg
from shared.bus.pulse import HEARTBEAT_S, Pulse
from shared.effects import KeyChanged, WatchBegins, WatchEvent, WatchReplayed
from shared.errors import BusError

INACTIVE_S = 10
"""The server forgets a consumer of ours that nobody listens to any more."""
_NS = 1_000_000_000

StoredHandler = Callable[[StoredMsg], Awaitable[None]]
StoredAtOnce = Callable[[StoredMsg], bool]
"""Whether it has taken a message, without a wait."""
Idle = Callable[[], Awaitable[None]]
"""Called when the server says that it has nothing to say."""


def stored(msg: Msg) -> tuple[StoredMsg, int]:
    """A message of a consumer, and its consumer sequence; both from its acknowledgement subject."""
    tokens = msg.reply.split(".")
    at = 4 if len(tokens) == 9 else 6  # with a domain and account there are two more in front
    delivered, seq, consumer_seq, at_ns, pending = map(int, tokens[at : at + 5])
    return (
        StoredMsg(msg.subject, msg.body, seq, msg.headers, at_ns // 1000, delivered, pending, msg.reply),
        consumer_seq,
    )


class _Session:
    """One consumer from its creation until something is wrong with it."""

    def __init__(
        self,
        js: JetStream,
        stream: str,
        handler: StoredHandler,
        idle: Idle,
        at_once: StoredAtOnce = lambda _: False,
    ) -> None:
        self._stream = stream
        self._handler = handler
        self._idle = idle
        self._at_once = at_once
        self._js = js
        self._pulse = Pulse()
        self._consumer_seq = 0

    async def run(self, config: dict[str, Any], created: Callable[[], Awaitable[None]]) -> str:
        """Deliver until it breaks; returns why. ``created`` is called when there is nothing to deliver yet."""
        connection = self._js.connection
        lost = connection.lost
        inbox = connection.new_inbox()
        listening = await connection.subscribe(inbox, self._on_message, limit=0, at_once=self._taken_at_once)
        try:
            usual = {
                "deliver_subject": inbox,
                "ack_policy": "none",
                "max_deliver": 1,
                "flow_control": True,
                "idle_heartbeat": HEARTBEAT_S * _NS,
                "inactive_threshold": INACTIVE_S * _NS,
                "mem_storage": True,
                "num_replicas": 1,
            }
            made = await self._js.call(
                f"CONSUMER.CREATE.{self._stream}", {"stream_name": self._stream, "config": usual | config}
            )
            if not made.get("num_pending", 0) + made.get("delivered", {}).get("consumer_seq", 0):
                await created()
            return await self._pulse.until_end(lost)
        finally:
            await listening.stop()

    def _taken_at_once(self, msg: Msg) -> bool:
        """Where nothing is wrong, and whoever wants it need not wait."""
        if not msg.body or self._pulse.ended:
            return False
        message, consumer_seq = stored(msg)
        if consumer_seq != self._consumer_seq + 1 or not self._at_once(message):
            return False
        self._consumer_seq = consumer_seq
        self._pulse.word()
        return True

    async def _on_message(self, msg: Msg) -> None:
        self._pulse.word()
        if self._pulse.ended:
            return
        if msg.status:
            await self._on_status(msg)
            return
        message, consumer_seq = stored(msg)
        if consumer_seq != self._consumer_seq + 1:
            self._pulse.end(f"gap: consumer sequence {consumer_seq} after {self._consumer_seq}")
            return
        self._consumer_seq = consumer_seq
        with self._pulse.handling():
            await self._handler(message)

    async def _on_status(self, msg: Msg) -> None:
        if msg.status != "100":
            self._pulse.end(f"{msg.status} {msg.description}")
        elif msg.reply:  # flow control: answered once everything before it was handled
            await self._js.connection.publish(msg.reply, b"", hold=False)
        elif stalled := msg.headers.get("Nats-Consumer-Stalled"):
            await self._js.connection.publish(stalled, b"", hold=False)
        elif int(msg.headers.get("Nats-Last-Consumer", "0")) <= self._consumer_seq:
            await self._idle()
        else:
            self._pulse.end(f"gap: heartbeat names {msg.headers['Nats-Last-Consumer']} after {self._consumer_seq}")


class Follow(Endless):
    """A stream from a sequence on (0: only what is new at the first session), in order, none left out."""

    def __init__(
        self,
        js: JetStream,
        stream: str,
        subject: str,
        start_seq: int,
        handler: StoredHandler,
        told: Told,
        mend: Mend,
    ) -> None:
        super().__init__(js, stream, told, mend)
        self._subject = subject
        self._next = start_seq
        self._handler = handler
        self._made = ""

    async def once(self) -> str:
        info = await self._js.info(self._stream)
        last_seq = int(info["state"]["last_seq"])
        if (self._made and info["created"] != self._made) or self._next > last_seq + 1:
            self._next = 1  # another stream of that name: its sequences begin again
        self._made = info["created"]
        if not self._next:
            self._next = last_seq + 1
        config = {
            "filter_subject": self._subject,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._next,
        }
        return await _Session(self._js, self._stream, self._deliver, _nothing).run(config, _nothing)

    async def _deliver(self, message: StoredMsg) -> None:
        await self._handler(message)
        self._next = message.seq + 1


class Watch(Endless):
    """A bucket: WatchBegins, every key as it is, WatchReplayed, then every change; all of it again after any doubt.
    ``keys``, with the wildcards of subjects, says of which keys: of the others nothing is said."""

    def __init__(  # noqa: PLR0913  # what a watch is told at its start, and nothing later
        self,
        js: JetStream,
        bucket: str,
        shown: str,
        handler: Callable[[WatchEvent], Awaitable[None]],
        told: Told,
        mend: Mend,
        keys: str = ">",
        *,
        at_once: Callable[[KeyChanged], bool] = lambda _: False,
    ) -> None:
        super().__init__(js, f"KV_{bucket}", told, mend)
        self._prefix = f"$KV.{bucket}."
        self._filter = f"{self._prefix}{keys}"
        self._shown = shown
        self._handler = handler
        self._at_once = at_once

    async def once(self) -> str:
        replay = _Replay(self._js, self._stream, self._filter)

        async def begin() -> None:
            if replay.begins():
                await self._handler(WatchBegins(self._shown))

        async def look() -> None:
            await begin()
            if (keys := await replay.complete()) is not None:
                names = frozenset(subject.removeprefix(self._prefix) for subject in keys)
                await self._handler(WatchReplayed(self._shown, names))

        def changed(message: StoredMsg) -> KeyChanged:
            return KeyChanged(self._shown, message.subject.removeprefix(self._prefix), value_of(message), message.seq)

        async def deliver(message: StoredMsg) -> None:
            await begin()
            change = changed(message)
            replay.saw(message.subject, present=change.value is not None)
            await self._handler(change)
            if message.pending == 0:
                await look()

        def at_once(message: StoredMsg) -> bool:
            return replay.done and self._at_once(changed(message))

        config = {"filter_subject": self._filter, "deliver_policy": "last_per_subject"}
        return await _Session(self._js, self._stream, deliver, look, at_once).run(config, look)


class _Replay:
    """Whether everything that a bucket holds has been delivered once.

    "Nothing pending" of the consumer is only a hint: a key that is written in that moment is neither pending any
    more nor yet again. So then the server is asked for its subjects, and all of them must have been seen.
    """

    def __init__(self, js: JetStream, stream: str, wanted: str) -> None:
        self._js = js
        self._stream = stream
        self._wanted = wanted
        self._keys: set[str] = set()
        self._gone: set[str] = set()
        self._begun = self._complete = False

    def begins(self) -> bool:
        """True the first time: the server says what it holds."""
        begun, self._begun = self._begun, True
        return not begun

    @property
    def done(self) -> bool:
        """All of it was delivered; what comes are changes."""
        return self._complete

    def saw(self, subject: str, *, present: bool) -> None:
        """A key, or the mark of a deleted one; not looked at any more once the replay is complete."""
        if not self._complete:
            (self._keys if present else self._gone).add(subject)
            (self._gone if present else self._keys).discard(subject)

    async def complete(self) -> set[str] | None:
        """The keys that exist, said once: when all were seen for the first time."""
        if self._complete:
            return None
        try:
            unseen = await self._js.subjects(self._stream, self._wanted) - self._keys - self._gone
        except BusError:
            return None  # asked again with the next word of the server, or in the next session
        if unseen or self._complete:
            return None
        self._complete = True
        return self._keys


async def _nothing() -> None:
    """Nobody waits for it."""

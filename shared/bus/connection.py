"""The connection to the server: the one file that imports nats; streams, buckets and services live elsewhere.

What it adds to the client: handlers that cannot end their subscription (case B24), cancellation that is never
swallowed, requests that fail at once when the link is lost, a bounded buffer of what is said while it is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import ssl
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import nats.errors
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg as ClientMsg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from shared.bus.credentials import Credentials
from shared.bus.hearing import AtOnce, Handler, Hearing
from shared.bus.msg import NOBODY, LinkEvent, Msg, NoResponders, ends, written
from shared.bus.reading import Reader
from shared.clock import Clock, SystemClock
from shared.errors import BusError, OutcomeUnknownError, RefusedError, TooLargeError
from shared.log import logger

MAX_OUTSTANDING_PINGS = 2
"""The third unanswered ping ends the connection."""
RECONNECT_WAIT_S = 0.2
"""Between attempts: a restarted server is found within a blink and a dead one costs five SYNs a second."""
CONNECT_TIMEOUT_S = 3
CLIENT_BUFFER_BYTES = 16 * 1024 * 1024
"""Beyond it a publish waits for the socket; one atomic batch of 1,000 small keys stays below it."""
HELD_MESSAGES = 4096
HELD_BYTES = 4 * 1024 * 1024
"""What is kept of lossy messages while the link is down; the oldest go first, and are counted (case B8)."""
PENDING_MESSAGES = 65_536
"""What a subscription may be behind before its newest messages are dropped, as those of a slow consumer."""

_REFUSED = re.compile(r'permissions violation for publish to "([^"]*)"')
Listener = Callable[[LinkEvent], None]


class Listening(Hearing):
    """A subscription that is on."""

    subscription: Subscription

    async def drain(self) -> None:
        """Take no more; returns when what had arrived was handled. A lost link makes it return at once."""
        with contextlib.suppress(nats.errors.Error):
            await self.subscription.drain()  # type: ignore[no-untyped-call]  # its own annotations stop short
            await self.handled()

    async def stop(self) -> None:
        """Take no more and forget what is waiting."""
        self.forget()
        with contextlib.suppress(nats.errors.Error):
            await self.subscription.unsubscribe()


class PlainServerError(nats.errors.Error):
    """The server does not encrypt where we insist on it."""


_HOPELESS = (nats.errors.AuthorizationError, PlainServerError, ssl.SSLError)
"""What trying again does not mend, unless somebody changes something."""
_SUBJECT = re.compile(r"[^ \t\r\n]+")
"""What the client takes as one."""


class _Client(Client):
    """The client with three faults mended, quicker with headers, and with messages heard where they are read.

    It waits for a dead link to take its last bytes before it looks for a new one; an attempt to connect that fails
    in the moment in which it is cancelled (asyncio.wait_for of Python 3.11) goes on for ever after ``close``; and
    ``close`` writes to a link that is gone, which the transports of Python 3.12 answer with a TypeError.
    """

    ended = False
    encrypted = False
    """Whether a server that does not encrypt is refused: the client would go on in the clear."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Parser(self)
        self._heard: dict[int, Callable[[Msg], None]] = {}
        self._pushing = False

    async def hear(self, subject: str, handler: Callable[[Msg], None], queue: str = "") -> Subscription:
        """A subscription whose messages are handed over where they are read, without a queue and a task."""
        sid = self._sid + 1  # the client's next number
        self._heard[sid] = handler
        try:
            return await self.subscribe(subject, queue, cb=_never)
        except BaseException:
            self._heard.pop(sid, None)  # else the next one of that number would be heard here
            raise

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._heard.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    def hand_over(self, sid: int, msg: Msg) -> None:
        """A message of a subscription, if that is still on."""
        if (hear := self._heard.get(sid)) is not None:
            hear(msg)

    def say(self, subject: str, reply: str, payload: bytes, headers: Mapping[str, str] | None) -> bool:
        """As ``publish`` where that would neither wait nor refuse, nearly always; False, and nothing is said, where it
        would. What is said in one turn of the loop goes out together at its end.
        """
        block = written(headers)
        if block is None or self._status != Client.CONNECTED or len(payload) > self._max_payload:
            return False
        if not _SUBJECT.fullmatch(subject) or (reply and not _SUBJECT.fullmatch(reply)):
            return False
        if block:
            head = f"HPUB {subject} {reply} {len(block)} {len(block) + len(payload)}\r\n".encode()
        else:
            head = f"PUB {subject} {reply} {len(payload)}\r\n".encode()
        command = b"".join((head, block, payload, b"\r\n"))
        if self._pending_data_size + len(command) > self._max_pending_size:
            return False
        self._pending.append(command)
        self._pending_data_size += len(command)
        if not self._pushing:
            self._pushing = True
            asyncio.get_running_loop().call_soon(self._push_in_turn)
        return True

    def _push_in_turn(self) -> None:
        """Where the link takes no more for now the client's flusher waits for it."""
        self._pushing = False
        if (writer := self._writer()) is not None and not writer.transport.get_write_buffer_size():
            self.push()
        if self._pending and self.is_connected and self._flush_queue is not None and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.Future())

    async def close(self) -> None:
        self.ended = True
        if not self.is_connected:
            self._pending, self._pending_data_size = [], 0
        await super().close()

    async def _attempt_reconnect(self) -> None:
        self._abort()
        await super()._attempt_reconnect()

    async def _connect_to_server(self, s: Srv) -> None:
        if self.ended:
            raise asyncio.CancelledError
        self._abort()  # also the socket of an attempt that got no further, which the client forgets
        await super()._connect_to_server(s)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self.encrypted and not info.get("tls_required"):
            raise PlainServerError("nats: the server does not encrypt, and our settings ask for it")
        await super()._process_info(info, initial_connection)

    def push(self) -> None:
        """What waits for the flusher goes out now; where it cannot, it is left to that."""
        if isinstance(self._transport, TcpTransport) and self.is_connected and self._pending:
            with contextlib.suppress(OSError, RuntimeError, TypeError, AttributeError):
                self._transport.writelines(self._pending)  # type: ignore[no-untyped-call]  # the client's own
                self._pending, self._pending_data_size = [], 0

    def _abort(self) -> None:
        if (writer := self._writer()) is not None:
            writer.transport.abort()

    def _writer(self) -> asyncio.StreamWriter | None:
        return getattr(self._transport, "_io_writer", None)


class _Parser(Parser):
    """The client's, for control lines alone."""

    nc: _Client

    def reset(self) -> None:
        super().reset()
        self._reader = Reader()

    async def parse(self, data: bytes = b"") -> None:
        try:
            found = self._reader.take(data)
        except (ValueError, IndexError):
            raise nats.errors.ProtocolError("nats: malformed message") from None
        for each in found:
            if isinstance(each, bytes):
                await super().parse(each)
            else:
                self.nc.hand_over(*each)


async def _never(_: ClientMsg) -> None:
    raise AssertionError("what is heard at once comes to no callback")


class Connection:
    """One client object from connect to close; a new start makes a new one (case B13)."""

    def __init__(self, listener: Listener | None = None, clock: Clock | None = None) -> None:
        self.counters: Counter[str] = Counter()
        """reconnects, dropped (lossy messages), slow_consumer, handler_failed, errors."""
        self._client = _Client()
        self._listener = listener or _ignore
        self._clock = clock or SystemClock()
        self._log = logger(part="connection")
        self._up = asyncio.Event()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost_at_us = 0
        self._held: deque[tuple[str, bytes, str, Mapping[str, str] | None]] = deque()
        self._held_bytes = 0
        self._inbox = ""
        self._told = ""
        self._waiting: dict[str, tuple[str, Callable[[Msg | BusError], None]]] = {}
        self._tokens = itertools.count(1)
        self._listening = WeakSet[Listening]()

    # --- life ---

    async def open(self, url: str, name: str, ping_interval_us: int, credentials: Credentials | None = None) -> None:
        """Connect, trying until it succeeds: the caller scopes the time. Reconnects for ever afterwards."""
        try:
            await self._connect(url, name, ping_interval_us, credentials or Credentials())
        except BaseException:
            await self.close()
            raise
        self._inbox = self._client.new_inbox()
        self._up.set()
        await self._client.hear(f"{self._inbox}.*", self._on_answer)

    async def _connect(self, url: str, name: str, ping_interval_us: int, credentials: Credentials) -> None:
        servers = [part.strip() for part in url.split(",")]
        self._client.encrypted = credentials.tls is not None or any(one.startswith("tls://") for one in servers)
        await self._client.connect(
            servers=servers,
            name=name,
            error_cb=self._on_error,
            disconnected_cb=self._on_lost,
            reconnected_cb=self._on_back,
            closed_cb=self._on_closed,
            connect_timeout=CONNECT_TIMEOUT_S,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # annotated int, used as seconds
            max_reconnect_attempts=-1,
            ping_interval=ping_interval_us / 1_000_000,  # type: ignore[arg-type]  # the same
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
            pending_size=CLIENT_BUFFER_BYTES,
            flush_timeout=CONNECT_TIMEOUT_S,
            nkeys_seed=credentials.seed_file,
            inbox_prefix=credentials.inbox_prefix,
            tls=credentials.tls,
        )

    async def close(self) -> None:
        """Send what is still buffered and end; nobody is called back."""
        self._listener = _ignore
        if self._client.is_connected:
            with contextlib.suppress(BusError):
                await self.round_trip()
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._client.close()
        for listening in self._listening:
            listening.forget()
        self._fail_waiting("connection closed")

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    @property
    def lost(self) -> asyncio.Future[None]:
        """Done when the present connection is lost; a new one after each reconnect."""
        return self._lost

    async def wait_up(self) -> None:
        await self._up.wait()

    async def _on_lost(self) -> None:
        if not self._up.is_set():
            return
        self._up.clear()
        self._lost_at_us = self._clock.now_us()
        self._lost.set_result(None)
        self._fail_waiting("connection lost")
        self._listener(LinkEvent("lost"))

    async def _on_back(self) -> None:
        self.counters["reconnects"] += 1
        self._lost = asyncio.get_running_loop().create_future()
        self._up.set()
        while self._held and self._client.is_connected:
            subject, body, reply, headers = self._held.popleft()
            self._held_bytes -= len(body)
            try:
                await self._send(subject, body, reply, headers)
            except BusError:
                self.counters["dropped"] += 1
        self._listener(LinkEvent("back", gap_us=self._clock.now_us() - self._lost_at_us))

    async def _on_closed(self) -> None:
        await self._on_lost()
        self._listener(LinkEvent("closed", str(self._client.last_error or "")))

    async def _on_error(self, error: Exception) -> None:
        if _cancelling():
            # an attempt that failed in the moment in which it was cancelled: the client would go on trying for ever
            raise asyncio.CancelledError
        self.counters["errors"] += 1
        text = str(error) or type(error).__name__
        if "permissions violation" in text:
            self._on_refused(text)
        elif isinstance(error, _HOPELESS) and text != self._told:
            self._told = text  # once, not at each attempt
            self._log.warning("the server is not for us", error=text)
        else:
            self._log.debug("client error", error=text)

    def _on_refused(self, error: str) -> None:
        """The server will not have it from our user: whoever waits for that subject is told at once."""
        said = _REFUSED.search(error)
        # the client has made its letters small
        asked = [token for token, (subject, _) in self._waiting.items() if said and subject.lower() == said[1]]
        for token in asked:
            subject, then = self._waiting.pop(token)
            then(RefusedError(f"not allowed to publish on {subject}"))
        if not asked:
            self._log.warning("refused by the server", error=error)

    # --- hearing ---

    async def subscribe(
        self,
        subject: str,
        handler: Handler,
        queue: str = "",
        limit: int = PENDING_MESSAGES,
        at_once: AtOnce = lambda _: False,
    ) -> Listening:
        """Call ``handler`` with each message, one at a time; it survives reconnects and faults of the handler.

        ``at_once`` is asked first, where nothing waits. ``limit``: messages that may wait for the handler before the
        newest are dropped; 0 for much that the server itself holds back.
        """
        listening = Listening(partial(self._guarded, handler), at_once, limit, self._too_slow)
        listening.subscription = await self._client.hear(subject, listening.heard, queue)
        self._listening.add(listening)
        return listening

    def _too_slow(self, subject: str) -> None:
        self.counters["slow_consumer"] += 1
        self._listener(LinkEvent("slow_consumer", subject))

    async def _guarded(self, handler: Handler, msg: Msg) -> None:
        try:
            await handler(msg)
        except asyncio.CancelledError:
            # Whoever calls us would end with it; only our own task's end may do so.
            if _cancelling():
                raise
            self._handler_failed(msg.subject, "cancelled")
        except Exception as error:  # noqa: BLE001  # one bad message must not end the subscription; counted and told
            self._handler_failed(msg.subject, repr(error))

    def _handler_failed(self, subject: str, error: str) -> None:
        self.counters["handler_failed"] += 1
        self._log.error("handler failed", subject=subject, error=error, exc_info=True)
        self._listener(LinkEvent("handler_failed", f"{subject}: {error}"))

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    # --- saying ---

    async def publish(
        self, subject: str, body: bytes, reply: str = "", headers: Mapping[str, str] | None = None, *, hold: bool = True
    ) -> None:
        """Say it once, lossy; raises TooLargeError, BusError.

        While the link is down it is held, within bounds; without ``hold`` it is dropped: what belongs to this link
        alone (asking for the next batch, flow control) would bring messages to an inbox that is gone.
        """
        if self._client.say(subject, reply, body, headers):
            return
        if self._client.is_connected:
            await self._send(subject, body, reply, headers)
        elif hold:
            self._hold(subject, body, reply, headers)

    async def _send(self, subject: str, body: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        """What may wait or be refused."""
        before = _cancelling()
        try:
            await self._client.publish(subject, body, reply, dict(headers) if headers else None)
        except nats.errors.MaxPayloadError:
            raise TooLargeError(
                f"{len(body)} bytes on {subject}, the server takes {self._client.max_payload}"
            ) from None
        except nats.errors.OutboundBufferLimitError:
            self._hold(subject, body, reply, headers)
        except nats.errors.Error as error:
            raise BusError(f"publish on {subject!r}: {error}") from error
        if _cancelling() > before:
            # The client's flush swallows a cancellation; without this a task group would wait for ever.
            raise asyncio.CancelledError

    def push(self) -> None:
        """Somebody waits for what was said just now: it goes out at once, not when the running task next waits."""
        self._client.push()

    def _hold(self, subject: str, body: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        self._held.append((subject, body, reply, headers))
        self._held_bytes += len(body)
        while len(self._held) > HELD_MESSAGES or self._held_bytes > HELD_BYTES:
            self._held_bytes -= len(self._held.popleft()[1])
            self.counters["dropped"] += 1

    async def request(
        self, subject: str, body: bytes, timeout_us: int, headers: Mapping[str, str] | None = None
    ) -> Msg | NoResponders:
        """The first answer. Raises OutcomeUnknownError after ``timeout_us`` or when the link is lost meanwhile."""
        try:
            async with asyncio.timeout(timeout_us / 1_000_000):
                await self._up.wait()
                answer = await self.ask(subject, body, headers)
                self.push()
                found = await answer
        except TimeoutError:
            raise OutcomeUnknownError(f"no answer on {subject} within {timeout_us} us") from None
        return NoResponders(subject) if found.status == NOBODY else found

    async def ask(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> asyncio.Future[Msg]:
        """Send a request on the link that is up; its first answer, whatever it is, ends the future."""
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        token = await self.ask_then(subject, body, ends(answer), headers)
        answer.add_done_callback(lambda _: self.forget(token))
        return answer

    async def ask_then(
        self,
        subject: str,
        body: bytes,
        then: Callable[[Msg | BusError], None],
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """The same, but ``then`` is called with the first answer, or why there will be none, where it is read: without
        a task of its own. It must not wait. Returns what ``forget`` wants; raises where it cannot be sent.
        """
        token = str(next(self._tokens))
        self._waiting[token] = (subject, then)
        reply = f"{self._inbox}.{token}"
        try:
            if not self._client.say(subject, reply, body, headers):
                await self._send(subject, body, reply, headers)
        except BaseException:
            self.forget(token)
            raise
        return token

    def forget(self, token: str) -> None:
        """Nobody waits for this answer any more."""
        self._waiting.pop(token, None)

    async def round_trip(self) -> None:
        """Return once the server has taken everything said so far, subscriptions too; raises as ``request`` does."""
        await self.request(f"{self._inbox}.nobody.listens.here", b"", CONNECT_TIMEOUT_S * 1_000_000)

    def _on_answer(self, msg: Msg) -> None:
        """Called by the client between two messages, so nothing may come out of it."""
        _, then = self._waiting.pop(msg.subject.rpartition(".")[2], ("", None))
        if then is None:
            return
        try:
            then(msg)
        except Exception as error:  # noqa: BLE001  # as in a handler: counted and told
            self._handler_failed(msg.subject, repr(error))

    def _fail_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for _, then in waiting.values():
            then(OutcomeUnknownError(why))


def _cancelling() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def _ignore(event: LinkEvent) -> None:
    del event

"""One service at work: it connects, feeds the core from one inbox, carries out its effects, and ends in stages."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from shared.bus import Bus, LinkEvent, Listening
from shared.clock import Clock, SystemClock
from shared.effects import (
    Ack,
    Commit,
    CommitDone,
    Disconnected,
    Draining,
    Effect,
    Emit,
    Publish,
    ReadFrom,
    ReadingFrom,
    Reconnected,
    Reply,
    Tick,
)
from shared.errors import BusError
from shared.log import configure, logger
from shared.messages import BusEvent
from shared.metrics import Sample
from shared.service import numbers, shutdown
from shared.service.discovery import Discovery
from shared.service.exposition import Exposition
from shared.service.inbox import Inbox
from shared.service.intake import Intake
from shared.service.outbox import Outbox
from shared.service.ready_file import ReadyFile
from shared.service.table import Core, Every, Listen, Outside, Service
from shared.settings import ServiceSettings

State = Literal["starting", "ready", "draining", "stopped"]
Slow = Mapping[type, Callable[[Any], Awaitable[object | None]]]
RootTask = Callable[["Runtime"], Awaitable[None]]

BUS_EVENT_EVERY_US = 5_000_000
"""At most one event of a kind of trouble within it, however often it happens; the rest is counted."""
TURN_US = 2_000
"""How long a core is fed while events wait, before others get a turn: who sends what it said, who reads answers."""
LOOK_US = 200_000
"""How often what is outside is asked whether the service is still ready."""


class Stopped(Exception):  # noqa: N818  # not an error: how an orderly end leaves the task group
    """The service was asked to stop, and has."""


class _Barrier:
    """Passes through the inbox: when the core reaches it, everything before it was handled."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()


class Runtime:
    """What root tasks and tests hold on to."""

    def __init__(
        self,
        service: Service,
        core: Core,
        settings: ServiceSettings,
        slow: Slow,
        clock: Clock,
        outside: Sequence[Outside] = (),
    ) -> None:
        self.service = service
        self.settings = settings
        self.clock = clock
        self.log = logger(service=service.name, instance=settings.instance)
        self.inbox = Inbox()
        self.counters: Counter[str] = Counter()
        self.state: State = "starting"
        self.ready = asyncio.Event()
        self.bus: Bus
        self.discovery: Discovery
        self.exposition: Exposition | None = None
        self._core, self._outside = core, outside
        self._slow: Slow = {Commit: self._commit, **slow}
        self._group: asyncio.TaskGroup
        self._outbox: Outbox
        self._taking: list[Listening] = []
        self._following: dict[str, asyncio.Task[Any]] = {}
        self._until_drain: list[asyncio.Task[None]] = []
        self._running: set[asyncio.Future[None]] = set()
        self._start_id = os.urandom(6).hex()
        self._bus_events = 0
        self._told_at_us: dict[str, int] = {}
        self._ticking: set[str] = set()
        self._ready_file = ReadyFile(settings.ready_file, service.name, settings.instance)
        self._closed = asyncio.Event()

    # --- for root tasks ---

    def post(self, event: object) -> None:
        """Put an event into the inbox; never waits."""
        self.inbox.post(event)

    def count(self, name: str, n: int = 1) -> None:
        """A counter shown in $SRV.STATS and in the last log line."""
        self.counters[name] += n

    @property
    def unsent(self) -> int:
        """How many events are on their way to the stream."""
        return len(self._outbox)

    async def events_stored(self) -> None:
        """Returns when every event that the core has published so far is in the stream."""
        await self._outbox.stored()

    @property
    def health(self) -> str:
        """``ok``, or what keeps it from being so."""
        if self.state != "ready":
            return self.state
        if not self.bus.connection.is_up:
            return "disconnected"
        if trouble := self._trouble:
            return trouble
        return str(getattr(self._core, "health", "ok"))

    @property
    def _trouble(self) -> str:
        return next(filter(None, (each.trouble for each in self._outside)), "")

    def data(self) -> dict[str, Any]:
        """What $SRV.STATS says beyond the convention; a core may have ``counters`` and a ``health`` of its own."""
        of_core: Counter[str] = getattr(self._core, "counters", None) or Counter()
        return {
            "state": self.state,
            "health": self.health,
            "counters": dict(self.counters + self.bus.connection.counters + of_core),
            "inbox": len(self.inbox),
            "outbox": len(self._outbox),
            **({"metrics": self.exposition.url} if self.exposition else {}),
        }

    def numbers(self) -> Iterator[Sample]:
        """What /metrics says: of every service, and of this one."""
        about = self.service
        ready = self.state == "ready" and self.bus.connection.is_up and not self._trouble
        of_all = (about.name, self.settings.instance, ready, self.data(), self.discovery.endpoints.values())
        yield from numbers.numbers(*of_all)
        if about.numbers is not None:
            yield from about.numbers(self._core)
        for outside in self._outside:
            yield from outside.numbers()

    # --- life ---

    async def serve(self, stop: asyncio.Event, tasks: Sequence[RootTask] = ()) -> None:
        """From connect to close. Returns after ``stop`` was set; raises what the core or a slow effect raised."""
        try:
            await self._serve(stop, tasks)
        except* Stopped:
            pass
        finally:
            self.state = "stopped"
            self._say_ready()
            if hasattr(self, "bus"):
                await shutdown.within(shutdown.CLOSE_US, self.bus.close())
            if self.exposition is not None:
                await self.exposition.close()
            self.log.info("stopped", counters=dict(self.counters))

    async def _serve(self, stop: asyncio.Event, tasks: Sequence[RootTask]) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            starting = group.create_task(self._start(tasks))
            await stop.wait()
            starting.cancel()
            if hasattr(self, "_outbox"):
                await self._drain()
            raise Stopped

    async def _start(self, tasks: Sequence[RootTask]) -> None:
        settings, name = self.settings, f"{self.service.name}/{self.settings.instance}"
        self.bus = await Bus.connect(settings, name, listener=self._on_link, told=self._on_anew, clock=self.clock)
        self.discovery = Discovery(self.service, self.bus, settings.instance, self.data)
        source = f"/{settings.prefix}/{self.service.name}/{settings.instance}"
        self._outbox = Outbox(self.bus, self._group, source, self.counters)
        self._group.create_task(self._feed())
        self._group.create_task(self._stop_when_closed())
        await self.discovery.start()
        if settings.metrics_port is not None:
            self.exposition = Exposition(self.numbers, self.count, self.log)
            await self.exposition.open(settings.metrics_host, settings.metrics_port)
        await self.bus.ensure_streams()
        await self._watches()
        await self._streams_and_work()
        await self._requests()
        for every in self.service.every:
            self._until_draining(self._tick(every))
        for task in tasks:
            self._until_draining(self._root(task))
        self.state = "ready"
        self._say_ready()
        if self._outside:
            self._until_draining(self._go_on_saying_ready())
        self.ready.set()
        self.log.info("ready")

    async def _watches(self) -> None:
        """Start all watches; returns when the core has handled everything that was there."""
        pending: list[asyncio.Event] = []
        for listen in self._of("watch"):
            replayed = asyncio.Event()
            pending.append(replayed)
            self._group.create_task(Intake(self, listen).watch(replayed.set))
        for replayed in pending:
            await replayed.wait()
        await self._reached()

    async def _streams_and_work(self) -> None:
        for listen in self._of("stream"):
            start_seq = listen.start(self._core) if listen.start is not None else 0
            if start_seq is not None:
                self._follow(listen, start_seq)
        for listen in self._of("work"):
            self._until_draining(Intake(self, listen).pull())

    def _follow(self, listen: Listen, start_seq: int) -> None:
        following = self._intake(listen).follow(start_seq)
        self._following[listen.subject] = self._group.create_task(following)

    async def _read_from(self, effect: ReadFrom) -> None:
        """What the former reader had put into the inbox stays before ReadingFrom."""
        (listen,) = (each for each in self._of("stream") if each.subject == effect.subject)
        if (former := self._following.pop(effect.subject, None)) is not None:
            former.cancel()
            await asyncio.wait([former])
        self.inbox.post(ReadingFrom(effect.subject, effect.start_seq))
        self._follow(listen, effect.start_seq)

    async def _requests(self) -> None:
        for listen in (*self._of("core"), *self._of("request")):
            self._taking.append(await self._intake(listen).subscribe())

    def _intake(self, listen: Listen) -> Intake:
        return Intake(self, listen, partial(listen.wanted, self._core) if listen.wanted is not None else None)

    def _of(self, kind: str) -> list[Listen]:
        return [listen for listen in self.service.listens if listen.kind == kind]

    def _until_draining(self, coroutine: Any) -> None:
        self._until_drain.append(self._group.create_task(coroutine))

    async def _root(self, task: RootTask) -> None:
        await task(self)
        raise RuntimeError(f"root task {task!r} ended, and root tasks never end")

    async def _stop_when_closed(self) -> None:
        await self._closed.wait()
        raise BusError("the connection was closed for good")

    async def _reached(self) -> None:
        barrier = _Barrier()
        self.inbox.post(barrier)
        await barrier.reached.wait()

    async def _drain(self) -> None:
        self.state = "draining"
        self._say_ready()
        self.log.info("draining")
        for task in self._until_drain:
            task.cancel()
        await shutdown.within(shutdown.INTAKE_US, self._take_no_more())
        await shutdown.within(shutdown.SLOW_US, self._slow_done())
        await shutdown.within(shutdown.OUTBOX_US, self._outbox.emptied())

    async def _take_no_more(self) -> None:
        await asyncio.gather(*(listening.drain() for listening in self._taking))
        self.inbox.post(Draining())
        await self._reached()

    async def _slow_done(self) -> None:
        """What a core says last may start slow effects, whose ends may start others."""
        while self._running:
            await asyncio.wait(self._running)
            await self._reached()

    # --- the core ---

    async def _feed(self) -> None:
        turn_us = 0
        while True:
            waited = not self.inbox
            event = await self.inbox.get()
            if isinstance(event, _Barrier):
                event.reached.set()
                continue
            if isinstance(event, Tick):
                self._ticking.discard(event.name)
            now_us = self.clock.now_us()
            if effects := self._core.handle(event, now_us):
                await self._carry_out_all(effects)
            if self.settings.check:
                self._core.check()
            if waited:
                turn_us = now_us
            elif now_us - turn_us >= TURN_US:
                turn_us = now_us
                await asyncio.sleep(0)

    async def _carry_out_all(self, effects: list[Effect]) -> None:
        """Replies go out before anything is done about what comes behind them."""
        answered = False
        for effect in effects:
            replies = isinstance(effect, Reply)
            if answered and not replies:
                self.bus.connection.push()
            await self._carry_out(effect)
            answered = replies

    async def _carry_out(self, effect: object) -> None:
        match effect:
            case Publish():
                self._outbox.add(effect, self.clock.wall_us())
            case Reply():
                await self._reply(effect)
            case Emit():
                await self._emit(effect)
            case Ack():
                await self.bus.ack(effect.token, effect.delay_us)
            case ReadFrom():
                await self._read_from(effect)
            case Commit() if self.bus.connection.is_up:
                await self._begin_commit(effect)
            case _:
                self._begin(effect)

    def _begin(self, effect: object, work: Callable[[Any], Awaitable[object | None]] | None = None) -> None:
        work = work or self._slow.get(type(effect))
        if work is None:
            raise TypeError(f"nobody carries out {type(effect).__name__}: it is missing in `slow`")
        task = self._group.create_task(self._end_in_event(work, effect))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _end_in_event(self, work: Callable[[Any], Awaitable[object | None]], effect: object) -> None:
        event = await work(effect)
        if event is not None:
            self.inbox.post(event)

    async def _begin_commit(self, effect: Commit) -> None:
        """Most are answered at once and cost no task; what goes wrong is gone after in one."""
        begun = asyncio.get_running_loop().create_future()
        self._running.add(begun)

        def ended(end: CommitDone | BusError) -> None:
            self._running.discard(begun)
            begun.set_result(None)
            if not isinstance(end, BusError):
                self.inbox.post(end)
            elif self.state != "stopped":
                self._begin(effect, partial(self._commit, failed=end))

        await self.bus.begin_commit(effect.bucket, effect.writes, effect.commit, ended)

    async def _commit(self, effect: Commit, failed: BusError | None = None) -> object:
        return await self.bus.commit(effect.bucket, effect.writes, effect.commit, failed)

    async def _emit(self, effect: Emit) -> None:
        try:
            await self.bus.publish(effect.subject, effect.body.to_json())
        except BusError as error:
            self.count("emit_failed")
            self.log.warning("not sent", subject=effect.subject, error=str(error))

    async def _reply(self, effect: Reply) -> None:
        if (outcome := getattr(effect.body, "outcome", None)) is not None:
            self.count(f"{numbers.REPLIES}{outcome}")
        if effect.to:
            await self.answer(effect.to, effect.body.to_json(), effect.error)

    async def answer(self, to: str, body: bytes, error: tuple[int, str] | None) -> None:
        """Send a reply; one that the bus refuses is counted, its requester sees a time-out."""
        self.discovery.answered(to, error[1] if error else None, self.clock.now_us())
        headers = None
        if error is not None:
            code, text = error
            headers = {"Nats-Service-Error": text, "Nats-Service-Error-Code": str(code)}
        try:
            await self.bus.publish(to, body, headers=headers)
        except BusError as failure:
            self.count("reply_failed")
            self.log.warning("no reply sent", to=to, error=str(failure))

    async def _tick(self, every: Every) -> None:
        due_us = self.clock.now_us() + every.period_us
        while True:
            await self.clock.sleep_us(due_us - self.clock.now_us())
            if every.name not in self._ticking:
                self._ticking.add(every.name)
                self.inbox.post(Tick(every.name, self.clock.wall_us()))
            # after a pause of the process the missed ticks are not made up for
            due_us = max(due_us + every.period_us, self.clock.now_us())

    # --- the link ---

    def _on_link(self, event: LinkEvent) -> None:
        match event.kind:
            case "lost":
                self.log.warning("connection lost")
                self.inbox.post(Disconnected())
            case "back":
                self.log.info("connection back", gap_us=event.gap_us)
                self.inbox.post(Reconnected(event.gap_us))
                dropped = self.bus.connection.counters["dropped"]
                detail = f"without the bus for {event.gap_us} us; {dropped} lossy messages dropped since the start"
                self._say("reconnected", detail, event.gap_us)
                self._mend_streams()
            case "closed":
                self.log.error("connection closed", why=event.detail)
                self._closed.set()
            case "slow_consumer" | "handler_failed":
                self._say_seldom("slow_consumer" if event.kind == "slow_consumer" else "dropped", event.detail)

    def _mend_streams(self) -> None:
        """A server that came back with an empty store has no streams."""
        if self.state == "ready":
            self._group.create_task(self.bus.ensure_streams())

    def _on_anew(self, stream: str, why: str) -> None:
        self.count("consumers_made_anew")
        if why != "connection lost":
            self._say_seldom("watch_restarted", f"{stream}: {why}")

    def _say_seldom(self, kind: str, detail: str) -> None:
        now_us = self.clock.now_us()
        last_us = self._told_at_us.get(kind)
        if last_us is None or now_us - last_us >= BUS_EVENT_EVERY_US:
            self._told_at_us[kind] = now_us
            self._say(kind, detail, None)

    def _say(self, kind: str, detail: str, gap_us: int | None) -> None:
        """Tell the world on rt.events.bus.<service> that something may have been missed."""
        if not hasattr(self, "_outbox") or self.state == "stopped":
            return
        self._bus_events += 1
        at_us, name, instance = self.clock.wall_us(), self.service.name, self.settings.instance
        body = BusEvent(at_us=at_us, service=name, instance=instance, kind=kind, detail=detail[:1000], gap_us=gap_us)
        event_id = f"bus/{name}/{instance}/{self._start_id}/{self._bus_events}"
        self._outbox.add(Publish(self.bus.subjects.bus_event(name), body, event_id, f"bus.{kind}"), at_us)

    async def _go_on_saying_ready(self) -> None:
        while True:
            await self.clock.sleep_us(LOOK_US)
            self._say_ready()

    def _say_ready(self) -> None:
        self._ready_file.say(self.state == "ready" and not self._trouble)


async def run(
    service: Service,
    core: Core,
    settings: ServiceSettings,
    *,
    slow: Slow | None = None,
    tasks: Sequence[RootTask] = (),
    outside: Sequence[Outside] = (),
    clock: Clock | None = None,
) -> None:
    """Run a service until SIGTERM or SIGINT. What the core, a slow effect or a root task raises ends the process
    with exit code 1: a bug is for the supervisor, which starts it again.
    """
    configure(settings.log_level, settings.log_format)
    runtime = Runtime(service, core, settings, slow or {}, clock or SystemClock(), outside)
    stop = asyncio.Event()
    with shutdown.on_signals(stop):
        try:
            await runtime.serve(stop, tasks)
        except BaseExceptionGroup as group:
            runtime.log.error("service failed", exc_info=group)
            raise SystemExit(1) from group

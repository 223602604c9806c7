"""Reads the clock and then the rings, in a thread of its own, and removes rings that are done; it judges nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from services.monitor.core import Forget, RingsRead, Wake
from services.monitor.open_tasks import RingRows, Row
from services.monitor.rings import RingCorruptError, RingDirectory, RingError, RingRead, RingReader
from services.monitor.settings import MonitorSettings
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import BusError
from shared.log import Logger
from shared.messages import ContainerLabels, RingInfo
from shared.subjects import MAX_NAME_BYTES, Subjects

TIDY_US: Final = 500_000
MAX_UNSENT: Final = 256
"""Batches that may wait for the bus. Beyond it the rings are left to hold the records: they count what they lose."""

SHORTEST_PAUSE_US: Final = 200
"""So that a deadline that comes with every breath cannot make the thread spin."""


class Shell(Protocol):
    """What is needed of the runtime."""

    @property
    def bus(self) -> Bus: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def log(self) -> Logger: ...

    def data(self) -> dict[str, Any]: ...

    def post(self, event: object) -> None: ...


@dataclass(slots=True)
class _Ring:
    """One ring and when to take its records."""

    reader: RingReader
    inherited: bool
    patience_us: int = 0
    """How long records may wait in the ring. Nothing before the first deadline is known; later so that a task's begin
    is taken well before its deadline, as long as its deadline is no shorter than those seen before."""
    shortest_us: int | None = None
    waiting_since_us: int | None = None
    info: RingInfo = field(init=False)
    _labels: ContainerLabels | None = None

    def __post_init__(self) -> None:
        self.info = ring_info(self.reader)
        self._labels = self.reader.labels

    def wants(self, clock_us: int) -> bool:
        """Whether to take the records now; raises RingCorruptError."""
        waiting = self.reader.waiting()
        if not waiting:
            self.waiting_since_us = None
            return False
        if self.waiting_since_us is None:
            self.waiting_since_us = clock_us
        crowded = 4 * abs(waiting) > self.reader.header.capacity
        return crowded or clock_us - self.waiting_since_us >= self.patience_us

    def take(self, most_patience_us: int, poll_us: int) -> RingRows:
        """Everything that is in the ring now; raises RingError and OSError."""
        gone = self.reader.writer_gone()  # asked first: what it wrote before is then all there is
        read = self.reader.read()
        self.waiting_since_us = None
        if self._labels is not self.reader.labels:
            self.info, self._labels = ring_info(self.reader), self.reader.labels
        if len(read):
            shortest_us = int(read.deadline_us.min())
            self.shortest_us = shortest_us if self.shortest_us is None else min(self.shortest_us, shortest_us)
            self.patience_us = max(0, min(most_patience_us, self.shortest_us - 2 * poll_us))
        return _rows(self, read, gone=gone)


class RingLoop:
    """The rings of one node. ``run`` and ``tidy`` are root tasks; ``wake`` and ``forget`` carry out the core's effects.

    The thread looks at each ring every few milliseconds, which costs a third of what it would cost in the event loop.
    It takes the records of all rings when one of them wants it or the core does, posts them, and goes on once the core
    has answered with Wake: one reading is under way at a time.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        start_id: str,
        started_us: int,
        before: Callable[[int], None] | None = None,
    ) -> None:
        """``before`` is told the clock's reading ahead of each look at the rings."""
        self._settings = settings
        self._before = before
        self._directory = RingDirectory(settings.ring_root)
        self._subject = Subjects(settings.prefix).task_events(settings.node)
        self._batch_prefix = f"{settings.node}/{start_id}/"
        self._started_us = started_us
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._wake_us = 0
        self._scan_us = 0
        self._rings: dict[str, _Ring] = {}
        self._vanished: list[str] = []
        self._done: dict[str, int] = {}
        self._removable: deque[str] = deque()

    async def run(self, shell: Shell) -> None:
        """Read for ever; what goes wrong in the thread is raised here."""
        loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._poll, shell, lambda event: loop.call_soon_threadsafe(shell.post, event))
        finally:
            self._stop.set()
            self._answered.set()

    async def wake(self, effect: Wake) -> None:
        """The core has taken the reading."""
        self._wake_us = effect.at_us
        self._answered.set()

    async def forget(self, effect: Forget) -> None:
        """The core has closed the ring; ``tidy`` has its file removed."""
        self._done[effect.ring] = effect.counter

    async def tidy(self, shell: Shell) -> None:
        """Let ring files go once their last batch is stored: a monitor that dies before that must find them."""
        while True:
            await shell.clock.sleep_us(TIDY_US)
            if self._done:
                stored = await self._stored(shell)
                for ring in [ring for ring, counter in self._done.items() if counter <= stored]:
                    del self._done[ring]
                    self._removable.append(ring)

    async def _stored(self, shell: Shell) -> int:
        """The counter of the last batch of this start that the stream has; 0 if none or unknown."""
        try:
            last = await shell.bus.last_event(self._subject)
        except BusError as error:
            shell.log.info("rings stay for now", why=str(error))
            return 0
        batch_id = last.headers.get("Nats-Msg-Id", "") if last else ""
        return int(batch_id.removeprefix(self._batch_prefix)) if batch_id.startswith(self._batch_prefix) else 0

    # --- the thread ---

    def _poll(self, shell: Shell, post: Callable[[object], object]) -> None:
        while not self._stop.is_set():
            clock_us = shell.clock.now_us()
            if self._before is not None:
                self._before(clock_us)
            self._scan(clock_us)
            pause_us = self._settings.poll_us if self._rings else self._settings.idle_us
            if self._wanted(clock_us, shell.log):
                if shell.data()["outbox"] >= MAX_UNSENT:
                    time.sleep(pause_us / 1_000_000)
                    continue
                self._answered.clear()
                post(self._take(clock_us, shell))
                while not self._answered.wait(TIDY_US / 1_000_000) and not self._stop.is_set():
                    pass  # a core that has failed answers no more
            pause_us = min(pause_us, self._wake_us - shell.clock.now_us())
            time.sleep(max(pause_us, SHORTEST_PAUSE_US) / 1_000_000)

    def _scan(self, clock_us: int) -> None:
        """Look for new and vanished rings and for writers that are gone, and remove what may be removed."""
        if clock_us < self._scan_us:
            return
        self._scan_us = clock_us + self._settings.scan_us
        found = self._directory.scan()
        for reader in found.new:
            inherited = reader.header.created_ns // 1_000 < self._started_us
            self._rings[reader.ring] = _Ring(reader, inherited)
        for reader in found.gone:
            if reader.ring in self._rings:
                self._vanished.append(reader.ring)
            else:
                reader.close()
        for ring in self._rings.values():
            if ring.reader.writer_gone():
                self._wake_us = 0
        removable = {self._removable.popleft() for _ in range(len(self._removable))}
        for reader in self._directory.readers if removable else ():
            if reader.ring in removable:
                self._directory.remove(reader)

    def _wanted(self, clock_us: int, log: Logger) -> bool:
        """Whether it is time for a reading. Every ring is looked at, since each notes since when it has waited."""
        wanted = clock_us >= self._wake_us or bool(self._vanished)
        for ring in list(self._rings.values()):
            try:
                wanted |= ring.wants(clock_us)
            except (RingError, OSError) as error:
                self._refuse(ring, error, log)
                wanted = True
        return wanted

    def _take(self, clock_us: int, shell: Shell) -> RingsRead:
        """One reading of everything. A ring whose writer is gone is not read again: the core closes it."""
        reads = []
        for ring in list(self._rings.values()):
            try:
                read = ring.take(self._settings.batch_us, self._settings.poll_us)
            except (RingError, OSError) as error:
                self._refuse(ring, error, shell.log)
                continue
            reads.append(read)
            if read.writer_gone and read.taken == read.head and read.info.ring not in self._vanished:
                del self._rings[read.info.ring]
        vanished, self._vanished = tuple(self._vanished), []
        for name in vanished:
            if gone := self._rings.pop(name, None):
                gone.reader.close()
        counts = dict(self._directory.counts)
        return RingsRead(clock_us, shell.clock.wall_us(), tuple(reads), vanished, counts)

    def _refuse(self, ring: _Ring, error: RingError | OSError, log: Logger) -> None:
        log.warning("ring refused", ring=ring.info.ring, container=ring.info.container, why=str(error))
        self._directory.refuse(ring.reader, error if isinstance(error, RingError) else RingCorruptError(str(error)))
        del self._rings[ring.info.ring]
        self._vanished.append(ring.info.ring)


def _rows(ring: _Ring, read: RingRead, *, gone: bool) -> RingRows:
    columns = zip(
        read.kind.tolist(),
        read.seq.tolist(),
        read.begin_seq.tolist(),
        read.task.tolist(),
        read.stamp_us.tolist(),
        read.deadline_us.tolist(),
        read.name,
        strict=True,
    )
    return RingRows(
        info=ring.info,
        rows=tuple(map(Row._make, columns)) if len(read) else (),
        lost=read.lost,
        taken=read.taken,
        head=read.head,
        writer_gone=gone,
        pid=ring.reader.header.pid,
        inherited=ring.inherited,
    )


def ring_info(reader: RingReader) -> RingInfo:
    """Whose tasks a ring holds, from the labels beside it; only a name where there are none that can be believed."""
    labels = reader.labels
    if labels is None or not 0 < len(labels.container.encode("utf-8", "replace")) <= MAX_NAME_BYTES:
        return RingInfo(ring=reader.ring, container=reader.path.parent.name)
    reservation = labels.reservation
    timing = reservation.realtime
    return RingInfo(
        ring=reader.ring,
        container=labels.container,
        request_id=reservation.request_id,
        replica=reservation.replica,
        generation=reservation.generation,
        guarantee=timing.guarantee if timing else None,
        window=timing.window if timing else None,
    )

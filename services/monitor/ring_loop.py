"""Reads the clock and then the rings, in a thread of its own, and removes rings that are done; it judges nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from services.monitor.core import Forget, RingsRead, Wake
from services.monitor.open_tasks import RingRows
from services.monitor.rings import MAX_DEADLINE_US, RingCorruptError, RingDirectory, RingError, RingReader
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

PATIENCE_PER_RECORD_US: Final = 10
"""Of the room in a ring: it overflows within its patience where more than 100,000 records a second come."""
QUIET_AFTER_US: Final = 1_000_000
ASK_US: Final = 500_000
"""How often it is asked whether the writer of a ring without an open task is gone."""
NEVER_US: Final = 1 << 62

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

    @property
    def unsent(self) -> int: ...

    def post(self, event: object) -> None: ...


@dataclass(slots=True)
class _Ring:
    """One ring and when to look at it."""

    reader: RingReader
    inherited: bool
    limits: MonitorSettings
    look_us: int = 0
    """When to look at it next."""
    ask_us: int = 0
    """When to ask whether the writer is gone, although no task is open."""
    gone: bool = False
    busy_us: int = 0
    """When it had something new or an open task last."""
    shortest_us: int = MAX_DEADLINE_US
    """The shortest deadline so far, of its tasks and of what the container declared."""
    info: RingInfo = field(init=False)
    _patience_us: int = field(init=False)
    """How long records may wait in it: so that a task's begin is taken well before its deadline, as long as its
    deadline is no shorter than those seen before. Nothing is known of the first one."""
    _quiet_patience_us: int = field(init=False)
    """The same once nothing was in it for a while."""
    _told: RingInfo | None = None
    _labels: ContainerLabels | None = None

    def __post_init__(self) -> None:
        self._patience_us, self._quiet_patience_us = self.limits.poll_us, self._at_most(self.limits.quiet_us)
        self._label()

    def _label(self) -> None:
        self.info, self._labels = ring_info(self.reader), self.reader.labels
        if self._labels and (timing := self._labels.reservation.realtime):
            self._expect(timing.deadline_us)

    def _expect(self, deadline_us: int) -> None:
        """A task may have this deadline."""
        if deadline_us < self.shortest_us:
            self.shortest_us = deadline_us
            self._patience_us = self._at_most(self.limits.batch_us)
            self._quiet_patience_us = self._at_most(self.limits.quiet_us)

    def rest(self, clock_us: int) -> None:
        """It was looked at just now."""
        patience_us = self._patience_us if clock_us - self.busy_us < QUIET_AFTER_US else self._quiet_patience_us
        self.look_us = clock_us + patience_us

    def take(self, clock_us: int, due_us: int) -> RingRows | None:
        """What is new; None if there is nothing. Raises RingError and OSError.

        ``due_us``: when the first of its open tasks becomes overdue. Whether the writer lives is asked only where that
        decides something, and then before the last read: what it wrote before is then all there is.
        """
        reader = self.reader
        if self._labels is not reader.labels:
            self._label()
        read = reader.read()
        for _, _, _, _, stamp_us, deadline_us, _ in read.rows:
            if deadline_us < self.shortest_us:
                self._expect(deadline_us)
            if stamp_us + deadline_us < due_us:  # noqa: PLR1730 - min() costs a call on the hot path
                due_us = stamp_us + deadline_us
        if self.gone or (due_us < clock_us and reader.writer_gone()):
            self.gone = True
            read = read.then(reader.read())
        if read.rows or due_us < NEVER_US:
            self.busy_us = clock_us
        self.rest(clock_us)
        if not (read.rows or read.lost or self.gone or read.taken != read.head or self._told is not self.info):
            return None
        self._told = self.info
        rows, _, lost, head, taken = read
        return RingRows(self.info, rows, lost, taken, head, self.gone, reader.header.pid, self.inherited)

    def _at_most(self, most_us: int) -> int:
        """How long records may wait: their deadlines must be known well before they pass, and the ring not overflow."""
        capacity_us = self.reader.header.capacity * PATIENCE_PER_RECORD_US
        return max(self.limits.poll_us, min(most_us, capacity_us, self.shortest_us - 2 * self.limits.poll_us))


class RingLoop:
    """The rings of one node. ``run`` and ``tidy`` are root tasks; ``wake`` and ``forget`` carry out the core's effects.

    The thread looks at a ring when its patience is at an end, which costs a third of what it would cost in the event
    loop. It takes the records of all rings when one has some or the core wants it, posts what is new, and goes on once
    the core has answered with Wake: one reading is under way at a time.
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
        self._wake = Wake(0)
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
        self._wake = effect
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
            if self._wanted(clock_us):
                if shell.unsent >= MAX_UNSENT:
                    time.sleep(self._settings.poll_us / 1_000_000)
                    continue
                self._answered.clear()
                post(self._take(clock_us, shell))
                while not self._answered.wait(TIDY_US / 1_000_000) and not self._stop.is_set():
                    pass  # a core that has failed answers no more
            look_us = min((ring.look_us for ring in self._rings.values()), default=clock_us + self._settings.idle_us)
            until_us = min(self._wake.at_us, self._scan_us, look_us)
            time.sleep(max(until_us - shell.clock.now_us(), SHORTEST_PAUSE_US) / 1_000_000)

    def _scan(self, clock_us: int) -> None:
        """Look for new and vanished rings and for writers that are gone, and remove what may be removed."""
        if clock_us < self._scan_us:
            return
        self._scan_us = clock_us + self._settings.scan_us
        found = self._directory.scan()
        for reader in found.new:
            inherited = reader.header.created_ns // 1_000 < self._started_us
            self._rings[reader.ring] = _Ring(reader, inherited, self._settings, busy_us=clock_us)
        for reader in found.gone:
            if reader.ring in self._rings:
                self._vanished.append(reader.ring)
            else:
                reader.close()
        for name, ring in self._rings.items():
            if name in self._wake.due_us or clock_us >= ring.ask_us:
                ring.ask_us = clock_us + ASK_US
                ring.gone = ring.reader.writer_gone()
        removable = {self._removable.popleft() for _ in range(len(self._removable))}
        for reader in self._directory.readers if removable else ():
            if reader.ring in removable:
                self._directory.remove(reader)

    def _wanted(self, clock_us: int) -> bool:
        """Whether it is time for a reading: the core wants one, or the writer of a ring is gone, or one has news."""
        if clock_us >= self._wake.at_us or self._vanished:
            return True
        for ring in self._rings.values():
            if ring.gone:
                return True
            if clock_us >= ring.look_us:
                ring.rest(clock_us)
                if ring.reader.waiting():
                    return True
        return False

    def _take(self, clock_us: int, shell: Shell) -> RingsRead:
        """One reading of everything. A ring whose writer is gone is not read again: the core closes it."""
        reads = []
        for name, ring in list(self._rings.items()):
            try:
                read = ring.take(clock_us, self._wake.due_us.get(name, NEVER_US))
            except (RingError, OSError) as error:
                self._refuse(ring, error, shell.log)
                continue
            if read is None:
                continue
            reads.append(read)
            if read.writer_gone and read.taken == read.head and name not in self._vanished:
                del self._rings[name]
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

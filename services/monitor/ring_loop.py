"""Reads the clock and then the rings, in a thread of its own, and removes rings that are done; it judges nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from services.monitor.core import Forget, RingsRead, Wake
from services.monitor.open_tasks import RingRows
from services.monitor.pod_folders import PodFolders
from services.monitor.rings import (
    MAX_DEADLINE_US,
    NEVER_US,
    RingCorruptError,
    RingDirectory,
    RingError,
    RingReader,
    waiting,
)
from services.monitor.settings import MonitorSettings
from services.monitor.shell import Shell
from shared.clock import Clock
from shared.errors import BusError
from shared.log import Logger
from shared.messages import ContainerLabels, RingInfo
from shared.subjects import MAX_NAME_BYTES, Subjects

TIDY_US: Final = 500_000
MAX_UNSENT: Final = 256
"""Batches that may wait for the bus. Beyond it the rings are left to hold the records: they count what they lose."""

RECORDS_PER_S: Final = 80_000
"""Where more than so many come, a ring may overflow within its patience."""
QUIET_AFTER_US: Final = 1_000_000
ASK_US: Final = 500_000
"""How often it is asked whether the writer of a ring without an open task is gone."""

SHORTEST_PAUSE_US: Final = 200
"""So that a deadline that comes with every breath cannot make the thread spin."""


@dataclass(slots=True)
class _Ring:
    """One ring and when to look at it."""

    reader: RingReader
    inherited: bool
    limits: MonitorSettings
    gone: bool = False
    patience_us: int = 0
    """How long after the last look at it the next one may be."""
    busy_us: int = 0
    """When it had something new or an open task last."""
    shortest_us: int = MAX_DEADLINE_US
    """The shortest deadline so far, of its tasks and of what the container declared."""
    info: RingInfo = field(init=False)
    _busy_patience_us: int = field(init=False)
    """How long records may wait in it: so that a task's begin is taken well before its deadline, as long as its
    deadline is no shorter than those seen before. Nothing is known of the first one."""
    _quiet_patience_us: int = field(init=False)
    """The same once nothing was in it for a while."""
    _told: RingInfo | None = None
    _labels: ContainerLabels | None = None

    def __post_init__(self) -> None:
        self._busy_patience_us, self._quiet_patience_us = self.limits.poll_us, self._at_most(self.limits.quiet_us)
        self._label()
        self.patience_us = self._busy_patience_us

    def _label(self) -> None:
        self.info, self._labels = ring_info(self.reader), self.reader.labels
        if self._labels and (timing := self._labels.reservation.realtime):
            self._expect(timing.deadline_us)

    def _expect(self, deadline_us: int) -> None:
        """A task may have this deadline."""
        if deadline_us < self.shortest_us:
            self.shortest_us = deadline_us
            self._busy_patience_us = self._at_most(self.limits.batch_us)
            self._quiet_patience_us = self._at_most(self.limits.quiet_us)

    def take(self, clock_us: int, due_us: int) -> RingRows | None:
        """What is new; None if there is nothing. Raises RingError and OSError.

        ``due_us``: when the first of its open tasks becomes overdue. Whether the writer lives is asked only where that
        decides something, and then before the last read: what it wrote before is then all there is.
        """
        reader = self.reader
        if self._labels is not reader.labels:
            self._label()
        read = reader.read()
        if read.shortest_us < self.shortest_us:
            self._expect(read.shortest_us)
        if self.gone or ((due_us < clock_us or read.due_us < clock_us) and reader.writer_gone()):
            self.gone = True
            read = read.then(reader.read())
        rows, lost, taken, head = read.rows, read.lost, read.taken, read.head
        if rows or due_us < NEVER_US:
            self.busy_us = clock_us
        quiet = clock_us - self.busy_us >= QUIET_AFTER_US
        self.patience_us = 0 if self.gone else self._quiet_patience_us if quiet else self._busy_patience_us
        if not (rows or lost or self.gone or taken != head or self._told is not self.info):
            return None
        self._told = self.info
        return RingRows(self.info, rows, lost, taken, head, self.gone, reader.header.pid, self.inherited)

    def _at_most(self, most_us: int) -> int:
        """How long records may wait: their deadlines must be known well before they pass, and the ring not overflow."""
        capacity_us = self.reader.header.capacity * 1_000_000 // RECORDS_PER_S
        return max(self.limits.poll_us, min(most_us, capacity_us, self.shortest_us - self.limits.poll_us))


class RingLoop:
    """The rings of one node. ``run`` and ``tidy`` are root tasks; ``wake`` and ``forget`` carry out the core's effects.

    The thread looks at a ring when its patience is at an end, which costs a third of what it would cost in the event
    loop. It takes the records of all rings when one has some or the core wants it, and posts what is new. One reading
    is under way at a time: the next one waits until the core has answered with Wake.
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
        self._pods = PodFolders(settings.pod_root, settings.ring_root) if settings.pod_root else None
        self._subject = Subjects(settings.prefix).task_events(settings.node)
        self._batch_prefix = f"{settings.node}/{start_id}/"
        self._started_us = started_us
        self._stop = threading.Event()
        self._wake = Wake(0)
        self._reading = False
        """Whether one is under way."""
        self._scan_us = self._ask_us = 0
        self._until_us = NEVER_US
        """How long the thread sleeps, unless the bell is rung."""
        self._bell = threading.Lock()
        """Held but when it rings. A lock: to wait for an Event costs five times as much."""
        self._bell.acquire()
        self._rings: dict[str, _Ring] = {}
        self._patient: dict[int, list[RingReader]] = {}
        """By patience: those of the same are looked at together. At 0 the writer is gone."""
        self._look_us: dict[int, int] = {}
        """By patience, when."""
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
            self._ring_bell()

    async def wake(self, effect: Wake) -> None:
        """The core has taken the reading. The thread is woken only where it would sleep too long."""
        self._wake, self._reading = effect, False
        if effect.at_us < self._until_us:
            self._ring_bell()

    def _ring_bell(self) -> None:
        if self._bell.locked():
            self._bell.release()

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
            if not self._reading and self._wanted(clock_us):
                if shell.unsent >= MAX_UNSENT:
                    time.sleep(self._settings.poll_us / 1_000_000)
                    continue
                self._reading = True
                post(self._take(clock_us, shell))
            self._sleep(clock_us, shell.clock)

    def _sleep(self, clock_us: int, clock: Clock) -> None:
        """Until a ring is to be looked at, or the core wants a reading, or the bell is rung."""
        self._until_us = NEVER_US  # an answer that comes from here on rings
        until_us = min(self._scan_us, min(self._look_us.values(), default=clock_us + self._settings.idle_us))
        if not self._reading:
            until_us = min(until_us, self._wake.at_us)
        if self._reading and until_us <= clock_us:
            until_us = clock_us + TIDY_US  # only its answer can help; a core that has failed gives none
        else:
            self._until_us = until_us
        self._bell.acquire(timeout=max(until_us - clock.now_us(), SHORTEST_PAUSE_US) / 1_000_000)

    def _scan(self, clock_us: int) -> None:
        """Look for new and vanished rings and for writers that are gone, and remove what may be removed.

        Rather a quarter of the period too early, while awake, than awake for it alone.
        """
        if clock_us < self._scan_us - self._settings.scan_us // 4:
            return
        self._scan_us = clock_us + self._settings.scan_us
        if self._pods is not None:
            self._pods.look(clock_us)
        found = self._directory.scan()
        for reader in found.new:
            inherited = reader.header.created_ns // 1_000 < self._started_us
            ring = self._rings[reader.ring] = _Ring(reader, inherited, self._settings, busy_us=clock_us)
            self._look_now(ring, clock_us)
        for reader in found.gone:
            if reader.ring in self._rings:
                self._vanished.append(reader.ring)
            else:
                reader.close()
        self._ask(clock_us)
        removable = {self._removable.popleft() for _ in range(len(self._removable))}
        for reader in self._directory.readers if removable else ():
            if reader.ring in removable:
                self._directory.remove(reader)

    def _ask(self, clock_us: int) -> None:
        """Which writers are gone: of rings with an open task, and now and then of all."""
        asked = [ring for name in self._wake.due_us if (ring := self._rings.get(name))]
        if clock_us >= self._ask_us:
            asked, self._ask_us = list(self._rings.values()), clock_us + ASK_US
        for ring in asked:
            if not ring.gone and ring.reader.writer_gone():
                ring.gone, ring.patience_us = True, 0
                self._look_now(ring, clock_us)

    def _look_now(self, ring: _Ring, clock_us: int) -> None:
        self._patient.setdefault(ring.patience_us, []).append(ring.reader)
        self._look_us[ring.patience_us] = clock_us

    def _wanted(self, clock_us: int) -> bool:
        """Whether it is time for a reading: the core wants one, or the writer of a ring is gone, or one has news."""
        if clock_us >= self._wake.at_us or self._vanished:
            return True
        for patience_us, look_us in self._look_us.items():
            if look_us <= clock_us:
                if not patience_us or waiting(self._patient[patience_us]):
                    return True
                self._look_us[patience_us] = clock_us + patience_us
        return False

    def _take(self, clock_us: int, shell: Shell) -> RingsRead:
        """One reading of everything. A ring whose writer is gone is not read again: the core closes it."""
        reads, due_us = [], self._wake.due_us
        patient: defaultdict[int, list[RingReader]] = defaultdict(list)
        for name, ring in list(self._rings.items()):
            try:
                read = ring.take(clock_us, due_us.get(name, NEVER_US))
            except (RingError, OSError) as error:
                self._refuse(ring, error, shell.log)
                continue
            if read is not None:
                reads.append(read)
                if read.writer_gone and read.taken == read.head and name not in self._vanished:
                    del self._rings[name]
                    continue
            patient[ring.patience_us].append(ring.reader)
        self._patient, self._look_us = patient, {patience_us: clock_us + patience_us for patience_us in patient}
        vanished, self._vanished = tuple(self._vanished), []
        for name in vanished:
            if gone := self._rings.pop(name, None):
                gone.reader.close()
        counts = dict(self._directory.counts + (self._pods.counts if self._pods else Counter()))
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

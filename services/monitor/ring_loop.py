"""Reads the clock and then the rings, as often as the core wants, and removes those that are done; judges nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, Protocol

from services.monitor.core import Forget, RingsRead, Wake
from services.monitor.open_tasks import RingRows, Row
from services.monitor.rings import RingCorruptError, RingDirectory, RingError, RingRead, RingReader
from services.monitor.settings import MonitorSettings
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import BusError
from shared.log import Logger
from shared.messages import RingInfo
from shared.subjects import MAX_NAME_BYTES, Subjects

TIDY_US: Final = 500_000
MAX_UNSTORED: Final = 256
"""Batches that may wait for the bus. Beyond it the rings are left to hold the records: they count what they lose."""


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


class RingLoop:
    """The rings of one node. ``run`` and ``tidy`` are root tasks; ``wake`` and ``forget`` carry out the core's effects.

    One reading is under way at a time: the next one waits until the core has answered with Wake.
    """

    def __init__(self, settings: MonitorSettings, start_id: str, started_us: int) -> None:
        self._settings = settings
        self._directory = RingDirectory(settings.ring_root)
        self._subject = Subjects(settings.prefix).task_events(settings.node)
        self._batch_prefix = f"{settings.node}/{start_id}/"
        self._started_us = started_us
        self._answered = asyncio.Event()
        self._wake_us = 0
        self._scan_us = 0
        self._gone: list[RingReader] = []
        self._done: dict[str, int] = {}

    async def run(self, shell: Shell) -> None:
        """Read for ever."""
        while True:
            if shell.data()["outbox"] < MAX_UNSTORED:
                event, news = self._read(shell)
                if news or event.clock_us >= self._wake_us:
                    self._answered.clear()
                    shell.post(event)
                    await self._answered.wait()
            await shell.clock.sleep_us(self._pause_us(shell.clock.now_us()))

    async def wake(self, effect: Wake) -> None:
        """The core has taken the reading."""
        self._wake_us = effect.at_us
        self._answered.set()

    async def forget(self, effect: Forget) -> None:
        """The ring is not read again; ``tidy`` removes its file."""
        self._done[effect.ring] = effect.counter

    async def tidy(self, shell: Shell) -> None:
        """Remove the files of rings whose last batch is stored: a monitor that dies before that must find them."""
        while True:
            await shell.clock.sleep_us(TIDY_US)
            if self._done:
                stored = await self._stored(shell)
                self._remove({ring for ring, counter in self._done.items() if counter <= stored})

    async def _stored(self, shell: Shell) -> int:
        """The counter of the last batch of this start that the stream has; 0 if none or unknown."""
        try:
            last = await shell.bus.last_event(self._subject)
        except BusError as error:
            shell.log.info("rings stay for now", why=str(error))
            return 0
        batch_id = last.headers.get("Nats-Msg-Id", "") if last else ""
        return int(batch_id.removeprefix(self._batch_prefix)) if batch_id.startswith(self._batch_prefix) else 0

    def _remove(self, rings: set[str]) -> None:
        for reader in self._directory.readers:
            if reader.ring in rings:
                self._directory.remove(reader)
        for ring in rings:
            del self._done[ring]

    def _pause_us(self, now_us: int) -> int:
        poll_us = self._settings.poll_us if self._directory.readers else self._settings.idle_us
        return max(0, min(poll_us, self._wake_us - now_us))

    def _read(self, shell: Shell) -> tuple[RingsRead, bool]:
        """One reading of everything, and whether there is anything in it that the core does not expect."""
        clock_us = shell.clock.now_us()
        if clock_us >= self._scan_us:
            self._scan_us = clock_us + self._settings.scan_us
            self._gone = self._directory.scan().gone
        reads: list[RingRows] = []
        vanished: list[str] = []
        for reader in self._directory.readers:
            if reader.ring not in self._done:
                self._take(reader, reads, vanished, shell.log)
        for reader in self._gone:
            if self._done.pop(reader.ring, None) is None:
                self._take(reader, reads, vanished, shell.log)
                vanished.append(reader.ring)
            reader.close()
        self._gone = []
        event = RingsRead(clock_us, shell.clock.wall_us(), tuple(reads), tuple(vanished), dict(self._directory.counts))
        return event, bool(vanished) or any(read.has_news for read in reads)

    def _take(self, reader: RingReader, reads: list[RingRows], vanished: list[str], log: Logger) -> None:
        try:
            gone = reader.writer_gone()
            read = reader.read()
        except (RingError, OSError) as error:
            log.warning("ring refused", ring=reader.ring, container=reader.container, why=str(error))
            refusal = error if isinstance(error, RingError) else RingCorruptError(str(error))
            self._directory.refuse(reader, refusal)
            vanished.append(reader.ring)
            return
        inherited = reader.header.created_ns // 1_000 < self._started_us
        reads.append(_rows(reader, read, gone=gone, inherited=inherited))


def _rows(reader: RingReader, read: RingRead, *, gone: bool, inherited: bool) -> RingRows:
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
        info=ring_info(reader),
        rows=tuple(Row(*row) for row in columns) if len(read) else (),
        lost=read.lost,
        taken=read.taken,
        head=read.head,
        writer_gone=gone,
        pid=reader.header.pid,
        inherited=inherited,
    )


def ring_info(reader: RingReader) -> RingInfo:
    """Whose tasks a ring holds, from the labels beside it; only a name where there are none that can be believed."""
    labels = reader.labels
    if labels is None or not 0 < len(labels.container.encode("utf-8", "replace")) <= MAX_NAME_BYTES:
        return RingInfo(ring=reader.ring, container=Path(reader.path).parent.name)
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

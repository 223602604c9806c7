"""The tasks of containers on made-up devices: simulated devices do them, and they come in rings as those of others do.

Nothing runs. Each container that declared a runtime begins a task once a period; how long that takes is up to the
device and to who else is on it. What the simulation says is written up to the time of a reading and before it, so that
a late reading changes no verdict.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.monitor.probes.fake import FakeDevices, fake_uuid
from services.monitor.rings import (
    BEGIN,
    END,
    ENDED,
    HEAD_OFFSET,
    HEADER,
    HEADER_SIZE,
    MAGIC,
    RECORD,
    VERSION,
    boot_id,
)
from shared.admission import RtTask, Sharing
from shared.errors import FieldError
from shared.messages import ContainerLabels, Regime
from shared.testing.devices import Container, Device, Event, What, periodic

SCAN_US: Final = 100_000
"""How often containers are looked for: a start takes that long."""
SLICE_US, SWITCH_US = 2_000, 100
"""Of a time-sliced device that says nothing of it; no admission test relies on it then."""
RECORDS: Final = 4_096


@dataclass(slots=True)
class _Tasks:
    """One container: its ring, and the begins of its open tasks by their number."""

    device: str
    ring: Ring
    begins: dict[int, int] = field(default_factory=dict)


class FakeTasks:
    """Of one node; ``advance`` writes what happened up to a time of the node's clock."""

    def __init__(self, node: str, devices: Sequence[FakeDevices], ring_root: Path) -> None:
        each = [kind for kind in devices for _ in range(kind.count)]
        self._devices = {fake_uuid(node, index): Device(_sharing(kind)) for index, kind in enumerate(each)}
        self._root = ring_root
        self._containers: dict[str, _Tasks | None] = {}
        """By the names of their folders; None: it has no tasks that we could play."""
        self._scan_us = 0

    def advance(self, now_us: int) -> None:
        for device in self._devices.values():
            for event in device.advance(now_us):
                self._write(event)
        if now_us >= self._scan_us:
            self._scan_us = now_us + SCAN_US
            self._scan(now_us)

    def _write(self, event: Event) -> None:
        job, deadline_us = event.job, event.job.due_us - event.job.release_us
        tasks = self._containers[job.container]
        assert tasks is not None, "who has no tasks is on no device"
        if event.what is What.RELEASED:
            tasks.begins[job.number] = tasks.ring.write(BEGIN, event.at_us, deadline_us)
        else:
            tasks.ring.write(END, event.at_us, deadline_us, tasks.begins.pop(job.number))

    def _scan(self, now_us: int) -> None:
        try:
            names = {folder.name for folder in self._root.iterdir() if not (folder / ENDED).exists()}
        except FileNotFoundError:
            names = set()
        for name in self._containers.keys() - names:
            if tasks := self._containers.pop(name):
                self._devices[tasks.device].remove(name)
                tasks.ring.close()
        for name in sorted(names - self._containers.keys()):
            try:
                self._containers[name] = self._begin(name, now_us)
            except OSError:
                pass  # its labels are not there yet, it is gone again, or there is no room for a ring
            except (FieldError, ValueError):  # labels that say nothing, or no place on its device
                self._containers[name] = None

    def _begin(self, name: str, now_us: int) -> _Tasks | None:
        folder = self._root / name
        held = ContainerLabels.from_json((folder / "container.json").read_bytes()).reservation
        task = RtTask.of(name, held.realtime) if held.realtime else None
        device = held.devices[0] if held.devices else ""
        if task is None or device not in self._devices:
            return None
        self._devices[device].add(Container(name, task, periodic(now_us, task.period_us)))
        try:
            return _Tasks(device, Ring(folder, now_us))
        except OSError:
            self._devices[device].remove(name)
            raise


class Ring:
    """A ring file (docs/ring-format.md) whose records are stamped by whoever writes them; locked until it is closed.

    It names no process: there is none.
    """

    def __init__(self, folder: Path, now_us: int) -> None:
        """Complete before it has its name. Raises OSError."""
        ring_id = os.urandom(16)
        made = folder / f".new-{ring_id.hex()}"
        self._descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._head = 0
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._descriptor, 0, HEADER_SIZE + RECORDS * RECORD.size)
            sizes = (VERSION, HEADER_SIZE, RECORD.size, RECORDS)
            os.pwrite(self._descriptor, HEADER.pack(MAGIC, *sizes, ring_id, boot_id(), 0, 0, 0, now_us * 1_000), 0)
            made.rename(folder / f"ring-{ring_id.hex()}.ring")
        except BaseException:
            self.close()
            made.unlink(missing_ok=True)
            raise

    def write(self, kind: int, stamp_us: int, deadline_us: int, begin: int | None = None) -> int:
        """The number of the record. An end names that of its begin."""
        number = self._head + 1
        record = RECORD.pack(number, stamp_us * 1_000, begin or number, deadline_us, kind, 0, b"infer", number)
        os.pwrite(self._descriptor, record, HEADER_SIZE + self._head % RECORDS * RECORD.size)
        os.pwrite(self._descriptor, number.to_bytes(8, "little"), HEAD_OFFSET)
        self._head = number
        return number

    def close(self) -> None:
        """Whoever reads it sees that its writer is gone."""
        os.close(self._descriptor)


def _sharing(device: FakeDevices) -> Sharing:
    if device.regime is Regime.TIME_SLICED and (device.slice_us is None or device.switch_us is None):
        return Sharing(device.regime, SLICE_US, SWITCH_US)
    return Sharing(device.regime, device.slice_us, device.switch_us)

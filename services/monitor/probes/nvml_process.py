"""Keeps the process that asks NVIDIA's driver: one at a time, with deadlines; what the answers mean is not judged."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from services.monitor.probes.reasons import Reason

PROGRAM: Final = (sys.executable, "-P", str(Path(__file__).with_name("nvml.py")))
LONGEST_PAUSE_S: Final = 30.0
_MOST_BYTES: Final = 1 << 24


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Asked(_Part):
    """A value as the driver gave it, or the reason why it gave none."""

    value: Any = None
    reason: str | None = None


class Memory(_Part):
    """In bytes. ``reserved`` None: the driver is too old to tell, and counts it as used."""

    total: int
    used: int
    reserved: int | None


class AskedMemory(_Part):
    value: Memory | None = None
    reason: str | None = None


class AskedProcesses(_Part):
    """Pid and bytes of each process that has a context; bytes None where the driver does not tell."""

    value: tuple[tuple[int, int | None], ...] | None = None
    reason: str | None = None


class RawDevice(_Part):
    """One GPU or one MIG device. A GPU that does not even answer has its index and, where it was known, its uuid."""

    index: int
    uuid: Asked
    name: Asked = Asked()
    memory: AskedMemory = AskedMemory()
    processes: AskedProcesses = AskedProcesses()
    health: dict[str, Asked] = {}
    instance: Asked = Asked()
    """Of a MIG device its GPU instance."""


class AskedInstances(_Part):
    """The MIG devices that can be seen, and the reason why some or all cannot."""

    value: tuple[RawDevice, ...] | None = None
    reason: str | None = None


class AskedXids(_Part):
    """Code, GPU instance (None: the whole GPU) and wall-clock time in us of each since the question before."""

    value: tuple[tuple[int, int | None, int], ...] | None = None
    reason: str | None = None


class Samples(_Part):
    """Pid and percent of each process that computed in the time since the question before."""

    window_us: int
    samples: tuple[tuple[int, int], ...] = ()


class AskedSamples(_Part):
    value: Samples | None = None
    reason: str | None = None


class AskedLinks(_Part):
    """Of each NVLink that is up what is at its other end: NVML's type of it, and its PCI bus id. Not in each cycle."""

    value: tuple[tuple[int, str], ...] | None = None
    reason: str | None = None


class AskedLevels(_Part):
    """NVML's level of the nearest common ancestor with each GPU of a higher index. Not in each cycle."""

    value: tuple[tuple[int, int], ...] | None = None
    reason: str | None = None


class RawGpu(RawDevice):
    """One GPU. ``instances`` None: it is not split."""

    xids: AskedXids = AskedXids()
    samples: AskedSamples = AskedSamples()
    links: AskedLinks = AskedLinks()
    levels: AskedLevels = AskedLevels()
    pci_bus_id: Asked = Asked()
    utilisation: Asked = Asked()
    compute_mode: Asked = Asked()
    instances: AskedInstances | None = None


class Answer(_Part):
    """What one cycle gave; ``failed`` is the reason why it gave nothing at all."""

    failed: str | None = None
    gpus: tuple[RawGpu, ...] = ()
    age_us: int = 0
    """Time since the question: nothing in it is older. A first answer may take long."""


class NvmlProcess:
    """Asks, and kills what does not answer in time.

    A new process is started at the next question, after a pause that doubles with each failure from ``pause_s`` to
    LONGEST_PAUSE_S. One that hangs in the kernel does not even die: no other is started beside it.
    """

    def __init__(self, deadline_s: float, first_deadline_s: float, pause_s: float) -> None:
        self._deadline_s, self._first_deadline_s, self._pause_s = deadline_s, first_deadline_s, pause_s
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._asked_s: float | None = None
        self._answered = False
        self._killed: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._not_before_s = 0.0
        self._last = Answer(failed=Reason.DRIVER_STARTING)

    def ask(self) -> Answer:
        """Takes little more than the deadline, and never raises."""
        if not self._ready():
            return self._last
        try:
            self._last = self._answer()
        except TimeoutError:
            if self._may_take_longer():
                return self._last if self._failures else Answer(failed=Reason.DRIVER_STARTING)
            self._last = Answer(failed=Reason.DRIVER_HUNG)
        except (OSError, EOFError, ValidationError):
            self._last = Answer(failed=Reason.DRIVER_CRASHED)
        if self._last.failed:
            self._fail()
        else:
            self._answered, self._failures = True, 0
        return self._last

    def restart(self) -> None:
        """End the present process; the next question starts another."""
        process, self._process = self._process, None
        self._received, self._asked_s, self._answered = b"", None, False
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._killed = process

    def _ready(self) -> bool:
        """Whether there is a process to ask, or one may be started."""
        if self._killed is not None and self._killed.poll() is None:
            return False
        self._killed = None
        return self._process is not None or time.monotonic() >= self._not_before_s

    def _answer(self) -> Answer:
        if self._process is None:
            command, pipe = [*PROGRAM, str(os.getpid())], subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)
        if self._asked_s is None:
            assert self._process.stdin is not None
            self._process.stdin.write(b"\n")
            self._asked_s = time.monotonic()
        line = self._line(self._process, time.monotonic() + self._deadline_s)
        age_us = round((time.monotonic() - self._asked_s) * 1_000_000)
        self._asked_s = None
        return Answer.model_validate_json(line).model_copy(update={"age_us": age_us})

    def _line(self, process: subprocess.Popen[bytes], until_s: float) -> bytes:
        """Raises TimeoutError, and EOFError where the process has ended."""
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, until_s - time.monotonic()) * 1000):
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 65_536)
            if not part or len(self._received) > _MOST_BYTES:
                raise EOFError
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _may_take_longer(self) -> bool:
        """A first answer may take longer than the ones after it."""
        return not self._answered and time.monotonic() < (self._asked_s or 0.0) + self._first_deadline_s

    def _fail(self) -> None:
        self.restart()
        self._not_before_s = time.monotonic() + min(LONGEST_PAUSE_S, self._pause_s * 2**self._failures)
        self._failures = min(self._failures + 1, 16)

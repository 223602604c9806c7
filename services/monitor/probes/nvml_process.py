"""Keeps the process that asks NVIDIA's driver: one at a time, with deadlines; what the answers mean is not judged."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from services.monitor.probes.reasons import Reason

PROGRAM: Final = (sys.executable, "-P", str(Path(__file__).with_name("nvml.py")))
LONGEST_PAUSE_S: Final = 30.0
LONGEST_ASIDE_S: Final = 120.0
"""To ask a GPU that hangs costs the process, and with it a cycle: it hardly ever comes back without a reset."""
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
    utilisation: Asked = Asked()
    """In percent; without a value and a reason where there is one sample of a MIG device so far."""
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
    compute_mode: Asked = Asked()
    instances: AskedInstances | None = None


class Answer(_Part):
    """What one cycle gave; ``failed`` is the reason why it gave nothing at all."""

    failed: str | None = None
    gpus: tuple[RawGpu, ...] = ()
    age_us: int = 0
    """Time since the question: nothing in it is older. A first answer may take long."""
    pending: bool = False
    """Not all GPUs were asked: of one that is left out there is nothing new."""


class _Said(_Part):
    """A line: which GPU is asked now, what one answered, or the end."""

    asking: int | None = None
    gpu: RawGpu | None = None
    done: bool = False
    failed: str | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Aside:
    """A GPU that is not asked before ``until_s``."""

    reason: Reason
    pause_s: float
    until_s: float


class NvmlProcess:
    """Asks, and kills what does not answer in time.

    A GPU in which it hung or crashed is not asked for a while, which doubles each time up to LONGEST_ASIDE_S, and then
    last, so that the others are told all the while.

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
        self._gpus: dict[int, RawGpu] = {}
        self._asking: int | None = None
        self._asking_s = 0.0
        self._aside: dict[int, _Aside] = {}
        self._uuids: dict[int, str] = {}

    def ask(self) -> Answer:
        """Takes little more than the deadline, and never raises."""
        if not self._ready():
            return self._nothing_new()
        try:
            self._last = self._answer()
        except TimeoutError:
            if self._may_take_longer():
                return self._nothing_new()
            self._last = self._broken(Reason.DRIVER_HUNG)
        except (OSError, EOFError, ValidationError):
            self._last = self._broken(Reason.DRIVER_CRASHED)
        return self._last

    def _nothing_new(self) -> Answer:
        """What was said before is not said again."""
        return self._last if self._last.failed else Answer(pending=True)

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
            self._asked_s = time.monotonic()
            self._gpus, self._asking = {}, None
            assert self._process.stdin is not None
            self._process.stdin.write(self._question(self._asked_s))
        until_s = time.monotonic() + self._deadline_s
        while not (said := _Said.model_validate_json(self._line(self._process, until_s))).done:
            if said.gpu is not None:
                self._gpus[said.gpu.index] = said.gpu
                self._aside.pop(said.gpu.index, None)
            self._asking, self._asking_s = said.asking, time.monotonic()
        if not said.failed:  # others are gone
            self._uuids = {index: uuid for index, uuid in self._uuids.items() if index < said.count}
            self._aside = {index: aside for index, aside in self._aside.items() if index < said.count}
            self._answered, self._failures = True, 0
        answer = self._all(said.failed)
        if said.failed:
            self._fail()
        return answer

    def _question(self, now_s: float) -> bytes:
        """Not in a first answer either, which may take long."""
        skip = [index for index, aside in self._aside.items() if now_s < aside.until_s or not self._answered]
        return json.dumps({"skip": skip, "last": list(self._aside)}).encode() + b"\n"

    def _all(self, failed: str | None) -> Answer:
        """What was said so far; those that were set aside are told by the names that they had."""
        age_us = round((time.monotonic() - (self._asked_s or 0.0)) * 1_000_000)
        self._asked_s = None
        self._uuids |= {i: gpu.uuid.value for i, gpu in self._gpus.items() if isinstance(gpu.uuid.value, str)}
        aside = {
            index: RawGpu(index=index, uuid=Asked(value=self._uuids.get(index), reason=each.reason))
            for index, each in self._aside.items()
        }
        unasked = self._uuids.keys() - self._gpus.keys() - aside.keys()
        if failed or not (self._gpus or unasked):
            return Answer(
                failed=failed or max((each.reason for each in self._aside.values()), default=Reason.DRIVER_CRASHED)
            )
        told = sorted((self._gpus | aside).items())
        return Answer(gpus=tuple(gpu for _, gpu in told), age_us=age_us, pending=bool(unasked))

    def _broken(self, reason: Reason) -> Answer:
        """The process did not come to an end: it is given up, and with it the GPU that it asked for a while."""
        if self._asking is not None:
            before = self._aside.get(self._asking)
            pause_s = min(LONGEST_ASIDE_S, before.pause_s * 2) if before else self._pause_s
            self._aside[self._asking] = _Aside(reason, pause_s, time.monotonic() + pause_s)
        answer = self._all(None if self._asking is not None or self._gpus else reason)
        if answer.failed:
            self._fail()
        else:
            self.restart()
        return answer

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
        """A first answer may take longer than the ones after it, and a tenth of that for each GPU."""
        if self._answered:
            return False
        since_s, most_s = self._asked_s or 0.0, self._first_deadline_s
        if self._asking is not None:
            since_s, most_s = self._asking_s, most_s / 10
        return time.monotonic() < since_s + most_s

    def _fail(self) -> None:
        self.restart()
        self._not_before_s = time.monotonic() + min(LONGEST_PAUSE_S, self._pause_s * 2**self._failures)
        self._failures = min(self._failures + 1, 16)

"""How long containers had each GPU: the driver's samples of their processes added up, and what that may be off by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from services.monitor.probes.base import IMPLAUSIBLE, LOST, ContainerReading, GpuTimeReading, Reading
from services.monitor.probes.nvml_process import AskedSamples

SAMPLE_US: Final = 1_000_000
"""The longest sample period that NVML names: use is known to begin and to end within one."""
STEP: Final = 0.01
"""Samples are whole percents."""
FULL: Final = 100


@dataclass(slots=True)
class _Had:
    """Of one container and GPU; ``reason`` is why the last sample is unknown."""

    busy_us: float = 0.0
    error_us: float = 0.0
    age_us: float = 0.0
    ratio: float | None = None
    reason: str | None = None
    known: bool = False
    """Whether there was a sample, or known to be none, ever."""

    def missed(self, elapsed_us: float, reason: str) -> None:
        """Nothing is known of that time."""
        self.age_us += elapsed_us
        self.error_us += elapsed_us
        self.ratio, self.reason = None, reason

    def add(self, percents: list[int], window_us: float, elapsed_us: float) -> None:
        """The samples of its processes, each of which is of the window; what is outside of it nobody saw."""
        ratio = min(1.0, sum(percents) / FULL)
        turned = bool(percents) != bool(self.ratio)
        self.age_us += elapsed_us
        self.busy_us += ratio * window_us
        self.error_us += max(1, len(percents)) * STEP * window_us + elapsed_us - window_us + turned * SAMPLE_US
        self.ratio, self.reason, self.known = ratio, None, True

    def told(self) -> GpuTimeReading:
        if not self.known:
            unknown = Reading(None, self.reason)
            return GpuTimeReading(unknown, unknown, unknown)
        error_us = min(self.error_us, self.age_us)
        return GpuTimeReading(Reading(self.ratio, self.reason), Reading(round(self.busy_us)), Reading(round(error_us)))


class GpuTimes:
    """Of all containers, by GPU. Fed once a cycle with what each GPU said, who holds it, and whose processes there are.

    Taken is that the driver averages over its samples since the question before. A process that is not among them had
    less than a percent.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._had: dict[str, dict[str, _Had]] = {}
        """By GPU and container."""
        self._owners: dict[int, str] = {}
        self._taken_s: float | None = None

    def take(
        self,
        asked: Mapping[str, AskedSamples],
        holders: Mapping[str, Mapping[int, int | None] | str],
        containers: Iterable[ContainerReading],
        now_s: float,
    ) -> None:
        """A process that is gone since the cycle before is still its container's."""
        elapsed_us = 0.0 if self._taken_s is None else (now_s - self._taken_s) * 1_000_000
        self._taken_s = now_s
        before, self._owners = self._owners, {pid: each.container for each in containers for pid in each.pids}
        owners, there = before | self._owners, {each.container for each in containers}
        for uuid, samples in asked.items():
            held = holders.get(uuid, samples.reason or LOST)
            had = self._had.setdefault(uuid, {})
            for pid in held if not isinstance(held, str) else ():
                if pid in self._owners:
                    had.setdefault(self._owners[pid], _Had())
            self._had[uuid] = {container: each for container, each in had.items() if container in there}
            reason = held if isinstance(held, str) else samples.reason
            self._add(uuid, samples, owners, elapsed_us, reason)
        for uuid in self._had.keys() - asked.keys():
            for each in self._had[uuid].values():
                each.missed(elapsed_us, LOST)

    def _add(
        self, uuid: str, samples: AskedSamples, owners: Mapping[int, str], elapsed_us: float, reason: str | None
    ) -> None:
        percents: dict[str, list[int]] = {}
        for pid, percent in samples.value.samples if samples.value else ():
            if pid in owners:
                percents.setdefault(owners[pid], []).append(percent)
        window_us = min(elapsed_us, samples.value.window_us if samples.value else 0)
        for container, each in self._had[uuid].items():
            own = percents.get(container, [])
            if reason is not None:
                each.missed(elapsed_us, reason)
            elif any(percent > FULL for percent in own):
                self._counts["nvml.samples.implausible"] += 1
                each.missed(elapsed_us, IMPLAUSIBLE)
            else:
                each.add(own, window_us, elapsed_us)

    def failed(self, reason: str, now_s: float) -> None:
        """The driver said nothing at all."""
        elapsed_us = 0.0 if self._taken_s is None else (now_s - self._taken_s) * 1_000_000
        self._taken_s = now_s
        for had in self._had.values():
            for each in had.values():
                each.missed(elapsed_us, reason)

    def of(self, container: str) -> dict[str, GpuTimeReading]:
        return {uuid: had[container].told() for uuid, had in self._had.items() if container in had}

"""What admission speaks of: a recurring task, how a device is shared, and the answer of a test."""

from dataclasses import dataclass
from functools import lru_cache

from shared.messages import Device, Kind, Realtime, Regime
from shared.units import format_us


@dataclass(frozen=True, slots=True)
class RtTask:
    """The recurring task of one container: C runtime, T period, D deadline, H host part, in microseconds.

    Segments are the lengths of its uninterrupted device parts; what the runtime has beyond them is one more.
    `overrun_us` is by how much it was seen to run longer than declared: every test counts it as part of the runtime.
    Raises ValueError for times that no task can have.
    """

    name: str
    runtime_us: int
    period_us: int
    deadline_us: int
    host_us: int = 0
    segments: tuple[int, ...] | None = None
    kind: Kind = Kind.HARD
    gate: bool = False
    overrun_us: int = 0

    def __post_init__(self) -> None:
        if min(self.runtime_us, self.period_us, self.deadline_us) < 1 or min(self.host_us, self.overrun_us) < 0:
            raise ValueError(f"runtime, period and deadline are above 0, host part and overrun not below: {self}")
        if self.segments and (min(self.segments) < 1 or sum(self.segments) > self.runtime_us):
            raise ValueError(f"segments are above 0 and add up to at most the runtime: {self}")

    @classmethod
    def of(cls, name: str, realtime: Realtime) -> "RtTask | None":
        """The task that a request declares, its period the deadline where absent; None without a runtime."""
        if realtime.runtime_us is None:
            return None
        return cls(
            name=name,
            runtime_us=realtime.runtime_us,
            period_us=realtime.period_us or realtime.deadline_us,
            deadline_us=realtime.deadline_us,
            host_us=realtime.host_us,
            segments=realtime.segments,
            kind=realtime.kind,
            gate=realtime.gate,
        )

    def parts(self) -> tuple[int, ...]:
        """The lengths of all device parts; they add up to the runtime."""
        declared = self.segments or ()
        rest = self.runtime_us - sum(declared)
        return (*declared, rest) if rest else declared


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a device is shared. Slice and switch cost are measured; None is unknown, never 0.

    `handover_us` is what the gate itself costs per task, `margin_us` by how much it lets a task overrun before it acts.
    """

    regime: Regime
    slice_us: int | None = None
    switch_us: int | None = None
    handover_us: int = 0
    margin_us: int = 0

    def __post_init__(self) -> None:
        slice_us = 1 if self.slice_us is None else self.slice_us
        if slice_us < 1 or min(self.handover_us, self.margin_us, self.switch_us or 0) < 0:
            raise ValueError(f"a slice is above 0, switch, hand-over and margin are not below: {self}")

    @classmethod
    def of(cls, device: Device) -> "Sharing":
        """As its facts say. What was measured as no time at all was not measured."""
        return _sharing(device.regime, device.slice_us or None, device.switch_us, device.handover_us or 0)

    def measured(self) -> tuple[int, int] | None:
        """Slice and switch cost, when both are known."""
        if self.slice_us is None or self.switch_us is None:
            return None
        return self.slice_us, self.switch_us


@lru_cache(maxsize=1024)
def _sharing(regime: Regime, slice_us: int | None, switch_us: int | None, handover_us: int) -> Sharing:
    """A cluster shares its devices in few ways, and each of them is asked for with all facts of its node."""
    return Sharing(regime, slice_us, switch_us, handover_us)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a test. Slack is the room left at the tightest point, negative what is short, else None.

    `unproven` marks a firm container that is admitted on its declaration, before it was measured. `late` is the name of
    the task whose deadline the test finds not kept, where it is one task's.
    """

    admitted: bool
    test: str
    slack_us: int | None
    reason: str
    unproven: bool = False
    late: str | None = None


def refused(reason: str, test: str = "none") -> Verdict:
    """A refusal that no amount of time would mend, hence without slack."""
    return Verdict(admitted=False, test=test, slack_us=None, reason=reason)


def room(slack_us: int) -> str:
    return f"{format_us(-slack_us)} short" if slack_us < 0 else f"{format_us(slack_us)} to spare"
